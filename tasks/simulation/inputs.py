"""What a comparison runs on: files read once, and the cluster as it comes and goes for one seed."""

import hashlib
from functools import cached_property
from math import inf
from typing import Any

from ebbflow.infra.errors import WorkloadError
from ebbflow.infra.simulation.faults import with_failures
from ebbflow.infra.simulation.traces.cluster import Cluster
from ebbflow.infra.simulation.traces.node_traces import NodeEvent, presences, read_node_trace, with_trace
from ebbflow.infra.simulation.traces.prices import PriceHistory, first_moment, read_prices, with_prices
from ebbflow.planners.communication.placement import profile_of
from ebbflow.planners.errors import OptionError
from ebbflow.planners.scheduling.placement_cost import PlacementCost, placement_cost
from ebbflow.tasks.communication import read_training
from ebbflow.tasks.simulation.clusters import ClusterSpec, read_cluster
from ebbflow.tasks.simulation.request import SimulationRequest, links_of
from ebbflow.tasks.simulation.sources import Loaded, Source


class Inputs:
    """Files of a ``request``, read when first needed."""

    def __init__(self, request: SimulationRequest) -> None:
        self.request = request
        self._loaded: dict[tuple[str, int], Loaded] = {}

    @cached_property
    def spec(self) -> ClusterSpec:
        return read_cluster(self.request.cluster, spot=self.request.spot_trace is not None)

    @cached_property
    def events(self) -> list[NodeEvent]:
        return read_node_trace(self.request.spot_trace) if self.request.spot_trace else []

    @cached_property
    def history(self) -> PriceHistory | None:
        return read_prices(self.request.prices) if self.request.prices else None

    @cached_property
    def present(self) -> Cluster:
        """Return the cluster with its spot trace, without failures, at list prices."""
        if not self.events:
            return self.spec.cluster
        request = self.request
        return with_trace(
            self.spec.cluster,
            self.events,
            self.spec.template,
            notice=request.notice,
            source=str(request.spot_trace),
        )

    @cached_property
    def begin(self) -> float:
        """Return when the simulation begins, s since the Unix epoch. Raises ``OptionError``."""
        assert self.history is not None
        if not any(one.node.market == "spot" for one in presences(self.present)):
            raise OptionError(
                "--prices needs nodes with market: spot, with their type and zone, in the cluster file"
            )
        first = first_moment(self.present, self.history)
        return first if self.spec.begin is None else self.spec.begin

    @cached_property
    def costs(self) -> dict[str, PlacementCost]:
        """Return what placements cost each model that has a recorded training. Raises ``OptionError``."""
        folder = self.request.communication
        if folder is None:
            return {}
        links, found = links_of(self.request.links), {}
        for path in sorted(folder.glob("*.json")):
            recorded = read_training(str(path))
            cost = placement_cost(profile_of(recorded, 1, None), links)
            assert cost is not None  # links between nodes are given
            found[path.stem] = cost
        if not found:
            raise OptionError(f"--communication: {folder} has no MODEL.json of a recorded training")
        return found

    def load(self, source: Source, seed: int) -> Loaded:
        """Return the workload; only a generated one depends on ``seed``.

        Raises ``OptionError`` for one without profiles where models have recorded trainings.
        """
        key = source.text, 0 if source.is_file else seed
        if key not in self._loaded:
            request = self.request
            self._loaded[key] = source.load(
                seed, profiles=request.profiles, throughputs=request.throughputs, nearest=request.nearest
            )
            if request.communication is not None and self._loaded[key].kind != "profiles":
                raise OptionError(
                    f"--communication is for workloads with profiles, such as pollux-1; {source.name} has none"
                )
        return self._loaded[key]

    def cluster(self, seed: int, horizon: float) -> tuple[Cluster, Cluster]:
        """Return the cluster at market prices and at list prices, with failures until ``horizon`` s."""
        listed = self.present
        if self.request.failures:
            listed = with_failures(listed, self.request.failures, seed, horizon)
        return (with_prices(listed, self.history, self.begin) if self.history else listed), listed

    def check_prices(self, last: float) -> None:
        """Raise ``WorkloadError`` if the price history is over before the simulation is, at ``last`` s."""
        if self.history and self.begin + last > self.history.end:
            raise WorkloadError(
                f"{self.history.source}: prices end {self.history.end - self.begin:.0f} s after the simulation"
                f" begins, which lasts {last:.0f} s; set an earlier start in the cluster file"
            )

    def notes(self, last: float) -> list[str]:
        """Return what a reader of a run that ended at ``last`` s should know."""
        if self.events and self.events[-1].at < last < inf:
            return [
                f"the spot trace ends at {self.events[-1].at:,.0f} s; the nodes of that moment stay until the end"
                f" at {last:,.0f} s"
            ]
        return []

    def digest(self) -> dict[str, Any]:
        """Return what the results depend on besides workload, policy and seed: by content, not by path."""
        request = self.request
        files = {"spot_trace": request.spot_trace, "prices": request.prices}
        return {
            "cluster": [repr(self.spec.cluster), repr(self.spec.template), self.spec.begin],
            "options": [
                request.interval,
                request.restart_delay,
                request.interference,
                request.checkpoint_interval,
                request.notice,
                repr(request.failures),
                repr(request.stragglers),
            ],
            **({"placements": repr(self.costs)} if self.costs else {}),
            **{
                name: hashlib.sha256(path.read_bytes()).hexdigest() if path else ""
                for name, path in files.items()
            },
        }
