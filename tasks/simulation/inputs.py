"""What a comparison runs on: options, files read once, and the cluster as it comes and goes for one seed."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

from ebbflow.infra.errors import WorkloadError
from ebbflow.infra.simulation.faults import Failures, Stragglers, with_failures
from ebbflow.infra.simulation.traces.cluster import Cluster
from ebbflow.infra.simulation.traces.node_traces import NodeEvent, presences, read_node_trace, with_trace
from ebbflow.infra.simulation.traces.prices import PriceHistory, first_moment, read_prices, with_prices
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.simulation.clusters import ClusterSpec, read_cluster
from ebbflow.tasks.simulation.sources import Loaded, Source


@dataclass(frozen=True, slots=True)
class Options:
    """All that a user may set besides workloads, policies and seeds; ``None``: what the workload's kind implies."""

    cluster: str = "16x4"
    profiles: Path | None = None
    throughputs: Path | None = None
    interval: float | None = None  # s between decisions
    restart_delay: float | None = None  # s
    interference: float = 0.0
    checkpoint_interval: float = 1800.0  # s, where nodes can be lost
    spot_trace: Path | None = None
    notice: float = 0.0  # s
    prices: Path | None = None
    failures: Failures | None = None
    stragglers: Stragglers | None = None
    nearest: bool = False  # replace unknown models by the nearest that was profiled

    def __post_init__(self) -> None:
        if not self.checkpoint_interval > 0:
            raise OptionError(f"the checkpoint interval must be > 0 s; got {self.checkpoint_interval}")
        if not 0 <= self.notice < inf:
            raise OptionError(f"the notice must be a finite number >= 0 s; got {self.notice}")
        if self.restart_delay is not None and not 0 <= self.restart_delay < inf:
            raise OptionError(f"the restart delay must be a finite number >= 0 s; got {self.restart_delay}")
        if self.interval is not None and not 0 < self.interval < inf:
            raise OptionError(f"the interval must be a finite number > 0 s; got {self.interval}")
        if not 0 <= self.interference < 1:
            raise OptionError(f"interference must be >= 0 and < 1; got {self.interference}")
        if self.notice and not self.spot_trace:
            raise OptionError("a notice needs --spot-trace, whose removals it announces")


class Inputs:
    """Files of ``options``, read when first needed."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._loaded: dict[tuple[str, int], Loaded] = {}

    @cached_property
    def spec(self) -> ClusterSpec:
        return read_cluster(self.options.cluster, spot=self.options.spot_trace is not None)

    @cached_property
    def events(self) -> list[NodeEvent]:
        return read_node_trace(self.options.spot_trace) if self.options.spot_trace else []

    @cached_property
    def history(self) -> PriceHistory | None:
        return read_prices(self.options.prices) if self.options.prices else None

    @cached_property
    def present(self) -> Cluster:
        """Return the cluster with its spot trace, without failures, at list prices."""
        if not self.events:
            return self.spec.cluster
        options = self.options
        return with_trace(
            self.spec.cluster,
            self.events,
            self.spec.template,
            notice=options.notice,
            source=str(options.spot_trace),
        )

    @cached_property
    def begin(self) -> float:
        """Return when the simulation begins, s since the Unix epoch."""
        assert self.history is not None
        if not any(one.node.market == "spot" for one in presences(self.present)):
            raise OptionError(
                "--prices needs nodes with market: spot, with their type and zone, in the cluster file"
            )
        first = first_moment(self.present, self.history)
        return first if self.spec.begin is None else self.spec.begin

    def load(self, source: Source, seed: int) -> Loaded:
        """Return the workload; only a generated one depends on ``seed``."""
        key = source.text, 0 if source.is_file else seed
        if key not in self._loaded:
            options = self.options
            self._loaded[key] = source.load(
                seed, profiles=options.profiles, throughputs=options.throughputs, nearest=options.nearest
            )
        return self._loaded[key]

    def cluster(self, seed: int, horizon: float) -> tuple[Cluster, Cluster]:
        """Return the cluster at market prices and at list prices, with failures until ``horizon`` s."""
        listed = self.present
        if self.options.failures:
            listed = with_failures(listed, self.options.failures, seed, horizon)
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
        options = self.options
        files = {"spot_trace": options.spot_trace, "prices": options.prices}
        return {
            "cluster": [repr(self.spec.cluster), repr(self.spec.template), self.spec.begin],
            "options": [
                options.interval,
                options.restart_delay,
                options.interference,
                options.checkpoint_interval,
                options.notice,
                repr(options.failures),
                repr(options.stragglers),
            ],
            **{
                name: hashlib.sha256(path.read_bytes()).hexdigest() if path else ""
                for name, path in files.items()
            },
        }
