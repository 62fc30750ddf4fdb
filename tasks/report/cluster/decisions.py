"""What a cluster's report says of stages, decisions and the loop's pace."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf

import numpy as np

from ebbflow.planners.model.ledger import AppReport, Decided
from ebbflow.tasks.drawing.wording import plural, seconds_text
from ebbflow.tasks.report.cluster.history import History
from ebbflow.tasks.report.cluster.spans import AppHistory, number
from ebbflow.tasks.report.cluster.values import DecisionRow, LatencyRow, StageSpan


def stages(app: AppHistory, said: AppReport | None, begin: float, end: float) -> list[StageSpan]:
    """Return the stages that a query last reported: ``job["stages"]``, each with name, status and its times."""
    listed = said.job.get("stages") if said is not None else None
    found = []
    for one in listed if isinstance(listed, list | tuple) else ():
        if not isinstance(one, Mapping):
            continue
        start = number(one.get("started"))
        if start is None or start > end:
            continue
        stop = number(one.get("ended"))
        stop = end if stop is None else stop
        if stop >= begin:
            found.append(
                StageSpan(
                    app.spec.id,
                    str(one.get("name", "")),
                    str(one.get("status", "")),
                    max(start, begin),
                    max(min(stop, end), start, begin),
                    str(one.get("plan", "")),
                    int(number(one.get("rows")) or 0),
                    str(one.get("note", "")),
                )
            )
    return found


# --- decisions ----------------------------------------------------------------------------------------------------


def changed(decided: Decided) -> bool:
    """Tell whether a re-planning chose another plan."""
    kind = decided.outcome.get("kind")
    if kind is not None:
        return bool(kind == "switch")
    return decided.outcome.get("chosen") != decided.outcome.get("current")


def decisions(history: History, ids: set[str] | None, begin: float, end: float) -> tuple[DecisionRow, ...]:
    """Return decisions from ``begin`` to ``end``, s since the Unix epoch; of the apps ``ids``, if any."""
    rows = []
    for event, decided in history.decisions:
        if begin <= event.at <= end and (ids is None or not decided.app or decided.app in ids):
            rows.append(
                DecisionRow(
                    event.number, event.at, decided.kind, decided.app, decided.revision, decided.reason,
                    decided.seconds, decided.inputs, decided.outcome,
                )
            )  # fmt: skip
    return _followed(rows, history, end)


def _followed(rows: Sequence[DecisionRow], history: History, end: float) -> tuple[DecisionRow, ...]:
    """Say for each scaling target what nodes came and left before the next one of the same pool."""
    until: dict[str, float] = {}
    done: list[DecisionRow] = []
    for row in reversed(rows):
        if row.kind != "scaling":
            done.append(row)
            continue
        pool = str(row.outcome.get("pool") or row.inputs.get("pool"))
        done.append(replace(row, became=_became(history, pool, row.at, until.get(pool, end))))
        until[pool] = row.at
    return tuple(reversed(done))


def _became(history: History, pool: str, since: float, until: float) -> str:
    """Say what came and left: of the pool where its nodes are called by its name, else of the cluster."""
    first = bisect_right(history.changes, since, key=lambda change: change.at)
    last = bisect_right(history.changes, until, key=lambda change: change.at)
    prefix = f"{pool}-" if any(span.node.id.startswith(f"{pool}-") for span in history.nodes) else ""
    came: list[float] = []
    gone = 0
    for change in history.changes[first:last]:
        mine = sum(node.startswith(prefix) for node in change.nodes)
        if change.kind == "came":
            came += [change.at - since] * mine
        elif change.kind in ("left", "reclaimed", "lost"):
            gone += mine
    parts = []
    if came:
        last = f" to {seconds_text(came[-1])}" if len(came) > 1 else ""
        parts.append(f"{plural(len(came), 'node')} came after {seconds_text(came[0])}{last}")
    if gone:
        parts.append(f"{plural(gone, 'node')} left")
    return "; ".join(parts) or f"no node came or left in {seconds_text(until - since)}"


# --- latency ------------------------------------------------------------------------------------------------------


def paced(said: Mapping[str, AppReport]) -> tuple[LatencyRow, ...]:
    """Return what the loop measures of itself: from a change that it saw to what it wrote."""
    if not any(name.startswith("_") for name in said):
        return ()
    from ebbflow.tasks.apps.loop_report import LOOP  # with all that a loop needs

    job = said[LOOP].job if LOOP in said else {}
    metrics = job.get("metrics", job.get("figures"))  # its former key
    times = metrics.get("latency_s") if isinstance(metrics, Mapping) else None
    if not isinstance(metrics, Mapping) or not isinstance(times, Mapping):
        return ()
    median, p99, most = (number(times.get(name)) for name in ("p50", "p99", "worst"))
    if median is None or p99 is None or most is None:
        return ()
    count = int(number(metrics.get("changes")) or 0)
    return (LatencyRow("a change being seen to leases being written", count, median, p99, most),)


def latency(history: History, ids: set[str], begin: float, end: float) -> tuple[LatencyRow, ...]:
    """Return how long decisions took, and how long it was from a cause to what followed."""

    def inside(at: float) -> bool:
        return begin <= at <= end

    found: list[tuple[str, list[float]]] = []
    for kind in ("auction", "scaling", "replan", "guard", "recovery"):
        took = [d.seconds for e, d in history.decisions if d.kind == kind and d.seconds > 0 and inside(e.at)]
        found.append((f"{kind}: computing the decision", took))
    arrivals = [
        app.first_lease - app.entered
        for id_, app in history.apps.items()
        if id_ in ids and app.first_lease is not None and inside(app.entered)
    ]
    found.append(("an app's arrival to its first lease", arrivals))
    recalls: dict[str, list[float]] = {}
    for lease in history.leases.values():
        if lease.recalled is not None:
            recalls.setdefault(lease.node, []).append(lease.recalled)
    found.append(
        ("a notice to the revocation of the node's leases", _after_notices(history, recalls, inside))
    )
    frees = [
        lease.until - lease.recalled
        for lease in history.leases.values()
        if lease.recalled is not None
        and lease.until is not None
        and inside(lease.recalled)
        and lease.app in ids
    ]
    found.append(("a revocation to the release of the GPU", frees))
    return tuple(
        LatencyRow(name, len(v), float(np.median(v)), float(np.percentile(v, 99)), max(v))
        for name, v in found
        if v
    )


def _after_notices(
    history: History, recalls: Mapping[str, Sequence[float]], inside: Callable[[float], bool]
) -> list[float]:
    found = []
    for span in history.nodes:
        if span.noticed is not None and inside(span.noticed):
            later = [at for at in recalls.get(span.node.id, ()) if span.noticed <= at <= (span.until or inf)]
            found += [min(later) - span.noticed] if later else []
    return found
