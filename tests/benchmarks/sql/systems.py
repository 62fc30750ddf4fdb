"""The systems compared. Each takes a query's text and leaves its result as Parquet; the time is that in between.

* ``spark``: Spark SQL with its own settings, adaptive execution on. It is not told of notices.
* ``spark-cbo``: the same with the cost-based optimiser, column statistics and join reordering on; a worker with
  a notice is decommissioned gracefully.
* ``spark-tuned``, ``spark-tuned-cbo``: the same two with the partitions and the limit of broadcasts that suit the
  cluster (``TUNED_SETTINGS``).
* ``ebbflow``: policy qoop, an empty store, statistics cached beforehand as the others' tables are registered
  beforehand. It sees notices and is told the schedule's losses per node-hour.
"""

import shutil
import threading
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from ebbflow.infra.errors import EngineUnavailableError
from ebbflow.infra.protocols import Relation, StageJob, StageProgress, StageResult
from ebbflow.infra.query.results import read_checkpoint
from ebbflow.infra.spark.engine import SparkEngine
from ebbflow.infra.spark.failures import first_line
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import EbbflowError
from ebbflow.planners.query.costs.stage_engines import StageEngineName
from ebbflow.tasks.query.opening import engine_in
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import PlainOrchestrator, execute
from tests.benchmarks.sql.cases import ANALYSED, TUNED, Suite, System
from tests.benchmarks.sql.metrics import contributing
from tests.benchmarks.sql.rig import TestCluster, Watchdog

_TIMED_OUT = "it was still not done"


@dataclass(frozen=True)
class Task:
    """One query to run once."""

    suite: Suite
    name: str
    sql: str
    tables: Path
    folder: Path  # new, for results and stores; the caller removes it
    timeout: float  # seconds
    hazard: float | None = None
    begun: Callable[[float], None] = lambda at: None  # called when the text is handed over
    stages: StageEngineName = "auto"  # how Ebbflow runs its stages


@dataclass(frozen=True)
class Outcome:
    """What a system made of a task."""

    began: float  # seconds since the Unix epoch
    ended: float
    table: Any = None  # the result as ``pyarrow.Table``; ``None`` when the run failed
    error: str = ""
    useful: Callable[[str], bool] = lambda group: True  # did a job group's work lead to the result?
    statements: int = 1
    switches: int = 0
    note: str = ""


def run_system(system: System, rig: TestCluster, task: Task, template: Path) -> Outcome:
    """Run ``task`` under ``system``; a failure is an outcome too.

    ``template`` is Ebbflow's prepared store: its statistics, and how long its stages took in the runs before. Results
    are not kept.
    """
    if system == "ebbflow":
        return _ebbflow(rig, task, template)
    return _plain(rig, task, analysed=system in ANALYSED, tuned=system in TUNED)


def _plain(rig: TestCluster, task: Task, *, analysed: bool, tuned: bool) -> Outcome:
    session = rig.plain_session(task.suite, analysed=analysed, tuned=tuned)
    group = f"bench-{uuid.uuid4().hex[:8]}"
    target = task.folder / "result"
    rig.context.setJobGroup(group, task.name, interruptOnCancel=True)
    error = ""
    with Watchdog(task.timeout, lambda: rig.context.cancelJobGroup(group), rig.clock) as watchdog:
        began = rig.clock.now()
        task.begun(began)
        try:
            frame = session.sql(task.sql)
            names = _distinct(frame.columns)
            if names != frame.columns:
                frame = frame.toDF(*names)
            frame.write.parquet(target.as_uri())
        except Exception as failure:  # PySpark raises several kinds
            error = first_line(failure)
        ended = rig.clock.now()
    rig.forget_group()
    if watchdog.fired:
        error = f"{_TIMED_OUT} after {task.timeout:.0f} s"
    if error:
        return Outcome(began, ended, error=error, useful=lambda _: False)
    return Outcome(began, ended, _read(target))


def _distinct(names: Sequence[str]) -> list[str]:
    """Return column names as Parquet wants them: different in any case. The answer does not depend on them."""
    lower = [name.lower() for name in names]
    return [n if lower.count(n.lower()) == 1 else f"{n}_{i}" for i, n in enumerate(names)]


def _read(folder: Path) -> Any:
    import pyarrow.parquet as pq

    return pq.ParquetDataset(sorted(str(p) for p in folder.glob("*.parquet"))).read()


def _ebbflow(rig: TestCluster, task: Task, template: Path) -> Outcome:
    store = task.folder / "store"
    shutil.copytree(template / "cache", store / "cache")
    request = QueryRequest(
        task.sql,
        tables=str(task.tables),
        engine="spark",
        master=rig.cluster.master_url,
        store=str(store),
        reuse=False,
        stages=task.stages,
        interruption_rate=task.hazard,
        name=task.name,
    )
    error, outcome = "", None
    with engine_in(rig.session, request, rig.clock) as opened:
        engine = Recorder(cast("SparkEngine", opened.engine))
        opened.source.capacity()  # the engine is open and its capacity known, as Spark's is
        with Watchdog(task.timeout, engine.stop, rig.clock) as watchdog:
            began = rig.clock.now()
            task.begun(began)
            try:
                outcome = execute(
                    request, PlainOrchestrator(), rig.clock, replace(opened, engine=engine, settled=True)
                )
            except Exception as failure:
                known = isinstance(failure, EbbflowError)
                error = first_line(failure) if known else f"{type(failure).__name__}: {first_line(failure)}"
            ended = rig.clock.now()
    if outcome is None:
        error = f"{_TIMED_OUT} after {task.timeout:.0f} s" if watchdog.fired else error
        return Outcome(began, ended, error=error, useful=lambda _: False, statements=engine.statements)
    shutil.copytree(store / "cache" / "history", template / "cache" / "history", dirs_exist_ok=True)
    result = outcome.result
    used = engine.contributing([_path(result.uri), *(f.path for f in result.relation.files)])
    report = outcome.report
    return Outcome(
        began,
        ended,
        read_checkpoint(result),
        useful=lambda group: group in used,
        statements=engine.statements,
        switches=len(report.switches),
        note="; ".join(f"{s.name} ({s.status}; {s.note})" for s in report.stages),
    )


class Recorder:
    """A ``SqlEngine`` that passes everything on and remembers which statement read and wrote what."""

    name: Literal["spark"] = "spark"

    def __init__(self, engine: SparkEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._stopped = False
        self._inputs: dict[str, tuple[str, ...]] = {}
        self._outputs: dict[str, str] = {}  # of those that succeeded

    @property
    def statements(self) -> int:
        return len(self._inputs)

    def run(self, job: StageJob, on_progress: Callable[[StageProgress], None] | None = None) -> StageResult:
        with self._lock:
            if self._stopped:
                raise EngineUnavailableError("the benchmark has stopped this run")
            self._inputs[job.id] = tuple(f.path for r in job.relations for f in r.files)
        result = self._engine.run(job, on_progress)
        with self._lock:
            self._outputs[job.id] = job.output.root
        return result

    def contributing(self, result: Sequence[str]) -> frozenset[str]:
        """Return the ids of the statements on which the result, given by its files, rests."""
        with self._lock:
            return contributing(self._outputs, self._inputs, result)

    def stop(self) -> None:
        """Fail what runs and what is still to come."""
        with self._lock:
            self._stopped = True
            running = [j for j in self._inputs if j not in self._outputs]
        for job in running:
            self._engine.cancel(job)

    def cancel(self, job_id: str) -> None:
        self._engine.cancel(job_id)

    def resize(self, cores: float, memory: float) -> None:
        self._engine.resize(cores, memory)

    def confine(
        self, relations: Sequence[Relation], folders: Sequence[StorageLocation], everything: bool = False
    ) -> None:
        self._engine.confine(relations, folders, everything)

    def tables(self, names: Collection[str]) -> Sequence[Relation]:
        return self._engine.tables(names)

    def table_list(self) -> Sequence[str]:
        return self._engine.table_list()

    def close(self) -> None:
        self._engine.close()

    def __getattr__(self, name: str) -> Any:
        """Pass on whatever else the engine offers."""
        return getattr(self._engine, name)


def _path(uri: str) -> str:
    return uri.partition("://")[2] or uri
