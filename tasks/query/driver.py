"""The hands of a running query: tells its session what happens and carries out what that decides.

Free of any orchestrator: Prefect and Airflow pass in how work is put into the background and who listens.
"""

import itertools
import logging
import queue
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import BroadcastTooLargeError, StageCancelledError, StageFailedError
from ebbflow.infra.logs.json_lines import current_ids, log_ids
from ebbflow.infra.protocols import Checkpoint, StageProgress
from ebbflow.planners.model import Capacity
from ebbflow.planners.query.plan.qep import Stage
from ebbflow.planners.query.plan.state import StageOutput
from ebbflow.planners.query.running.execution import Cancel, Finish, Reuse, Start
from ebbflow.planners.query.running.session import Action, Decided, FailureKind, Notify, Session, StageFailure
from ebbflow.tasks.query.listening import Background, CapacityChanged, StageOutcome, TierChanged
from ebbflow.tasks.query.recorder import RunRecorder
from ebbflow.tasks.query.report import StageStatus
from ebbflow.tasks.query.slices import SlicesDone, StageRun
from ebbflow.tasks.query.stagework import StageWork

log = logging.getLogger(__name__)

_POLL = 1.0  # seconds; the loop looks up at least this often
_NEWS = 3.0  # seconds for which a failure waits for word of a change of capacity that explains it


class Driver:
    """Runs one query to its end.

    Args:
        session: decides.
        work: runs stages. Into its inbox the feedback task puts ``CapacityChanged``, or the exception that ended it.
        recorder: hears of everything.
        background: where stages run.
        clock: of this run.
    """

    def __init__(
        self, session: Session, work: StageWork, recorder: RunRecorder, background: Background, clock: Clock
    ) -> None:
        self.session = session
        self.recorder = recorder
        self._work = work
        self._inbox = work.inbox
        self._background = background
        self._clock = clock
        self.result: Checkpoint | None = None
        self._checkpoints: dict[str, Checkpoint] = {}
        self._runs: dict[str, StageRun] = {}  # by job id, cancelled ones until their thread has ended
        self._current: dict[str, str] = {}  # output_fp -> job id that the session counts as running
        self._jobs = itertools.count(1)
        self._ready: dict[str, Stage] = {}  # by output_fp: counted as running, and not started so far
        self._taken: deque[object] = deque()  # from the inbox, and not handled so far
        # by job id: failures to judge, and until when they wait for news
        self._doubts: dict[str, tuple[float, StageOutcome]] = {}
        self._waited: set[str] = set()  # job ids of failures that have waited
        self._insisted = 0.0  # when cancelled runs were last cancelled again, seconds since the Unix epoch

    def run(self, capacity: Capacity) -> Checkpoint:
        """Run to the end and return the result. Raises the first error that cannot be mended; running stages
        are cancelled then, finished ones stay in the store."""
        try:
            self._see(capacity, "")
            plans = self.session.plans.values()
            self._checkpoints, sliced = self._work.earlier(plans, self.session.sources)
            self._note_problems()
            found = {fp: StageOutput(fp, c.rows, c.bytes) for fp, c in self._checkpoints.items()}
            self._act(self.session.begin(found, self._clock.now(), sliced))
            while self.result is None:
                self._handle(self._next())
            for run in self._runs.values():
                self.recorder.ended(run, self._clock.now(), self.session.plan.id, "cancelled")
            return self.result
        finally:
            for run in self._runs.values():
                self._work.stop(run)

    # --- events -------------------------------------------------------------------------------------------

    def _next(self) -> object:
        if self._taken:
            return self._taken.popleft()
        # a report shows every candidate: rendered while the engine works, not afterwards
        while self._computing() and self._inbox.empty() and self.session.render():
            pass
        self._insist()
        now = self._clock.now()
        for job_id, (due, outcome) in self._doubts.items():
            if due <= now:
                del self._doubts[job_id]
                return outcome
        try:
            return self._inbox.get(timeout=min([_POLL, *(due - now for due, _ in self._doubts.values())]))
        except queue.Empty:
            return None

    def _computing(self) -> bool:
        """Tell whether the engine works on all that runs: what it has yet to be given waits for this interpreter."""
        return self._work.engine.name != "spark" or all(r.progress.tasks_total for r in self._runs.values())

    def _insist(self) -> None:
        """Cancel again, now and then, what has been cancelled and still runs: an engine ignores the
        cancellation of a job that has not reached it yet."""
        now = self._clock.now()
        if now - self._insisted >= _POLL:
            self._insisted = now
            for run in self._runs.values():
                if run.cancelled.is_set():
                    self._work.stop(run)

    def _handle(self, event: object) -> None:
        now = self._clock.now()
        for fp in self._ready:
            self.session.execution.on_start(fp, now)  # it has not begun
        if isinstance(event, CapacityChanged):
            self._see(event.capacity, event.change)
            self._act(self.session.on_capacity(event.change, now))
            self._doubts = {job_id: (now, outcome) for job_id, (_, outcome) in self._doubts.items()}
        elif isinstance(event, TierChanged):
            self._act(self.session.on_tier(event.tier, now))
        elif isinstance(event, StageOutcome):
            self._note_problems()
            run = self._runs.pop(event.job_id)
            if event.error is None:
                self._finished(event, run, now)
            else:
                self._failed(event, event.error, run, now)
        elif isinstance(event, SlicesDone):
            if event.job_id in self._runs:
                self.session.on_slices(self._runs[event.job_id].stage.output_fp, event.fraction)
        elif isinstance(event, Exception):
            raise event
        elif isinstance(event, tuple):
            job_id, progress = event
            if job_id in self._runs:
                self._progressed(self._runs[job_id], progress, now)

    def _see(self, capacity: Capacity, change: str) -> None:
        self._work.resize(self.session.see(capacity))
        self.recorder.capacity_changed(capacity, change)

    def _progressed(self, run: StageRun, seen: StageProgress, now: float) -> None:
        run.progress = seen
        if self._is_current(run):
            counts = seen.tasks_total, seen.tasks_done, seen.tasks_running
            self.session.on_progress(run.stage, *counts, now, native=seen.native)
        self.recorder.stage_progress(run.stage, seen)

    def _finished(self, outcome: StageOutcome, run: StageRun, now: float) -> None:
        stage, checkpoint = outcome.stage, outcome.checkpoint
        assert checkpoint is not None
        late = not self._is_current(run)
        if not late:
            del self._current[stage.output_fp]
        self._checkpoints[stage.output_fp] = checkpoint
        status: StageStatus = "completed" if outcome.result is not None else "reused"
        note = ", ".join(words for words in (_slices_words(outcome), _native_words(run, outcome)) if words)
        self.recorder.ended(run, now, self.session.plan.id, status, checkpoint, outcome.result, note)
        output = StageOutput(stage.output_fp, checkpoint.rows, checkpoint.bytes, outcome.keys)
        measured = self._work.measured(run, outcome, self.session.cold_since(run.started))
        more = self._others_finished()
        self._act(self.session.on_finished(stage, output, now, late=late, measured=measured, more=more))

    def _others_finished(self) -> bool:
        """Tell whether other stages have finished, such as while plans were made: all are weighed together."""
        while not self._inbox.empty():
            self._taken.append(self._inbox.get())
        return any(isinstance(one, StageOutcome) and one.error is None for one in self._taken)

    def _failed(self, outcome: StageOutcome, error: Exception, run: StageRun, now: float) -> None:
        stage, plan = outcome.stage, self.session.plan.id
        if not self._is_current(run):  # we have cancelled it: whatever it says is no failure
            self.recorder.ended(run, now, plan, "cancelled")
            return
        failure = self._failure(run, error)
        if not self.session.remedy(stage, failure):
            if self._doubtful(outcome, error, now):
                self._runs[run.job_id] = run
                return
            # nothing else explains it: before giving up, what it has read is hashed again
            failure = self._failure(run, error, anew=True)
        del self._current[stage.output_fp]
        if failure.kind == "cancelled":  # by somebody else, such as in Spark's own page
            self.recorder.ended(run, now, plan, "cancelled")
        else:
            self.recorder.ended(run, now, plan, "failed", note=failure.message)
        actions = self.session.on_failed(stage, failure, now)
        if actions is None:
            raise error
        self._note_problems()
        for fp in failure.gone:
            del self._checkpoints[fp]
        for fp in failure.held:  # they start once what they read is there again
            del self._ready[fp]
        self._act(actions)

    def _failure(self, run: StageRun, error: Exception, *, anew: bool = False) -> StageFailure:
        """Say how a run failed; ``anew`` reads what it has read, otherwise only sizes are compared."""
        lost = self._work.lost(run, error, anew=anew)
        gone = [c for c in lost if self._checkpoints.get(c.fingerprint) is c]
        fps = frozenset(c.fingerprint for c in gone)
        return StageFailure(
            _kind(error),
            str(error),
            frozenset(c.fingerprint for c in lost),
            fps,
            held=frozenset(fp for fp, stage in self._ready.items() if fps.intersection(stage.inputs)),
            moved=self.session.share.revision != run.revision,
        )

    def _doubtful(self, outcome: StageOutcome, error: Exception, now: float) -> bool:
        """Put a failure off, once, that a change of capacity may explain: an engine feels a node's loss before
        the feedback task tells of it. DuckDB's statements do not fail with nodes."""
        explicable = isinstance(error, StageFailedError) and self._work.engine.name != "duckdb"
        if not explicable or outcome.job_id in self._waited:
            return False
        self._waited.add(outcome.job_id)
        self._doubts[outcome.job_id] = (now + _NEWS, outcome)
        return True

    def _is_current(self, run: StageRun) -> bool:
        return self._current.get(run.stage.output_fp) == run.job_id

    # --- actions ------------------------------------------------------------------------------------------

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Start):
                self._ready[action.stage.output_fp] = action.stage
            elif isinstance(action, Cancel) and action.stage.output_fp in self._ready:
                del self._ready[action.stage.output_fp]
            elif isinstance(action, Cancel):
                job_id = self._current.pop(action.stage.output_fp, None)
                if job_id is not None:
                    self._work.stop(self._runs[job_id])
            elif isinstance(action, Reuse):
                checkpoint = self._checkpoints[action.stage.output_fp]
                self.recorder.reused(action.stage, checkpoint, self._clock.now(), self.session.plan.id)
            elif isinstance(action, Finish):
                self.result = self._checkpoints[action.output.fingerprint]
            elif isinstance(action, Decided):
                spent = self._clock.now() - action.decision.at
                self.session.planned(spent)
                self.recorder.decided(replace(action.decision, seconds=spent))
            elif isinstance(action, Notify):
                self.recorder.note(action.text)
        usable = self.session.execution.share.total.cores > 0
        if self._ready and usable and not self._others_finished():  # else what they show is weighed first
            for stage in self.session.execution.running:
                if stage.output_fp in self._ready:  # in the form that is planned by now
                    self._start(stage)
            self._ready.clear()

    def _note_problems(self) -> None:
        for problem in self._work.problems():
            self.recorder.note(problem)

    def _start(self, stage: Stage) -> None:
        job_id = f"{stage.output_fp[:12]}-{next(self._jobs)}-{uuid.uuid4().hex[:6]}"
        share = self.session.share
        run = self._runs[job_id] = StageRun(
            stage,
            job_id,
            self._clock.now(),
            share.revision,
            share.total.cores,
            share.hazard,
            [self._checkpoints[fp] for fp in stage.inputs],
            self.session.sources(stage.output_fp),
            self.session.fallback(stage),
            cold=share.cold,
        )
        self._current[stage.output_fp] = job_id
        self.session.execution.on_start(stage.output_fp, run.started)
        self.recorder.stage_started(stage)

        ids = current_ids()

        def work() -> StageOutcome:
            with log_ids(**{**ids, "stage": job_id}):
                log.info("the stage begins on %d cores", run.cores)
                try:
                    outcome = self._work.execute(run)
                except Exception as error:  # handed to the driver's thread, which decides
                    outcome = StageOutcome(stage, job_id, error=error)
                log.info("the stage ends: %s", outcome.error or "done")
            self._inbox.put(outcome)
            return outcome

        self._background.submit(stage, work)


def _kind(error: Exception) -> FailureKind:
    if isinstance(error, StageCancelledError):
        return "cancelled"
    if isinstance(error, BroadcastTooLargeError):
        return "broadcast"
    return "statement" if isinstance(error, StageFailedError) else "other"


def _native_words(run: StageRun, outcome: StageOutcome) -> str:
    if outcome.result is not None and outcome.result.native:
        return "native"
    why = run.remark or (outcome.result.remark if outcome.result is not None else "")
    return f"on Spark SQL: {why}" if why else ""


def _slices_words(outcome: StageOutcome) -> str:
    if not outcome.slices:
        return ""
    before = f", {outcome.reused_slices} from before" if outcome.reused_slices else ""
    return f"{outcome.slices} slices{before}"
