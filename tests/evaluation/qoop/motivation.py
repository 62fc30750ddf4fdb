"""How capacity changes: the source's figures 2.3 and 2.4 (QOOP, section 2.2)."""

import csv
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from ebbflow.planners.model import Resources, Work
from ebbflow.planners.query.plan.qep import QueryExecutionPlan, Stage, Text
from ebbflow.planners.query.running.baselines import volcano
from ebbflow.planners.query.running.packing import simulate
from tests.evaluation.qoop.families import chosen, stored
from tests.evaluation.qoop.profiles import MINUTE, Profile, spot
from tests.evaluation.qoop.settings import Settings
from tests.evaluation.qoop.simulator import Options, run
from tests.evaluation.qoop.volatility import events
from tests.evaluation.qoop.workloads import Family, Testbed
from tests.evaluation.qoop.world import build, cluster, prices, spot_machines, workload

RECENT = "us-west-2a-p2.xlarge.csv"
LEVELS = (0.1, 0.15, 0.2)


def run_motivation(settings: Settings) -> dict[str, Any]:
    """Count volatility events of both profiles and play figure 2.4's example."""
    machines = spot_machines(replace(settings, spot_traces=1))[0]
    shares = cluster(settings)
    counts = np.array([events(shares.seen_by(i), 0.1) for i in range(min(len(shares.stays), 2000))])
    regions = {
        name: {kind: len(rows) for kind, rows in build(name, "tpcds", settings).regions.items()}
        for name in ("spot", "cluster")
    }
    calm = [Profile.every(MINUTE, day).levels for day in _windows(recent_prices())]
    return {
        "settings": settings.shown(),
        "spot_2020": {
            "windows": len(calm),
            "events": {f"{x:.0%}": float(np.mean([events(levels, x) for levels in calm])) for x in LEVELS},
        },
        "spot": {
            "minutes": int(machines.length / 60),
            "most": max(machines.levels),
            "least": min(machines.levels),
            "mean": machines.mean,
            "events": {f"{x:.0%}": events(machines.levels, x) for x in LEVELS},
            "sum_of_bids_events": {
                f"{x:.0%}": events(spot(prices(), rule="sum-of-bids").levels, x) for x in LEVELS
            },
            "levels": [float(v) for v in machines.sampled(60.0)],
        },
        "cluster": {
            "jobs": len(counts),
            "mean_share": shares.profile.mean,
            "at_least_1": float((counts >= 1).mean()),
            "at_least_4": float((counts >= 4).mean()),
            "counts": [int((counts == n).sum()) for n in range(int(counts.max()) + 1)],
        },
        "regions": regions,
        "regret": {
            "as planned": regret(chosen(stored(), settings.queries, settings.testbed), settings.testbed),
            "in three degrees": regret(workload("tpcds", settings), settings.testbed),
        },
        "example": example(),
    }


def regret(
    families: Sequence[Family], bed: Testbed, few: float = 60.0, many: float = 600.0
) -> dict[str, float]:
    """Return how many times longer the plan that is best on ``few`` containers takes on ``many`` than the one
    that is best there, and the other way round: median and mean over the families."""
    up, down = [], []
    for f in families:
        times = [[simulate(p, bed.share(c)).seconds for c in (few, many)] for p in f.plans]
        low, high = min(times), min(times, key=lambda t: t[1])
        up.append(low[1] / high[1])
        down.append(high[0] / low[0])
    return {
        "up_median": float(np.median(up)), "up_mean": float(np.mean(up)),
        "down_median": float(np.median(down)), "down_mean": float(np.mean(down)),
    }  # fmt: skip


def recent_prices() -> list[tuple[float, float]]:
    """Return (hours since the first, $/h) of each change of a real price, December 2019 to March 2020."""
    path = Path(__file__).parent / "data" / "spot-2020" / RECENT
    rows = list(csv.DictReader(path.read_text().splitlines()))
    first = datetime.fromisoformat(rows[0]["timestamp"])
    return [
        (
            (datetime.fromisoformat(r["timestamp"]) - first).total_seconds() / 3600,
            float(r["spot_price_usd_per_hour"]),
        )
        for r in rows
    ]


def _windows(changes: list[tuple[float, float]], hours: float = 5.0) -> list[list[float]]:
    """Return the instances held each minute in every ``hours`` of a price history, from the second hour of
    each on: what a bidder buys at first is no volatility."""
    times, values = np.array([t for t, _ in changes]), np.array([p for _, p in changes])
    out = []
    for start in np.arange(0.0, times[-1] - hours - 1, hours):
        minutes = start + np.arange(0.0, hours + 1, 1 / 60)
        trace = values[np.searchsorted(times, minutes + 1e-9, side="right") - 1]
        out.append([float(v) for v in spot([float(p) for p in trace]).sampled(MINUTE)[60:]])
    return out


def example() -> dict[str, Any]:
    """Play figure 2.4: three plans of A⋈B⋈C⋈D on 2 containers, 4 from the first second on."""
    family = figure_2_4()
    bed = Testbed(machines=1, per_machine=4)
    profile = Profile((0.0, 1.0), (2.0, 4.0), 2.0)
    took = {
        policy: run(family, profile, Options(policy, hysteresis=h), testbed=bed).seconds
        for policy, h in (("volcano", 0.0), ("clarinet", 0.0), ("qoop", 0.15))
    }
    late = run(family, profile, Options("qoop", hysteresis=0.2), testbed=bed).seconds
    return {
        "seconds": took,
        "qoop_with_h_20": late,
        "volcano": volcano(family.plans, bed.share(2)).shape,
    }


def figure_2_4() -> Family:
    """Return an instance of figure 2.4 whose best times are those that the source names."""

    def stage(fp: str, inputs: tuple[str, ...], tasks: int, duration: float) -> Stage:
        return Stage(
            name=fp, output_fp=fp, physical_key=f"{fp}({','.join(inputs)})", inputs=inputs, tables=(),
            statement=Text(""), tasks=tasks, demand=Resources(1.0, 0.0), duration=duration, latency=0.0,
            rows=0.0, bytes=0.0, work=Work(),
        )  # fmt: skip

    def plan(shape: str, *stages: Stage) -> QueryExecutionPlan:
        return QueryExecutionPlan(shape, stages, shape)

    return Family(
        "figure 2.4",
        (
            plan("((A⋈B)⋈C)⋈D", stage("AB", (), 1, 3), stage("ABC", ("AB",), 1, 3), stage("ABCD", ("ABC",), 1, 3)),
            plan("(A⋈B)⋈(C⋈D)", stage("AB", (), 1, 3), stage("CD", (), 1, 3), stage("ABCD", ("AB", "CD"), 2, 4)),
            plan("(A⋈C)⋈(B⋈D)", stage("AC", (), 2, 2), stage("BD", (), 2, 2), stage("ABCD", ("AC", "BD"), 4, 3)),
        ),
        3,
        3,
    )  # fmt: skip
