"""The driver in the middle of a run: switches, cancellations, late results, capacity, and what it records."""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ebbflow.infra.errors import EngineUnavailableError
from ebbflow.infra.protocols import StageJob, StageProgress
from ebbflow.planners.memory.tiers import Tier
from ebbflow.tasks.query.driver import Driver
from ebbflow.tasks.query.listening import TierChanged
from tests.tasks.driving import (
    JOINED,
    ORDERS,
    SHARED,
    WAIT,
    Obedient,
    Ride,
    Scripted,
    bushy_and_deep,
    capacity,
    fingerprint,
    right,
    statuses,
    until_cancelled,
)

# --- without anything happening ---------------------------------------------------------------------------


def test_a_quiet_run_completes_every_stage_of_one_plan_once(ride: Ride, engine: Scripted) -> None:
    driver = ride.drive(engine)
    plan = driver.session.plans[ride.listener.decisions[0].chosen]
    assert [s.status for s in driver.recorder.stages] == ["completed"] * len(plan.stages)
    assert {s.fingerprint for s in driver.recorder.stages} == set(plan.by_fp)
    assert set(engine.runs.values()) == {1}
    assert right(ride, driver)


def test_the_record_has_times_in_order_and_what_calibration_needs(ride: Ride, engine: Scripted) -> None:
    driver = ride.drive(engine, first=replace(capacity(1), at=1.0))  # seen long before the query began
    stages = {s.fingerprint: s for s in driver.recorder.stages}
    plan = driver.session.plans[driver.recorder.stages[0].plan]
    for stage in plan.stages:
        report = stages[stage.output_fp]
        assert 0 <= report.started <= report.ended
        assert report.seconds == pytest.approx(report.ended - report.started)
        assert all(stages[fp].ended <= report.started for fp in stage.inputs)
        assert report.rows > 0 < report.bytes
        assert report.estimated_seconds is not None
        assert report.estimated_seconds > 0
    assert [c.at for c in driver.recorder.capacity] == [0.0]
    assert len(driver.session.measured) == len(plan.stages)
    assert all(m.task_seconds > 0 and m.cores == 2 for m in driver.session.measured)


def test_a_second_run_over_the_same_store_starts_nothing(ride: Ride, engine: Scripted) -> None:
    ride.drive(engine)
    engine.runs.clear()
    again = Ride(ride.request)
    driver = again.drive(engine)
    assert not engine.runs
    assert [s.status for s in driver.recorder.stages] == ["reused"]
    assert driver.recorder.stages[0].saved_seconds > 0
    assert right(again, driver)


def test_reuse_turned_off_computes_everything_again(ride: Ride, engine: Scripted) -> None:
    ride.drive(engine)
    engine.runs.clear()
    again = Ride(replace(ride.request, reuse=False))
    driver = again.drive(engine)
    assert set(engine.runs.values()) == {1}
    assert {s.status for s in driver.recorder.stages} == {"completed"}
    assert right(again, driver)


def test_reports_are_not_rendered_while_a_stage_waits_to_be_given_to_spark(ride: Ride) -> None:
    before, left = threading.Event(), list[int]()

    def prepared(job: StageJob, runs: int, cancelled: threading.Event) -> None:
        left.append(len(ride.driver.session._unrendered))
        before.wait(0.5)  # milliseconds are enough for all of it
        left.append(len(ride.driver.session._unrendered))
        raise EngineUnavailableError("enough")

    engine = Scripted(prepared, name="spark")
    try:
        with pytest.raises(EngineUnavailableError, match="enough"):
            ride.drive(engine)
    finally:
        engine.close()
    assert left[0] > 0
    assert len(set(left)) == 1


# --- switches ---------------------------------------------------------------------------------------------


def test_a_switch_cancels_what_is_not_needed_and_reuses_what_is_done(ride: Ride, engine: Scripted) -> None:
    bushy, deep = bushy_and_deep(ride.plans)

    def before(job: StageJob, runs: int, cancelled: threading.Event) -> None:
        if job.name == ORDERS:
            until_cancelled(job, cancelled)

    engine.before = before
    ended = ride.listener.ended

    def on_end() -> None:
        assert [r.name for r in ended] == [SHARED]
        ride.tell(capacity(2, nodes=8), "as told")

    _when_ended(ride, SHARED, on_end)
    driver = ride.drive(engine, Obedient(ride.plans, [deep.id]), bushy)
    assert [(d.kind, d.chosen) for d in ride.listener.decisions] == [("start", bushy.id), ("switch", deep.id)]
    assert statuses(driver, ORDERS) == ["cancelled"]
    assert statuses(driver, SHARED) == ["completed"]
    assert all(count == 1 for count in engine.runs.values())
    assert [c.cores for c in driver.recorder.capacity] == [2, 8]
    assert engine.sizes == [(2, 8.0), (8, 32.0)]
    assert ride.listener.changes == ["as told"]
    assert right(ride, driver)
    assert ride.store.find(bushy.by_fp[fingerprint(bushy, ORDERS)].output_fp) is None


def test_a_real_change_of_capacity_is_weighed_by_the_real_replanner(ride: Ride, engine: Scripted) -> None:
    _when_ended(ride, SHARED, lambda: ride.tell(capacity(2, nodes=64), "arrived: n2"))
    driver = ride.drive(engine)
    told = ride.listener.decisions
    assert [d.trigger for d in told][:1] == ["the query begins"]
    assert any(d.trigger == "arrived: n2" and d.revision == 2 and d.estimates for d in told)
    assert right(ride, driver)


def test_another_tier_of_outputs_is_weighed_and_the_decision_says_so(ride: Ride, engine: Scripted) -> None:
    tier = Tier("peer memory", 1e-4, 1e9)
    _when_ended(ride, SHARED, lambda: ride.inbox.put(TierChanged(tier)))
    driver = ride.drive(engine)
    assert "stage outputs are kept in peer memory" in [d.trigger for d in ride.listener.decisions]
    assert ride.planner.tier == tier
    assert right(ride, driver)


def test_a_late_result_of_a_cancelled_stage_is_kept_and_not_computed_again(
    ride: Ride, engine: Scripted
) -> None:
    """To the deep plan and back: the stage that was cancelled has finished meanwhile."""
    bushy, deep = bushy_and_deep(ride.plans)

    def before(job: StageJob, runs: int, cancelled: threading.Event) -> None:
        if job.name == ORDERS and not runs:
            assert cancelled.wait(WAIT)  # and then it finishes nonetheless

    engine.before = before
    engine.inner.cancel = lambda job_id: None  # type: ignore[method-assign]
    _when_ended(ride, SHARED, lambda: ride.tell(capacity(2, nodes=8)))
    _when_ended(ride, ORDERS, lambda: ride.tell(capacity(3)))
    _hold_until_ended(ride, engine, "customer ⋈ orders ⋈ nation", ORDERS)
    driver = ride.drive(engine, Obedient(ride.plans, [deep.id, bushy.id]), bushy)
    assert statuses(driver, ORDERS) == ["completed"]
    assert driver.recorder.stages[-1].plan == bushy.id
    assert engine.runs[fingerprint(bushy, ORDERS)[:12]] == 1
    assert right(ride, driver)


def test_a_late_result_ends_the_run_that_was_started_in_its_place(ride: Ride, engine: Scripted) -> None:
    bushy, deep = bushy_and_deep(ride.plans)
    second = threading.Event()

    def before(job: StageJob, runs: int, cancelled: threading.Event) -> None:
        if job.name == ORDERS and runs == 0:
            assert cancelled.wait(WAIT)
            assert second.wait(WAIT)  # the first run is late, and finishes after all
        elif job.name == ORDERS:
            second.set()
            until_cancelled(job, cancelled)
        elif job.name == "customer ⋈ orders ⋈ nation":
            ride.tell(capacity(3))
            until_cancelled(job, cancelled)

    engine.before = before
    engine.inner.cancel = lambda job_id: None  # type: ignore[method-assign]
    _when_ended(ride, SHARED, lambda: ride.tell(capacity(2, nodes=8)))
    driver = ride.drive(engine, Obedient(ride.plans, [deep.id, bushy.id]), bushy)
    assert Counter(statuses(driver, ORDERS)) == {"completed": 1, "cancelled": 1, "reused": 1}
    assert engine.runs[fingerprint(bushy, ORDERS)[:12]] == 2
    assert right(ride, driver)


def test_what_still_runs_when_the_result_is_there_is_cancelled_and_recorded(
    ride: Ride, engine: Scripted
) -> None:
    bushy, deep = bushy_and_deep(ride.plans)

    def before(job: StageJob, runs: int, cancelled: threading.Event) -> None:
        if job.name == ORDERS:
            until_cancelled(job, cancelled)

    engine.before = before
    replanner = Obedient(ride.plans, [deep.id])
    replanner.switch_cost = 1e9  # every stage counts as nearly done: it is left to end beside the new plan
    _when_ended(ride, SHARED, lambda: ride.tell(capacity(2)))
    driver = ride.drive(engine, replanner, bushy)
    assert [(s.name, s.status) for s in driver.recorder.stages][-2:] == [
        ("Result", "completed"),
        (ORDERS, "cancelled"),
    ]
    assert right(ride, driver)


def test_a_plan_begins_at_the_checkpoint_nearest_to_its_end(ride: Ride, engine: Scripted) -> None:
    bushy, _ = bushy_and_deep(ride.plans)
    ride.drive(engine)
    for path in (Path(ride.request.store) / "manifests").glob(f"{bushy.sink.output_fp}*"):
        path.unlink()
    engine.runs.clear()
    again = Ride(ride.request)
    driver = again.drive(engine, chosen=bushy)
    assert [(s.name, s.status) for s in driver.recorder.stages] == [
        (JOINED, "reused"),
        ("Result", "completed"),
    ]
    assert len(engine.runs) == 1
    assert right(again, driver)


# --- capacity -------------------------------------------------------------------------------------------


def test_without_capacity_nothing_starts_until_some_comes(ride: Ride, engine: Scripted) -> None:
    heard = threading.Timer(0.2, lambda: ride.tell(capacity(2), "arrived: n0, n1"))
    heard.start()
    driver = ride.drive(engine, first=capacity(1, nodes=0))
    assert [d.kind for d in ride.listener.decisions][:2] == ["wait", "start"]
    assert min(s.started for s in driver.recorder.stages) >= driver.recorder.capacity[1].at
    assert right(ride, driver)


def test_a_share_of_an_older_revision_is_recorded_but_changes_nothing(ride: Ride, engine: Scripted) -> None:
    _when_ended(ride, SHARED, lambda: ride.tell(capacity(1, nodes=0), "out of order"))
    driver = ride.drive(engine, first=capacity(5))
    assert "out of order" not in [d.trigger for d in ride.listener.decisions]
    assert right(ride, driver)


# --- how ------------------------------------------------------------------------------------------------


def _when_ended(ride: Ride, name: str, then: Callable[[], None]) -> None:
    """Call ``then`` in the driver's thread when the stage has completed for the first time."""
    listener, inner = ride.listener, ride.listener.stage_ended
    done = threading.Event()

    def ended(stage: object, report: object) -> None:
        inner(stage, report)  # type: ignore[arg-type]
        if report.name == name and report.status == "completed" and not done.is_set():  # type: ignore[attr-defined]
            done.set()
            then()

    listener.stage_ended = ended  # type: ignore[method-assign]


def _hold_until_ended(ride: Ride, engine: Scripted, held: str, name: str) -> None:
    """Let the stage ``held`` wait until ``name`` has completed."""
    done, before = threading.Event(), engine.before
    _when_ended(ride, name, done.set)

    def wait(job: StageJob, runs: int, cancelled: threading.Event) -> None:
        before(job, runs, cancelled)
        if job.name == held:
            assert done.wait(WAIT)

    engine.before = wait


def test_whose_tasks_are_counted_reaches_the_session() -> None:
    told: list[tuple[object, ...]] = []
    driver = SimpleNamespace(
        session=SimpleNamespace(on_progress=lambda *counts, native: told.append((*counts, native))),
        recorder=SimpleNamespace(stage_progress=lambda stage, seen: None),
        _is_current=lambda run: True,
    )
    run = SimpleNamespace(stage="A", progress=None)
    for native in (True, False):
        Driver._progressed(driver, run, StageProgress(4, 1, 0, 2, native=native), 7.0)  # type: ignore[arg-type]
    assert told == [("A", 4, 1, 2, 7.0, True), ("A", 4, 1, 2, 7.0, False)]
