"""The experiments of Themis' evaluation: which runs are made, with how many seeds."""

from collections.abc import Iterable
from typing import Any

from tests.evaluation.experiments import Experiment
from tests.evaluation.themis.cases import POLICIES, Case, run_cases

KNOBS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0)
LEASES = (300.0, 600.0, 1200.0, 2400.0)  # s
ERRORS = (0.1, 0.2, 0.4)
LIES = (0.1, 0.2, 0.3, 0.4, 0.6, 1.0)
SHARES = (0.0, 0.4, 0.6, 1.0)
CLUSTERS = ("sim-256", "sim-128", "sim-64")
POOLS = (0.05, 0.2)
MAIN = ("themis", "gandiva", "las", "srtf", "throughput", "slaq")


def experiments(quick: bool) -> list[Experiment]:
    """Return all of them. The quick ones have one seed, a few apps and the ends of every sweep."""
    small: Case = {"apps": 8, "hours": 2.0} if quick else {}
    made: list[Experiment] = []

    def add(name: str, seeds: int, weight: float, settings: Iterable[Case]) -> None:
        cases = [small | case | {"seed": seed} for case in settings for seed in range(1 if quick else seeds)]
        made.append(Experiment(name, run_cases, {"cases": cases}, weight * len(cases)))

    def ends(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return (values[0], values[-1]) if quick else values

    for workload in ("w1", "w2"):
        for policy in MAIN if quick else POLICIES:
            weight = 4.0 if policy == "themis" else 0.5
            add(f"testbed-{workload}-{policy}", 5, weight, [_with(policy, workload=workload, paused=True)])
        add(f"testbed-{workload}-all-bid", 5, 6.0, [_with(workload=workload, paused=True, knob=0.0)])
    add("knob", 4, 4.0, [_with(workload="w2", knob=knob) for knob in ends(KNOBS)])
    add("lease", 2, 4.0, [_with(workload="w2", lease_s=lease, paused=True) for lease in ends(LEASES)])
    add("error", 2, 4.0, [_with(workload="w2", error=error) for error in (0.0, *ends(ERRORS))])
    add("pool", 2, 6.0, [_with(workload="w2", pool=pool) for pool in ends(POOLS)])
    rules: tuple[Case, ...] = ({"leftovers": "affine"}, {"leftovers": "affine", "payments": False})
    add("rules", 2, 4.0, [_with(workload="w2", **rule) for rule in ends(rules)])
    for policy in MAIN:
        weight = 2.5 if policy == "themis" else 0.5
        add(f"contention-{policy}", 2, weight, [_with(policy, cluster=name) for name in ends(CLUSTERS)])
        add(f"network-{policy}", 2, weight, [_with(policy, workload="w2", network=x) for x in ends(SHARES)])
    about = [("", 0.0), *((kind, lie) for kind in ("spread", "dense") for lie in ends(LIES))]
    add("lying", 4, 0.3, [
        _with(workload="identical", cluster="one-dense-64", lie=lie, lie_about=kind) for kind, lie in about
    ])  # fmt: skip
    add("times", 1, 5.0, [_with(workload="w2", probe=10)])
    return made


def _with(policy: str = "themis", **settings: Any) -> Case:
    return {"policy": policy} | settings
