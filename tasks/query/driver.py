"""Carries out what ``planners.query.running.execution`` decides: runs stages, hears of capacity.

Free of any orchestrator: Prefect and Airflow pass in how work is put into the background and who listens.
"""

import itertools
import math
import queue
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import (
    BroadcastTooLargeError,
    DamagedInputError,
    StageCancelledError,
    StageFailedError,
    StorageError,
)
from ebbflow.infra.protocols import Checkpoint, CheckpointStore, Relation, SqlEngine
from ebbflow.infra.query.results import is_whole
from ebbflow.infra.query.slices import SliceIndex, covers, together
from ebbflow.planners.model import Capacity, Measured, Share
from ebbflow.planners.query.plan.qep import QueryExecutionPlan, Stage, Statement
from ebbflow.planners.query.plan.state import StageOutput
from ebbflow.planners.query.running.execution import Action, Cancel, Execution, Finish, Reuse, Start
from ebbflow.tasks.query.book import Book
from ebbflow.tasks.query.listening import Background, CapacityChanged, Inbox, StageOutcome
from ebbflow.tasks.query.slices import SlicesDone
from ebbflow.tasks.query.stagework import Run, StageWork

_POLL = 1.0  # seconds; the loop looks up at least this often
_MAX_FAILURES = 3  # of one stage; only those that another run may mend are repeated at all
_NEWS = 3.0  # seconds for which a failure waits for word of a change of capacity that explains it
_DEVIATION = 2.0  # actual / estimated rows beyond which plans are made anew (q-error)


Replan = Callable[[Share, Mapping[str, StageOutput]], Sequence[QueryExecutionPlan]]


class Driver:
    """Runs one query to its end.

    ``relations`` are the base tables by name, ``versions`` theirs, ``replan`` makes candidates anew from
    actual sizes, ``fraction`` is the app's share of the cluster, ``book`` hears of everything. ``inbox`` is
    where the feedback task puts ``CapacityChanged``, or the exception that ended it.
    """

    def __init__(
        self,
        execution: Execution,
        candidates: Sequence[QueryExecutionPlan],
        *,
        engine: SqlEngine,
        store: CheckpointStore,
        relations: Mapping[str, Relation],
        versions: Mapping[str, str],
        replan: Replan,
        background: Background,
        book: Book,
        clock: Clock,
        inbox: Inbox,
        fraction: float = 1.0,
        reuse: bool = True,
        slices: SliceIndex | None = None,
    ) -> None:
        self._execution = execution
        self._candidates = candidates
        self._engine = engine
        self._store = store
        self._relations = {k.lower(): v for k, v in relations.items()}
        self._versions = {k.lower(): v for k, v in versions.items()}
        self._replan = replan
        self._background = background
        self.book = book
        self._clock = clock
        self._inbox = inbox
        self._fraction = fraction
        self._reuse = reuse
        self._slices = slices  # without an index every stage runs as one statement
        self.divided: dict[str, tuple[str, int]] = {}  # by output_fp: how stages begun here are divided
        self._runs: dict[str, Run] = {}  # by job id, cancelled ones until their thread has ended
        self._current: dict[str, str] = {}  # output_fp -> job id that the execution counts as running
        self._jobs = itertools.count(1)
        self._failures: Counter[str] = Counter()  # by output_fp
        self._fractions: dict[str, float] = {}  # by output_fp: the most of a stage that has existed in slices
        # by job id: failures to judge, and until when they wait for news
        self._doubts: dict[str, tuple[float, StageOutcome]] = {}
        self._waited: set[str] = set()  # job ids of failures that have waited
        self._unfit: set[str] = set()  # physical keys of stages whose broadcasts do not fit
        self._sources: dict[str, dict[str, str]] = {}  # output_fp -> versions of all tables below it
        self._volatile: set[str] = set()  # by output_fp
        self._checkpoints: dict[str, Checkpoint] = {}
        self._unrendered: deque[Statement] = deque()
        self._told = 0  # decisions already passed on
        self._insisted = 0.0  # when cancelled runs were last cancelled again, seconds since the Unix epoch
        self._capacity: Capacity | None = None
        self._share: Share | None = None
        self.result: Checkpoint | None = None
        since = 0.0 if reuse else book.started
        self._work = StageWork(engine, store, self._relations, inbox, slices, reuse=reuse, since=since)

    def run(self, capacity: Capacity) -> Checkpoint:
        """Run to the end and return the result. Raises the first error that cannot be mended; running stages
        are cancelled then, finished ones stay in the store."""
        self._learn(self._candidates)
        try:
            share = self._note_capacity(capacity, "")
            self._act(self._execution.begin(share, self._known_outputs(self._candidates), self._clock.now()))
            while self.result is None:
                self._handle(self._next())
            for run in self._runs.values():
                self.book.ended(run, self._clock.now(), self._execution.plan.id, "cancelled")
            return self.result
        finally:
            for run in self._runs.values():
                self._work.stop(run)

    def _learn(self, plans: Sequence[QueryExecutionPlan]) -> None:
        """Remember new plans, and which versions of which tables their stages are computed from."""
        for plan in plans:
            if plan.id not in self.book.plans:
                self.book.plans[plan.id] = plan
                self._unrendered.extend(stage.statement for stage in plan.stages)
            for stage in plan.stages:
                names = [t.lower() for t in stage.tables]
                sources = {t: self._versions[t] for t in names if t in self._versions}
                for fp in stage.inputs:
                    sources |= self._sources[fp]
                self._sources[stage.output_fp] = sources
                if stage.volatile:
                    self._volatile.add(stage.output_fp)

    # --- events -------------------------------------------------------------------------------------------

    def _next(self) -> object:
        while (
            self._unrendered
        ):  # a report shows every candidate: rendered while the engine works, not afterwards
            with suppress(queue.Empty):
                return self._inbox.get_nowait()
            self._unrendered.popleft().spark  # noqa: B018
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
        if isinstance(event, CapacityChanged):
            share = self._note_capacity(event.capacity, event.change)
            candidates = self._anew(share)
            self._act(self._execution.on_share(share, now, event.change, candidates or None))
            self._doubts = {job_id: (now, outcome) for job_id, (_, outcome) in self._doubts.items()}
        elif isinstance(event, StageOutcome):
            self._ended(event, now)
        elif isinstance(event, SlicesDone):
            if event.job_id in self._runs:
                fp = self._runs[event.job_id].stage.output_fp
                if event.fraction > self._fractions.get(fp, 0.0):
                    self._fractions[fp] = event.fraction
                    self._failures[fp] = 0  # a run that gets on is not one that cannot be mended
                self._execution.on_slices(fp, event.fraction)
        elif isinstance(event, Exception):
            raise event
        elif isinstance(event, tuple):
            job_id, progress = event
            run = self._runs.get(job_id)
            if run is not None:
                run.progress = progress
                self._tell_progress(run, now)
                self.book.stage_progress(run.stage, progress)

    def _note_capacity(self, capacity: Capacity, change: str) -> Share:
        self._capacity = capacity
        self._share = Share.of(capacity, self._fraction)
        self._engine.resize(self._share.total.cores, self._share.total.memory)
        self.book.capacity_changed(capacity, change)
        return self._share

    def _tell_progress(self, run: Run, now: float) -> None:
        fp, progress = run.stage.output_fp, run.progress
        if self._current.get(fp) != run.job_id or not progress.tasks_total:
            return
        # Spark's adaptive execution submits a statement bit by bit: what it counts now is not all there will be.
        total = max(progress.tasks_total, math.ceil(run.stage.work.tasks), progress.tasks_done + 1)
        self._execution.on_progress(fp, total, progress.tasks_done, now, progress.tasks_running)

    def _ended(self, outcome: StageOutcome, now: float) -> None:
        self._note_problems()
        stage = outcome.stage
        run = self._runs.pop(outcome.job_id)
        if outcome.error is not None:
            self._failed(outcome, run, now)
            return
        checkpoint = outcome.checkpoint
        assert checkpoint is not None
        late = self._current.get(stage.output_fp) != run.job_id
        if not late:
            del self._current[stage.output_fp]
        self._checkpoints[stage.output_fp] = checkpoint
        result = outcome.result
        if result is not None and not outcome.reused_slices:
            # figures of a stage that was not computed as a whole would mislead calibration
            self.book.measured.append(
                Measured(
                    self._engine.name,
                    stage.work,
                    result.task_seconds,
                    result.seconds,
                    result.tasks,
                    run.cores,
                )
            )
        self.book.ended(
            run,
            now,
            self._execution.plan.id,
            "completed" if result is not None else "reused",
            checkpoint,
            result,
            _slices_words(outcome),
        )
        output = StageOutput(stage.output_fp, checkpoint.rows, checkpoint.bytes)
        actions = self._execution.on_finished(output, now, late=late)
        if not any(isinstance(a, Finish) for a in actions) and self._deviates(stage, checkpoint.rows):
            actions = [*actions, *self._new_candidates(stage, checkpoint.rows, now)]
        self._act(actions)

    def _deviates(self, stage: Stage, rows: int) -> bool:
        estimate, actual = max(stage.rows, 1.0), max(float(rows), 1.0)
        return max(estimate / actual, actual / estimate) > _DEVIATION

    def _new_candidates(self, stage: Stage, rows: int, now: float) -> list[Action]:
        assert self._share is not None
        plans = self._anew(self._share)
        trigger = f"{stage.name}: {rows:,} rows, {stage.rows:,.0f} expected"
        return list(self._execution.on_candidates(plans, now, trigger)) if plans else []

    def _anew(self, share: Share) -> Sequence[QueryExecutionPlan]:
        """Plan anew for ``share`` with the actual sizes of finished stages."""
        outputs = {fp: StageOutput(fp, c.rows, c.bytes) for fp, c in self._checkpoints.items()}
        plans = self._replan(share, outputs)
        self._learn(plans)
        return plans

    def _failed(self, outcome: StageOutcome, run: Run, now: float) -> None:
        stage, error = outcome.stage, outcome.error
        assert error is not None
        fp = stage.output_fp
        if self._current.get(fp) != run.job_id:  # we have cancelled it: whatever it says is no failure
            self.book.ended(run, now, self._execution.plan.id, "cancelled")
            return
        lost = self._lost(run, error)
        why = self._mendable(run, error, lost)
        if why is None and self._doubtful(outcome, now):
            self._runs[run.job_id] = run
            return
        if why is None:  # nothing else explains it: before giving up, what it has read is hashed again
            lost = self._lost(run, error, anew=True)
            why = self._mendable(run, error, lost)
        del self._current[fp]
        cancelled = isinstance(error, StageCancelledError)  # by somebody else, such as in Spark's own page
        said = "" if cancelled else str(error)
        self.book.ended(run, now, self._execution.plan.id, "cancelled" if cancelled else "failed", note=said)
        self._failures[fp] += 1
        if why is None or self._failures[fp] >= _MAX_FAILURES:
            raise error
        self._note_problems()
        self.book.note(f"{stage.name} {why}")
        gone = [c.fingerprint for c in lost if self._checkpoints.get(c.fingerprint) is c]
        for output_fp in gone:
            del self._checkpoints[output_fp]
        self._act(self._execution.on_failed(fp, now, gone))

    def _lost(self, run: Run, error: Exception, *, anew: bool = False) -> list[Checkpoint]:
        """Return what the run has read that is not whole any more: others may tidy the store or damage it.

        ``anew`` reads the files; otherwise only their sizes are compared.
        """
        if not isinstance(error, StageFailedError):
            return []
        damaged = error.fingerprints if isinstance(error, DamagedInputError) else frozenset()
        lost = [c for c in run.inputs if c.fingerprint in damaged]
        for checkpoint in run.inputs:
            with suppress(StorageError):  # not known
                whole = self._store.verify(checkpoint, anew=True) if anew else is_whole(checkpoint)
                if not whole and checkpoint not in lost:
                    lost.append(checkpoint)
        return lost

    def _doubtful(self, outcome: StageOutcome, now: float) -> bool:
        """Put a failure off, once, that a change of capacity may explain: an engine feels a node's loss before
        the feedback task tells of it. DuckDB's statements do not fail with nodes."""
        explicable = isinstance(outcome.error, StageFailedError) and self._engine.name != "duckdb"
        if not explicable or outcome.job_id in self._waited:
            return False
        self._waited.add(outcome.job_id)
        self._doubts[outcome.job_id] = (now + _NEWS, outcome)
        return True

    def _mendable(self, run: Run, error: Exception, lost: Sequence[Checkpoint]) -> str | None:
        """Tell what is done about a failed run, as a sentence's end; ``None``: another would fail too."""
        stage = run.stage
        if isinstance(error, StageCancelledError):
            return "was cancelled from outside; running it again"
        if lost:  # what is volatile would be another when computed again, and others may have read it
            volatile = self._volatile & {c.fingerprint for c in lost}
            return None if volatile else "has lost what it reads, which is computed again"
        hinted = stage.physical_key not in self._unfit and stage.statement.spark != stage.statement.fallback
        if isinstance(error, BroadcastTooLargeError) and hinted:
            self._unfit.add(stage.physical_key)
            return "has a broadcast that did not fit; running it again with shuffled joins"
        moved = self._capacity is not None and self._capacity.epoch != run.epoch
        if isinstance(error, StageFailedError) and moved:
            return f"failed while capacity changed; trying again ({error})"
        return None

    # --- actions ------------------------------------------------------------------------------------------

    def _act(self, actions: Sequence[Action]) -> None:
        decisions = self._execution.decisions
        for decision in decisions[self._told :]:
            self.book.decided(replace(decision, seconds=self._clock.now() - decision.at))
        self._told = len(decisions)
        for action in actions:
            if isinstance(action, Start):
                self._start(action.stage)
            elif isinstance(action, Cancel):
                job_id = self._current.pop(action.stage.output_fp, None)
                if job_id is not None:
                    self._work.stop(self._runs[job_id])
            elif isinstance(action, Reuse):
                checkpoint = self._checkpoints[action.stage.output_fp]
                self.book.reused(action.stage, checkpoint, self._clock.now(), self._execution.plan.id)
            elif isinstance(action, Finish):
                self.result = self._checkpoints[action.output.fingerprint]

    def _note_problems(self) -> None:
        for problem in self._store.problems():
            self.book.note(problem)

    def _start(self, stage: Stage) -> None:
        now = self._clock.now()
        job_id = f"{stage.output_fp[:12]}-{next(self._jobs)}-{uuid.uuid4().hex[:6]}"
        epoch = self._capacity.epoch if self._capacity else 0
        cores, hazard = (self._share.total.cores, self._share.hazard) if self._share else (0.0, 0.0)
        self._current[stage.output_fp] = job_id
        inputs = [self._checkpoints[fp] for fp in stage.inputs]
        run = self._runs[job_id] = Run(stage, job_id, now, epoch, cores, hazard, inputs)
        if stage.slicing is not None and self._work.divides(stage):
            self.divided[stage.output_fp] = (stage.slicing.grid.name, stage.slicing.slices)
        self.book.stage_started(stage)
        sources = self._sources[stage.output_fp]
        fallback = stage.physical_key in self._unfit

        def work() -> StageOutcome:
            try:
                outcome = self._work.execute(run, inputs, sources, fallback=fallback)
            except Exception as error:  # handed to the driver's thread, which decides
                outcome = StageOutcome(stage, job_id, error=error)
            self._inbox.put(outcome)
            return outcome

        self._background.submit(stage, work)

    def _known_outputs(self, plans: Sequence[QueryExecutionPlan]) -> dict[str, StageOutput]:
        """Look in the store for what earlier runs have finished.

        Of what nothing may read only the presence is checked here: stages verify what they read as they begin.
        The result is nobody's input, so it is verified now.
        """
        out = {}
        if self._reuse:
            stages = {s.output_fp: s for p in plans for s in p.stages if not s.volatile}
            for fp, stage in stages.items():
                found = self._store.find(fp, self._sources[fp], verified=False) or self._sliced(stage)
                if found is not None:
                    self._checkpoints[fp] = found
            for fp in {p.sink.output_fp for p in plans} & self._checkpoints.keys():
                if not self._store.verify(self._checkpoints[fp]):
                    del self._checkpoints[fp]
                    self._sliced(stages[fp])
            out = {fp: StageOutput(fp, c.rows, c.bytes) for fp, c in self._checkpoints.items()}
        self._note_problems()
        return out

    def _sliced(self, stage: Stage) -> Checkpoint | None:
        """Return the stage's checkpoint if earlier runs have left all its slices; note what they have left."""
        if stage.slicing is None or self._slices is None:
            return None
        fp, cells = stage.output_fp, stage.slicing.grid.cells
        found = self._slices.find(fp, stage.slicing.key, self._sources[fp], verified=False)
        if covers(found, cells):
            return together(fp, found)
        if found:
            self._execution.on_slices(fp, sum(last - first for first, last in found) / cells)
        return None


def _slices_words(outcome: StageOutcome) -> str:
    if not outcome.slices:
        return ""
    before = f", {outcome.reused_slices} from before" if outcome.reused_slices else ""
    return f"{outcome.slices} slices{before}"
