"""The account of a query: kept for the report, told to whoever listens."""

from dataclasses import replace

import pytest

from ebbflow.infra.protocols import Checkpoint, Relation, StageProgress, StageResult
from ebbflow.planners.model import Capacity, Node
from ebbflow.planners.query.plan.state import ReplanDecision
from ebbflow.tasks.query.recorder import RunRecorder
from ebbflow.tasks.query.slices import StageRun
from tests.planners.query.replanning_cases import stage
from tests.tasks.driving import Recorder

STARTED = 1000.0
AB = replace(stage("AB", duration=4.0, latency=1.0, tasks=6), rows=30)
RESULT = StageResult(20, (("a", "int"),), 2.5, 4.0, 7, failed_tasks=1)
CHECKPOINT = Checkpoint(
    "AB", "file:///store/ab", Relation("ckpt_AB", "file", (), ()), 20, 160, seconds=2.5, created=1.0
)


@pytest.fixture(name="heard")
def _heard() -> Recorder:
    return Recorder()


@pytest.fixture(name="book")
def _book(heard: Recorder) -> RunRecorder:
    return RunRecorder(STARTED, heard)


def run() -> StageRun:
    seen = StageProgress(9, 3, 2)
    return StageRun(AB, "ab-1", STARTED + 5.0, revision=1, cores=4.0, hazard=0.0, progress=seen)


def test_a_completed_stage_is_reported_with_what_the_engine_has_counted(
    book: RunRecorder, heard: Recorder
) -> None:
    book.ended(run(), STARTED + 8.0, "q1", "completed", CHECKPOINT, RESULT, "4 slices")
    (report,) = book.stages
    assert (report.status, report.plan, report.note) == ("completed", "q1", "4 slices")
    assert (report.started, report.ended, report.seconds) == (5.0, 8.0, 3.0)
    assert (report.rows, report.bytes, report.tasks, report.failed_tasks) == (20, 160, 7, 1)
    assert (report.estimated_seconds, report.estimated_rows) == (1.0 + 6.0, 30)
    assert heard.ended == [report]


def test_a_cancelled_stage_is_reported_as_far_as_it_came(book: RunRecorder) -> None:
    book.ended(run(), STARTED + 8.0, "q1", "cancelled")
    (report,) = book.stages
    assert (report.status, report.rows, report.tasks, report.failed_tasks) == ("cancelled", 0, 9, 2)


def test_a_reused_stage_took_no_time_and_saved_some(book: RunRecorder, heard: Recorder) -> None:
    book.reused(AB, CHECKPOINT, STARTED + 2.0, "q1")
    (report,) = book.stages
    assert (report.status, report.started, report.ended, report.seconds) == ("reused", 2.0, 2.0, 0.0)
    assert (report.rows, report.saved_seconds) == (20, 2.5)
    assert heard.ended == [report]


def test_the_first_capacity_is_kept_and_changes_are_told(book: RunRecorder, heard: Recorder) -> None:
    one, two = Node("n1", 2, 8.0), Node("n2", 2, 8.0)
    book.capacity_changed(Capacity(1, (one,), at=STARTED - 3.0), "")
    book.capacity_changed(Capacity(2, (one, two), at=STARTED + 4.0), "arrived: n2")
    assert [(c.at, c.cores, c.change, c.arrived) for c in book.capacity] == [
        (0.0, 2.0, "at start", ()),
        (4.0, 4.0, "arrived: n2", ("n2",)),
    ]
    assert heard.changes == ["arrived: n2"]


def test_everything_else_is_kept_and_passed_on(book: RunRecorder, heard: Recorder) -> None:
    decision = ReplanDecision("stay", 1, STARTED, "q1", "q1", "stay: it is soonest", "left: n2")
    book.stage_started(AB)
    book.decided(decision)
    book.note("a checkpoint was damaged")
    assert (heard.started, heard.decisions, heard.notes) == ([AB], [decision], ["a checkpoint was damaged"])
    assert (book.decisions, book.notes) == ([decision], ["a checkpoint was damaged"])
