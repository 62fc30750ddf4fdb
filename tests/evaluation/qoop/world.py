"""The workload and the resource profiles of an evaluation run."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.evaluation.qoop.families import chosen, stored
from tests.evaluation.qoop.profiles import PriceModel, Profile, Sharing, shared, spot
from tests.evaluation.qoop.settings import ProfileName, Settings
from tests.evaluation.qoop.volatility import VolatilityClass, chain, regions
from tests.evaluation.qoop.workloads import Family, Testbed, calibrated, synthetic, varied

PRICES = "spot-prices.json"
TYPICAL = 24.0  # containers: 600 shared by the 25 jobs that are active on average


@dataclass(frozen=True)
class World:
    """One workload on one kind of profile."""

    name: ProfileName
    workload: str
    families: tuple[Family, ...]
    regions: Mapping[VolatilityClass, npt.NDArray[np.float64]]
    level: float  # containers, mean over the profile
    minutes: int
    seed: int

    def profile(self, kind: VolatilityClass, query: int, run: int) -> Profile:
        """Return the capacity that run ``run`` of a query sees; the same for every system."""
        number = ("low", "medium", "high").index(kind)
        rng = np.random.default_rng([self.seed, len(self.name), number, query, run])
        return chain(rng, self.regions[kind], self.minutes)


def prices() -> tuple[float, ...]:
    """Return the stored price trace: $/h each minute."""
    text = (Path(__file__).parent / "data" / PRICES).read_text()
    return tuple(json.loads(text)["prices"])


def spot_machines(settings: Settings) -> list[Profile]:
    """Return machines held over time: the stored trace, then others of the same price model."""
    rng = np.random.default_rng([settings.seed, 5])
    traces = [prices(), *(PriceModel().prices(rng) for _ in range(settings.spot_traces - 1))]
    return [spot(trace) for trace in traces]


def cluster(settings: Settings) -> Sharing:
    """Return the shares of a cluster on which the stored families' jobs come and go."""
    given = (
        settings.seed,
        settings.cluster_gap,
        settings.cluster_time,
        settings.cluster_jobs,
    )
    return _cluster(settings.testbed, *given)


@lru_cache(maxsize=4)
def _cluster(bed: Testbed, seed: int, gap: float, time: float, jobs: int) -> Sharing:
    times = [f.best_seconds(bed.share(TYPICAL)) for f in chosen(stored(), 99)]
    rng = np.random.default_rng([seed, 6])
    return shared(rng, times, containers=float(bed.containers), mean_gap=gap, mean_time=time, jobs=jobs)


@lru_cache(maxsize=16)
def _regions(profiles: tuple[Profile, ...]) -> Mapping[VolatilityClass, npt.NDArray[np.float64]]:
    return regions(profiles)


def workload(name: str, settings: Settings) -> tuple[Family, ...]:
    """Return the families of ``tpcds`` or ``synthetic``, in all degrees of parallelism, before calibration."""
    count = settings.queries if name == "tpcds" else min(settings.random_queries, settings.queries)
    planned = _planned(name, settings.testbed, settings.seed, count)
    return tuple(varied(f, settings.testbed, settings.variety) for f in planned)


@lru_cache(maxsize=8)
def _planned(name: str, bed: Testbed, seed: int, queries: int) -> tuple[Family, ...]:
    if name == "tpcds":
        return chosen(stored(), queries, bed)
    return synthetic(np.random.default_rng([seed, 7]), queries, testbed=bed)


@lru_cache(maxsize=64)
def build(name: ProfileName, load: str, settings: Settings) -> World:
    """Return a workload on a profile, its times calibrated to the profile's mean level."""
    bed = settings.testbed
    if name == "spot":
        profiles = tuple(p.scaled(bed.per_machine) for p in spot_machines(settings))
    else:
        profiles = (cluster(settings).profile,)
    level = float(np.mean([p.mean for p in profiles]))
    families = calibrated(workload(load, settings), settings.mean_seconds, bed.share(round(level)))
    return World(name, load, families, _regions(profiles), level, settings.minutes, settings.seed)
