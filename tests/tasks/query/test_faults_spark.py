"""Faults of a real Spark cluster in mid-query: the result is right and the report tells the story."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ebbflow.infra.errors import EngineUnavailableError
from ebbflow.infra.protocols import StageProgress
from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster
from ebbflow.planners.query.plan.qep import Stage
from ebbflow.tasks.query.opening import OpenedEngine, opened_engine
from ebbflow.tasks.query.report import QueryReport
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import PlainOrchestrator, execute
from tests.free_ports import free_port
from tests.tasks.driving import FOUR_TABLES, WAIT, Recorder

pytestmark = [pytest.mark.spark, pytest.mark.timeout(280)]

WORKERS = 2
AWAY = 6.0  # seconds for which no worker is there

TWO_STAGES = """
    SELECT o_orderpriority, count(*) AS items, sum(l_quantity) AS quantity
    FROM orders JOIN lineitem ON l_orderkey = o_orderkey GROUP BY o_orderpriority
"""


@pytest.fixture(scope="module")
def cluster(_home: None) -> Iterator[LocalSparkCluster]:
    with LocalSparkCluster.start("faults", workers=WORKERS, memory="1400m") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def opened(cluster: LocalSparkCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenedEngine]:
    """Return the application that all queries on the cluster share, as those of a notebook do."""
    tables = str(tmp_path_factory.mktemp("none"))
    request = QueryRequest("SELECT 1", tables=tables, master=cluster.master_url, interruption_rate=60.0)
    with opened_engine(request) as opened:
        yield opened


@pytest.fixture
def whole(cluster: LocalSparkCluster, opened: OpenedEngine) -> None:
    """Have all workers and an executor on each, whatever the test before has done to them."""
    while len(up(cluster)) < WORKERS:
        cluster.add()
    end = time.monotonic() + WAIT
    while len(opened.source.capacity().nodes) < WORKERS:
        assert time.monotonic() < end, opened.source.capacity()
        time.sleep(0.1)


def up(cluster: LocalSparkCluster) -> list[str]:
    return [n.id for n in cluster.state.nodes if n.phase == "up" and n.deadline is None]


@dataclass
class Trigger(Recorder):
    """Starts ``fault`` in a thread of its own, once, when a stage that ``when`` names has tasks running; with
    ``at_start`` as soon as it starts, for one that may be over before its tasks are seen."""

    fault: Callable[[], None] = lambda: None
    when: Callable[[Stage], bool] = lambda stage: True
    at_start: bool = False
    thread: threading.Thread | None = field(default=None)

    def stage_started(self, stage: Stage) -> None:
        super().stage_started(stage)
        if self.at_start:
            self._begin(stage)

    def stage_progress(self, stage: Stage, progress: StageProgress) -> None:
        if progress.tasks_running:
            self._begin(stage)

    def _begin(self, stage: Stage) -> None:
        if self.thread is None and self.when(stage):
            self.thread = threading.Thread(target=self.fault)
            self.thread.start()


def run(
    opened: OpenedEngine,
    cluster: LocalSparkCluster,
    tables: str,
    store: Path,
    fault: Callable[[], None],
    when: Callable[[Stage], bool] = lambda stage: True,
    sql: str = TWO_STAGES,
    at_start: bool = False,
    **options: Any,
) -> tuple[QueryReport, Trigger]:
    """Run the query with ``fault`` in its middle; it must be answered rightly."""
    trigger = Trigger(fault=fault, when=when, at_start=at_start)
    chosen: dict[str, Any] = {
        "tables": tables,
        "master": cluster.master_url,
        "interruption_rate": 60.0,
        "materialize": "every-join",
        "stages": "spark",
        "store": str(store),
        "verify": True,
    }
    request = QueryRequest(sql, **(chosen | options))
    report = execute(request, PlainOrchestrator(trigger), opened=opened).report
    assert trigger.thread is not None, "the fault never happened"
    trigger.thread.join(150)
    assert report.verified is True, report.verification
    assert report.stages[-1].status in ("completed", "cancelled")
    return report, trigger


def test_a_broadcast_that_does_not_fit_is_replaced_by_a_shuffle(tpch_medium: str, tmp_path: Path) -> None:
    """Parts, beyond the limit set here, are so few beside the wide line items that the planner broadcasts them.

    Before the application of the cluster's queries starts, in one with the settings of ``test_spark_engine``, which
    is there still: a process has one at a time.
    """
    request = QueryRequest(
        "SELECT p_brand, sum(l_extendedprice) AS price, sum(l_quantity) AS quantity, max(l_comment) AS comment, "
        "max(l_shipinstruct) AS how FROM lineitem, part WHERE l_partkey = p_partkey GROUP BY p_brand",
        tables=tpch_medium,
        master="local[2,64]",
        executor_memory="1g",
        stages="spark",
        conf={"spark.sql.maxBroadcastTableSize": "512k"},
        materialize="every-join",
        store=str(tmp_path / "store"),
        verify=True,
    )
    report = execute(request, PlainOrchestrator()).report
    assert report.verified is True, report.verification
    (failed,) = [s for s in report.stages if s.status == "failed"]
    assert "broadcast" in failed.note.lower()
    assert failed.fingerprint in {s.fingerprint for s in report.stages if s.status == "completed"}
    assert sum("a broadcast that did not fit" in p for p in report.problems) == 1


def test_a_master_that_cannot_be_reached_is_told_within_seconds(tpch: str, tmp_path: Path) -> None:
    port = free_port()
    request = QueryRequest(
        FOUR_TABLES, tables=tpch, master=f"spark://127.0.0.1:{port}", store=str(tmp_path / "store")
    )
    with pytest.raises(EngineUnavailableError, match="no Spark master at"):
        execute(request, PlainOrchestrator())


@pytest.mark.parametrize("stages", ["spark", "auto"])
def test_a_worker_killed_without_notice_costs_its_tasks_and_nothing_else(
    whole: None,
    opened: OpenedEngine,
    cluster: LocalSparkCluster,
    tpch_medium: str,
    tmp_path: Path,
    stages: str,
) -> None:
    victim = up(cluster)[0]
    report, trigger = run(
        opened,
        cluster,
        tpch_medium,
        tmp_path / "store",
        lambda: _kill(cluster, victim),
        sql=FOUR_TABLES,
        stages=stages,
        at_start=stages == "auto",  # native tasks may be over before they are seen
    )
    assert any(victim in c.left for c in report.capacity)
    change = next(c for c in report.capacity if victim in c.left)
    assert change.cores < report.capacity[0].cores
    assert any(victim in d.trigger for d in report.decisions)
    assert any(victim in change for change in trigger.changes)


def test_a_worker_with_notice_stops_counting_at_once_and_leaves_later(
    whole: None, opened: OpenedEngine, cluster: LocalSparkCluster, tpch_medium: str, tmp_path: Path
) -> None:
    victim = up(cluster)[0]
    left = threading.Event()

    def fault() -> None:
        cluster.notice(victim, 3.0)
        left.set()

    report, _ = run(opened, cluster, tpch_medium, tmp_path / "store", fault)
    assert left.is_set()
    noticed = next(c for c in report.capacity if victim in c.noticed)
    assert noticed.cores < report.capacity[0].cores
    assert any(f"notice: {victim}" in d.trigger for d in report.decisions)
    assert not [s for s in report.stages if s.status == "failed"]
    _kill(cluster, victim)


def test_a_worker_killed_during_the_last_stage_does_not_bring_back_earlier_ones(
    whole: None, opened: OpenedEngine, cluster: LocalSparkCluster, tpch_medium: str, tmp_path: Path
) -> None:
    victim = up(cluster)[0]
    report, _ = run(
        opened,
        cluster,
        tpch_medium,
        tmp_path / "store",
        lambda: _kill(cluster, victim),
        lambda stage: stage.sink,
        at_start=True,
    )
    done = [s.fingerprint for s in report.stages if s.status == "completed"]
    assert len(done) == len(set(done))


def test_with_all_workers_gone_the_query_says_so_waits_and_goes_on(
    whole: None, opened: OpenedEngine, cluster: LocalSparkCluster, tpch_medium: str, tmp_path: Path
) -> None:
    waited = threading.Event()

    def fault() -> None:
        for victim in up(cluster):
            _kill(cluster, victim)
        threading.Event().wait(AWAY)
        waited.set()
        cluster.add()

    report, _ = run(opened, cluster, tpch_medium, tmp_path / "store", fault)
    assert waited.is_set()
    empty = next(c for c in report.capacity if c.nodes == 0)
    back = next(c for c in report.capacity if c.at > empty.at and c.nodes)
    assert back.at - empty.at > AWAY / 2
    (wait,) = [d for d in report.decisions if d.kind == "wait"]
    assert empty.at <= wait.at < back.at
    assert wait.reason == "there is no usable node"
    assert report.decisions[-1].kind != "wait"
    assert not [s for s in report.stages if empty.at + 1 < s.started < back.at - 1]


def _kill(cluster: LocalSparkCluster, node: str) -> None:
    cluster.kill(node)
