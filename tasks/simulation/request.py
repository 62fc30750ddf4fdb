"""What is asked of the simulator."""

from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from ebbflow.infra.simulation.faults import Failures, Stragglers
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.numbers import is_number, parse_bit_rate
from ebbflow.planners.scheduling.catalogue import Entry, policy_entries
from ebbflow.planners.scheduling.placement_cost import ClusterLinks
from ebbflow.tasks.simulation.sources import Source, sources


@dataclass(frozen=True, slots=True)
class SimulationRequest:
    """Policies to compare on workloads, once for each seed, and on which cluster.

    ``workload``, ``policy``: names or files, separated by commas; ``cluster``: NODESxGPUS or a YAML file; ``seeds``:
    runs of each policy. ``None``: what the workload's kind implies. Raises ``OptionError`` for a value that breaks
    its rule.
    """

    workload: str = "pollux-1"
    policy: str = "tiresias,optimus"
    cluster: str = "16x4"
    seeds: int = 1
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
    communication: Path | None = None  # directory of MODEL.json, what trainings of models have recorded
    links: str = ""  # bandwidth on a node, within a rack and across racks, such as 64gbit,50gbit,25gbit

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise OptionError(f"--seeds must be >= 1; got {self.seeds}")
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
        if bool(self.links) != (self.communication is not None):
            raise OptionError(
                "--communication needs --links, the bandwidth of the cluster, and the other way round"
            )
        if self.links:
            links_of(self.links)
        if self.notice and not self.spot_trace:
            raise OptionError("a notice needs --spot-trace, whose removals it announces")

    @property
    def sources(self) -> list[Source]:
        """Return the workloads, not yet read. Raises ``OptionError`` or ``WorkloadError``."""
        return sources(self.workload)

    @property
    def policies(self) -> list[Entry]:
        """Return the policies, each once. Raises ``OptionError`` for a name that there is not."""
        return policy_entries(self.policy)

    def shown(self) -> dict[str, Any]:
        """Return what was asked for, for reports; what was left open is left out."""
        found = {
            "workload": ", ".join(source.name for source in self.sources),
            "cluster": Path(self.cluster).name,
            "policy": self.policy,
            "seeds": self.seeds,
            "interval, s": self.interval,
            "restart delay, s": self.restart_delay,
            "interference": self.interference or None,
            "spot trace": self.spot_trace and self.spot_trace.name,
            "notice, s": self.notice or None,
            "communication": self.communication and self.communication.name,
            "links": self.links or None,
            "prices": self.prices and self.prices.name,
            "throughputs": self.throughputs and self.throughputs.name,
        }
        if self.failures:
            found["failures"] = f"{self.failures.rate:g} per node-hour, back after {self.failures.repair:g} s"
        if self.stragglers:
            found["stragglers"] = (
                f"{self.stragglers.share:.0%} of nodes, {self.stragglers.factor:g} times slower"
            )
        if self.failures or self.spot_trace:
            found["checkpoints every, s"] = self.checkpoint_interval
        return {name: value for name, value in found.items() if value is not None}


def links_of(text: str) -> ClusterLinks:
    """Return ``NODE,RACK[,CROSS]``: bandwidth on a node, between nodes and between racks. Raises ``OptionError``."""
    parts = text.split(",")
    if not 2 <= len(parts) <= 3:
        raise OptionError(f"--links is written NODE,RACK[,CROSS], such as 64gbit,25gbit; got {text!r:.60}")
    return ClusterLinks(*(parse_bit_rate(part, "--links") / 8 for part in parts))


def failures(text: str | None) -> Failures | None:
    """Return ``RATE[,REPAIR]``: losses per node-hour, and seconds until a node is back. Raises ``OptionError``."""
    return None if text is None else Failures(*_numbers("--failures", text, "RATE[,REPAIR]", "0.01,1800"))


def stragglers(text: str | None) -> Stragglers | None:
    """Return ``SHARE[,FACTOR]``: chance of a node to be slow, and how many times. Raises ``OptionError``."""
    return None if text is None else Stragglers(*_numbers("--stragglers", text, "SHARE[,FACTOR]", "0.1,2"))


def _numbers(option: str, text: str, shape: str, example: str) -> list[float]:
    parts = text.split(",")
    values = [float(part) for part in parts if is_number(part)]
    if not 1 <= len(values) <= 2 or len(values) < len(parts):
        raise OptionError(f"{option} is written {shape}, such as {example}; got {text!r}")
    return values
