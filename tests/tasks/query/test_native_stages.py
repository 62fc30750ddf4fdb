"""Queries whose stages run natively on Spark: as right as Spark's own, and told."""

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ebbflow.infra.protocols import Relation
from ebbflow.infra.spark.native import stages as native
from ebbflow.infra.spark.native.exchange import costs as exchange_costs
from ebbflow.infra.spark.native.exchange import division
from ebbflow.infra.spark.native.exchange.division import Division
from ebbflow.infra.spark.native.exchange.waves import Waves
from ebbflow.tasks.query import run as run_module
from ebbflow.tasks.query.opening import OpenedEngine, opened_engine
from ebbflow.tasks.query.planning import Gathered, stage_engines_of
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import QueryOutcome, execute
from tests.tasks.driving import SHARED_SPARK

pytestmark = [pytest.mark.spark(shared=True), pytest.mark.timeout(280)]

TPCH = Path(__file__).parents[3] / "flows" / "tpch"


@pytest.fixture(scope="module", name="opened")
def _opened(tpch_medium: str) -> Iterator[OpenedEngine]:
    with opened_engine(QueryRequest("SELECT 1", tables=tpch_medium, **SHARED_SPARK)) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(division, "_SMALLEST", 1 << 20)


def run(sql: str, tables: str, opened: OpenedEngine, store: Path, **options: object) -> QueryOutcome:
    request = QueryRequest(sql, tables=tables, store=str(store), reuse=False, **options)
    return execute(request, opened=opened)


def natively(outcome: QueryOutcome) -> int:
    return sum("native" in stage.note.split(", ") for stage in outcome.report.stages)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_tpch_queries_run_natively_and_are_right(
    every: int, opened: OpenedEngine, tpch: str, tmp_path: Path
) -> None:
    for number in range(1, 23, every):
        sql = (TPCH / f"q{number}.sql").read_text()
        outcome = run(sql, tpch, opened, tmp_path, stages="native", verify=True)
        assert outcome.report.verified, f"Q{number}: {outcome.report.verification}"
        assert natively(outcome) == len(outcome.report.stages), f"Q{number}: {outcome.report.stages}"


def test_slices_add_up_to_sparks_types_and_digits(
    opened: OpenedEngine, tpch_medium: str, tmp_path: Path
) -> None:
    for number in (1, 8):
        sql = (TPCH / f"q{number}.sql").read_text()
        own = run(sql, tpch_medium, opened, tmp_path, stages="spark").to_arrow()
        other = run(sql, tpch_medium, opened, tmp_path, stages="native").to_arrow()
        assert other.schema.types == own.schema.types
        assert sorted(map(repr, other.to_pylist())) == sorted(map(repr, own.to_pylist()))


def test_stages_that_a_cut_divides_are_all_native(
    opened: OpenedEngine, tpch_medium: str, tmp_path: Path
) -> None:
    sql = "SELECT o_orderpriority, count(*) AS n FROM orders JOIN lineitem ON l_orderkey = o_orderkey GROUP BY 1"
    outcome = run(sql, tpch_medium, opened, tmp_path, stages="native", materialize="every-join", verify=True)
    assert outcome.report.verified
    assert natively(outcome) == len(outcome.report.stages) > 1


def test_aggregates_of_several_tables_are_computed_in_waves(
    opened: OpenedEngine, tpch_medium: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_costs, "WAVE", 0)
    waves: list[Any] = []
    whole = Division.way

    def way(self: Division, *rest: Any) -> Any:
        waves.append(whole(self, *rest))
        return waves[-1]

    monkeypatch.setattr(Division, "way", way)
    sql = (
        "SELECT o.k, o.n, l.v FROM (SELECT o_orderpriority AS k, count(*) AS n FROM orders GROUP BY 1) o JOIN ("
        "SELECT o_orderpriority AS k, sum(l_tax) AS v FROM lineitem JOIN orders ON l_orderkey = o_orderkey WHERE "
        "l_quantity > (SELECT avg(l_quantity) FROM lineitem) GROUP BY 1) l ON o.k = l.k"
    )
    outcome = run(sql, tpch_medium, opened, tmp_path, stages="native", materialize="none", verify=True)
    assert outcome.report.verified
    assert natively(outcome) == len(outcome.report.stages)
    (found,) = (one for one in waves if isinstance(one, Waves))
    assert [len(wave) for wave in found.pieces] == [2, 1]


@pytest.mark.slow
def test_tpcds_queries_run_natively_and_are_right(opened: OpenedEngine, tpcds: Path, tmp_path: Path) -> None:
    told = []
    for number in (3, 17, 19, 22, 42, 52, 89, 96):
        sql = (tpcds / "queries" / f"q{number}.sql").read_text()
        outcome = run(sql, str(tpcds), opened, tmp_path, stages="native", dialect="duckdb", verify=True)
        assert outcome.report.verified, f"Q{number}: {outcome.report.verification}"
        told += [stage.note for stage in outcome.report.stages]
    assert {*told} == {"native"}


def test_auto_leaves_to_spark_what_it_expects_to_be_sooner(
    opened: OpenedEngine, tpch_medium: str, tmp_path: Path
) -> None:
    sql = (TPCH / "q6.sql").read_text()
    outcome = run(sql, tpch_medium, opened, tmp_path, stages="auto", verify=True)
    assert outcome.report.verified
    assert all(stage.note for stage in outcome.report.stages)


def test_partitioned_tables_are_read_both_ways(
    opened: OpenedEngine, tpch_partitioned: str, tmp_path: Path
) -> None:
    for number in (3, 12):
        sql = (TPCH / f"q{number}.sql").read_text()
        for stages in ("native", "spark"):
            outcome = run(sql, tpch_partitioned, opened, tmp_path, stages=stages, verify=True)
            assert outcome.report.verified, f"Q{number}: {outcome.report.verification}"
            assert natively(outcome) == (len(outcome.report.stages) if stages == "native" else 0)


def test_by_default_stages_run_natively_or_the_plan_is_made_for_spark_sql(
    opened: OpenedEngine, tpch_medium: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sql = (TPCH / "q18.sql").read_text()
    outcome = run(sql, tpch_medium, opened, tmp_path / "native", verify=True)
    assert outcome.report.verified
    assert natively(outcome) == len(outcome.report.stages)

    why = "executors have other versions: duckdb 1.0.0, here 2.0.0"
    monkeypatch.setitem(native._probed, opened.application, why)
    costs = []
    made = run_module.planner_of

    def planned(request: QueryRequest, *rest: Any, **named: Any) -> Any:
        planner = made(request, *rest, **named)
        costs.append((request.stages, planner.model.engine))
        return planner

    monkeypatch.setattr(run_module, "planner_of", planned)
    outcome = run(sql, tpch_medium, opened, tmp_path / "spark", verify=True)
    assert outcome.report.verified
    assert natively(outcome) == 0
    assert costs == [("spark", "spark")]
    assert f"all stages run on Spark SQL: {why}" in outcome.report.problems


def test_where_stages_cannot_run_natively_the_plan_does_not_count_on_it(tmp_path: Path) -> None:
    def told(
        tables: str, store: str, stages: str = "auto", scheme: str = "file", outside: bool = False
    ) -> str:
        request = QueryRequest("SELECT 1", tables=tables, store=store, engine="spark", stages=stages)  # type: ignore[arg-type]
        read = (Relation("t", scheme, (), (("a", "bigint"),), external=outside),)
        return stage_engines_of(request, cast(Gathered, SimpleNamespace(read=lambda: read)))

    here = str(tmp_path)
    assert told(here, here) == "auto"
    assert told("s3://a/b", "s3://a/b", scheme="s3") == "auto"
    assert told(here, here, outside=True) == "spark"
    assert told(here, here, "native", outside=True) == "native"


def test_containers_without_memory_for_python_run_spark_sql(monkeypatch: pytest.MonkeyPatch) -> None:
    for master, conf, told in (
        ("yarn", {}, "spark.executor.pyspark.memory"),
        ("k8s://https://h:443", {}, "spark.executor.pyspark.memory"),
        ("yarn", {"spark.executor.pyspark.memory": "1g"}, "other"),
        ("spark://h:7077", {}, "other"),
        ("local[2]", {}, "other"),
    ):
        found = SimpleNamespace(get=lambda key, default, conf=conf: conf.get(key, default))
        context = SimpleNamespace(
            master=master,
            getConf=lambda found=found: found,
            defaultParallelism=2,
            applicationId=master + str(conf),
        )
        monkeypatch.setattr(native, "trouble", lambda context: "other")
        assert told in native.NativeStages(context, owned=False).trouble(threading.Event())
