"""Runs the stages of one query: each as one statement, or slice by slice. Knows what earlier runs have left.

What keeps an engine from one of its ways of running stages is told here, too.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ebbflow.infra.errors import (
    DamagedInputError,
    EngineUnavailableError,
    StageCancelledError,
    StageFailedError,
    StorageError,
)
from ebbflow.infra.protocols import Checkpoint, CheckpointStore, Relation, SqlEngine, StageJob, StageProgress
from ebbflow.infra.query.results import is_whole
from ebbflow.infra.query.slices import SliceIndex, covers, together
from ebbflow.infra.storage import files
from ebbflow.planners.model import Measured, Share
from ebbflow.planners.query.costs.links import cold_tasks
from ebbflow.planners.query.costs.stage_engines import StageEngineName, StageEngines
from ebbflow.planners.query.plan.qep import QueryExecutionPlan, Stage, Statement
from ebbflow.tasks.query.listening import Inbox, StageOutcome
from ebbflow.tasks.query.planning import Gathered, stage_engines_of
from ebbflow.tasks.query.request import QueryRequest, settings_of_meaning
from ebbflow.tasks.query.slices import KnownSlices, SliceRunner, SlicesDone, StageRun

Sources = Mapping[str, str]  # versions of the tables that something is computed from, by name


class StageWork:
    """Runs stages of one query on ``engine`` and commits their checkpoints; ``execute`` is for background threads.

    Args:
        engine: runs statements.
        store: of checkpoints.
        relations: the base tables by name.
        slices: which slices there are.
        inbox: progress and slices that are done go there.
        reuse: take what earlier runs have left.
        since: s since the Unix epoch; without ``reuse``, what is older is not taken.
        engines: by which of Spark's ways a stage runs; by its SQL unless given.
        sampled: draw samples of the join keys of what stages write, for whoever re-plans.
    """

    def __init__(
        self,
        engine: SqlEngine,
        store: CheckpointStore,
        relations: Mapping[str, Relation],
        slices: SliceIndex,
        inbox: Inbox,
        *,
        reuse: bool,
        since: float,
        engines: StageEngines | None = None,
        sampled: bool = False,
    ) -> None:
        self._sampled = sampled
        self._engines = engines
        self._logged = False  # that nothing can run natively
        self._told = deque[str]()  # of slices, not yet asked for
        self.engine = engine
        self.inbox = inbox
        self._store = store
        self._relations = {name.lower(): relation for name, relation in relations.items()}
        self._slices = KnownSlices(slices, 0.0 if reuse else since)
        self._reuse = reuse

    # --- in the driver's thread ---------------------------------------------------------------------------

    def resize(self, share: Share) -> None:
        """Hold the engine to a share."""
        self.engine.resize(share.total.cores, share.total.memory)

    def problems(self) -> Sequence[str]:
        """Return what has been wrong with the store and where slices run since the last call, as sentences."""
        found = list(self._store.problems())
        while self._told:
            found.append(self._told.popleft())
        trouble = getattr(self.engine, "native_trouble", "") if self._engines is not None else ""
        if trouble and not self._logged:
            self._logged = True
            found.append(f"all stages run on Spark SQL: {trouble}")
        return found

    def earlier(
        self, plans: Iterable[QueryExecutionPlan], sources: Callable[[str], Sources]
    ) -> tuple[dict[str, Checkpoint], dict[str, float]]:
        """Return what earlier runs have finished of ``plans``, and the fractions of stages that they have left in
        slices, by output fingerprint; ``sources`` gives what a stage is computed from.

        Of what nothing may read only the presence is checked: stages verify what they read as they begin. The
        result is nobody's input, so it is verified now.
        """
        found: dict[str, Checkpoint] = {}
        sliced: dict[str, float] = {}
        if not self._reuse:
            return found, sliced
        plans = list(plans)
        stages = {s.output_fp: s for p in plans for s in p.stages if not s.volatile}

        def look(fp: str) -> Checkpoint | None:
            there = self._store.find(fp, sources(fp), verified=False)
            return there or self._sliced(stages[fp], sources, sliced)

        for fp, whole in zip(stages, files.in_parallel(look, [*stages]), strict=True):
            if whole is not None:
                found[fp] = whole
        for fp in {p.sink.output_fp for p in plans} & found.keys():
            if not self._store.verify(found[fp]):
                del found[fp]
                self._sliced(stages[fp], sources, sliced)
        return found, sliced

    def _sliced(
        self, stage: Stage, sources: Callable[[str], Sources], sliced: dict[str, float]
    ) -> Checkpoint | None:
        """Return the stage's checkpoint if earlier runs have left all its slices; note in ``sliced`` what they have
        left."""
        if stage.slicing is None:
            return None
        fp, cells = stage.output_fp, stage.slicing.grid.cells
        found = self._slices.index.find(fp, stage.slicing.key, sources(fp), verified=False)
        if covers(found, cells):
            return together(fp, found)
        if found:
            sliced[fp] = sum(last - first for first, last in found) / cells
        return None

    def lost(self, run: StageRun, error: Exception, *, anew: bool = False) -> list[Checkpoint]:
        """Return what a failed run has read that is not whole any more: others may tidy the store or damage it.

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

    def measured(self, run: StageRun, outcome: StageOutcome, cold: float = 0.0) -> Measured | None:
        """Return the figures of a run that costs may be fitted to: of a stage that was computed as a whole, by an
        engine that tells how long tasks took. ``cold`` are cores that had yet to warm up while it ran."""
        result = outcome.result
        several = run.apart or outcome.mixed  # it was more work than that, or partly another engine's
        if result is None or outcome.reused_slices or several or result.task_seconds <= 0.0:
            return None
        seconds = result.task_seconds
        seconds -= min(run.stage.waiting, seconds / 2)  # tasks count the time in which they wait as theirs
        wall = _outside_tasks(outcome, run.cores) + seconds / max(min(run.cores, result.tasks), 1.0)
        engine = "native" if result.native else self.engine.name
        met = cold_tasks(result.tasks, cold, max(run.cores, cold))
        return Measured(engine, run.stage.work, seconds, wall, result.tasks, run.cores, met)

    def stop(self, run: StageRun) -> None:
        """Ask a run to end. The engine ignores the cancellation of a job that has not reached it yet."""
        run.cancelled.set()
        if run.slices is not None:
            run.slices.cancel()
        self.engine.cancel(run.job_id)

    # --- in a thread of the background --------------------------------------------------------------------

    def execute(self, run: StageRun) -> StageOutcome:
        """Run one stage and commit its checkpoint. Raises what the engine and the store raise."""
        outcome = self._executed(run)
        if self._sampled and run.stage.keys and outcome.checkpoint is not None and not run.cancelled.is_set():
            from ebbflow.infra.tables.keysamples import samples_of_keys  # queries of one stage need none

            outcome = replace(outcome, keys=samples_of_keys(outcome.checkpoint.relation, run.stage.keys))
        return outcome

    def _executed(self, run: StageRun) -> StageOutcome:
        stage, job_id, inputs = run.stage, run.job_id, run.inputs
        if self._reuse and not stage.volatile:
            found = self._store.find(stage.output_fp, run.sources)
            if found is not None:  # another run over the same store was faster
                return StageOutcome(stage, job_id, found)
        self._verify(stage, inputs)
        relations = [self._relations[t.lower()] for t in stage.tables if t.lower() in self._relations]
        relations += [c.relation for c in inputs]

        def text(statement: Statement) -> str:
            if self.engine.name != "spark":
                return statement.duckdb
            return statement.fallback if run.fallback else statement.spark

        if self._engines is not None and self.engine.name == "spark":
            choice = self._engines.choose(stage.work, run.cores, stage.engine, stage.engine_reason)
            run.native, run.remark = choice.native, "" if choice.native else choice.reason
        if stage.slicing is not None:
            return self._in_slices(run, relations, text)
        attempt = self._store.begin(stage.output_fp)
        try:
            sql = run.bound(text(stage.statement))
            split = run.split(max((r.bytes for r in relations), default=0))
            job = StageJob(
                job_id,
                stage.name,
                sql,
                tuple(relations),
                attempt.place,
                stage.partitions,
                split,
                expected=stage.core_seconds,
                native=run.native,
            )
            if run.cancelled.is_set():
                raise StageCancelledError(f"{stage.name} was cancelled before it began")
            result = self.engine.run(job, lambda p: self.inbox.put((job_id, p)))
            checkpoint = self._store.commit(
                attempt, rows=result.rows, columns=result.columns, seconds=result.seconds, sources=run.sources
            )
        except BaseException:
            self._store.discard(attempt)
            raise
        return StageOutcome(stage, job_id, checkpoint, result)

    def _verify(self, stage: Stage, inputs: Sequence[Checkpoint]) -> None:
        """Look at what the stage reads before its first use. Raises ``DamagedInputError``."""
        damaged = [c.fingerprint for c in inputs if not self._store.verify(c)]
        if damaged:
            names = ", ".join(fp[:16] for fp in damaged)
            raise DamagedInputError(f"{stage.name} reads checkpoints that are damaged: {names}", damaged)

    def _in_slices(
        self, run: StageRun, relations: Sequence[Relation], text: Callable[[Statement], str]
    ) -> StageOutcome:
        def notify(what: StageProgress | SlicesDone | str) -> None:
            if isinstance(what, str):
                self._told.append(what)
            else:
                self.inbox.put((run.job_id, what) if isinstance(what, StageProgress) else what)

        run.slices = SliceRunner(run, relations, text, self.engine, self._store, self._slices, notify)
        done = run.slices.run()
        return StageOutcome(
            run.stage,
            run.job_id,
            done.checkpoint,
            done.result,
            slices=done.slices,
            reused_slices=done.reused,
            mixed=done.mixed,
        )


def _outside_tasks(outcome: StageOutcome, cores: float) -> float:
    """Return the seconds in which no task of a stage ran; of slices, which may run side by side, those of one."""
    result, slicing, slices = outcome.result, outcome.stage.slicing, max(outcome.slices, 1)
    assert result is not None
    at_once = 1 if slicing is None else min(slicing.at_once, slices)
    width = max(min(cores, at_once * result.tasks / slices), 1.0)
    return max(result.seconds - at_once * result.task_seconds / width, 0.0) / slices


@dataclass(frozen=True, slots=True)
class StageWays:
    """How stages may run. ``told`` says why that is not what the plan was made for; empty if it is."""

    stages: StageEngineName
    told: str = ""


def stage_ways(request: QueryRequest, gathered: Gathered, engine: SqlEngine, *, cores: float) -> StageWays:
    """Return how stages may run on ``engine``, which is confined already.

    An executor is asked where there are ``cores``. Raises ``EngineUnavailableError`` where only Spark SQL could run
    them and lacks what it needs.
    """
    asked = stage_engines_of(request, gathered)
    lacking = str(getattr(engine, "spark_sql_obstacle", str)())
    if lacking:
        if why := _no_native_stage(request, asked, engine, cores):
            raise EngineUnavailableError(f"{lacking}; native stages need no client of Spark's, but {why}")
        told = "all stages run natively, for Spark has no client for s3://" if asked != "native" else ""
        return StageWays("native", told)
    if engine.name != "spark" or asked != "auto":
        return StageWays(asked)
    obstacle = _obstacle(request, engine, cores)
    return StageWays("spark", f"all stages run on Spark SQL: {obstacle}") if obstacle else StageWays(asked)


def _no_native_stage(request: QueryRequest, asked: StageEngineName, engine: SqlEngine, cores: float) -> str:
    """Return what keeps all stages, or the last one, from running natively."""
    if request.stages == "spark":
        return "stages=spark (--stages) rules them out"
    if asked == "spark":
        return "the query reads tables of Spark's catalogue"
    return _obstacle(request, engine, cores)


def _obstacle(request: QueryRequest, engine: SqlEngine, cores: float) -> str:
    """Return why no stage can run natively; an executor is asked."""
    if cores <= 0:
        return ""
    if changed := settings_of_meaning(request):
        return f"native stages are not proven to be right with {', '.join(changed[:3])} set"
    return str(getattr(engine, "native_obstacle", str)())
