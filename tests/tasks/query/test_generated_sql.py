"""Names, rows and errors of generated queries are those of the plain engine, however they are planned."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sqlglot.parser

from ebbflow.infra.clock import SystemClock
from ebbflow.planners.errors import UnknownColumnError, UnsupportedQueryError
from ebbflow.planners.query.sql.parse import parse
from ebbflow.tasks.query.opening import opened_engine
from ebbflow.tasks.query.planning import tables_of
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import PlainOrchestrator, execute
from tests.tasks.driving import SHARED_SPARK
from tests.tasks.query.generated_sql import Statement, comparison, generated

_SEEDS = 6
WRITTEN = (
    "SELECT k + 1, count(*), upper(s) FROM a GROUP BY ALL ORDER BY 1 DESC",
    "SELECT K, upper(S), CAST(k AS VARCHAR), 1, 'x', NULL FROM a",
    "SELECT (SELECT max(k) FROM c), EXISTS (SELECT 1 FROM c) FROM a ORDER BY 1",
    "SELECT * FROM (SELECT k + 1, n FROM a) q",
    'SELECT "(k + 1)" FROM (SELECT k + 1 FROM a) q',
    "SELECT a.k + c.k FROM a JOIN c ON a.n = c.n JOIN b ON b.k = a.k ORDER BY a.k + c.k",
    "SELECT k + 1 FROM a UNION ALL SELECT k FROM c ORDER BY 1",
    "SELECT * FROM (SELECT s, n FROM c) q NATURAL JOIN (SELECT n, k FROM b) p",
    "WITH x AS (WITH y AS (SELECT * FROM b JOIN (SELECT k, n AS m FROM c) z USING (k)) FROM y) FROM x",
    "SELECT COLUMNS('k|n'), d FROM a",
    "SELECT min(COLUMNS(*)) FROM c",
    "SELECT COLUMNS('k|n'), c.*, s AS K, 1 AS k_1 FROM c",
    "PIVOT c ON k USING sum(n) GROUP BY s",
    "SELECT q.* FROM (PIVOT c ON k USING count(n) GROUP BY s) q JOIN a ON q.s = a.s",
    "SELECT * FROM (SELECT k, n, s FROM c) PIVOT (sum(n) FOR k IN (1, 2))",
    "UNPIVOT (SELECT k, n, s FROM c) ON k, n INTO NAME which VALUE val",
    "SELECT * FROM (SELECT k, n FROM c) UNPIVOT (v FOR w IN (k AS Kay, n))",
    "SELECT x, u.s FROM a t(x) JOIN c u(y, m) ON x = y",
    "WITH v AS (WITH w AS (SELECT k AS j FROM a) SELECT j FROM w) SELECT z FROM v q(z)",
    "WITH v AS (SELECT 1), v AS (SELECT 2) FROM v",
    "SELECT count(*) OVER w, k FROM a WINDOW w AS (PARTITION BY k)",
    "SELECT (q.h + INTERVAL 1 HOUR)::VARCHAR, a.t + q.i, typeof(q.n), q.e > 'B' FROM (SELECT k, sum(n) AS n, "
    "max(TIME '10:00') AS h, max(INTERVAL 1 MONTH * k) AS i, max(s::ENUM('ab', 'B', 'a', '')) AS e FROM b GROUP BY k"
    ") q JOIN c ON q.k = c.k JOIN a ON a.k = c.n",
    "SELECT jaro_winkler_similarity(s, 'A'), jaro_winkler_similarity(s, 'Ab', 0.9), log10(k + 1000.5) FROM a",
    "SELECT t + INTERVAL 3 DAY / k, d / 3, k / 2, k / n / 2 FROM a WHERE k > 0",
    "WITH v(z) AS (SELECT 0 UNION ALL SELECT * FROM range(2, 4)) SELECT z, k FROM v JOIN a ON k = z",
    "SELECT date_trunc(u, t), date_diff(u, t, DATE '2025-01-01') FROM a, (SELECT 'year' AS u) x",
    "SELECT time_bucket(INTERVAL 1 DAY, t::TIMESTAMPTZ, 'Europe/Paris')::VARCHAR, bool_and(k > 1 ORDER BY n) "
    "FROM b GROUP BY ALL",
    'SELECT {\'Camel\': k, "Up": n}, ROW(k)::STRUCT("Xy" INTEGER) FROM c',
    "SELECT q.m.Color, m.color, (q.m).Color FROM (SELECT map{'Color': k} AS m FROM a) q WHERE m.Color > 1",
    """SELECT count(*), sum(CAST(q.j.Family.Name AS INTEGER)) FROM (
    SELECT CAST('{"Family": {"Name": 7}}' AS JSON) AS j FROM a) q WHERE j.Family IS NOT NULL""",
    "SELECT r.X, e.R.x, count(*) FROM a e GROUP BY r.x ORDER BY r.X",
    "SELECT bool_or(DISTINCT k > 1), bool_and(DISTINCT n > 0) FROM a",
    "SELECT i, last(x IGNORE NULLS) OVER (ORDER BY i), first(x ORDER BY i DESC IGNORE NULLS) OVER w FROM "
    "(VALUES (1, NULL), (2, 'A'), (3, NULL), (4, 'B')) v(i, x) WINDOW w AS (ORDER BY i)",
    "SELECT k FROM a UNION SELECT n FROM c UNION SELECT n + 1 FROM c ORDER BY n + 1",
    "SELECT reduce([1, 2, 3], lambda x, y: x + y, k), reduce([k, n], lambda x, y: x - y) FROM c",
    """SELECT upper(j->'a'), coalesce((j)->'b', k), min(j->'a'||'b'), list_transform([j], lambda x: x->>'a') FROM (
    SELECT '{"a": 1, "ab": 2}'::JSON AS j, k FROM c) q GROUP BY ALL""",
    r"""SELECT '{"\"a\nb\"": 4}'->'$."\"a\nb\""', '{"a": 4}'->'$.a', '{"a": {"b": 1}}'->'$..b' FROM c""",
    "SELECT str[1], text[2:3], date[k], [str[i + 1] FOR i IN range(len(str))] FROM (SELECT s AS str, "
    "['x', 'y', 'z'] AS text, [1, 2] AS date, k FROM a) q",
    "SELECT user, current_schema, current_role, current_catalog, session_user, k AS localtime FROM c WHERE "
    "localtime > 1 AND typeof(current_time) = 'TIME WITH TIME ZONE'",
    "SELECT typeof(q.j), json_structure(q.l[1]) FROM (SELECT k, max('{}'::JSON) AS j, list('{}'::JSON) AS l FROM b "
    "GROUP BY k) q JOIN c ON q.k = c.k JOIN a ON a.k = c.n",
    "SELECT a.k, c.n FROM a JOIN b ON (SELECT a.k = b.k) LEFT JOIN c ON (SELECT CASE WHEN a.k + c.n > 3 THEN c.k = 1 "
    "ELSE FALSE END)",
    "VALUES (1, 2)",
    "SELECT * FROM range(3)",
    "SELECT a FROM a",
    "SELECT nope FROM a",
)


def test_a_query_answers_as_the_plain_engine_does(tmp_path: Path) -> None:
    wrong, stages, planned = {}, 0, 0
    with comparison(tmp_path) as differences:
        for statement in [
            *(Statement(sql, frozenset()) for sql in WRITTEN),
            *(generated(seed) for seed in range(_SEEDS)),
        ]:
            found, answer = differences(statement)
            stages, planned = max(stages, answer.stages), planned + answer.planned
            if found:
                wrong[statement.sql] = found
    assert not wrong
    assert stages > 2  # not one statement each
    assert planned > _SEEDS * 0.7


@pytest.mark.parametrize("planner", ["qoop", "single"])
def test_a_resumed_query_keeps_its_names(planner: str, tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    pq.write_table(pa.table({"k": [1, 2]}), tmp_path / "tables" / "t.parquet")
    request = QueryRequest(
        "SELECT k + 1, count(*) FROM t GROUP BY k ORDER BY 1",
        tables=str(tmp_path / "tables"),
        engine="duckdb",
        dialect="duckdb",
        planner=planner,  # type: ignore[arg-type]
        store=str(tmp_path / "store"),
    )
    for status in ("completed", "reused"):
        outcome = execute(request, PlainOrchestrator())
        assert outcome.to_arrow().to_pydict() == {"(k + 1)": [2, 3], "count_star()": [1, 1]}
        assert outcome.report.stages[-1].status == status


def test_columns_of_sparks_sql_are_called_by_the_calls_that_duckdb_has_too(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    pq.write_table(pa.table({"k": [1, 2]}), tmp_path / "tables" / "t.parquet")

    def names(items: str) -> list[str]:
        request = QueryRequest(f"SELECT {items} FROM t", tables=str(tmp_path / "tables"), engine="duckdb")
        return tables_of(request, SystemClock())[0].expression.named_selects

    assert names("ln(k), log10(k)") == ["ln(k)", "log10(k)"]
    assert names("isnull(k)") == ["(k IS NULL)"]


@pytest.mark.spark(shared=True)
def test_spark_names_what_the_query_does_not(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    pq.write_table(pa.table({"k": [1, 2], "s": ["a", "b"]}), tmp_path / "tables" / "t.parquet")

    def request(sql: str) -> QueryRequest:
        return QueryRequest(
            sql, tables=str(tmp_path / "tables"), store=str(tmp_path / "store"), **SHARED_SPARK
        )

    with opened_engine(request("SELECT 1")) as opened:
        found = execute(
            request("SELECT k + 1, count(*), CAST(k AS STRING) FROM t JOIN t u USING (k) GROUP BY k"),
            PlainOrchestrator(),
            opened=opened,
        )
        assert found.to_arrow().column_names == ["(k + 1)", "count(1)", "k"]
        inner = execute(
            request("SELECT `(k + 1)` FROM (SELECT k + 1 FROM t) ORDER BY 1"),
            PlainOrchestrator(),
            opened=opened,
        )
        assert inner.to_arrow().to_pydict() == {"(k + 1)": [2, 3]}
        twice = execute(
            request("SELECT s, e.*, k AS S, null AS s FROM t LATERAL VIEW explode(map('x', k)) e ORDER BY k"),
            PlainOrchestrator(),
            opened=opened,
        )
        names, row = zip(*twice.to_arrow().to_pylist()[0].items(), strict=True)
        assert names == ("s", "key", "value", "S_1", "s_2")
        assert row == ("a", "x", 1, 1, None)
        with pytest.raises(UnknownColumnError, match="nope"):
            execute(request("SELECT nope FROM t"), PlainOrchestrator(), opened=opened)


def test_fields_of_structs_have_one_spelling_where_spark_sees_one(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    rows = {
        "s": [{"color": "a"}, {"color": "b"}, {"color": "a"}],
        "m": [[("Up", 1)], [("Up", 2)], [("up", 3)]],
    }
    kinds = [("s", pa.struct([("color", pa.string())])), ("m", pa.map_(pa.string(), pa.int64()))]
    pq.write_table(pa.table(rows, schema=pa.schema(kinds)), tmp_path / "tables" / "ev.parquet")
    sql = "SELECT s.Color AS c, count(*) AS n, sum(m.Up) AS u FROM ev GROUP BY s.color ORDER BY s.COLOR"
    request = QueryRequest(
        sql, tables=str(tmp_path / "tables"), engine="duckdb", store=str(tmp_path / "store")
    )
    found = execute(request, PlainOrchestrator()).to_arrow().to_pydict()
    assert found == {"c": ["a", "b"], "n": [2, 1], "u": [1, 2]}


def test_a_compiled_sqlglot_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sqlglot.parser, "__file__", "/packages/sqlglot/parser.cpython-311-x86_64-linux-gnu.so"
    )
    with pytest.raises(UnsupportedQueryError, match="pip uninstall sqlglotc"):
        parse("SELECT 1")
