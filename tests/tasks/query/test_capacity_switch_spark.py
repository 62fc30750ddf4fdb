"""A query on a real Spark cluster changes its plan by itself when workers are killed, and its answer is right."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from ebbflow.infra.errors import StageCancelledError
from ebbflow.infra.protocols import SqlEngine, StageJob, StageProgress, StageResult
from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster
from ebbflow.planners.model import Capacity
from ebbflow.planners.query.costs.cost import DEFAULTS, SPARK
from ebbflow.planners.query.plan.state import ReplanDecision
from ebbflow.tasks.query.opening import OpenedEngine, opened_engine
from ebbflow.tasks.query.report import QueryReport
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import PlainOrchestrator, execute
from tests.tasks.driving import FOUR_TABLES, WAIT, Recorder

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(280)]

WORKERS, LEFT = 3, 1
# these tables are a hundredth of scale factor 1: rates are brought down with them, what a task or a statement costs
# beside its rows is not
_SLOWED = SPARK.slower(100.0)
MODEL = SPARK.with_rates(replace(_SLOWED.rates, tasks=SPARK.rates.tasks), SPARK.latency)


@pytest.fixture(scope="module")
def cluster(_home: None) -> Iterator[LocalSparkCluster]:
    with LocalSparkCluster.start("switch", workers=WORKERS, memory="1400m") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def opened(cluster: LocalSparkCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenedEngine]:
    tables = str(tmp_path_factory.mktemp("none"))
    with opened_engine(QueryRequest("SELECT 1", tables=tables, master=cluster.master_url)) as opened:
        yield opened


@pytest.fixture(autouse=True)
def slowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEFAULTS, "spark", MODEL)


@pytest.fixture(autouse=True)
def whole(cluster: LocalSparkCluster, opened: OpenedEngine) -> None:
    """Have all workers, whatever the test before has done to them."""
    missing = WORKERS - len(up(cluster))
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(lambda _: cluster.add(), range(missing)))
    end = time.monotonic() + WAIT
    while len(opened.source.capacity().nodes) < WORKERS:
        assert time.monotonic() < end, opened.source.capacity()
        time.sleep(0.1)


def up(cluster: LocalSparkCluster) -> list[str]:
    return [n.id for n in cluster.state.nodes if n.phase == "up"]


@dataclass
class Watcher(Recorder):
    """Tells when a decision has been made on ``nodes`` nodes."""

    nodes: int = LEFT
    decided_on: threading.Event = field(default_factory=threading.Event)
    _now: int = 0

    def capacity_changed(self, capacity: Capacity, change: str) -> None:
        super().capacity_changed(capacity, change)
        self._now = len(capacity.usable)

    def decided(self, decision: ReplanDecision) -> None:
        super().decided(decision)
        if self._now == self.nodes:
            self.decided_on.set()


class Held:
    """Spark, whose first job begins only when workers have been killed and the query has decided on it."""

    name = "spark"

    def __init__(self, engine: SqlEngine, kill: Callable[[], None], decided: threading.Event) -> None:
        self._engine, self._kill, self._decided = engine, kill, decided
        self._lock, self._begun = threading.Lock(), False
        self._cancelled: set[str] = set()

    def run(self, job: StageJob, on_progress: Callable[[StageProgress], None] | None = None) -> StageResult:
        with self._lock:
            first, self._begun = not self._begun, True
        if first:
            self._kill()
        assert self._decided.wait(WAIT), "the query has not decided on what is left"
        if job.id in self._cancelled:
            raise StageCancelledError(f"{job.name} was cancelled")
        return self._engine.run(job, on_progress)

    def cancel(self, job_id: str) -> None:
        self._cancelled.add(job_id)
        self._engine.cancel(job_id)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def run(
    cluster: LocalSparkCluster, opened: OpenedEngine, tables: str, store: Path, planner: str
) -> QueryReport:
    """Run the query, of whose workers two are killed while its first stage runs; it must be answered rightly."""
    watcher = Watcher()

    def kill() -> None:
        for node in up(cluster)[LEFT:]:
            cluster.kill(node)

    engine: Any = Held(opened.engine, kill, watcher.decided_on)
    request = QueryRequest(
        FOUR_TABLES,
        tables=tables,
        master=cluster.master_url,
        planner=planner,  # type: ignore[arg-type]
        materialize="every-join",
        stages="spark",
        store=str(store),
        verify=True,
    )
    report = execute(request, PlainOrchestrator(watcher), opened=replace(opened, engine=engine)).report
    assert report.verified is True, report.verification
    assert len(up(cluster)) == LEFT
    assert report.capacity[0].nodes == WORKERS
    assert report.capacity[-1].nodes == LEFT
    return report


def test_a_query_whose_workers_are_killed_switches_by_itself(
    cluster: LocalSparkCluster, opened: OpenedEngine, tpch: str, tmp_path: Path
) -> None:
    report = run(cluster, opened, tpch, tmp_path / "store", "qoop")
    (switch,) = [d for d in report.decisions if d.kind == "switch"]
    assert switch.trigger.startswith("left: ")
    assert "sooner, above the 15 % threshold" in switch.reason
    assert switch.current == report.decisions[0].chosen
    assert {s.plan for s in report.stages if s.status == "completed" and s.started > switch.at} == {
        switch.chosen
    }


def test_the_same_query_with_its_plan_frozen_stays(
    cluster: LocalSparkCluster, opened: OpenedEngine, tpch: str, tmp_path: Path
) -> None:
    report = run(cluster, opened, tpch, tmp_path / "store", "clarinet")
    assert {d.kind for d in report.decisions[1:]} == {"stay"}
    assert not report.switches
