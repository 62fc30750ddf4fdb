"""Planning anew while stages run: what is learnt of their speed."""

from pathlib import Path

import pytest

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.query.checkpoints import ParquetCheckpointStore
from ebbflow.planners.model import Capacity, Node, Share
from ebbflow.planners.query.running.session import Session
from ebbflow.tasks.query.planning import prepare
from ebbflow.tasks.query.request import QueryRequest
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
