"""Runs a stage slice by slice: what one slice has computed stays, whatever becomes of the others."""

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ebbflow.infra.errors import StageCancelledError, StorageError
from ebbflow.infra.protocols import (
    Checkpoint,
    CheckpointStore,
    Relation,
    SqlEngine,
    StageJob,
    StageProgress,
    StageResult,
)
from ebbflow.infra.query.slices import Cells, FilePruning, SliceIndex, covers, together
from ebbflow.infra.storage import private
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.query.costs.operators import split_bytes
from ebbflow.planners.query.plan.partial import bound
from ebbflow.planners.query.plan.qep import SharedPart, Slicing, Stage, Statement
from ebbflow.planners.query.plan.render import checkpoint_name
from ebbflow.planners.query.plan.slicing import AT_ONCE, runs


@dataclass(frozen=True)
class SlicesDone:
    """A slice of a running stage has become durable."""

    job_id: str
    fraction: float  # of the stage that exists in slices


@dataclass(frozen=True)
class SlicedOutput:
    """A stage whose slices are all there."""

    checkpoint: Checkpoint
    result: StageResult
    slices: int
    reused: int  # slices that had been there before
    mixed: bool = False  # some of them ran natively, and some on Spark SQL


@dataclass
class StageRun:
    """One run of a stage, as the driver follows it and as it is carried out."""

    stage: Stage
    job_id: str
    started: float  # seconds since the Unix epoch
    revision: int  # of the capacity that it began with
    cores: float
    hazard: float  # expected losses per node-hour
    inputs: Sequence[Checkpoint] = ()
    sources: Mapping[str, str] = field(default_factory=dict)  # versions of all tables below it, by name
    fallback: bool = False  # its statement is the one without broadcasts
    native: bool = False  # tasks of DuckDB's may compute it
    remark: str = ""  # why they are not to
    cold: float = 0.0  # cores that were cold when it began
    apart: bool = False  # each of its slices computes what they would have shared
    progress: StageProgress = field(default_factory=lambda: StageProgress(0, 0))
    cancelled: threading.Event = field(default_factory=threading.Event)
    slices: "SliceRunner | None" = None  # of a stage that runs in slices

    def bound(self, sql: str) -> str:
        """Return ``sql`` with the columns of the checkpoints that it reads."""
        return bound(sql, {c.fingerprint: c.relation.columns for c in self.inputs})

    def split(self, largest: float) -> int:
        """Return the bytes into which input files are split, of which the largest has ``largest``; 0: as the engine
        likes."""
        return split_bytes(largest, self.cores, self.hazard) if largest else 0


@dataclass
class KnownSlices:
    """The slices that a query may use: those of the index, but none that others made before ``since``."""

    index: SliceIndex
    since: float = 0.0  # seconds since the Unix epoch
    made: set[str] = field(default_factory=set)  # fingerprints of slices that this query has computed
    narrowing: FilePruning = field(default_factory=FilePruning)

    def of(self, run: StageRun, slicing: Slicing) -> dict[Cells, Checkpoint]:
        """Return the slices of a stage that are there and whole."""
        found = self.index.find(run.stage.output_fp, slicing.key, run.sources)
        return {c: s for c, s in found.items() if s.created >= self.since or s.fingerprint in self.made}

    def add(self, run: StageRun, slicing: Slicing, cells: Cells, fingerprint: str) -> None:
        """Note a slice that the query has computed."""
        self.index.add(run.stage.output_fp, slicing.key, cells, fingerprint)
        self.made.add(fingerprint)


class SliceRunner:
    """Runs the slices of one stage that are not in the store yet.

    ``relations`` are all that its statement names, ``text`` gives a statement in the engine's dialect. ``notify``
    hears of progress, summed over slices, of every slice that is done, and of trouble, as a sentence. Job ids of
    slices are the run's, a dash and the cells; ``cancel`` stops them. What they share is computed first, into a
    folder of the engine's that goes when they end: a run that takes the stage up computes it again. Where it cannot
    be kept, each slice computes it.
    """

    def __init__(
        self,
        run: StageRun,
        relations: Sequence[Relation],
        text: Callable[[Statement], str],
        engine: SqlEngine,
        store: CheckpointStore,
        known: KnownSlices,
        notify: Callable[[StageProgress | SlicesDone | str], None],
    ) -> None:
        assert run.stage.slicing is not None
        self._run = run
        self._slicing: Slicing = run.stage.slicing
        self._relations = relations
        self._text = text
        self._engine = engine
        self._store = store
        self._known = known
        self._notify = notify
        self._lock = threading.Lock()
        self._turn = threading.Semaphore(self._slicing.at_once)  # on the engine: others commit meanwhile
        self._done: dict[Cells, Checkpoint] = {}
        self._results: list[StageResult] = []
        self._shared: list[Relation] = []
        self._progress: dict[Cells, StageProgress] = {}
        self._jobs: set[str] = set()

    def cancel(self) -> None:
        """Ask the slices that run to stop. The run's ``cancelled`` keeps others from starting."""
        with self._lock:
            jobs = list(self._jobs)
        for job in jobs:
            self._engine.cancel(job)

    def run(self) -> SlicedOutput:
        """Run what is missing and return the whole. Raises what the engine and the store raise; slices that are
        done stay."""
        run, stage, grid = self._run, self._run.stage, self._slicing.grid
        self._done = self._known.of(run, self._slicing)
        reused = len(self._done)
        if reused:
            self._notify(SlicesDone(run.job_id, self._fraction()))
        todo = list(runs(list(self._done), grid.cells, self._slicing.slices))
        if todo:
            with self._sharing():
                self._run_all(todo, reused)
        assert covers(self._done, grid.cells)
        mixed = len({result.native for result in self._results}) > 1
        return SlicedOutput(
            together(stage.output_fp, self._done), _summed(self._results), len(self._done), reused, mixed
        )

    @contextmanager
    def _sharing(self) -> Iterator[None]:
        """Compute what the slices share, and keep it while they run."""
        if not self._slicing.shared:
            yield
            return
        scratch: StorageLocation | None = getattr(self._engine, "scratch", None)  # statements reach it
        folder = ""
        try:
            try:
                with translated("make a directory for what slices share"):
                    folder = tempfile.mkdtemp(dir=None if scratch is None else scratch.root)
                self._share(StorageLocation(folder))
            except StorageError as error:  # such as a full disk
                self._run.apart = True
                self._shared.clear()
                shutil.rmtree(folder, ignore_errors=True)
                self._notify(f"each slice of {self._run.stage.name} computes what they would share: {error}")
            yield
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _share(self, place: StorageLocation) -> None:
        """Compute what the slices share into directories below ``place``."""
        there = {relation.name for relation in self._relations}
        for part in self._slicing.shared:
            if checkpoint_name(part.fingerprint) not in there:  # else another stage has computed the same
                self._compute(part, place.under(part.fingerprint))

    def _compute(self, part: SharedPart, place: StorageLocation) -> None:
        with translated(f"make {place}"):
            private.make_folder(place.root)
        job = StageJob(
            f"{self._run.job_id}-{part.fingerprint[:12]}",
            f"{self._run.stage.name} [shared by its slices]",
            self._run.bound(self._text(part.statement)),
            tuple(self._relations),
            place,
        )
        result = self._on_engine(job, None, self._run.cancelled)
        self._results.append(replace(result, rows=0))
        with translated(f"read {place}"):
            files = tuple(FileEntry(info.path, info.size, info.mtime_ns / 1e9) for info in place.entries())
        self._shared.append(Relation(checkpoint_name(part.fingerprint), place.scheme, files, result.columns))

    def _on_engine(
        self, job: StageJob, on_progress: Callable[[StageProgress], None] | None, stop: threading.Event
    ) -> StageResult:
        with self._lock:
            self._jobs.add(job.id)
        try:
            with self._turn:
                # once more: the engine ignores the cancellation of a job that has not reached it yet
                if self._run.cancelled.is_set() or stop.is_set():
                    raise StageCancelledError(f"{job.name} was cancelled before it began")
                return self._engine.run(job, on_progress)
        finally:
            with self._lock:
                self._jobs.discard(job.id)

    def _run_all(self, todo: Sequence[Cells], reused: int) -> None:
        stop = threading.Event()
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="ebbflow-slice") as pool:
            futures: list[Future[None]] = [
                pool.submit(self._one, cells, len(todo) + reused, stop) for cells in todo
            ]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            if any(f.exception() is not None for f in done):
                stop.set()
                for future in futures:
                    future.cancel()
                self.cancel()
        errors = [e for f in futures if not f.cancelled() and (e := f.exception()) is not None]
        # the others were cancelled because of the one that failed
        errors.sort(key=lambda e: isinstance(e, StageCancelledError))
        if errors:
            raise errors[0]

    def _one(self, cells: Cells, total: int, stop: threading.Event) -> None:
        run, stage = self._run, self._run.stage
        job_id = f"{run.job_id}-{cells[0]}-{cells[1]}"
        if run.cancelled.is_set() or stop.is_set():
            raise StageCancelledError(f"{stage.name} was cancelled before all its slices began")
        fingerprint = self._slicing.fingerprint(stage.output_fp, *cells)
        attempt = self._store.begin(fingerprint)
        try:
            job = self._job(job_id, cells, attempt.place)
            result = self._on_engine(job, lambda p: self._record_progress(cells, p, total), stop)
            checkpoint = self._store.commit(
                attempt, rows=result.rows, columns=result.columns, seconds=result.seconds, sources=run.sources
            )
        except BaseException:
            stop.set()  # here, or this thread would begin another before anybody hears of it
            self._store.discard(attempt)
            raise
        self._known.add(run, self._slicing, cells, fingerprint)
        with self._lock:
            self._done[cells] = checkpoint
            self._results.append(result)
            fraction = self._fraction()
        self._notify(SlicesDone(run.job_id, fraction))

    def _job(self, job_id: str, cells: Cells, output: StorageLocation) -> StageJob:
        run, stage = self._run, self._run.stage
        low, high = self._slicing.grid.bounds(*cells)
        columns = dict(self._slicing.grid.columns)
        narrow = {table.lower(): columns[alias] for alias, table in self._slicing.tables.items()}
        part = (cells[1] - cells[0]) / self._slicing.grid.cells
        relations, largest = [], 0.0
        for given in self._relations:
            column = narrow.get(given.name.lower())
            relation = given
            if column is not None:
                relation = self._known.narrowing.narrowed(given, column, low, high)
            relations.append(relation)
            # of a single file the range is a part too, though the file cannot be left out
            size = relation.bytes * (part if column is not None and relation is given else 1.0)
            largest = max(largest, size)
        return StageJob(
            job_id,
            f"{stage.name} [{cells[0]}-{cells[1]} of {self._slicing.grid.cells}]",
            run.bound(self._text(self._slicing.statement(*cells, apart=run.apart))),
            (*relations, *self._shared),
            output,
            stage.partitions,
            run.split(largest),
            expected=stage.core_seconds * part,
            native=run.native,
        )

    def _record_progress(self, cells: Cells, progress: StageProgress, total: int) -> None:
        with self._lock:
            self._progress[cells] = progress
            known = list(self._progress.values())
            before = sum(1 for c in self._done if c not in self._progress)
        each = sum(p.tasks_total for p in known) / len(known)
        self._notify(
            StageProgress(
                round(each * total),
                sum(p.tasks_done for p in known) + round(each * before),
                sum(p.tasks_failed for p in known),
                sum(p.tasks_running for p in known),
                all(p.native for p in known if p.tasks_total),
            )
        )

    def _fraction(self) -> float:
        return sum(last - first for first, last in self._done) / self._slicing.grid.cells


def _summed(results: Sequence[StageResult]) -> StageResult:
    if not results:
        return StageResult(0, (), 0.0, 0.0, 0)
    return replace(
        results[0],
        native=all(r.native for r in results),
        remark=next((r.remark for r in results if r.remark), ""),
        rows=sum(r.rows for r in results),
        seconds=sum(r.seconds for r in results),
        task_seconds=sum(r.task_seconds for r in results),
        tasks=sum(r.tasks for r in results),
        failed_tasks=sum(r.failed_tasks for r in results),
        retried_stages=sum(r.retried_stages for r in results),
        shuffle_bytes=sum(r.shuffle_bytes for r in results),
        spilled_bytes=sum(r.spilled_bytes for r in results),
        input_bytes=sum(r.input_bytes for r in results),
    )
