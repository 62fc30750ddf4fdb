"""The experiments on renting: worlds made of real prices and presence, jobs, and strategies."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ebbflow.infra.simulation.traces.prices import PriceHistory, moment, read_prices
from ebbflow.infra.simulation.traces.rows import read_spot_rows
from tests.evaluation.experiments import Experiment
from tests.evaluation.renting.driver import World, run
from tests.evaluation.renting.jobs import MACHINES, Job, job_of
from tests.evaluation.renting.spot_supply import PresenceTrace, Supply
from tests.evaluation.renting.strategies import Once, Planned, Strategy

DATA = Path(__file__).parent / "data"
FIRST, LAST = moment("2020-01-04T00:00:00Z"), moment("2020-03-16T00:00:00Z")
"""Between them jobs begin: all US prices are known, and the longest runs end before the last ones."""

REGIONS = ("us-west-2", "us-east-1", "us-east-2")
STARTS = 12
HOURS = 10.0  # of each job, on the better single GPU
SHARE = 1 / 12  # of the trace's nodes that are to be had where capacity is scarce: one at a time, on average

GANGS = ("ResNet-50", "ResNet-18", "Transformer", "LM")
SINGLES = ("A3C", "Recommendation")
SLACKS: Mapping[str, tuple[float, ...]] = {
    **dict.fromkeys(GANGS, (0.6, 1.2, 2.0)),
    **dict.fromkeys(SINGLES, (1.2, 2.0)),
}
"""Time allowed, times that of the better single GPU; below 1 it takes several."""

STRATEGIES: Mapping[str, Callable[[], Strategy]] = {
    "planned": Planned,
    "cheapest-work": lambda: Once("cheapest-work", "spot"),
    "cheapest-hour": lambda: Once("cheapest-hour", "spot", by="hour"),
    "on-demand": lambda: Once("on-demand", "on-demand", reserve=1.0),
}


@dataclass(frozen=True, slots=True)
class WorldKind:
    """Which interruptions there are."""

    share: float = 0.0  # of the stays of the g4dn trace; 0: there always are nodes
    limited: bool = False  # no more is paid than the price at the start


WORLDS: Mapping[str, WorldKind] = {
    "prices": WorldKind(),
    "limit": WorldKind(limited=True),
    "presence": WorldKind(share=1.0),
    "scarce": WorldKind(share=SHARE),
}


@cache
def history() -> PriceHistory:
    """Return the spot prices."""
    return read_prices(DATA / "spot" / "aws-2019-12-to-2020-03.csv.gz")


@cache
def presence() -> PresenceTrace:
    """Return the stays of the g4dn pool."""
    return PresenceTrace.of(read_spot_rows(DATA / "presence" / "g4dn.csv"))


def world_of(name: str, seed: int) -> World:
    """Return a world by name: region, beginning and, of presence, each place's offset by ``seed``."""
    kind = WORLDS[name]
    rng = np.random.default_rng([seed, 1])
    region = REGIONS[seed % len(REGIONS)]
    begin = float(rng.uniform(FIRST, LAST))
    supplies: dict[tuple[str, str], Supply] = {}
    for (zone, type_), series in sorted(history().series.items()):
        if zone.startswith(region) and type_ in MACHINES and series.covers(begin):
            trace = _thinned(presence(), kind.share, rng) if kind.share else None
            offset = float(begin - rng.uniform(0, presence().length))
            supplies[zone, type_] = Supply(series, trace, offset)
    limits = {place: supply.prices.at(begin) for place, supply in supplies.items()} if kind.limited else {}
    return World(supplies, begin, limits, seed)


def _thinned(trace: PresenceTrace, share: float, rng: np.random.Generator) -> PresenceTrace:
    """Return ``share`` of the stays, drawn at random: the others are somebody else's."""
    count = max(1, round(share * len(trace.stays)))
    kept = sorted(int(at) for at in rng.choice(len(trace.stays), count, replace=False))
    return PresenceTrace(tuple(trace.stays[at] for at in kept), trace.length)


def jobs(quick: bool = False) -> list[tuple[str, float, Job]]:
    """Return (model, slack, job); quick: two of them, short."""
    if quick:
        return [
            (model, slack, job_of(model, 2.0, slack)) for model, slack in (("ResNet-50", 0.6), ("A3C", 1.2))
        ]
    return [(model, slack, job_of(model, HOURS, slack)) for model, all_ in SLACKS.items() for slack in all_]


def measured(world: str, seed: int, quick: bool = False) -> list[dict[str, Any]]:
    """Return what became of every job under every strategy from one beginning on."""
    there = world_of(world, seed)
    rows = []
    for model, slack, job in jobs(quick):
        for name, make in STRATEGIES.items():
            outcome = run(job, make(), there)
            rows.append({"model": model, "slack": slack, "strategy": name, **asdict(outcome)})
    return rows


def experiments(quick: bool = False) -> list[Experiment]:
    """Return one experiment a world and beginning."""
    return [
        Experiment(f"{world}-{seed}", measured, {"world": world, "seed": seed, "quick": quick})
        for world in WORLDS
        for seed in range(2 if quick else STARTS)
    ]
