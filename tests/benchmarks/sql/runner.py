"""Runs the whole comparison, round by round, and goes on where an earlier command stopped."""

import hashlib
import os
import platform
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import ClusterError, EngineError
from ebbflow.infra.protocols import Relation
from ebbflow.infra.query.checkpoints import ParquetCheckpointStore
from ebbflow.infra.query.comparison import same_rows
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables import parquet as tables
from ebbflow.planners.errors import EbbflowError
from ebbflow.planners.query.costs.stage_engines import StageEngineName
from ebbflow.planners.query.sql.parse import parse
from ebbflow.planners.query.sql.references import table_names
from ebbflow.tasks.query.planning import Gathered, prepare
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.verify import oracle
from tests.benchmarks.sql import schedules
from tests.benchmarks.sql.cases import ANALYSED, Plan, Query, Run, Suite, System, query_text
from tests.benchmarks.sql.faults import Faults
from tests.benchmarks.sql.metrics import Metrics, Window, measure
from tests.benchmarks.sql.records import Journal, Record
from tests.benchmarks.sql.rig import TUNED_SETTINGS, RigOptions, TestCluster, started_rig
from tests.benchmarks.sql.systems import Outcome, Task, run_system

_LEAST_TIMEOUT, _TIMEOUT_SPANS = 180.0, 10.0  # a run is given up after so many seconds and spans
_FIRST_TIMEOUT = 3600.0  # while nothing is known of a query
_RESTARTS = 3  # of a cluster that has broken

Listener = Callable[["Step"], None]


@dataclass(frozen=True, slots=True)
class Step:
    """How far a benchmark has come; reported before and after every run."""

    words: str
    done: int  # runs, baselines included
    total: int
    eta: float | None  # seconds, ``None`` while nothing is known
    record: Record | None = None  # of the run that has just ended


@dataclass
class Bench:
    """One benchmark: its plan, data and folder. ``tables`` maps each suite to its folder of Parquet tables."""

    plan: Plan
    tables: Mapping[Suite, Path]
    rig: RigOptions
    out: Path
    clock: Clock
    listener: Listener
    time_limit: float = float("inf")  # seconds
    stages: StageEngineName = "auto"  # of Ebbflow
    rehearsals: int = 2  # rounds on a new application that do not count: nothing is compiled yet
    baselines: int = 1  # undisturbed runs of plain Spark whose median scales a query's schedules
    _texts: dict[Query, str] = field(default_factory=dict)
    _answers: dict[Query, Any] = field(default_factory=dict)
    _relations: dict[Suite, list[Relation]] = field(default_factory=dict)
    _known: set[tuple[Query, System]] = field(default_factory=set)  # run by this application, without losses

    def run(self) -> bool:
        """Do what is missing; return whether nothing is left. Raises ``EbbflowError``."""
        self._journal = Journal(self.out)
        self._began = self.clock.now()
        self._done = 0
        self._spent = 0.0
        self._texts = {q: query_text(q, self.tables[q.suite]) for q in self.plan.queries}
        if not self._left():
            return True
        with tempfile.TemporaryDirectory(prefix="ebbflow-bench-") as scratch:
            self._scratch = Path(scratch)
            self._prepare()
            for attempt in range(_RESTARTS + 1):
                try:
                    return self._on_a_cluster(attempt == 0)
                except ClusterError as error:
                    if attempt == _RESTARTS:
                        raise
                    self._say(f"the cluster is started anew: {error}")
        return False

    # --- preparation, outside all times -------------------------------------------------------------------

    def _prepare(self) -> None:
        """Find the tables, let Ebbflow collect its statistics, and compute the right answers by DuckDB."""
        for query, sql in self._texts.items():
            self._say(f"preparing {query.name}: statistics and the right answer")
            request = QueryRequest(
                sql,
                tables=str(self.tables[query.suite]),
                engine="spark",
                store=str(self._template(query.suite)),
                reuse=False,
            )
            store = ParquetCheckpointStore(request.store_place, clock=self.clock)
            gathered, _ = prepare(request, store, self.clock, run_id="bench")
            self._answers[query] = self._answer(query, gathered)
        for suite in {q.suite for q in self._texts}:
            texts = [sql for q, sql in self._texts.items() if q.suite == suite]
            named = {n.lower() for sql in texts for n in table_names(parse(sql))}
            found = tables.discover(StorageLocation(self.tables[suite]))
            self._relations[suite] = [r for r in found if r.name.lower() in named]

    def _answer(self, query: Query, gathered: Gathered) -> Any:
        """Return the right answer, ``None`` for a query that DuckDB cannot run; kept in the folder."""
        import pyarrow.parquet as pq

        version = hashlib.sha256(repr(sorted(gathered.versions.items())).encode()).hexdigest()[:12]
        path = self.out / "answers" / f"{query.name}-{version}.parquet"
        if path.is_file():
            return pq.read_table(path)
        try:
            answer = oracle(gathered)
        except EngineError as error:
            self._say(f"{query.name}: not checked, DuckDB cannot run it ({error})")
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(answer, f"{path}.part")
        Path(f"{path}.part").replace(path)
        return answer

    def _template(self, suite: Suite) -> Path:
        return self._scratch / f"store-{suite}"

    def _setup(self, rig: TestCluster) -> dict[str, Any]:
        import pyspark

        versions = {
            suite: hashlib.sha256("".join(map(tables.version, found)).encode()).hexdigest()[:12]
            for suite, found in self._relations.items()
        }
        state = rig.cluster.state
        return {
            "tables": {suite: self.tables[suite].name for suite in versions},
            "versions": versions,
            "bytes": {suite: sum(r.bytes for r in found) for suite, found in self._relations.items()},
            "workers": self.rig.workers,
            "cpus": state.cpus,
            "cap": state.cap,
            "memory": self.rig.memory,
            "conf": dict(self.rig.conf or {}),
            "stages": self.stages,
            "tuned": TUNED_SETTINGS,
            "class_archive": "SharedArchiveFile" in self.rig.java_options,
            "seed": self.plan.seed,
            "scaled_by": self.plan.scaled_by,
            "pairs": self.plan.pairs,
            "first_runs": not self.rehearsals,
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "spark": pyspark.__version__,
        }

    # --- runs ---------------------------------------------------------------------------------------------

    def _on_a_cluster(self, first: bool) -> bool:
        self._say(f"starting a master, {self.rig.workers} workers and Spark")
        with started_rig(self.rig, self.clock) as rig:
            self._known.clear()
            if first:
                self._journal.add_setup(self._setup(rig))
            for suite, relations in self._relations.items():
                self._say(f"{suite}: registering tables" + (", analysing them" if self._analyses else ""))
                rig.register(suite, relations, self._scratch, analyse=self._analyses)
            self._rehearse(rig)
            for query in self.plan.queries:
                if query.name not in self._journal.spans and not self.rehearsals:
                    self._journal.add_span(query, 0.0)  # of no schedule, and nothing has run before
                elif query.name not in self._journal.spans:
                    if self._late(len(self.plan.systems) + self._baselines):
                        return False
                    self._baseline(rig, query)
            for whole in self.plan.rounds():
                runs = self._narrowed(whole)
                if self._journal.done(runs):
                    continue
                if self._late(len(runs)):
                    return False
                for order, run in enumerate(runs):
                    self._timed(rig, run, order)
        return True

    def _narrowed(self, runs: tuple[Run, ...]) -> tuple[Run, ...]:
        found = self._journal.records
        case = [record for record in found.values() if record.case == runs[0].case and not record.pair]
        return self.plan.narrowed(runs, {record.system: record.seconds for record in case})

    @property
    def _analyses(self) -> bool:
        return any(system in ANALYSED for system in self.plan.systems)

    def _rehearse(self, rig: TestCluster) -> None:
        for number in range(self.rehearsals):
            for system in self.plan.systems:
                self._say(f"rehearsal {number + 1} of {self.rehearsals}: {system}")
                self._one(rig, Run(self.plan.queries[0], "none", -1, system), 0, 0.0)

    def _baseline(self, rig: TestCluster, query: Query) -> None:
        """Let every system run the query once, then measure the first one that is plain Spark, or Ebbflow where that
        runs alone; the median scales the schedules."""
        order: list[System] = [*self.plan.systems, *([self.plan.scaled_by] * self._baselines)]
        walls = []
        for number, system in enumerate(order):
            run = Run(query, "none", -1, system)
            record = self._counted(rig, run, number, 0.0)
            self._journal.add_baseline(record)
            self._report(record)
            if number >= len(self.plan.systems):
                if not record.ok:
                    raise EbbflowError(
                        f"{self.plan.scaled_by} cannot run {query.name} ({record.error}): leave it out with --queries"
                    )
                walls.append(record.wall)
        self._journal.add_span(query, statistics.median(walls) if walls else record.wall)

    @property
    def _baselines(self) -> int:
        """Return how often plain Spark is measured: not at all where no schedule is to be scaled."""
        return self.baselines if any(schedule != "none" for schedule in self.plan.schedules) else 0

    def _timed(self, rig: TestCluster, run: Run, order: int) -> None:
        span = self._journal.spans[run.query.name]
        # a schedule's changes leave young executors, which the next run would find much slower than the old
        if self.rehearsals and (run.schedule != "none" or (run.query, run.system) not in self._known):
            self._say(f"rehearsal of {run.query.name}, {run.schedule}: {run.system}")
            self._one(rig, run, order, span, disturbed=False)
        record = self._counted(rig, run, order, span)
        self._journal.add(record)
        self._report(record)

    def _counted(self, rig: TestCluster, run: Run, order: int, span: float) -> Record:
        started = self.clock.now()
        self._say(self._words(run))
        record = self._one(rig, run, order, span)
        self._spent += self.clock.now() - started
        return record

    def _one(self, rig: TestCluster, run: Run, order: int, span: float, *, disturbed: bool = True) -> Record:
        """Run once on a restored cluster, with the schedule's changes if ``disturbed``, and return what came of it.
        Ebbflow is told of the losses in either case."""
        rig.warm_with(run.query.suite, self._relations[run.query.suite])
        rig.restore()
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=self._scratch))
        workers = self.rig.workers
        faults = None
        if run.schedule != "none" and disturbed:
            seed = self.plan.seed_of(run)
            planned = schedules.changes(run.schedule, span, workers, seed)
            faults = Faults(
                rig.cluster,
                planned,
                self.clock,
                serving=rig.serving,
                seed=seed,
                notices=run.system != "spark",
            )
        hazard = schedules.hazard(run.schedule, span, workers) if run.schedule != "none" else None
        if run.schedule == "none":
            self._known.add((run.query, run.system))
        task = Task(
            run.query.suite,
            run.query.name,
            self._texts[run.query],
            self.tables[run.query.suite],
            folder,
            max(_LEAST_TIMEOUT, _TIMEOUT_SPANS * span) if span else _FIRST_TIMEOUT,
            hazard,
            faults.begin if faults else lambda at: None,
            self.stages,
        )
        window = Window(rig.api, self.clock)
        try:
            outcome = run_system(run.system, rig, task, self._template(run.query.suite))
        finally:
            if faults:
                faults.end()
        metrics = self._measured(window, outcome)
        right, difference = self._judge(run.query, outcome)
        shutil.rmtree(folder, ignore_errors=True)
        notes = [outcome.note, f"schedule: {faults.problem}" if faults and faults.problem else ""]
        return Record.of(
            run,
            metrics,
            order=order,
            ok=not outcome.error,
            wall=round(outcome.ended - outcome.began, 4),
            right=right,
            error=outcome.error or difference,
            span=span,
            hazard=None if hazard is None else round(hazard, 3),
            happenings=tuple(faults.happenings) if faults else (),
            statements=outcome.statements,
            switches=outcome.switches,
            started=round(outcome.began, 3),
            load=round(os.getloadavg()[0], 2),
            note="; ".join(filter(None, notes)),
        )

    def _measured(self, window: Window, outcome: Outcome) -> Metrics:
        """Return the run's figures. Raises ``ClusterError`` when Spark's driver is gone: that is no result."""
        try:
            return measure(window.close(), outcome.began, outcome.ended, useful=outcome.useful)
        except OSError as error:
            raise ClusterError(
                f"Spark's driver does not answer any more ({error}); {outcome.error}"
            ) from error

    def _judge(self, query: Query, outcome: Outcome) -> tuple[bool | None, str]:
        expected = self._answers[query]
        if outcome.table is None or expected is None:
            return None, ""
        if outcome.table.num_columns != expected.num_columns:
            return False, f"{outcome.table.num_columns} columns, {expected.num_columns} are right"
        # engines name columns without an alias differently
        difference = same_rows(outcome.table.rename_columns(expected.column_names), expected)
        return difference is None, "" if difference is None else str(difference)

    # --- progress -----------------------------------------------------------------------------------------

    def _left(self) -> int:
        """Return the number of runs that are missing."""
        rounds = map(self._narrowed, self.plan.rounds())
        missing = sum(len(runs) for runs in rounds if not self._journal.done(runs))
        fresh = sum(q.name not in self._journal.spans for q in self.plan.queries)
        return missing + fresh * (len(self.plan.systems) + self._baselines)

    def _eta(self) -> float | None:
        return self._left() * self._spent / self._done if self._done else None

    def _late(self, runs: int) -> bool:
        """Tell whether so many further runs would pass the time limit."""
        each = self._spent / self._done if self._done else 0.0
        return self.clock.now() - self._began + runs * each > self.time_limit

    def _words(self, run: Run) -> str:
        pair = f"pair {run.pair + 1} of {self.plan.pairs}" if run.pair >= 0 else "baseline"
        return f"{run.query.name}, {run.schedule}, {pair}: {run.system}"

    def _say(self, words: str, record: Record | None = None) -> None:
        left = self._left()
        self.listener(Step(words, self._done, self._done + left, self._eta(), record))

    def _report(self, record: Record) -> None:
        self._done += 1
        self._say("", record)
