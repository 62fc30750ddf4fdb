"""Planning anew while stages run: what is learnt of their speed."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.query.checkpoints import ParquetCheckpointStore
from ebbflow.infra.tables.benchmark_data import skewed
from ebbflow.planners.model import Capacity, Node, Share
from ebbflow.planners.query.running.session import Session
from ebbflow.planners.query.running.speed import RunCosts
from ebbflow.tasks.query.listening import StageOutcome
from ebbflow.tasks.query.planning import prepare
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import PlainOrchestrator, execute
from ebbflow.tasks.query.slices import StageRun
from ebbflow.tasks.query.stagework import StageWork
from tests.tasks.driving import FOUR_TABLES


class Clock(SystemClock):
    """A clock that is set by hand."""

    time = 1000.0

    def now(self) -> float:
        return self.time


def seen(revision: int) -> Capacity:
    return Capacity(revision, tuple(Node(f"n{i}", 2, 8.0) for i in range(3)))


def test_a_slow_machine_stays_slow_at_every_change_of_capacity(tpch: str, tmp_path: Path) -> None:
    """The estimate that a stage is measured by must not count the slowness that was found before."""
    clock = Clock()
    request = QueryRequest(FOUR_TABLES, tables=tpch, engine="duckdb", store=str(tmp_path / "store"))
    store = ParquetCheckpointStore(request.store_place, clock=clock)
    _, planner = prepare(request, store, clock, run_id="run")
    prior = planner.model = planner.model.slower(1e5)  # these tables take milliseconds
    session = Session(planner, Share.of(seen(1)))
    session.begin({}, clock.now())
    (stage,) = session.execution.running
    expected = stage.latency + stage.core_seconds / 6
    factors = []
    for change in range(1, 5):
        clock.time += expected / 2  # and an eighth of the work is done: it takes four times as long
        session.execution.on_progress(stage.output_fp, 1000, 125 * change, clock.now(), 6)
        session.see(seen(1 + change))
        session.on_capacity("changed", clock.now())
        factors.append(planner.model.latency / prior.latency)
    assert factors == pytest.approx([4.0] * 4, rel=0.2)


def test_joins_that_meet_otherwise_than_expected_change_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each filter is estimated right; how often what they leave meets is seen once stages have finished."""
    # what is gained are milliseconds: as if a busy machine took none to plan and to begin a stage
    monkeypatch.setattr(Session, "planned", lambda session, seconds: None)
    monkeypatch.setattr(RunCosts, "latency", 0.0)
    leaves, run_of = threading.Barrier(3), StageWork.execute

    def execute_leaves_together(work: StageWork, run: StageRun) -> StageOutcome:
        outcome = run_of(work, run)
        if not run.stage.inputs:
            leaves.wait(150.0)
        return outcome

    monkeypatch.setattr(StageWork, "execute", execute_leaves_together)
    tables = skewed(0.05, tmp_path / "films", lambda line: None)
    text = (tables / "queries" / "q4.sql").read_text()
    request = QueryRequest(
        text,
        tables=str(tables),
        engine="duckdb",
        materialize="every-join",
        store=str(tmp_path / "store"),
        verify=True,
    )
    report = execute(request, PlainOrchestrator()).report
    assert report.verified, report.verification
    last = [s for s in report.stages if s.status == "completed"][-2]
    assert last.estimated_rows is not None
    assert last.rows / 3 < last.estimated_rows < last.rows * 3, "from samples of the keys of both sides"
    frozen = execute(replace(request, planner="clarinet", store=str(tmp_path / "other")), PlainOrchestrator())
    rows = [max(s.rows for s in one.stages) for one in (report, frozen.report)]
    assert rows[0] < rows[1] / 2, (
        "the largest intermediate result of the plan that it begins with is not made"
    )
    assert [d for d in report.decisions if d.kind == "switch" and d.trigger.endswith("expected")]
