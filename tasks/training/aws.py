"""A training on a pool of the cluster's fleet: ``ebbflow train script.py --nodes aws:POOL:NODESxGPUS``.

It uses the instances that are there and free; how many there are is the fleet's business (``ebbflow fleet grow``). An
instance that comes later takes the place of one that has left.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from ebbflow.infra.aws.capacity import AwsCapacity, NullNotices
from ebbflow.infra.aws.train_nodes import FORM, LOGS, NEVER, AwsNodes
from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import ClusterError
from ebbflow.infra.protocols import Decide, Trainer, TrainingJob
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.launcher.trainer import TorchTrainer
from ebbflow.infra.training.process.channel import Report
from ebbflow.planners.errors import OptionError
from ebbflow.planners.hazard import hazard
from ebbflow.planners.model.fleet import family
from ebbflow.planners.training.replicas import least_whole, whole_replicas
from ebbflow.tasks.fleet.steps import OpenedFleet
from ebbflow.tasks.training.capacity import Nodes
from ebbflow.tasks.training.code import variables_of
from ebbflow.tasks.training.request import TrainingRequest

_POLL = 5.0  # seconds between polls for instances that have come
_REFRESH = (
    3.0  # seconds between polls of the pool: so long a run may wait for the word that an instance is gone
)


class NullFaults:
    """Scripted faults are for nodes of this machine."""

    def _refuse(self, *_: object) -> NoReturn:
        raise ClusterError("scripted faults are for nodes of this machine: --nodes local:NODESxGPUS")

    kill = notice = pause = resume = _refuse


class ShippingTrainer(TorchTrainer):
    """A launcher whose nodes share no directory with it: the script goes into the run's directory on S3."""

    def __init__(self, pool: AwsNodes, region: str, **options: Any) -> None:
        super().__init__(pool, **options)
        self._region = region

    def launch(self, job: TrainingJob, placement: Mapping[str, int]) -> None:
        """Start the run; see ``TorchTrainer``. Raises ``StorageError`` too."""
        super().launch(shipped(job, self._region), placement)


def capacity_of(
    cluster: OpenedFleet, pools: Sequence[str], clock: Clock, *, gangs: bool = False
) -> AwsCapacity:
    """Return the instances of ``pools``, not yet looked at; ``gangs``: a pool may be a gang, ``POOL/GANG``.

    The queue of notices has one reader, the fleet's loop: what it hears is in the fleet's state, and a training is
    told by a node's own agent. Raises ``OptionError`` for a pool that the cluster does not have.
    """
    for pool in pools:
        if (family(pool) if gangs else pool) not in cluster.settings.pools:
            there = ", ".join(cluster.settings.pools) or "none"
            raise OptionError(f"there is no pool {pool!r} in this cluster; there are {there}")
    return AwsCapacity(
        cluster.control, NullNotices(), hazard=hazard, pools=list(pools), refresh=_REFRESH, clock=clock
    )


class PoolNodes(Nodes):
    """The nodes of a run on a pool; one that did not start is replaced on another instance, or later.

    Args:
        pool: where they are started.
        nodes, most, least, replica: see ``Nodes``.
    """

    def __init__(
        self, pool: AwsNodes, nodes: Mapping[str, int], most: int, least: int, *, replica: int
    ) -> None:
        super().__init__(nodes, most, least, replica=replica)
        self._pool = pool

    def give_up(self, names: Iterable[str]) -> None:
        """Take note that nodes did not start."""
        given = list(names)
        self._pool.give_up(given)
        self.remove(given)


class AwsSite:
    """Nodes on instances of one pool. A ``Site``; ``take`` returns the run's, for new instances to be used.

    Raises ``OptionError`` for a pool that the cluster does not have.
    """

    def __init__(self, request: TrainingRequest, cluster: OpenedFleet, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._count, self._slots = len(request.placement), max(request.placement.values())
        self._pool, self._cluster = request.pool, cluster
        self._replica, self._most = request.replica_gpus, request.most_gpus
        self._least = least_whole(request.min_gpus, self._replica)
        self._capacity = capacity_of(cluster, [self._pool], self._clock, gangs=True)
        self._nodes = AwsNodes(cluster.runner(FORM), self._capacity, clock=self._clock)
        self._stop = threading.Event()
        self._follower: threading.Thread | None = None

    @property
    def nodes(self) -> NullFaults:
        """See ``Site``."""
        return NullFaults()

    def trainer(
        self, request: TrainingRequest, decide: Decide, record_report: Callable[[Report], None]
    ) -> Trainer:
        """See ``Site``."""
        return ShippingTrainer(
            self._nodes,
            self._cluster.settings.region,
            logs=Path(LOGS) / request.run_id,
            decide=decide,
            node_timeout=max(request.node_timeout, 1e-3),
            form=FORM,
            variables=variables_of(request),
            on_report=record_report,
            replica=request.replica_gpus,
        )

    def take(self, timeout: float) -> Nodes:
        """Return the run's nodes: as many as are free, once they are enough, and from then on those that come.

        Raises ``ClusterError`` when they are not enough within ``timeout`` seconds, and ``EngineUnavailableError``.
        """
        end = self._clock.now() + timeout
        while self._usable(free := min(self._count, self._free())) < self._least:
            if self._clock.now() >= end:
                more = f"scale out: ebbflow fleet grow {self._pool} {self._count}"
                if "/" in self._pool:
                    more = "a gang does not scale out: see ebbflow fleet status, or start one with ebbflow fleet gang"
                raise ClusterError(
                    f"the pool {self._pool} has {free} free instances with {self._slots} slots, and the run needs "
                    f"{self._least} slots to start; {more}"
                )
            self._clock.wait(self._stop, min(_POLL, max(0.0, end - self._clock.now())))
        names = [f"node-{number}" for number in range(1, free + 1)]
        there = dict.fromkeys(names, self._slots)
        nodes = PoolNodes(self._nodes, there, self._most, self._least, replica=self._replica)
        self._follower = threading.Thread(target=self._follow, args=(nodes,), daemon=True)
        self._follower.start()
        return nodes

    def close(self) -> None:
        """Release everything; instances stay. May be called twice."""
        self._stop.set()
        if self._follower is not None:
            self._follower.join(60.0)
        self._nodes.close()
        self._capacity.close()

    def __enter__(self) -> "AwsSite":
        self._capacity.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _free(self) -> int:
        """Return how many instances are free and large enough, those where a start has just failed not counted."""
        return sum(size >= self._slots for size in self._nodes.placement().values())

    def _usable(self, count: int) -> int:
        """Return the slots of so many instances that the run can use."""
        return sum(whole_replicas(dict.fromkeys(map(str, range(count)), self._slots), self._replica).values())

    def _follow(self, nodes: Nodes) -> None:
        """Take instances that come in, up to the number that was requested."""
        while not self._clock.wait(self._stop, _POLL):
            nodes.remove(list(filter(self._nodes.failed, nodes.there())))
            there = nodes.there()
            waiting = sum(self._nodes.lost(name) == NEVER for name in there)
            more = min(self._count - len(there), self._free() - waiting)
            if more > 0:
                nodes.add(more)


def shipped(job: TrainingJob, region: str) -> TrainingJob:
    """Return the job for remote nodes, with its script copied to the run's directory. Raises ``StorageError``."""
    job = replace(job, environment={"AWS_REGION": region, **job.environment})
    if "://" in job.script:
        return job
    place, name = StorageLocation(job.folder).under("script"), Path(job.script).name
    with translated(f"put the script into {place.uri}"):
        place.write(name, Path(job.script).read_bytes())
    return replace(job, script=place.uri_of(name))
