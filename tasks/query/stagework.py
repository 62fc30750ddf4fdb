"""Runs one stage: as one statement, or slice by slice. All of it happens in the background."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ebbflow.infra.errors import DamagedInputError, StageCancelledError
from ebbflow.infra.protocols import Checkpoint, CheckpointStore, Relation, SqlEngine, StageJob, StageProgress
from ebbflow.infra.query.slices import Narrowing, SliceIndex
from ebbflow.planners.query.costs.operators import split_bytes
from ebbflow.planners.query.plan.partial import bound
from ebbflow.planners.query.plan.qep import Stage, Statement
from ebbflow.tasks.query.listening import Inbox, StageOutcome
from ebbflow.tasks.query.slices import SliceRunner, SlicesDone, StageRun


@dataclass
class Run:
    """One run of a stage, as the driver follows it."""

    stage: Stage
    job_id: str
    started: float  # seconds since the Unix epoch
    epoch: int  # of the capacity that it began with
    cores: float
    hazard: float  # expected losses per node-hour
    inputs: Sequence[Checkpoint] = ()
    progress: StageProgress = field(default_factory=lambda: StageProgress(0, 0))
    cancelled: threading.Event = field(default_factory=threading.Event)
    slices: SliceRunner | None = None  # of a stage that runs in slices


class StageWork:
    """Runs stages of one query on ``engine`` and commits their checkpoints.

    ``relations`` are the base tables by lower-case name. Progress goes into ``inbox``. Without ``slices`` every
    stage runs as one statement. ``since`` (seconds since the Unix epoch) leaves out older slices; 0 uses all.
    """

    def __init__(
        self,
        engine: SqlEngine,
        store: CheckpointStore,
        relations: Mapping[str, Relation],
        inbox: Inbox,
        slices: SliceIndex | None,
        *,
        reuse: bool,
        since: float,
    ) -> None:
        self._engine = engine
        self._store = store
        self._relations = relations
        self._inbox = inbox
        self._slices = slices
        self._reuse = reuse
        self._since = since
        self._made: set[str] = set()  # fingerprints of slices that this query has computed
        self._narrowing = Narrowing()

    def divides(self, stage: Stage) -> bool:
        """Tell whether the stage runs in slices."""
        return stage.slicing is not None and self._slices is not None

    def execute(
        self, run: Run, inputs: Sequence[Checkpoint], sources: Mapping[str, str], *, fallback: bool
    ) -> StageOutcome:
        """Run one stage and commit its checkpoint.

        ``inputs`` are the checkpoints that it reads, ``sources`` the versions of all tables below it;
        ``fallback`` asks for its statement without broadcasts. Raises what the engine and the store raise.
        """
        stage, job_id = run.stage, run.job_id
        if self._reuse and not stage.volatile:
            found = self._store.find(stage.output_fp, sources)
            if found is not None:  # another run over the same store was faster
                return StageOutcome(stage, job_id, found)
        self._verify(stage, inputs)
        relations = [self._relations[t.lower()] for t in stage.tables if t.lower() in self._relations]
        relations += [c.relation for c in inputs]

        def dialect(statement: Statement) -> str:
            if self._engine.name != "spark":
                return statement.duckdb
            return statement.fallback if fallback else statement.spark

        if self.divides(stage):
            described = StageRun(
                stage,
                job_id,
                inputs,
                relations,
                sources,
                run.cancelled,
                run.cores,
                run.hazard,
                dialect,
                self._since,
                self._made,
            )
            return self._in_slices(run, described)
        attempt = self._store.begin(stage.output_fp)
        try:
            sql = bound(dialect(stage.statement), {c.fingerprint: c.relation.columns for c in inputs})
            largest = max((r.bytes for r in relations), default=0)
            split = split_bytes(largest, run.cores, run.hazard) if largest else 0
            job = StageJob(job_id, stage.name, sql, tuple(relations), attempt.uri, stage.partitions, split)
            if run.cancelled.is_set():
                raise StageCancelledError(f"{stage.name} was cancelled before it began")
            result = self._engine.run(job, lambda p: self._inbox.put((job_id, p)))
            checkpoint = self._store.commit(
                attempt, rows=result.rows, columns=result.columns, seconds=result.seconds, sources=sources
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

    def stop(self, run: Run) -> None:
        """Ask a run to end. The engine ignores the cancellation of a job that has not reached it yet."""
        run.cancelled.set()
        if run.slices is not None:
            run.slices.cancel()
        self._engine.cancel(run.job_id)

    def _in_slices(self, run: Run, described: StageRun) -> StageOutcome:
        assert self._slices is not None

        def tell(what: StageProgress | SlicesDone) -> None:
            self._inbox.put((run.job_id, what) if isinstance(what, StageProgress) else what)

        run.slices = SliceRunner(described, self._engine, self._store, self._slices, self._narrowing, tell)
        done = run.slices.run()
        return StageOutcome(
            run.stage,
            run.job_id,
            done.checkpoint,
            done.result,
            slices=done.slices,
            reused_slices=done.reused,
        )
