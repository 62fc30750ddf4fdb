"""How well costs of stages are known: those of one query predicted from the stages of all others.

    python -m tests.benchmarks.stage_costs docs/benchmarks/switching.json

Of the runs that ``switching`` has written, the figures of each stage are predicted by costs fitted to the stages of
the other queries: once with what is known of cold nodes, once without. Task seconds are of all stages, wall seconds
of those beside which nothing ran or changed. It runs no query.

Runs without such figures have at least how long each stage was expected to take, by costs that knew no cold nodes.
Fitted is then ``seconds = a * expected + w * met``, where ``met`` is how many of a stage's first tasks meet a cold
node, at most one; a node is cold for 30 s of stages from its arrival (``WARM``), less from second to second.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ebbflow.planners.model import Measured, Work
from ebbflow.planners.model.capacity import warming
from ebbflow.planners.query.costs.cost import DEFAULTS, CostModel
from ebbflow.planners.query.costs.fitting import calibrate
from ebbflow.planners.query.costs.links import cold_tasks
from tests.benchmarks.switching import undisturbed


class Seen(NamedTuple):
    """One stage of one run."""

    query: int
    measured: Measured
    alone: bool  # nothing ran or changed beside it


def stages_of(runs: Sequence[dict[str, Any]]) -> list[Seen]:
    """Return the stages with figures of all runs."""
    found = []
    for run in runs:
        for stage in run["stages"]:
            if figures := stage.get("measured"):
                measured = Measured(**(figures | {"work": Work(**figures["work"])}))
                found.append(Seen(run["query"], measured, undisturbed(stage, run)))
    return found


def task_seconds(model: CostModel, one: Measured) -> float:
    """Return what ``model`` expects of a stage's tasks in all."""
    return model.core_seconds(one.work) + model.warm_up * one.cold


def wall_seconds(model: CostModel, one: Measured) -> float:
    """Return what ``model`` expects of a stage that has the cores to itself."""
    used = max(min(one.cores, one.tasks), 1.0)
    return model.latency + model.core_seconds(one.work) / used + model.warm_up * min(one.cold, 1.0)


def errors(
    seen: Sequence[Seen],
    expected: Callable[[CostModel, Measured], float],
    actual: Callable[[Measured], float],
    *,
    blind: bool,
    alone: bool,
) -> dict[str, float]:
    """Return the q-errors of stages by costs fitted to those of other queries; ``blind`` to cold nodes."""
    found = []
    for query in {one.query for one in seen}:
        others = [_as_known(one.measured, blind) for one in seen if one.query != query]
        for one in seen:
            if one.query == query and (one.alone or not alone):
                known = _as_known(one.measured, blind)
                model = calibrate(DEFAULTS[known.engine], others)
                pair = expected(model, known), actual(known)
                found.append(max(pair) / max(min(pair), 1e-3))
    return _summary(found)


def _as_known(one: Measured, blind: bool) -> Measured:
    return replace(one, cold=0.0) if blind else one


class Expected(NamedTuple):
    """One stage beside which nothing ran or changed, of a run without its figures."""

    query: int
    seconds: float
    expected: float
    met: float  # of its tasks, those that met a cold node, at most 1


def expected_of(runs: Sequence[dict[str, Any]]) -> list[Expected]:
    """Return such stages of all runs on one fleet, in the order in which they ran; its oldest node stays."""
    found = []
    busy = [math.inf]  # seconds in which stages ran while a node was there, the oldest first
    for run in runs:
        busy = _nodes(busy, run["capacity"][0][1])
        stages, began, last, running = run["stages"], {}, 0.0, set[int]()
        events = [(at, 0, nodes) for at, nodes in run["capacity"][1:]]
        for i, stage in enumerate(stages):
            events += [(stage["started"], 2, i), (stage["started"] + stage["seconds"], 1, i)]
        for at, kind, which in sorted(events):
            busy = [b + (at - last if running else 0.0) for b in busy]
            last = at
            if kind == 0:
                busy = _nodes(busy, which)
            elif kind == 1:
                running.discard(which)
            else:
                running.add(which)
                cold = sum(warming(b) for b in busy)
                began[which] = min(cold_tasks(stages[which]["tasks"], cold, len(busy)), 1.0)
        found += [
            Expected(run["query"], stage["seconds"], stage["expected"], began[i])
            for i, stage in enumerate(stages)
            if stage["expected"] and stage["seconds"] and undisturbed(stage, run)
        ]
    return found


def _nodes(busy: list[float], count: int) -> list[float]:
    return [*busy[:count], *[0.0] * (count - len(busy))]


def fitted_errors(seen: Sequence[Expected], *, blind: bool) -> dict[str, float]:
    """Return the q-errors of stages by ``a`` and ``w`` that fit those of other queries best; ``blind``: w is 0."""
    found = []
    for query in {one.query for one in seen}:
        others = [one for one in seen if one.query != query]
        grid = [(a / 50, w / 5) for a in range(10, 80) for w in range(1 if blind else 30)]
        a, w = min(grid, key=lambda k: sum(abs(math.log(_by(k, one) / one.seconds)) for one in others))
        mine = [(_by((a, w), one), one.seconds) for one in seen if one.query == query]
        found += [max(pair) / min(pair) for pair in mine]
    return _summary(found)


def _by(fit: tuple[float, float], one: Expected) -> float:
    return fit[0] * one.expected + fit[1] * one.met


def _summary(found: list[float]) -> dict[str, float]:
    found = sorted(found)
    return {
        "stages": len(found),
        "median": round(statistics.median(found), 2),
        "95th percentile": round(found[min(int(0.95 * len(found)), len(found) - 1)], 2),
    }


def main() -> None:
    """Print the q-errors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", help="what switching has written")
    given = parser.parse_args()
    runs = [run for path in given.runs for run in json.loads(path.read_text())["runs"]]
    seen = stages_of(runs)
    if not seen:
        known = expected_of(runs)
        print(
            "as expected:", _summary([max(s.seconds, s.expected) / min(s.seconds, s.expected) for s in known])
        )
        print("one factor:", fitted_errors(known, blind=True))
        print("with cold nodes:", fitted_errors(known, blind=False))
        return
    if len({one.query for one in seen}) < 2:
        raise SystemExit(f"stages of two queries at least are needed; these files have {len(seen)} stages")
    for name, blind in (("averaged over cold and warm nodes", True), ("with cold nodes", False)):
        print(name)
        tasks = errors(seen, task_seconds, lambda m: m.task_seconds, blind=blind, alone=False)
        print("  task seconds:", tasks)
        print(
            "  wall seconds:", errors(seen, wall_seconds, lambda m: m.wall_seconds, blind=blind, alone=True)
        )


if __name__ == "__main__":
    main()
