"""What the runs say: ratios by case and schedule, the bars, and where the time of every loss goes.

The ratio of a round is Ebbflow's completion time over that of the best plain Spark, which is the system, of those
that took part in all rounds, with the smallest median over them. A run that failed or was wrong never completes:
a ratio against it is 0 (shown as such), Ebbflow's own is infinite, and where neither completes it is 1. Means
take for a plain run that failed the time until it failed, so they rather understate the gain.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tests.benchmarks.sql.cases import PLAIN, QUERIES
from tests.benchmarks.sql.records import Journal, Record

_MEDIANS = (
    "planning", "idle", "task_seconds", "wasted", "stages", "retried", "failed_tasks", "waiting",
    "scheduler_delay", "deserialize", "run", "cpu", "gc", "fetch_wait", "broadcast", "input_bytes",
    "shuffle_bytes", "spilled_bytes", "output_bytes",
)  # fmt: skip
# Parts of the time, and what each is called; task times are per core in parallel.
_PARTS = {
    "planning": "planning",
    "idle": "between statements",
    "stages": "stages running",
}
_INSIDE = {
    "broadcast": ("broadcasts", 1.0),
    "waiting": ("waiting for cores", 1.0),
    "wasted": ("repeated work", 0.0),
    "scheduler_delay": ("scheduler delay", 0.0),
    "deserialize": ("task start-up", 0.0),
    "fetch_wait": ("shuffle reads", 0.0),
    "gc": ("garbage collection", 0.0),
    "cpu": ("processor time", 0.0),
}


@dataclass(frozen=True)
class Bar:
    """One figure that must hold."""

    name: str
    value: float | None  # ``None``: nothing was measured
    bar: float
    at_least: bool = False

    @property
    def holds(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.bar if self.at_least else self.value <= self.bar


@dataclass(frozen=True)
class Pair:
    """Ebbflow's run and the better plain system's of one round."""

    ours: Record
    theirs: Record

    @property
    def ratio(self) -> float:
        ours, theirs = self.ours.seconds, self.theirs.seconds
        if math.isinf(ours) and math.isinf(theirs):
            return 1.0
        return 0.0 if math.isinf(theirs) else ours / theirs

    @property
    def bounded(self) -> float:
        """Return a ratio that is certainly not too small: a plain run that failed took longer than that."""
        if math.isinf(self.theirs.seconds) and not math.isinf(self.ours.seconds):
            return self.ours.wall / max(self.theirs.wall, 1e-9)
        return self.ratio

    @property
    def gain(self) -> float:
        """Return how many times sooner Ebbflow was done; of a plain run that failed, at least."""
        return 1 / self.bounded


@dataclass(frozen=True)
class Case:
    """One query under one schedule."""

    suite: str
    query: int
    schedule: str
    runs: dict[str, list[Record]]  # by system, in order of rounds
    better: str  # plain system
    pairs: tuple[Pair, ...]

    @property
    def name(self) -> str:
        return f"{self.suite} Q{self.query}"

    @property
    def ratio(self) -> float:
        return statistics.median(p.ratio for p in self.pairs)

    @property
    def bounded(self) -> float:
        return statistics.median(p.bounded for p in self.pairs)


def cases(records: Iterable[Record]) -> list[Case]:
    """Return the cases that have at least one whole round of Ebbflow and a plain system."""
    grouped: defaultdict[tuple[str, int, str], dict[str, list[Record]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for record in sorted(records, key=lambda r: r.pair):
        grouped[record.case][record.system].append(record)
    found = []
    for (suite, query, schedule), runs in grouped.items():
        plain = [s for s in PLAIN if runs.get(s)]
        if not plain or not runs.get("ebbflow"):
            continue
        rounds = max(len(runs[s]) for s in plain)  # after the first, only the best of several takes part
        plain = [s for s in plain if len(runs[s]) == rounds]
        better = min(plain, key=lambda s: (statistics.median(r.seconds for r in runs[s]), s))
        theirs = {r.pair: r for r in runs[better]}
        pairs = tuple(Pair(r, theirs[r.pair]) for r in runs["ebbflow"] if r.pair in theirs)
        if pairs:
            found.append(Case(suite, query, schedule, dict(runs), better, pairs))
    return found


def alone(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Return the median seconds of Ebbflow's runs of cases that no plain system has run."""
    chosen = list(records)
    others = {record.case for record in chosen if record.system != "ebbflow"}
    seconds: defaultdict[tuple[str, int, str], list[float]] = defaultdict(list)
    for record in chosen:
        if record.case not in others:
            seconds[record.case].append(record.seconds)
    return [
        {"suite": suite, "query": query, "schedule": schedule, "seconds": statistics.median(found)}
        for (suite, query, schedule), found in seconds.items()
    ]


def summarise(journal: Journal) -> dict[str, Any]:
    """Return everything as JSON values; infinite numbers are the text ``inf``."""
    found = cases(journal.records.values())
    schedules = list(dict.fromkeys(r.schedule for r in journal.records.values()))
    suites = list(dict.fromkeys(c.suite for c in found))
    workers = int(journal.setup.get("workers", 3))
    return jsonable(
        {
            "benchmark": "sql",
            "setup": journal.setup,
            "runs": len(journal.records),
            "bars": [
                {"name": b.name, "value": b.value, "bar": b.bar, "at_least": b.at_least, "holds": b.holds}
                for b in bars(found)
            ],
            "schedules": [
                {"suite": suite, "schedule": schedule, **_overall(chosen)}
                for suite in suites
                for schedule in schedules
                if (chosen := [c for c in found if c.suite == suite and c.schedule == schedule])
            ],
            "cases": [_case(c, journal, workers) for c in found],
            "alone": alone(journal.records.values()),
        }
    )


def bars(found: Sequence[Case]) -> list[Bar]:
    """Return the figures that must hold, over TPC-H's multi-join queries."""
    chosen = [c for c in found if c.suite == "tpch" and c.query in QUERIES["tpch"]]

    def under(*names: str) -> list[Case]:
        return [c for c in chosen if c.schedule in names]

    def median(taken: list[Case]) -> float | None:
        return statistics.median(p.bounded for c in taken for p in c.pairs) if taken else None

    none, kill, volatile = under("none"), under("kill"), under("volatile", "volatile-notice")
    lossy = [*kill, *under("notice"), *volatile]
    ours, theirs = wasted_share(lossy, "ebbflow"), wasted_share(lossy, "better")
    share = None if ours is None or theirs is None else ours / theirs if theirs > 0 else math.inf
    gains = [p.gain for c in volatile for p in c.pairs]
    return [
        Bar("no change: geometric mean of ratios", geometric_mean(none), 0.80),
        Bar("no change: worst ratio", max((c.bounded for c in none), default=None), 1.10),
        Bar("one kill without notice: median ratio", median(kill), 0.65),
        Bar("high volatility: median ratio", median(volatile), 0.55),
        Bar("high volatility: 90th percentile of gain", quantile(gains, 0.9), 3.0, at_least=True),
        Bar("wasted work over plain Spark's, under faults", share, 1 / 3),
    ]


def geometric_mean(found: Sequence[Case]) -> float | None:
    """Return the geometric mean over cases of the median ratio; infinite if Ebbflow fails most of one case."""
    if not found:
        return None
    ratios = [c.bounded for c in found]
    return math.inf if math.inf in ratios else statistics.geometric_mean(ratios)


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least ``share`` of ``values`` do not exceed (inverse of the CDF)."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def wasted_share(found: Iterable[Case], system: str) -> float | None:
    """Return wasted over useful task-seconds of a system, summed over all runs; see ``metrics``.

    ``better`` is each case's better plain Spark.
    """
    chosen = [c.runs.get(c.better if system == "better" else system, ()) for c in found]
    figures = [r.metrics for runs in chosen for r in runs if r.metrics]
    wasted = sum(m["wasted"] for m in figures)
    useful = sum(m["task_seconds"] for m in figures) - wasted
    if not figures:
        return None
    return wasted / useful if useful > 0 else math.inf


def _overall(chosen: Sequence[Case]) -> dict[str, Any]:
    pairs = [p for c in chosen for p in c.pairs]
    systems = list(dict.fromkeys(s for c in chosen for s in c.runs))
    gains = [p.gain for p in pairs]
    return {
        "cases": len(chosen),
        "pairs": len(pairs),
        "geometric_mean": geometric_mean(chosen),
        "median": statistics.median(p.ratio for p in pairs),
        "worst": max(c.ratio for c in chosen),
        "worst_case": max(chosen, key=lambda c: c.ratio).name,
        "gain_90": quantile(gains, 0.9),
        "wasted_share": {s: wasted_share(chosen, s) for s in systems},
        "failed": {s: sum(not r.ok for c in chosen for r in c.runs.get(s, ())) for s in systems},
        "wrong": {s: sum(r.right is False for c in chosen for r in c.runs.get(s, ())) for s in systems},
        "unchecked": sum(r.ok and r.right is None for c in chosen for rs in c.runs.values() for r in rs),
        "ratios": sorted(p.ratio for p in pairs),
        "days": _days(r.started for c in chosen for rs in c.runs.values() for r in rs),
    }


def _days(times: Iterable[float]) -> list[str]:
    """Return the first and the last day, UTC, of times in seconds since the Unix epoch."""
    known = sorted(times)
    return [datetime.fromtimestamp(known[place], UTC).date().isoformat() for place in (0, -1)]


def _case(case: Case, journal: Journal, workers: int) -> dict[str, Any]:
    systems = {name: _system(runs) for name, runs in case.runs.items()}
    return {
        "suite": case.suite,
        "query": case.query,
        "schedule": case.schedule,
        "span": journal.spans.get(f"{case.suite}-q{case.query}"),
        "better": case.better,
        "ratio": case.ratio,
        "ratios": [p.ratio for p in case.pairs],
        "systems": systems,
        "loss": explain_loss(systems["ebbflow"], systems[case.better], workers) if case.ratio > 1 else "",
    }


def _system(runs: Sequence[Record]) -> dict[str, Any]:
    measured = [r.metrics for r in runs if r.metrics]
    figures = {k: round(statistics.median(m[k] for m in measured), 3) for k in _MEDIANS} if measured else {}
    return {
        "seconds": statistics.median(r.seconds for r in runs),
        "all": [r.seconds for r in runs],
        "failed": [r.error for r in runs if not r.ok],
        "wrong": [r.error for r in runs if r.right is False],
        "statements": statistics.median(r.statements for r in runs),
        "losses": sum(h.what == "kill" for r in runs for h in r.happenings),  # of workers, during all runs
        "switches": sum(r.switches for r in runs),
        **figures,
    }


def explain_loss(ours: dict[str, Any], theirs: dict[str, Any], workers: int) -> str:
    """Say in which parts of its time Ebbflow takes longer, largest first, by the differences of medians.

    The completion time is planning (until the first job), time with no stage running, and time with one;
    the differences inside the last are core-seconds over the number of workers, or seconds where Spark tells
    those. They overlap, so they do not add up.
    """
    if not math.isfinite(ours["seconds"]):
        return f"failed: {'; '.join(ours['failed'] or ours['wrong'])}"
    if "planning" not in ours or "planning" not in theirs or not math.isfinite(theirs["seconds"]):
        return "nothing to compare with"

    def parts(system: dict[str, Any]) -> dict[str, float]:
        busy = system["seconds"] - system["planning"] - system["idle"]
        return {"planning": system["planning"], "idle": system["idle"], "stages": busy}

    mine, other = parts(ours), parts(theirs)
    outer = sorted(((mine[k] - other[k], words) for k, words in _PARTS.items()), reverse=True)
    inner = []
    for key, (words, weight) in _INSIDE.items():
        change = (ours[key] - theirs[key]) * (weight or 1 / workers)
        inner.append((change, words))
    if ours["shuffle_bytes"] > theirs["shuffle_bytes"]:
        more = (ours["shuffle_bytes"] - theirs["shuffle_bytes"]) / 2**20
        inner.append((0.051, f"{more:.0f} MiB more shuffled"))
    shown = [f"{words} {change:+.1f} s" for change, words in outer if abs(change) >= 0.05]
    details = [
        words if words.endswith("shuffled") else f"{words} {change:+.1f} s"
        for change, words in sorted(inner, reverse=True)
        if change > 0.05
    ]
    return "; ".join(
        filter(None, [", ".join(shown), "inside the stages: " + ", ".join(details[:4]) if details else ""])
    )


def jsonable(value: Any) -> Any:
    """Return ``value`` with numbers rounded for reading and infinite ones as the text ``inf``."""
    if isinstance(value, dict):
        return {k: jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(v) for v in value]
    if isinstance(value, float):
        return "inf" if math.isinf(value) else round(value, 4)
    return value
