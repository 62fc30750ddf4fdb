"""Hang and straggler detection: when a generation makes no progress, or a node holds all others up.

Pure rules over what nodes show of their processes and what rank 0 reports.
"""

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from ebbflow.infra.training.channel.wire import RankState
from ebbflow.planners.training.failures.stragglers import StragglerWatch, late_workers

_STOPPED = "Tt"
_QUIET_START = 600.0  # seconds


@dataclass(frozen=True, slots=True)
class HangRule:
    """Bounds, in seconds, beyond which something is taken to hang."""

    stopped: float = 1.0  # a process, or a whole node, is stopped (SIGSTOP, a debugger)
    silence: float = 15.0  # a node shows no sign of life
    floor: float = 30.0  # nothing is reported and no process computes: never less than this
    factor: float = 10.0  # ... and never less than so many times the median time between reports
    start: float = 120.0  # the same before the first report: data are being loaded
    limit: float = 3600.0  # nothing is reported, whatever the processes do
    worker_silence: float = 10.0  # a worker of the aggregation service shows no sign of life
    exchange: float = 0.0  # those that are left may wait in a collective for one that was lost
    busy: float = 0.02  # share of a processor below which a process is taken to wait

    def quiet(self) -> "HangRule":
        """Return the rule for processes that may never report: no limit while one computes, ten minutes else."""
        return replace(self, start=max(self.start, _QUIET_START), limit=inf)


@dataclass(frozen=True, slots=True)
class HangDiagnosis:
    """What hangs."""

    reason: str
    ranks: tuple[int, ...] = ()  # to blame, where that can be told


@dataclass(slots=True)
class _RankProgress:
    since: float  # when the window began in which the process has waited
    cpu: float
    stopped: float | None = None  # since when it is stopped


@dataclass(slots=True)
class HangWatch:
    """Follows one generation. Times are the launcher's, seconds."""

    rule: HangRule
    begun: float
    _ranks: dict[int, _RankProgress] = field(default_factory=dict)
    _reported: float | None = None
    _gaps: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    _excused: float = 0.0  # until when silence is put down to a loss

    def report(self, now: float) -> None:
        """Take note of a sign of progress."""
        if self._reported is not None:
            self._gaps.append(now - self._reported)
        self._reported = now

    def look(self, now: float, ranks: Iterable[RankState]) -> None:
        """Take note of what a node says of its processes."""
        for rank in ranks:
            seen = self._ranks.get(rank.rank)
            if seen is None:
                seen = self._ranks[rank.rank] = _RankProgress(now, rank.cpu)
            if rank.cpu - seen.cpu > self.rule.busy * (now - seen.since) or rank.state == "D":
                seen.since, seen.cpu = now, rank.cpu
            if rank.state not in _STOPPED:
                seen.stopped = None
            elif seen.stopped is None:
                seen.stopped = now

    def forget(self, rank: int, now: float) -> None:
        """Do without a process that has left."""
        self._ranks.pop(rank, None)
        self._excused = now + self.rule.exchange

    @property
    def bound(self) -> float:
        """Return how long nothing may be reported while no process computes."""
        if self._reported is None or not self._gaps:
            return self.rule.start
        return max(self.rule.floor, self.rule.factor * statistics.median(self._gaps))

    def verdict(self, now: float) -> HangDiagnosis | None:
        """Return what hangs, if anything does."""
        stopped = tuple(
            rank
            for rank, seen in sorted(self._ranks.items())
            if seen.stopped is not None and now - seen.stopped >= self.rule.stopped
        )
        if stopped:
            names = ", ".join(map(str, stopped))
            return HangDiagnosis(f"rank {names} has been stopped for {self.rule.stopped:g} s", stopped)
        if now < self._excused:
            return None
        quiet = now - (self.begun if self._reported is None else self._reported)
        if quiet >= self.rule.limit:
            return HangDiagnosis(f"no progress reported for {quiet:.0f} s")
        waiting = bool(self._ranks) and all(now - s.since >= self.bound for s in self._ranks.values())
        if waiting and quiet >= self.bound:
            return HangDiagnosis(f"no progress reported for {quiet:.0f} s and no process uses CPU time")
        return None


@dataclass(slots=True)
class StragglerDetector:
    """Turns reports of rank times into the rank to replace, by the rule of
    ``planners.training.failures.stragglers``."""

    window: int = 20  # reports
    share: float = 0.5  # of the median step that a rank must come late
    pause: float = 300.0  # seconds between replacements
    _rows: deque[Sequence[float]] = field(default_factory=deque)
    _watch: StragglerWatch = field(init=False)

    def __post_init__(self) -> None:
        self._watch = StragglerWatch(pause=self.pause)

    def restart(self) -> None:
        """Forget the times of a generation that has ended."""
        self._rows.clear()

    def look(self, now: float, ready: object) -> int | None:
        """Take the seconds after which each rank was ready to exchange gradients, and return the rank to replace."""
        if not isinstance(ready, Sequence) or len(ready) < 2:
            return None
        self._rows.append([float(seconds) for seconds in ready])
        if len(self._rows) < self.window:
            return None
        rows = [row for row in self._rows if len(row) == len(ready)]
        self._rows.clear()
        step = float(np.median([max(row) for row in rows])) if rows else 0.0
        return self._watch.look(now, late_workers(rows, step, self.share)) if step > 0 else None
