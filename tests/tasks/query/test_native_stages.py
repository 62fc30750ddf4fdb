"""Queries whose stages run natively on Spark: as right as Spark's own, and told."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbflow.infra.spark.native import stages as native
from ebbflow.tasks.query.opening import OpenedEngine, opened_engine
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import QueryOutcome, execute

pytestmark = [pytest.mark.spark, pytest.mark.timeout(280)]

TPCH = Path(__file__).parents[3] / "flows" / "tpch"


@pytest.fixture(scope="module", name="opened")
def _opened(tpch_medium: str) -> Iterator[OpenedEngine]:
    with opened_engine(QueryRequest("SELECT 1", tables=tpch_medium, engine="spark")) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_SMALLEST", 1 << 20)


def run(sql: str, tables: str, opened: OpenedEngine, store: Path, **options: object) -> QueryOutcome:
    request = QueryRequest(sql, tables=tables, store=str(store), reuse=False, **options)
    return execute(request, opened=opened)


def natively(outcome: QueryOutcome) -> int:
    return sum("native" in stage.note.split(", ") for stage in outcome.report.stages)


def test_all_tpch_queries_run_natively_and_are_right(opened: OpenedEngine, tpch: str, tmp_path: Path) -> None:
    for number in range(1, 23):
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


@pytest.mark.slow
def test_tpcds_queries_mix_both_ways_and_say_why(opened: OpenedEngine, tpcds: Path, tmp_path: Path) -> None:
    told = []
    for number in (3, 19, 42, 52, 89, 96):
        sql = (tpcds / "queries" / f"q{number}.sql").read_text()
        outcome = run(sql, str(tpcds), opened, tmp_path, stages="native", dialect="duckdb", verify=True)
        assert outcome.report.verified, f"Q{number}: {outcome.report.verification}"
        told += [stage.note for stage in outcome.report.stages]
    assert told.count("native") >= 5
    assert all(note == "native" or note.startswith("on Spark SQL: ") for note in told)
    assert any("not proven to be equal" in note for note in told)  # a window


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
