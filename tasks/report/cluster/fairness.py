"""Finish-time fairness of a cluster's apps, from what its ledger knows.

Themis (Mahajan et al., NSDI 2020), section 3: ρ is the time to the end in the shared cluster over the time alone on a
1/N share. Here both the GPUs and the apps come and go, so the share is the mean over the app's own time, and an app
with a weight is entitled to its weight over the sum of all weights. The weights are those of the loop: a team that
has one has it for all its apps together (``planners.capacity.view.team_weights``). What the loop adds as a deadline
nears does not count: it is urgency, not a right.

    share = mean GPUs · mean weight / mean sum of weights
    alone = work / min(share, the most GPUs that it can use)
    ρ     = (time there so far + time left) / alone

Work is measured where it can be: the GPU-seconds that the app held, and what it says is left. Time that moves cost it
is among them, so ρ is rather too small for an app that was moved often. So is what its script waits for outside of
its steps, such as evaluations: that would take its time on a share of its own, too.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby
from operator import itemgetter

import numpy as np

from ebbflow.planners.model.ledger import AppReport, AppSpec
from ebbflow.planners.model.scheduling import UNFAIR
from ebbflow.planners.query.shares import jain
from ebbflow.tasks.drawing.wording import number_text, plural, seconds_text
from ebbflow.tasks.report.cluster.history import History
from ebbflow.tasks.report.cluster.spans import AppHistory
from ebbflow.tasks.report.cluster.values import AppRow, FairnessReport, RhoReport


class ActiveApps:
    """GPUs there and weights of apps that want GPUs, over time."""

    def __init__(self, history: History, until: float) -> None:
        self.history, self.until = history, until
        self._gpus = _integral([(step.at, float(step.gpus)) for step in history.steps], until)
        moves: list[tuple[float, int, str]] = []
        for id_, app in history.apps.items():
            if app.spec.kind != "query":
                moves += [
                    move
                    for begin, end in app.active(until)
                    if begin < end
                    for move in ((begin, 1, id_), (end, -1, id_))
                ]
        shared = any(weights for _, weights in history.teams)
        own, total = _shared(history, sorted(moves), until) if shared else _plain(history, sorted(moves))
        self._own = {id_: _integral(steps, until) for id_, steps in own.items()}
        self._weights = _integral(total, until)

    def share(self, app: AppHistory, spans: Sequence[tuple[float, float]]) -> float | None:
        """Return the mean number of GPUs that ``app`` was entitled to in ``spans``; ``None`` without any."""
        gpus, weights = _mean(self._gpus, spans), _mean(self._weights, spans)
        if gpus is None or weights is None or gpus <= 0 or weights <= 0:
            return None
        own = _mean(self._own[app.spec.id], spans) if app.spec.id in self._own else app.spec.weight
        return gpus * min(1.0, (own or 0.0) / weights)


Moves = Sequence[tuple[float, int, str]]  # (when, 1: it came, -1: it went, which), in order
Steps = list[tuple[float, float]]  # (from, value)


def _plain(history: History, moves: Moves) -> tuple[dict[str, Steps], Steps]:
    """Return the sum of the weights of the apps that are there, where each counts by its own all the time."""
    levels = accumulate(sign * history.apps[id_].spec.weight for _, sign, id_ in moves)
    return {}, [(at, level) for (at, _, _), level in zip(moves, levels, strict=True)]


def _shared(history: History, moves: Moves, until: float) -> tuple[dict[str, Steps], Steps]:
    """Return each app's weight as apps of its team come and go, and their sum."""
    from ebbflow.planners.capacity.values import Team
    from ebbflow.planners.capacity.view import team_weights  # with all that a loop needs

    own: dict[str, Steps] = {}
    total: Steps = []
    there: dict[str, AppSpec] = {}
    news = [(at, 0, "") for at, _ in history.teams[1:] if at <= until]
    known = [(at, {name: Team(weight=w) for name, w in weights.items()}) for at, weights in history.teams]
    later = known[::-1]
    _, teams = later.pop()  # what held before is not known
    for at, group in groupby(sorted([*moves, *news]), key=itemgetter(0)):
        for _, sign, id_ in group:
            if sign > 0:
                there[id_] = history.apps[id_].spec
            elif sign < 0:
                del there[id_]
        while later and later[-1][0] <= at:
            _, teams = later.pop()
        weights = team_weights(there.values(), teams)
        for id_, weight in weights.items():
            steps = own.setdefault(id_, [])
            if not steps or steps[-1][1] != weight:
                steps.append((at, weight))
        total.append((at, sum(weights.values())))
    return own, total


def rho(crowd: ActiveApps, app: AppHistory, held: int, report: AppReport | None) -> RhoReport:
    """Return ρ of ``app`` as of the crowd's end, or at its own.

    ``held``: GPUs of leases that continue; ``report``: what it says of the work left, ``None`` where it says nothing.
    """
    now = crowd.until
    phase, service = app.phase(now).phase, app.service(crowd.history.leases, now)
    spec = app.spec
    if spec.kind == "query":
        return RhoReport(None, how="a query holds no GPUs: its share of cores is by weight")
    spans = [(begin, min(end, now)) for begin, end in app.active(now) if begin <= now]
    elapsed = sum(end - begin for begin, end in spans)
    share = crowd.share(app, spans)
    if share is None:
        return RhoReport(
            None, how="the cluster had no GPUs while it was there, so there is no share to compare with"
        )
    most = max(spec.max_gpus, spec.gpus, held, 1)
    if phase in ("stopped", "failed"):
        return RhoReport(None, how=f"it {phase} before its end", share=share)
    if phase == "finished":
        work, left, bound, words = service, 0.0, False, f"it took {seconds_text(elapsed)}"
        source = "as many as it held"
    else:
        rest = _work_left(report)
        soon = report.seconds_left if report is not None else None
        if held and soon is not None:
            left, bound = soon, False
        elif rest is not None:
            left, bound = rest / (held or most), not held
        else:
            return RhoReport(None, how="it has not said how much work is left", share=share)
        work = service + (rest if rest is not None else left * held)
        words = f"{seconds_text(elapsed)} so far and {seconds_text(left)} left"
        words += f", if it had {plural(most, 'GPU')} from now on" if bound else ""
        source = "those that it held, and what it says is left"
    if not work > 0:
        return RhoReport(None, how="its work is not known: it held no GPU", share=share)
    alone = work / min(share, most)
    how = (
        f"{words}; alone on {number_text(min(share, most))} GPUs, its share"
        f"{'' if share <= most else ' up to what it can use'}, its {number_text(work / 3600)} GPU-hours"
        f" ({source}) take {seconds_text(alone)}"
    )
    return RhoReport((elapsed + left) / alone, bound, how, share)


def _work_left(report: AppReport | None) -> float | None:
    """Return the GPU-seconds that an app says are left, ``None`` where it says nothing of it."""
    if report is None or report.work_left is not None:
        return None if report is None else report.work_left
    if report.work_total is None or report.progress is None:
        return None
    return report.work_total * (1 - report.progress)


def fairness(apps: Iterable[AppRow]) -> FairnessReport:
    """Return how evenly ``apps`` were treated; bounds do not count."""
    known = [(app.rho.value, app.id) for app in apps if app.rho.value is not None and not app.rho.bound]
    if not known:
        return FairnessReport(0)
    values = [value for value, _ in known]
    worst, who = max(known)
    return FairnessReport(len(known), worst, who, jain(values), sum(value > UNFAIR for value in values))


Integral = tuple[np.ndarray, np.ndarray]


def _integral(steps: Sequence[tuple[float, float]], until: float) -> Integral:
    """Return times and the integral of a step function up to each."""
    if not steps:
        return np.array([until]), np.array([0.0])
    times = np.array([at for at, _ in steps] + [max(until, steps[-1][0])])
    values = np.array([value for _, value in steps])
    return times, np.concatenate([[0.0], np.cumsum(values * np.diff(times))])


def _mean(integral: Integral, spans: Sequence[tuple[float, float]]) -> float | None:
    length = sum(end - begin for begin, end in spans)
    if length <= 0:
        return None
    begins, ends = np.interp(np.array(spans).T, *integral)
    return float((ends - begins).sum() / length)
