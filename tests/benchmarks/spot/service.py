"""The spot-trace replay of shared aggregation: a lost worker costs the step in flight, aggregators are nodes, too.

What a round costs is as measured (``tests.benchmarks.aggregation_rounds``): each byte that is pushed and pulled takes
processor time of an aggregator's front, which is one thread a process, and of the worker, and crosses both links.
None of it is taken to overlap with computing, and none to replace the exchange within the published speeds. Nodes of
aggregators are paid on demand and never interrupted; each counts as much as a worker's node.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ebbflow.infra.simulation.traces.rows import SpotRow
from ebbflow.planners.aggregation.choice import SyncCosts, choose_sync
from tests.benchmarks.spot.models import SpotModel
from tests.benchmarks.spot.recovery import HOUR, STEP, Event
from tests.benchmarks.spot.replicas import RecoveryCosts, ReplicaReplay, shards_of
from tests.benchmarks.spot.table import Row

FLOAT = 4  # bytes of a gradient or parameter on the wire
NODES = (1, 2, 4, 8, 16)  # of aggregators, of which the best is taken


@dataclass(frozen=True, slots=True)
class ServiceCosts:
    """What aggregation takes.

    ``front`` and ``worker`` are processor seconds of a push and a pull of a megabyte each
    (``aggregation_rounds --megabytes 50 --workers 4``); ``loss`` is what a SIGKILL took beyond a step
    (``aggregation_losses``).
    """

    front: float = 0.0028
    worker: float = 0.0032
    loss: float = 0.5
    processes: int = 16  # aggregators on a node, each with a front of its own
    counts: float = 1.0  # how much a node of aggregators counts, of a worker's node

    def round_s(self, size: float, workers: int, nodes: int, link: float) -> float:
        """Return the seconds of a round in which nothing overlaps.

        Args:
            size: bytes of all gradients.
            workers: that push and pull.
            nodes: of aggregators, over which tensors are spread evenly.
            link: of a node, Gbit/s each way.
        """
        megabytes = size / 1e6
        fronts = workers * megabytes * self.front / (nodes * self.processes)
        wire = 2 * workers * size * 8e-9 / link / nodes
        return max(fronts, wire, megabytes * self.worker, 2 * size * 8e-9 / link)


class ServiceReplay(ReplicaReplay):
    """Replays a spot trace with workers over aggregators.

    Args:
        model: what trains; it fits a node.
        rows: the trace.
        nodes: of aggregators.
        costs: of aggregation.
        recovery: what joins and starts take; a loss takes what ``costs`` say.
    """

    def __init__(
        self,
        model: SpotModel,
        rows: list[SpotRow],
        nodes: int,
        costs: ServiceCosts | None = None,
        recovery: RecoveryCosts | None = None,
    ) -> None:
        self.service, self.aggregators = costs or ServiceCosts(), nodes
        super().__init__(model, rows, replace(recovery or RecoveryCosts(), loss=self.service.loss), shards=1)
        self.share = FLOAT * model.parameters  # what a worker that joins pulls: moments stay where they are
        self.round = 0  # ms of each step

    def begin_step(self, now: int) -> None:
        size = FLOAT * self.model.parameters
        link = self.costs.link
        self.round = round(1000 * self.service.round_s(size, self.nodes, self.aggregators, link))
        self.effective += self.step_time
        self.checkpoint += self.round  # of the components the one in which training waits
        heapq.heappush(self.heap, Event(now + self.step_time + self.round, STEP, -1, self.version))

    def on_step(self, event: Event) -> None:
        if event.version == self.version:
            workers = max(len(self.usable), 1)
            self.idle += (event.at - self.previous_end) * self.aggregators * self.service.counts / workers
        super().on_step(event)


def service_rows(models: Sequence[SpotModel], traces: Mapping[str, list[SpotRow]]) -> list[Row]:
    """Return a row per model that fits a node and trace, with the number of aggregator nodes that is best."""
    rows: list[Row] = []
    for model in (one for one in models if shards_of(one) == 1):
        for trace, events in traces.items():
            tried = {nodes: ServiceReplay(model, events, nodes).run() for nodes in NODES}
            best = max(tried, key=lambda nodes: tried[nodes].share)
            outcome = tried[best]
            free = ServiceReplay(
                model, events, 1, ServiceCosts(front=0.0, worker=0.0), RecoveryCosts(link=1e9)
            )
            nodes_free = ServiceReplay(model, events, best, ServiceCosts(counts=0.0))
            more: Row = {
                "share": outcome.share,
                "aggregators": best,
                "share_free_rounds": free.run().share,
                "share_free_nodes": nodes_free.run().share,
                "auto": answer(model, events),
            }
            rows.append({"model": model.name, "trace": trace, "recovery": "service"} | asdict(outcome) | more)
    return rows


def answer(model: SpotModel, rows: list[SpotRow]) -> str:
    """Return what ``--sync auto`` answers for a model, with the trace's rate of losses: the choice and its reason."""
    there: set[str] = set()
    at, node_ms, losses, most = rows[0].at, 0, 0, 0
    for row in rows:
        node_ms += len(there) * (row.at - at)
        at = row.at
        if row.kind == "add":
            there.add(row.node)
        else:
            there.discard(row.node)
            losses += 1
        most = max(most, len(there))
    size, link = FLOAT * model.parameters, RecoveryCosts().link / 8e-9
    sync = 2 * (most - 1) / most * size / link
    speed = model.in_place[max(30 - most, 0)] if most >= 15 else model.in_place[-1]
    found: Any = choose_sync(
        SyncCosts(
            parameter_bytes=int(size),
            sum_s=size / 4 / 1e9,  # a float a nanosecond: the fastest that memory allows favours aggregators
            update_s=size / 4 / 1e9,
            step_s=model.samples / speed,
            sync_s=sync,
            measured_world=most,
            world=most,
            nodes=most,
            interruption_rate=losses / (node_ms / HOUR),
            restart_s=RecoveryCosts().restart,
            in_place=True,
        )
    )
    return str(found.sync)
