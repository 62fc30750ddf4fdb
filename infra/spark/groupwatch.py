"""Looking after one running job group: progress, and failures that no retry will heal."""

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ebbflow.infra.protocols import StageProgress
from ebbflow.infra.spark.failures import headline, is_own, parse
from ebbflow.infra.spark.metrics import StatusApi, TaskFailure

OWN_FAILURES = 4  # of one task, as Spark's default for all failures together
_log = logging.getLogger(__name__)


class GroupWatch:
    """The state of watching one job group; ``look`` is called every fraction of a second by one thread.

    Spark is told to bear many task failures, since on a standalone cluster a lost machine counts as one. So
    a task that fails by itself would be repeated as often; ``verdict`` says when to stop it.
    """

    def __init__(
        self,
        context: Any,
        api: StatusApi,
        group: str,
        on_progress: Callable[[StageProgress], None] | None = None,
    ) -> None:
        self._tracker = context.statusTracker()
        self._api = api
        self._group = group
        self._on_progress = on_progress
        self._totals: dict[int, int] = {}  # stage -> tasks of its first attempt
        self._failed: dict[tuple[int, int], int] = {}  # (stage, attempt) -> failures seen
        self._given = 0  # native tasks that Spark was given, which it may not have told of
        self._begun = 0  # those with what is to come
        self._withdrawn: frozenset[int] = frozenset()  # stages of native tasks whose work was wasted
        self._reporting = threading.Lock()
        self._verdict: TaskFailure | None = None

    @property
    def verdict(self) -> str | None:
        """Return why the group must be stopped; ``None``: it need not be. A failure of wasted work is no
        reason."""
        found = self._verdict
        return None if found is None or found.stage in self._withdrawn else found.message

    def stages(self) -> set[int]:
        """Return the ids of the stages that have run, as of the last look, and were not wasted."""
        return set(self._totals) - self._withdrawn

    def look(self) -> None:
        """Report progress and set ``verdict`` when a task has failed too often by itself."""
        total = done = running = 0
        torn = False
        for job in self._tracker.getJobIdsForGroup(self._group):
            for stage in self._started(job):
                total += self._totals[stage.stageId]
                # a repeated stage has only the tasks whose output was lost
                done += self._totals[stage.stageId] - (stage.numTasks - stage.numCompletedTasks)
                running += stage.numActiveTasks
                attempt = (stage.stageId, stage.currentAttemptId)
                if stage.numFailedTasks > self._failed.get(attempt, 0):
                    self._failed[attempt] = stage.numFailedTasks
                    torn = True
        if torn and self.verdict is None:
            self._judge()
        self._report(StageProgress(total, done, self._failures(), running))

    def begun(self, tasks: int, later: int = 0) -> None:
        """Note that Spark was given native ``tasks``, before it tells of them, and is to be given about as many as
        ``later`` when they are done; report the first."""
        first, self._given = not self._given, self._given + tasks
        self._begun = self._given + later
        if first:
            self._report(StageProgress(tasks, 0))

    def withdrawn(self) -> None:
        """Note that Spark SQL runs the group from here on: what ran until now counts no more."""
        jobs = map(self._tracker.getJobInfo, self._tracker.getJobIdsForGroup(self._group))
        self._withdrawn = frozenset(stage for job in jobs if job is not None for stage in job.stageIds)
        self._given = self._begun = 0

    def finish(self) -> None:
        """Report that everything is done, also what came and went between two looks."""
        for job in self._tracker.getJobIdsForGroup(self._group):
            self._started(job)
        total = max(1, self._begun, sum(self._totals[stage] for stage in self.stages()))
        self._report(StageProgress(total, total, self._failures(), 0))

    def _started(self, job: int) -> list[Any]:
        """Return the stages of ``job`` that count: not those whose output an earlier job has left behind."""
        info = self._tracker.getJobInfo(job)
        if info is None:
            return []
        counted = (stage for stage in info.stageIds if stage not in self._withdrawn)
        stages = [s for s in map(self._tracker.getStageInfo, counted) if s is not None]
        begun = {s.stageId for s in stages if s.numActiveTasks + s.numCompletedTasks + s.numFailedTasks > 0}
        latest = max(begun, default=-1)
        waiting = info.status == "RUNNING"
        kept = [s for s in stages if s.stageId in begun or (waiting and s.stageId > latest)]
        for stage in kept:
            self._totals[stage.stageId] = max(self._totals.get(stage.stageId, 0), stage.numTasks)
        for stage in stages:
            if stage not in kept:
                self._totals.pop(stage.stageId, None)
        return kept

    def _failures(self) -> int:
        return sum(n for (stage, _), n in self._failed.items() if stage not in self._withdrawn)

    def _judge(self) -> None:
        try:
            failures = self._api.failures(sorted(a for a in self._failed if a[0] not in self._withdrawn))
        except OSError as error:
            _log.debug("cannot ask why tasks of %s failed: %s", self._group, error)
            return
        own = [f for f in failures if is_own(f.message)]
        for (stage, index), count in Counter((f.stage, f.index) for f in own).items():
            if count >= OWN_FAILURES:
                last = [f for f in own if (f.stage, f.index) == (stage, index)][-1]
                self._verdict = last
                _log.info("task %d failed %d times: %s", index, count, headline(parse(last.message)))
                return

    def _report(self, progress: StageProgress) -> None:
        with self._reporting:  # a look that saw no task may end after they were told of
            if self._on_progress is None:
                return
            try:
                total = max(progress.tasks_total, self._begun)
                self._on_progress(replace(progress, tasks_total=total, native=self._given > 0))
            except Exception:  # a listener's mistake must not lose the work it listens to
                _log.exception("the progress listener of %s failed; it is not called again", self._group)
                self._on_progress = None
