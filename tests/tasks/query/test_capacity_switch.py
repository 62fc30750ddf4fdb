"""A live query changes its plan by itself when capacity changes, and its answer is right."""

import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import StageCancelledError
from ebbflow.infra.protocols import StageJob
from ebbflow.infra.query.checkpoints import ParquetCheckpointStore
from ebbflow.infra.query.slices import SliceIndex
from ebbflow.planners.model import Capacity, Node, Share
from ebbflow.planners.query.costs.cost import SPARK
from ebbflow.planners.query.running.session import Session
from ebbflow.tasks.query.driver import Driver
from ebbflow.tasks.query.listening import CapacityChanged, Inbox, Threads
from ebbflow.tasks.query.planning import prepare
from ebbflow.tasks.query.recorder import RunRecorder
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.stagework import StageWork
from tests.tasks.driving import FOUR_TABLES, WAIT, Recorder, Scripted

# these tables are a hundredth of scale factor 1: rates, links and memory are brought down with them
SLOWED = 1000.0
MODEL = replace(SPARK.slower(SLOWED), latency=SPARK.latency)


def nodes(revision: int, count: int, memory: float = 4.0, network: float = 0.0) -> Capacity:
    return Capacity(
        revision,
        tuple(Node(f"n{i}", 1, memory) for i in range(count)),
        at=SystemClock().now(),
        network=network,
    )


class Run:
    """The product's own driver, session and planner; only the engine waits for decisions where it is told to."""

    def __init__(self, tables: str, folder: Path, first: Capacity, planner: str = "qoop") -> None:
        self.request = QueryRequest(
            FOUR_TABLES,
            tables=tables,
            engine="duckdb",
            planner=planner,
            store=str(folder / "store"),
            materialize="every-join",
        )
        self.clock = SystemClock()
        store = ParquetCheckpointStore(self.request.store_place, clock=self.clock)
        gathered, query_planner = prepare(self.request, store, self.clock, run_id="run")
        query_planner.model = MODEL
        self.first, self.listener, self.inbox = first, Recorder(), Inbox()
        self.session = Session(query_planner, Share.of(first), planner, versions=gathered.versions)
        self.engine = Scripted()
        book = RunRecorder(self.clock.now(), self.listener)
        slices = SliceIndex(store, store.cache("slices"))
        work = StageWork(
            self.engine, store, gathered.relations, slices, self.inbox, reuse=True, since=book.started
        )
        self.threads = Threads(8)
        self.driver = Driver(self.session, work, book, self.threads, self.clock)

    def change_in(self, ordinal: int, capacity: Capacity, change: str) -> None:
        """Change capacity while the job of this number runs, which waits until the query has decided on it."""
        lock, seen = threading.Lock(), Counter[str]()

        def before(job: StageJob, _: int, cancelled: threading.Event) -> None:
            with lock:
                seen["jobs"] += 1
                mine = seen["jobs"] == ordinal
            if not mine:
                return
            known = len(self.listener.decisions)
            self.inbox.put(CapacityChanged(replace(capacity, at=self.clock.now()), change))
            end = self.clock.now() + WAIT
            while len(self.listener.decisions) == known and self.clock.now() < end:
                self.clock.sleep(0.02)
            if cancelled.wait(0.5):
                raise StageCancelledError(f"{job.name} was cancelled")

        self.engine.before = before

    def answer(self) -> Any:
        try:
            result = self.driver.run(self.first)
        finally:
            self.threads.close()
        return duckdb.sql(f"SELECT * FROM '{result.uri}/*.parquet'").fetchall()


def expected(tables: str) -> list[Any]:
    with duckdb.connect() as connection:
        for path in Path(tables).glob("*.parquet"):
            connection.sql(f"CREATE VIEW {path.stem} AS SELECT * FROM '{path}'")
        return sorted(map(repr, connection.sql(FOUR_TABLES).fetchall()))


CHANGES = {
    "more nodes, on narrow links": (nodes(1, 1), nodes(2, 6, network=0.02)),
    "more nodes": (nodes(1, 1), nodes(2, 6)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_query_switches_by_itself_and_its_answer_is_right(change: str, tpch: str, tmp_path: Path) -> None:
    first, then = CHANGES[change]
    run = Run(tpch, tmp_path, first)
    before = run.session.plan
    run.change_in(1, then, change)
    rows = run.answer()
    assert sorted(map(repr, rows)) == expected(tpch)
    kinds = [decision.kind for decision in run.listener.decisions]
    assert kinds[:2] == ["start", "switch"], run.listener.decisions
    switch = run.listener.decisions[1]
    assert (switch.trigger, switch.current) == (change, run.listener.decisions[0].chosen)
    assert "sooner, above the 15 % threshold" in switch.reason or "cannot continue" in switch.reason
    assert switch.chosen != before.id
    # the model by which it was decided: the plan that was left would have taken longer from there
    told = {estimate.plan_id: estimate.seconds for estimate in switch.estimates}
    assert told[switch.chosen] < 0.85 * told[switch.current]


def test_links_are_named_in_the_reason(tpch: str, tmp_path: Path) -> None:
    first, then = CHANGES["more nodes, on narrow links"]
    run = Run(tpch, tmp_path, first)
    run.change_in(1, then, "six nodes")
    run.answer()
    assert "links busy for" in run.listener.decisions[1].reason


def test_a_frozen_plan_stays(tpch: str, tmp_path: Path) -> None:
    first, then = CHANGES["more nodes, on narrow links"]
    run = Run(tpch, tmp_path, first, planner="clarinet")
    run.change_in(1, then, "six nodes")
    assert sorted(map(repr, run.answer())) == expected(tpch)
    assert [decision.kind for decision in run.listener.decisions[:2]] == ["start", "stay"]
