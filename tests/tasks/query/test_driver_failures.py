"""Failures in the middle of a run: what the driver tries again, computes again, and gives up."""

import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from ebbflow.infra.errors import (
    BroadcastTooLargeError,
    StageCancelledError,
    StageFailedError,
    StorageFullError,
)
from ebbflow.infra.protocols import StageJob
from ebbflow.planners.query.plan.qep import QueryExecutionPlan
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


def fail(name: str, errors: list[Exception]) -> Callable[[StageJob, int, threading.Event], None]:
    """Return what makes the first runs of a stage raise ``errors``, one each."""

    def before(job: StageJob, runs: int, cancelled: threading.Event) -> None:
        if job.name == name and runs < len(errors):
            raise errors[runs]

    return before


def test_a_failure_is_raised_at_once_and_finished_stages_are_kept(ride: Ride, engine: Scripted) -> None:
    engine.before = fail(JOINED, [StageFailedError("broken")])
    with pytest.raises(StageFailedError, match="broken"):
        ride.drive(engine)
    assert engine.runs[_job(engine, JOINED)] == 1
    assert statuses(ride.driver, JOINED) == ["failed"]
    assert [s.note for s in ride.driver.recorder.stages if s.status == "failed"] == ["broken"]

    engine.before = lambda *_: None
    again = Ride(ride.request)
    driver = again.drive(engine)
    assert statuses(driver, SHARED) == ["reused"]
    assert right(again, driver)


def test_a_failure_while_capacity_changed_is_tried_again(ride: Ride, engine: Scripted) -> None:
    bushy, _ = bushy_and_deep(ride.plans)
    _change_before_failing(ride, engine, failures=1)
    driver = ride.drive(engine, Obedient(ride.plans, []), bushy)
    assert statuses(driver, ORDERS) == ["failed", "completed"]
    assert driver.recorder.notes == [f"{ORDERS} failed while capacity changed; trying again (lost a node)"]
    assert ride.listener.notes == driver.recorder.notes
    assert right(ride, driver)


def test_a_stage_that_fails_at_every_change_is_given_up(ride: Ride, engine: Scripted) -> None:
    bushy, _ = bushy_and_deep(ride.plans)
    _change_before_failing(ride, engine, failures=100)
    with pytest.raises(StageFailedError, match="lost a node"):
        ride.drive(engine, Obedient(ride.plans, []), bushy)
    assert statuses(ride.driver, ORDERS) == ["failed"] * 3


def test_a_failure_that_is_known_before_the_change_that_explains_it_is_tried_again(
    ride: Ride, engine: Scripted
) -> None:
    bushy, _ = bushy_and_deep(ride.plans)
    engine.name = "spark"
    later = threading.Timer(0.3, lambda: ride.tell(capacity(2, nodes=1), "left: n1"))

    def before(job: StageJob, runs: int, cancelled: threading.Event) -> None:
        if job.name == ORDERS and not runs:
            later.start()
            raise StageFailedError("lost a node")

    engine.before = before
    driver = ride.drive(engine, Obedient(ride.plans, []), bushy)
    assert statuses(driver, ORDERS) == ["failed", "completed"]
    assert right(ride, driver)


def test_a_failure_that_nothing_explains_is_raised_after_a_moment(
    ride: Ride, engine: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbflow.tasks.query.driver._NEWS", 0.2)
    engine.name = "spark"
    engine.before = fail(JOINED, [StageFailedError("broken")])
    with pytest.raises(StageFailedError, match="broken"):
        ride.drive(engine)
    assert statuses(ride.driver, JOINED) == ["failed"]
    assert engine.runs[_job(engine, JOINED)] == 1


def test_a_checkpoint_that_is_lost_before_it_is_read_is_computed_again(ride: Ride, engine: Scripted) -> None:
    """As when another process that shares the store makes room in it."""
    bushy, _ = bushy_and_deep(ride.plans)
    _lose_before(ride, engine, bushy.by_fp[fingerprint(bushy, JOINED)].inputs)
    driver = ride.drive(engine, Obedient(ride.plans, []), bushy)
    assert Counter(statuses(driver, ORDERS)) == {"completed": 2}
    assert Counter(statuses(driver, SHARED)) == {"completed": 2}
    assert statuses(driver, JOINED) == ["failed", "completed"]
    assert driver.recorder.notes == [f"{JOINED} has lost what it reads, which is computed again"]
    assert right(ride, driver)


def test_a_lost_checkpoint_of_what_is_drawn_at_random_is_not_drawn_again(
    ride: Ride, engine: Scripted
) -> None:
    bushy, _ = bushy_and_deep(ride.plans)
    volatile = replace(bushy, stages=tuple(replace(s, volatile=True) for s in bushy.stages))
    ride.plans = tuple(volatile if p is bushy else p for p in ride.plans)
    _lose_before(ride, engine, bushy.by_fp[fingerprint(bushy, JOINED)].inputs)
    with pytest.raises(StageFailedError):
        ride.drive(engine, Obedient(ride.plans, []), volatile)
    assert engine.runs[fingerprint(bushy, SHARED)[:12]] == 1


def broadcasting(ride: Ride) -> QueryExecutionPlan:
    """Return a plan whose first stage broadcasts a table."""
    return next(
        plan for plan in ride.plans if "BROADCAST" in plan.by_fp[fingerprint(plan, SHARED)].statement.spark
    )


def test_a_broadcast_that_does_not_fit_is_run_again_without_it(ride: Ride, engine: Scripted) -> None:
    plan = broadcasting(ride)
    engine.name = "spark"  # whose statements have hints; DuckDB takes them for comments
    stage = plan.by_fp[fingerprint(plan, SHARED)]
    assert "BROADCAST" in stage.statement.spark
    assert "BROADCAST" not in stage.statement.fallback
    engine.before = fail(SHARED, [BroadcastTooLargeError("too large")])
    driver = ride.drive(engine, chosen=plan)
    texts = [job.sql for job in engine.jobs if job.name == SHARED]
    assert texts == [stage.statement.spark, stage.statement.fallback]
    assert statuses(driver, SHARED) == ["failed", "completed"]
    assert driver.recorder.notes == [
        f"{SHARED} has a broadcast that did not fit; running it again with shuffled joins"
    ]
    assert right(ride, driver)


def test_a_statement_without_broadcasts_that_is_too_large_is_an_error(ride: Ride, engine: Scripted) -> None:
    plan = broadcasting(ride)
    engine.name = "spark"
    engine.before = fail(SHARED, [BroadcastTooLargeError("too large")] * 9)
    with pytest.raises(BroadcastTooLargeError):
        ride.drive(engine, chosen=plan)
    assert statuses(ride.driver, SHARED) == ["failed"] * 2


def test_cancellations_by_others_are_repeated_but_not_for_ever(ride: Ride, engine: Scripted) -> None:
    engine.before = fail(JOINED, [StageCancelledError("killed in the UI")])
    driver = ride.drive(engine)
    assert statuses(driver, JOINED) == ["cancelled", "completed"]
    assert right(ride, driver)


def test_a_stage_that_others_always_cancel_is_given_up(ride: Ride, engine: Scripted) -> None:
    engine.before = fail(JOINED, [StageCancelledError("killed in the UI")] * 99)
    with pytest.raises(StageCancelledError):
        ride.drive(engine)
    assert statuses(ride.driver, JOINED) == ["cancelled"] * 3


def test_a_full_store_is_raised_at_once(ride: Ride, engine: Scripted) -> None:
    engine.before = fail(ORDERS, [StorageFullError("no space left")])
    bushy, _ = bushy_and_deep(ride.plans)
    with pytest.raises(StorageFullError):
        ride.drive(engine, chosen=bushy)
    assert engine.runs[fingerprint(bushy, ORDERS)[:12]] == 1


def test_an_error_cancels_what_runs_beside_it(ride: Ride, engine: Scripted) -> None:
    bushy, _ = bushy_and_deep(ride.plans)
    running = threading.Event()

    def before(job: StageJob, runs: int, cancelled: threading.Event) -> None:
        if job.name == SHARED:
            running.set()
            until_cancelled(job, cancelled)
        if job.name == ORDERS:
            assert running.wait(WAIT)
            raise StageFailedError("broken")

    engine.before = before
    with pytest.raises(StageFailedError, match="broken"):
        ride.drive(engine, chosen=bushy)
    assert any(job_id.startswith(fingerprint(bushy, SHARED)[:12]) for job_id in engine.cancelled)


def test_a_mistake_of_the_feedback_task_ends_the_query(ride: Ride, engine: Scripted) -> None:
    ride.inbox.put(KeyError("a mistake"))
    with pytest.raises(KeyError):
        ride.drive(engine)


# --- how ------------------------------------------------------------------------------------------------


def _job(engine: Scripted, name: str) -> str:
    return next(j.id.split("-")[0] for j in engine.jobs if j.name == name)


def _lose_before(ride: Ride, engine: Scripted, fingerprints: Iterable[str]) -> None:
    """Delete these checkpoints when ``JOINED`` is about to read them for the first time."""

    def before(job: StageJob, runs: int, cancelled: threading.Event) -> None:
        if job.name == JOINED and not runs:
            for fingerprint in fingerprints:
                (Path(ride.request.store) / "manifests" / f"{fingerprint}.json").unlink()
                shutil.rmtree(Path(ride.request.store) / "data" / fingerprint)

    engine.before = before


def _change_before_failing(ride: Ride, engine: Scripted, failures: int) -> None:
    """Let ``ORDERS`` fail after a change of capacity in mid-run, ``failures`` times."""

    def before(job: StageJob, runs: int, cancelled: threading.Event) -> None:
        if job.name == ORDERS and runs < failures:
            ride.tell(capacity(2 + runs, nodes=1), "left: n1")
            raise StageFailedError("lost a node")

    engine.before = before
