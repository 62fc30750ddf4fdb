"""Which engine a query gets that names none."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import TableError
from ebbflow.infra.query.checkpoints import ParquetCheckpointStore
from ebbflow.planners.errors import PlanningError, UnsupportedQueryError
from ebbflow.tasks.query import opening
from ebbflow.tasks.query.opening import choose_engine, opened_engine
from ebbflow.tasks.query.planning import gather
from ebbflow.tasks.query.request import LOCAL, QueryRequest
from ebbflow.tasks.query.run import execute
from ebbflow.tasks.query.verify import verify

SQL = "SELECT n_name, count(*) AS n FROM nation JOIN customer ON n_nationkey = c_nationkey GROUP BY n_name"


@pytest.fixture(autouse=True)
def _spark_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_without_spark", lambda: "")


def chosen(tables: str, sql: str = SQL, **options: Any) -> tuple[str, str]:
    request = choose_engine(QueryRequest(sql, tables=tables, **options))
    return request.engine, request.engine_reason


def test_small_tables_and_no_master_are_for_the_embedded_engine(tpch: str, tmp_path: Path) -> None:
    request = QueryRequest(SQL, tables=tpch, store=str(tmp_path / "store"))
    report = execute(request).report
    assert (report.engine, report.master, report.rows) == ("duckdb", "", 25)
    assert "no Spark master is named" in report.engine_reason
    assert "MiB to hold fit" in report.engine_reason
    again = execute(request).report
    assert {stage.status for stage in again.stages} == {"reused"}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"master": "local[1]"}, "a master is named"),
        ({"conf": {"spark.sql.ansi.enabled": "false"}}, "a setting of Spark's is named"),
        ({"executor_memory": "1g"}, "the memory of executors is named"),
        ({"stages": "native"}, "a way of running Spark's stages is named"),
    ],
)
def test_what_only_spark_has_is_for_spark(options: dict[str, Any], reason: str, tpch: str) -> None:
    assert chosen(tpch, **options) == ("spark", reason)


def test_a_catalogue_is_for_spark_and_no_file_is_looked_at() -> None:
    request = choose_engine(QueryRequest("SELECT 1", catalog=True))
    assert (request.engine, request.master) == ("spark", LOCAL)


def test_a_function_that_duckdb_lacks_is_for_spark(tpch: str, tmp_path: Path) -> None:
    sql = "SELECT xxhash64(n_name) AS x FROM nation"
    engine, reason = chosen(tpch, sql)
    assert engine == "spark"
    assert "xxhash64 does not exist" in reason
    with pytest.raises(UnsupportedQueryError, match=r"refuses .*xxhash64.*; run it with --engine spark"):
        execute(QueryRequest(sql, tables=tpch, store=str(tmp_path / "store"), engine="duckdb"))


def test_a_word_that_duckdb_would_not_be_told_is_for_spark(tpch: str, tmp_path: Path) -> None:
    """Left out, it would be another query, and an oracle that leaves it out too would agree."""
    sql = "SELECT array_sort(array(n_nationkey, 3), (x, y) -> y - x) AS a FROM nation"
    engine, reason = chosen(tpch, sql)
    assert engine == "spark"
    assert "DuckDB has no words for all of the query" in reason
    request = QueryRequest(sql, tables=tpch, store=str(tmp_path / "store"), engine="duckdb")
    with pytest.raises(UnsupportedQueryError, match="comparator"):
        execute(request)
    clock, other = SystemClock(), replace(request, engine="spark")
    gathered = gather(other, ParquetCheckpointStore(other.store_place, clock), clock, run_id="run")
    found: Any = None  # a result is not looked at before the oracle has one
    verified, sentence = verify(gathered, found)
    assert verified is None
    assert "comparator" in sentence


def test_a_call_that_duckdb_answers_otherwise_is_for_spark(
    tpch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sql = "SELECT CAST(CAST(c_acctbal AS DOUBLE) AS STRING) AS paid FROM customer"
    engine, reason = chosen(tpch, sql)
    assert engine == "spark"
    assert "texts of such values are others" in reason
    advice = r"otherwise: .*; run it with --engine spark \(needs Java\), .* or cast to DECIMAL first"
    with pytest.raises(UnsupportedQueryError, match=advice):
        execute(QueryRequest(sql, tables=tpch, store=str(tmp_path / "store"), engine="duckdb"))
    monkeypatch.setattr(opening, "_without_spark", lambda: "there is no Java")
    with pytest.raises(UnsupportedQueryError, match=r"DuckDB cannot \(.*texts.*\), .* \(there is no Java\)"):
        chosen(tpch, sql)


def test_a_call_that_spark_answers_otherwise_is_for_duckdb(
    tpch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "usable_memory", lambda: 1e-6)
    sql = "SELECT list(l_comment ORDER BY l_orderkey) AS said FROM lineitem"
    engine, reason = chosen(tpch, sql, dialect="duckdb")
    assert engine == "duckdb"
    assert "Spark cannot run it here (Spark answers" in reason
    store = str(tmp_path / "store")
    request = QueryRequest(sql, tables=tpch, store=store, engine="spark", dialect="duckdb")
    clock = SystemClock()
    with pytest.raises(UnsupportedQueryError, match="leaves nulls and the order out"):
        gather(request, ParquetCheckpointStore(request.store_place, clock), clock, run_id="run")


def test_more_than_this_machine_can_hold_is_for_spark(tpch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "usable_memory", lambda: 1e-6)
    engine, reason = chosen(tpch)
    assert engine == "spark"
    assert "too much" in reason
    monkeypatch.setattr(opening, "_without_spark", lambda: "there is no Java")
    assert chosen(tpch)[0] == "duckdb"


def test_only_columns_that_are_named_count(tpch: str) -> None:
    def held(sql: str) -> str:
        return chosen(tpch, sql)[1].split("about ")[1].split(" to hold")[0]

    assert float(held("SELECT * FROM lineitem").split()[0]) > 3 * float(
        held("SELECT sum(l_quantity) AS q FROM lineitem").split()[0]
    )


def test_a_named_engine_stays_and_has_no_reason(tpch: str) -> None:
    assert chosen(tpch, engine="spark") == ("spark", "")
    assert chosen(tpch, engine="duckdb", master="local[2]") == ("duckdb", "")


def test_an_engine_that_is_kept_is_the_one(tpch: str, tmp_path: Path) -> None:
    with opened_engine(QueryRequest("SELECT 1", tables=tpch, engine="duckdb")) as opened:
        request = QueryRequest(SQL, tables=tpch, master="spark://nowhere:7077", store=str(tmp_path / "s"))
        assert execute(request, opened=opened).report.engine == "duckdb"


@pytest.mark.parametrize(("stated", "expected"), [(None, 0.0), (60.0, 60.0)])
def test_the_embedded_engine_expects_the_interruptions_that_are_stated(
    tpch: str, stated: float | None, expected: float
) -> None:
    request = QueryRequest("SELECT 1", tables=tpch, engine="duckdb", interruption_rate=stated)
    with opened_engine(request) as opened:
        assert opened.source.capacity().hazard == expected


def test_what_is_wrong_is_told_as_without_a_choice(tpch: str, tmp_path: Path) -> None:
    with pytest.raises(PlanningError, match="natoin"):
        chosen(tpch, "SELECT * FROM natoin")
    with pytest.raises(TableError, match="does not exist"):
        chosen(str(tmp_path / "nothing"))
