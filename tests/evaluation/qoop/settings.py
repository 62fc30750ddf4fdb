"""What an evaluation run is made of. Every parameter is written beside the figures that it gave."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from ebbflow.planners.errors import OptionError
from tests.evaluation.qoop.workloads import Testbed, Variety

ProfileName = Literal["spot", "cluster"]
PROFILES: tuple[ProfileName, ...] = ("spot", "cluster")


@dataclass(frozen=True, slots=True)
class Settings:
    """Parameters of the micro-benchmarks and sweeps."""

    seed: int = 1
    queries: int = 50  # TPC-DS queries (QOOP, section 8)
    random_queries: int = 20  # of the other workload, at most as many as TPC-DS's
    runs: int = 10  # random regions a query and class
    hysteresis: float = 0.15  # inside the source's plateau of 10 to 25 %
    mean_seconds: float = 500.0  # mean time of the families' best plans at the profile's mean level
    minutes: int = 1200  # of capacity laid out for each run
    spot_traces: int = 1  # price traces that spot regions come from; the first is the stored one
    cluster_jobs: int = 20_000  # arrivals from which shared-cluster regions come
    cluster_gap: float = 20.0  # mean seconds between them (QOOP, section 2.2.1)
    cluster_time: float = 500.0  # their mean time: seconds (ditto)
    grains: tuple[float, ...] = (0.25, 1.0, 4.0)  # degrees of parallelism, times the cost model's tasks
    grain_work: float = 1.3  # work of a stage cut into 4 times the tasks, over its work as it is
    processes: int = 2

    def __post_init__(self) -> None:
        for name in ("queries", "runs", "minutes", "spot_traces", "processes"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be >= 1; got {getattr(self, name)}")
        if self.seed < 0:
            raise OptionError(f"seed must be >= 0; got {self.seed}")
        if not self.hysteresis >= 0:
            raise OptionError(f"hysteresis must be >= 0; got {self.hysteresis}")
        if self.mean_seconds <= 0:
            raise OptionError(f"mean_seconds must be > 0; got {self.mean_seconds}")

    @property
    def testbed(self) -> Testbed:
        """Return the cluster of the source: 20 machines of 30 one-core containers."""
        return Testbed()

    @property
    def variety(self) -> Variety:
        """Return which physical variants the plans come in."""
        return Variety(grains=self.grains, grain_work=self.grain_work)

    def with_runs(self, runs: int) -> "Settings":
        """Return the settings with another number of runs."""
        return replace(self, runs=runs)

    def shown(self) -> dict[str, Any]:
        """Return the parameters for a report."""
        found = asdict(self)
        del found["processes"]  # no result depends on it
        return found | {"testbed": asdict(self.testbed)}
