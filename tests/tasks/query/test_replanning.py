"""Planning anew while stages run: what is learnt of their speed."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.query.checkpoints import ParquetCheckpointStore
from ebbflow.infra.query.slices import SliceIndex
from ebbflow.planners.model import Capacity, Node, Share
from ebbflow.tasks.query.planning import prepare
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import _Run
from tests.tasks.driving import FOUR_TABLES


class Clock(SystemClock):
    """A clock that is set by hand."""

    time = 1000.0

    def now(self) -> float:
        return self.time


def seen(epoch: int) -> Capacity:
    return Capacity(epoch, tuple(Node(f"n{i}", 2, 8.0) for i in range(3)))


def test_a_slow_machine_stays_slow_at_every_change_of_capacity(tpch: str, tmp_path: Path) -> None:
    """The estimate that a stage is measured by must not count the slowness that was found before."""
    clock = Clock()
    request = QueryRequest(FOUR_TABLES, tables=tpch, engine="duckdb", store=str(tmp_path / "store"))
    store = ParquetCheckpointStore(request.store, clock=clock)
    prepared = prepare(request, store, clock, run_id="run")
    prepared = replace(prepared, prior=prepared.prior.slower(1e5))  # these tables take milliseconds
    prepared.planner.model = prepared.prior
    run = _Run(request, prepared, seen(1), clock, SliceIndex(store, store.cache("slices")))
    run.driver = SimpleNamespace(divided={}, book=SimpleNamespace(measured=[]))  # type: ignore[assignment]
    run.execution.begin(Share.of(seen(1)), {}, clock.now())
    (stage,) = run.execution.running
    expected = stage.latency + stage.core_seconds / 6
    factors = []
    for change in range(1, 5):
        clock.time += expected / 2  # and an eighth of the work is done: it takes four times as long
        run.execution.on_progress(stage.output_fp, 1000, 125 * change, clock.now(), 6)
        share = Share.of(seen(1 + change))
        plans = run.replan(share, {})
        factors.append(run._planner.model.latency / prepared.prior.latency)
        run.execution.on_share(share, clock.now(), "changed", plans)
    assert factors == pytest.approx([4.0] * 4, rel=0.2)
