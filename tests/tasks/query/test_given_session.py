"""Queries in a SparkSession that somebody else has started."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from ebbflow.flows.query.flow import run_query
from ebbflow.planners.errors import OptionError, UnknownTableError
from ebbflow.tasks.query.opening import engine_in, request_in
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import execute
from tests.infra.tables.deleting import DELETING, delete_by_vector

PLAIN = {  # as a session has them that Ebbflow has not started
    "spark.sql.parquet.outputTimestampType": "INT96",
    "spark.sql.session.timeZone": "America/New_York",
    "spark.python.daemon.module": "pyspark.daemon",
}


class Connected:
    """Looks like a session of Spark Connect, as far as is looked."""


@pytest.mark.parametrize(
    ("session", "options", "rule"),
    [
        (Connected(), {}, r"session must be a SparkSession of this process.*Connected"),
        ("spark", {}, r"got a value of type builtins.str"),
        (
            None,
            {"engine": "duckdb", "catalog": False, "tables": "there"},
            "session needs engine spark or auto",
        ),
        (None, {"master": "spark://h:7077"}, "master is the session's own"),
        (
            None,
            {"conf": {"spark.hadoop.secret": "x-y-z"}},
            "conf is the session's own; leave it out; got 'spark.hadoop.secret'",
        ),
        (None, {"executor_memory": "1g"}, "executor_memory is the session's own"),
    ],
)
def test_what_a_session_cannot_be_or_has_itself_is_refused(
    session: Any, options: dict[str, Any], rule: str
) -> None:
    class Classic:
        _jsparkSession = None

        class sparkContext:
            _jsc = "runs"

    with pytest.raises(OptionError, match=rule):
        request_in(session or Classic(), QueryRequest("SELECT 1 AS x", **{"catalog": True, **options}))


@pytest.mark.spark
def test_tables_and_views_of_a_session_are_read_and_the_session_runs_on(tmp_path: Path) -> None:
    from ebbflow.infra.spark.session import start_session, stop_session
    from ebbflow.infra.spark.settings import settings

    session, process = start_session(settings("local[2]", app_name="given", memory="1g", conf=PLAIN))
    try:
        warehouse = tmp_path / "kept"
        warehouse.mkdir()
        pq.write_table(pa.table({"k": [1, 2, 3, 4], "v": [10, 20, 30, 40]}), warehouse / "a.parquet")
        session.sql(f"CREATE DATABASE sales LOCATION '{(tmp_path / 'db').as_uri()}'")
        session.sql(f"CREATE TABLE sales.kept USING parquet LOCATION '{warehouse.as_uri()}'")
        session.createDataFrame(
            [(1, "one"), (2, "two"), (2, "deux")], "k INT, name STRING"
        ).createOrReplaceTempView("names")
        session.conf.set("spark.sql.ansi.enabled", "false")
        session.udf.register("twice", lambda value: 2 * value, "BIGINT")
        before = dict(session.conf.getAll)
        text = (
            "SELECT n.name, sum(kept.v) AS v, max(kept.v / 0) AS nothing "
            "FROM sales.kept JOIN names n ON sales.kept.k = n.k GROUP BY n.name"
        )

        def run(sql: str) -> Any:
            asked = QueryRequest(sql, catalog=True, materialize="every-join", store=str(tmp_path / "store"))
            request = request_in(session, asked)
            with engine_in(session, request) as opened:
                return execute(request, opened=opened)

        outcome = run(text)
        assert sorted(outcome.to_arrow().to_pylist(), key=lambda row: row["name"]) == [
            {"name": "deux", "v": 20, "nothing": None},
            {"name": "one", "v": 10, "nothing": None},
            {"name": "two", "v": 20, "nothing": None},
        ]
        assert outcome.report.engine == "spark"
        last = run("SELECT TIMESTAMP '9999-12-31 00:00:00' AS t, k FROM names WHERE k = 1")
        assert str(last.to_arrow()["t"][0].as_py().replace(tzinfo=None)) == "9999-12-31 05:00:00"
        deleting = str(tmp_path / "deleting")
        write_deltalake(f"{deleting}/t", pa.table({"v": range(10)}), configuration=DELETING)
        delete_by_vector(Path(deleting, "t"), 0, [0, 9])
        asked = QueryRequest("SELECT sum(v) AS v FROM t", tables=deleting, store=str(tmp_path / "store"))
        request = request_in(session, asked)
        with engine_in(session, request) as opened:
            left = execute(request, opened=opened)
        assert left.to_arrow().to_pylist() == [{"v": 36}]
        assert type(session).getActiveSession() is session
        assert session._jvm.org.apache.spark.sql.classic.SparkSession.active().equals(session._jsparkSession)
        files = QueryRequest("SELECT twice(v) AS w FROM kept", tables=str(tmp_path), engine="spark")
        first, other = (request_in(session, files).conf for _ in range(2))
        assert first != other, "a function may have become another"
        assert request_in(session, replace(files, sql="SELECT v FROM kept")).conf == {
            name: text for name, text in before.items() if name.startswith("spark.sql.")
        }
        with pytest.raises(UnknownTableError, match="nams"):
            run("SELECT * FROM nams")
        assert dict(session.conf.getAll) == before
        assert [table.name for table in session.catalog.listTables()] == ["names"]
        assert session.sql(text).count() == 3
        session.sparkContext.parallelize([(7,)]).toDF(["x"]).createOrReplaceTempView("later")
        assert session.sql("SELECT x FROM later").first().x == 7, "toDF is the session's own"
        kept = run_query.serialize_parameters({"sql": text, "session": session})
        assert kept == {"sql": text, "session": "<SparkSession>"}, "what Prefect keeps of a flow run"
    finally:
        stop_session(session, process)
