"""Stages in slices: what a slice has computed stays, whatever becomes of the others."""

import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import duckdb
import pytest

from ebbflow.infra.errors import StageCancelledError, StageFailedError, StorageFullError
from ebbflow.infra.protocols import StageJob, StageProgress, StageResult
from ebbflow.infra.query.duckdb import DuckDbEngine
from ebbflow.infra.query.slices import SliceIndex
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.query.costs.cost import DEFAULTS, DUCKDB
from ebbflow.planners.query.plan.qep import QueryExecutionPlan, Stage
from ebbflow.tasks.query.listening import StageOutcome
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import execute
from ebbflow.tasks.query.slices import SliceRunner, StageRun
from ebbflow.tasks.query.stagework import StageWork
from tests.tasks.driving import Obedient, Ride, Scripted, capacity, right, until_cancelled

QUERY = """
    SELECT o_orderpriority, count(*) AS items, sum(l_quantity) AS quantity, avg(l_discount) AS discount
    FROM orders JOIN lineitem ON l_orderkey = o_orderkey
    WHERE l_shipmode IN ('AIR', 'MAIL')
    GROUP BY o_orderpriority ORDER BY o_orderpriority
"""
SHARING = """
    SELECT o_orderpriority, p_brand, count(*) AS items, sum(l_quantity) AS quantity
    FROM orders JOIN lineitem ON l_orderkey = o_orderkey JOIN part ON p_partkey = l_partkey
    WHERE p_name LIKE '%green%' AND p_size < 30
    GROUP BY o_orderpriority, p_brand ORDER BY o_orderpriority, p_brand
"""
OFTEN = 1e9  # losses per node-hour: even queries of milliseconds are divided


@pytest.fixture(name="tables", scope="module")
def _tables(tpch: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tables in small row groups, so that a small table is worth dividing."""
    folder = tmp_path_factory.mktemp("sliced")
    with duckdb.connect() as connection:
        for name in ("orders", "lineitem", "part"):
            source, target = Path(tpch) / f"{name}.parquet", folder / f"{name}.parquet"
            connection.execute(f"COPY (FROM '{source}') TO '{target}' (ROW_GROUP_SIZE 2048)")
    return str(folder)


@pytest.fixture(name="request_")
def _request(tables: str, tmp_path: Path) -> QueryRequest:
    return QueryRequest(QUERY, tables=tables, engine="duckdb", store=str(tmp_path / "store"))


def sliced(plans: tuple[QueryExecutionPlan, ...]) -> list[tuple[QueryExecutionPlan, Stage]]:
    """Return the plans whose partial result is divided, with that stage."""
    return [(p, s) for p in plans for s in p.stages if s.slicing is not None and len(p.stages) == 2]


def cells(job: StageJob) -> tuple[int, int] | None:
    found = re.search(r"\[(\d+)-(\d+) of 16\]", job.name)
    return (int(found[1]), int(found[2])) if found else None


def test_every_cell_is_computed_once_and_the_answer_is_right(
    request_: QueryRequest, engine: Scripted
) -> None:
    ride = Ride(request_, hazard=OFTEN)
    plan, stage = sliced(ride.plans)[0]
    driver = ride.drive(engine, chosen=plan)
    assert right(ride, driver)
    done = sorted(c for job in engine.jobs if (c := cells(job)))
    assert [c for first, last in done for c in range(first, last)] == list(range(16))
    assert stage.slicing is not None
    assert len(done) == stage.slicing.slices > 1
    report = next(s for s in driver.recorder.stages if s.fingerprint == stage.output_fp)
    assert (report.status, report.note) == ("completed", f"{stage.slicing.slices} slices")
    read = [one.work.scanned_rows for one in driver.session.measured]
    assert read == [stage.work.scanned_rows, plan.sink.work.scanned_rows]


def test_a_stage_whose_slices_ran_both_ways_does_not_say_what_either_costs(
    request_: QueryRequest, engine: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    ride = Ride(request_, hazard=OFTEN)
    plan, _ = sliced(ride.plans)[0]
    plain = engine.run

    def run(job: StageJob, on_progress: Callable[[StageProgress], None] | None = None) -> StageResult:
        return replace(plain(job, on_progress), native=(cells(job) or (1, 1))[0] == 0)

    monkeypatch.setattr(engine, "run", run)
    driver = ride.drive(engine, chosen=plan)
    assert [one.work.scanned_rows for one in driver.session.measured] == [plan.sink.work.scanned_rows]


@pytest.fixture(name="sharing")
def _sharing(request_: QueryRequest, monkeypatch: pytest.MonkeyPatch) -> QueryRequest:
    slow = replace(DUCKDB.rates, scanned_bytes=1e-6)  # so that it pays for a small table
    monkeypatch.setitem(DEFAULTS, "duckdb", DUCKDB.with_rates(slow, DUCKDB.latency))
    return replace(request_, sql=SHARING)


def shares(plan: QueryExecutionPlan) -> bool:
    return any(s.slicing and s.slicing.shared for s in plan.stages)


def test_what_all_slices_read_alike_is_computed_once_in_each_run(
    sharing: QueryRequest, engine: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = []
    move = DuckDbEngine._move
    monkeypatch.setattr(
        DuckDbEngine, "_move", lambda engine, reach: (moves.append(reach), move(engine, reach))[1]
    )
    ride = Ride(sharing, hazard=OFTEN)
    engine.confine(ride.gathered.read(), [sharing.store_place])
    plan = next(p for p in ride.plans if shares(p))

    def breaks(job: StageJob, before: int, _event: object) -> None:
        running.append(job)
        assert sum(cells(one) is not None for one in running) == len(running) - 1, (
            "the first is what is shared"
        )
        if before == 4:
            raise StageFailedError("out of luck")

    running: list[StageJob] = []
    engine.before = breaks
    with pytest.raises(StageFailedError, match="out of luck"):
        ride.drive(engine, chosen=plan)
    assert len(moves) == 1  # one database serves it all
    assert not list(Path(engine.scratch.root).iterdir())
    again = Scripted()
    try:
        second = Ride(sharing, hazard=OFTEN)
        driver = second.drive(again, chosen=next(p for p in second.plans if p.id == plan.id))
    finally:
        again.close()
    assert right(second, driver)
    for jobs in (engine.jobs, again.jobs):
        (shared,) = (job for job in jobs if "shared by its slices" in job.name)
        assert "part" in shared.sql
        assert not any("green" in job.sql for job in jobs if cells(job) is not None)


@pytest.mark.parametrize("trouble", ["full while it is written", "no directory for it"])
def test_where_there_is_no_room_for_what_slices_share_each_computes_it(
    sharing: QueryRequest, engine: Scripted, trouble: str
) -> None:
    ride = Ride(sharing, hazard=OFTEN)
    plan = next(p for p in ride.plans if shares(p))

    def breaks(job: StageJob, _before: int, _event: object) -> None:
        if cells(job) is None and "shared by its slices" in job.name:
            raise StorageFullError("no space left")

    if trouble == "no directory for it":
        shutil.rmtree(engine.scratch.root)
    engine.before = breaks
    driver = ride.drive(engine, chosen=plan)
    assert right(ride, driver)
    divided = next(s for s in plan.stages if s.slicing and s.slicing.shared)
    computed = [job for job in engine.jobs if cells(job) and job.id.startswith(divided.output_fp[:12])]
    assert computed
    assert all("green" in job.sql for job in computed)
    assert sum("computes what they would share: " in note for note in ride.listener.notes) == 1
    # figures of a stage that did more work than was planned would mislead calibration
    assert len(driver.session.measured) == len(plan.stages) - 1


def test_the_embedded_engine_divides_stages_where_interruptions_are_stated(
    request_: QueryRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DEFAULTS, "duckdb", DUCKDB.with_rates(DUCKDB.rates, 1e-9))  # as in ``Ride``
    for rate in (None, OFTEN):
        request = replace(request_, interruption_rate=rate, reuse=False, verify=True)
        report = execute(request).report
        assert report.verified is True, report.verification
        divided = [stage.name for stage in report.stages if "slices" in stage.note]
        assert bool(divided) == (rate is not None)


def test_what_a_failed_run_has_left_is_used_by_the_next(request_: QueryRequest, engine: Scripted) -> None:
    ride = Ride(request_, hazard=OFTEN)
    plan, stage = sliced(ride.plans)[0]

    def breaks(job: StageJob, before: int, _event: object) -> None:
        if before == 5:
            raise StageFailedError("out of luck")

    engine.before = breaks
    with pytest.raises(StageFailedError, match="out of luck"):
        ride.drive(engine, chosen=plan)
    finished = {checkpoint.fingerprint for checkpoint in ride.store.checkpoints()}
    assert finished
    again = Scripted()
    try:
        second = Ride(request_, hazard=OFTEN)
        driver = second.drive(again, chosen=next(p for p, _ in sliced(second.plans) if p.id == plan.id))
    finally:
        again.close()
    assert right(second, driver)
    run = {c for job in again.jobs if (c := cells(job))}
    covered = {c for first, last in run for c in range(first, last)}
    assert stage.slicing is not None
    assert 0 < len(covered) < 16
    assert len(covered) == 16 - 16 // stage.slicing.slices * len(finished)
    report = next(s for s in driver.recorder.stages if s.fingerprint == stage.output_fp)
    assert report.note == f"{stage.slicing.slices} slices, {len(finished)} from before"
    # figures of a stage that was not computed as a whole would mislead calibration
    assert len(driver.session.measured) == 1


def _without_reuse(request_: QueryRequest, engine: Scripted) -> tuple[Ride, QueryExecutionPlan]:
    """Leave a run's slices in the store, and return a run that must not use them, and its plan of the same id."""
    ride = Ride(request_, hazard=OFTEN)
    plan, _ = sliced(ride.plans)[0]
    ride.drive(engine, chosen=plan)
    fresh = Ride(QueryRequest(**{**_options(request_), "reuse": False}), hazard=OFTEN)
    return fresh, next(p for p in fresh.plans if p.id == plan.id)


def test_a_run_that_must_not_reuse_anything_computes_all_cells(
    request_: QueryRequest, engine: Scripted
) -> None:
    fresh, plan = _without_reuse(request_, engine)
    first = len(engine.jobs)
    driver = fresh.drive(engine, chosen=plan)
    assert right(fresh, driver)
    assert len(engine.jobs) == 2 * first


def test_a_run_that_must_not_reuse_anything_uses_what_it_has_computed_itself(
    request_: QueryRequest, engine: Scripted
) -> None:
    """Where an older slice of equal content is in the store, that one stays there."""
    fresh, plan = _without_reuse(request_, engine)
    again = Scripted()

    def breaks(job: StageJob, before: int, _event: object) -> None:
        if before == 5:
            fresh.tell(capacity(2, nodes=1))
            raise StageFailedError("lost a node")

    again.before = breaks
    try:
        driver = fresh.drive(again, Obedient(fresh.plans, []), plan)
    finally:
        again.close()
    assert right(fresh, driver)
    computed = Counter(c for job in again.jobs if (c := cells(job)))
    assert sum(count > 1 for count in computed.values()) <= 2  # what failed, and what ran beside it


def test_a_slice_that_always_fails_is_given_up_although_others_are_there(
    request_: QueryRequest, engine: Scripted
) -> None:
    ride = Ride(request_, hazard=OFTEN)
    plan, stage = sliced(ride.plans)[0]
    index = SliceIndex(ride.store, ride.store.cache("slices"))
    failed: list[str] = []
    first: list[object] = []

    def breaks(job: StageJob, _before: int, cancelled: threading.Event) -> None:
        if (found := cells(job)) is not None:
            first.append(found)  # whichever slice has the engine first is the only one that is computed
            if found == first[0]:
                return
            while not index.divisions(stage.output_fp):  # it is not durable yet
                if cancelled.wait(0.01):
                    raise StageCancelledError("another has failed")
            failed.append(job.name)
            ride.tell(capacity(1 + len(failed)))
            if len(failed) > 30:
                raise KeyError("it is tried for ever")
            raise StageFailedError("lost a node")

    engine.before = breaks
    with pytest.raises(StageFailedError, match="lost a node"):
        ride.drive(engine, Obedient(ride.plans, []), plan)
    reports = [s.status for s in ride.driver.recorder.stages if s.fingerprint == stage.output_fp]
    assert reports == ["failed"] * 3


def test_slices_serve_the_plan_that_is_switched_to(request_: QueryRequest, engine: Scripted) -> None:
    ride = Ride(request_, hazard=OFTEN)
    (one, stage), (other, twin) = sliced(ride.plans)[:2]
    assert stage.output_fp == twin.output_fp
    assert stage.physical_key != twin.physical_key

    def held(job: StageJob, before: int, cancelled: object) -> None:
        if cells(job) is not None and before == 4 and not told:
            told.append(job.name)
            ride.tell(capacity(2, nodes=1))
            until_cancelled(job, cancelled)  # type: ignore[arg-type]

    told: list[str] = []
    engine.before = held
    driver = ride.drive(engine, replanner=Refusing(ride.plans, [other.id]), chosen=one)
    assert right(ride, driver)
    assert [d.chosen for d in driver.session.execution.decisions if d.kind == "switch"] == [other.id]
    stages = [s for s in driver.recorder.stages if s.fingerprint == stage.output_fp]
    assert [s.status for s in stages] == ["cancelled", "completed"]
    computed = [c for job in engine.jobs if (found := cells(job)) for c in range(*found)]
    assert set(computed) == set(range(16))
    assert len(computed) < 24  # the slices of before the switch were not computed again


def test_slices_are_cancelled_with_their_stage(request_: QueryRequest, engine: Scripted) -> None:
    ride = Ride(request_, hazard=OFTEN)
    plan, _ = sliced(ride.plans)[0]

    def interrupt(job: StageJob, before: int, cancelled: object) -> None:
        if before == 2:
            ride.inbox.put(KeyError("stop"))  # whatever ends the driver ends its stages
        if before >= 2:
            until_cancelled(job, cancelled)  # type: ignore[arg-type]

    engine.before = interrupt
    with pytest.raises(KeyError, match="stop"):
        ride.drive(engine, chosen=plan)
    held = [job.id for job in engine.jobs[2:]]
    assert held
    assert set(held) <= set(engine.cancelled)


class Refusing(Obedient):
    """An obedient replanner that takes no running stage along."""

    def assess(self, plan, state, share, now):  # type: ignore[no-untyped-def]
        if plan.id != state.plan.id:
            state = type(state)(state.plan, state.checkpoints, {}, state.done_tasks, state.sliced)
        return super().assess(plan, state, share, now)


def _options(request: QueryRequest) -> dict[str, object]:
    names = ("sql", "tables", "engine", "store")
    return {name: getattr(request, name) for name in names}


def test_the_tasks_of_slices_are_native_where_each_that_has_some_has_native_ones() -> None:
    seen: list[StageProgress] = []
    run = SimpleNamespace(_lock=threading.Lock(), _progress={}, _done={}, _notify=seen.append)
    for cells, progress in (
        ((0, 1), StageProgress(2, 1, 0, 1, native=True)),
        ((1, 2), StageProgress(0, 0)),
        ((1, 2), StageProgress(4, 0, 0, 2)),
    ):
        SliceRunner._record_progress(run, cells, progress, 4)  # type: ignore[arg-type]
    assert [one.native for one in seen] == [True, True, False]
    assert seen[-1] == StageProgress(12, 1, 0, 3)


def test_slices_run_natively_where_their_stage_is_to(request_: QueryRequest, engine: Scripted) -> None:
    _, stage = sliced(Ride(request_, hazard=OFTEN).plans)[0]
    run = StageRun(stage, "job", 0.0, 1, 2.0, 0.0, native=True)
    runner = SliceRunner(run, (), lambda s: s.duckdb, engine, None, None, print)  # type: ignore[arg-type]
    job = runner._job("job-0-4", (0, 4), StorageLocation("unused"))
    assert job.native
    assert job.expected == pytest.approx(stage.core_seconds / 4)


@pytest.mark.parametrize(
    ("slices", "at_once", "seconds"),
    [(0, 2, 5.5), (8, 2, 14.0), (8, 1, 9.0), (1, 2, 5.5)],
    ids=["one statement", "slices", "slices one by one", "one slice"],
)
def test_what_a_statement_takes_beside_its_tasks_is_measured_without_waits_and_the_slice_beside_it(
    request_: QueryRequest, slices: int, at_once: int, seconds: float
) -> None:
    """Tasks of 10 s in all on two cores: 5 s, and half a second a statement."""
    stage = sliced(Ride(request_, hazard=OFTEN).plans)[0][1]
    assert stage.slicing is not None
    assert stage.slicing.at_once == 1  # of DuckDB, which has all cores for each
    stage = replace(stage, waiting=2.0, slicing=replace(stage.slicing, at_once=at_once))
    result = StageResult(rows=1, columns=(), seconds=seconds, task_seconds=10.0, tasks=20)
    outcome = StageOutcome(stage, "job", result=result, slices=slices)
    work = SimpleNamespace(engine=SimpleNamespace(name="spark"))
    measured = StageWork.measured(work, StageRun(stage, "job", 0.0, 1, 2.0, 0.0), outcome)  # type: ignore[arg-type]
    assert measured is not None
    assert measured.task_seconds == 8.0
    assert measured.wall_seconds - measured.task_seconds / 2 == pytest.approx(0.5)
