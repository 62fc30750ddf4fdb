"""Files that a query leaves out by their partitions: never one that its result needs."""

import itertools
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.protocols import Relation, StageJob
from ebbflow.infra.query.checkpoints import ParquetCheckpointStore
from ebbflow.infra.query.duckdb import DuckDbEngine
from ebbflow.infra.query.duckdb_statements import register_view
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables import partitions
from ebbflow.infra.tables.parquet import discover
from ebbflow.planners.model import Catalogue, Share, Table
from ebbflow.planners.query.plan.analysis import Analysis
from ebbflow.planners.query.plan.pruning import partition_filters
from ebbflow.planners.query.sql.parse import parse_query
from ebbflow.planners.query.views.views import view_chain
from ebbflow.tasks.query.planning import gather
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import execute, explain

NULL = "__HIVE_DEFAULT_PARTITION__"
KINDS = {"k": "bigint", "d": "date", "s": "string"}


@pytest.fixture(scope="module", name="folder")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pruning")
    parts = itertools.product(("1", "2", NULL), ("2026-11-01", "2026-12-03", NULL), ("1", "b", NULL))
    for number, (k, d, s) in enumerate(parts):
        path = folder / "t" / f"k={k}" / f"d={d}" / f"s={s}"
        path.mkdir(parents=True)
        pq.write_table(pa.table({"v": [number, number + 1], "w": ["b", None]}), path / "1.parquet")
    return folder


@pytest.fixture(scope="module", name="table")
def _table(folder: Path) -> Relation:
    return discover(StorageLocation(folder))[0]


@pytest.fixture(scope="module", name="connections")
def _connections() -> Iterator[tuple[duckdb.DuckDBPyConnection, duckdb.DuckDBPyConnection]]:
    with duckdb.connect() as one, duckdb.connect() as other:
        yield one, other


def kept(sql: str, table: Relation, *, portable: bool = False) -> Relation:
    plain = Catalogue({"t": Table("t", table.columns, "")})
    parsed = parse_query(sql, plain, now=datetime(2026, 11, 26, tzinfo=UTC), dialect="duckdb")
    analysis = Analysis.of(view_chain(parsed, plain), plain, "")
    places = partition_filters(analysis, {"t": KINDS}, portable=portable).get("t")
    return table if places is None else partitions.pruned(table, places)


LEAVES = st.sampled_from(
    [
        "{}.k = 1", "{}.k <> 2", "{}.k IN (2, 3)", "{}.k NOT IN (1, NULL)", "{}.k IS NULL", "{}.k BETWEEN 0 AND 1",
        "{}.k IS NOT DISTINCT FROM NULL", "{}.k > {}.v", "{}.v > 20", "{}.w = 'b'", "{}.w = {}.s", "{}.s = '1'",
        "{}.s >= 'a'", "{}.s IN ('b', 'c')", "{}.s LIKE 'b%'", "{}.s IS NOT NULL", "upper({}.s) = 'B'",
        "CAST({}.s AS INT) = 1", "TRY_CAST({}.s AS INT) = {}.k", "{}.s = {}.k::text", "coalesce({}.k, 0) = 0",
        "{}.d = '2026-11-01'", "{}.d >= DATE '2026-12-01'", "year({}.d) = 2026", "month({}.d) = 12",
        "{}.d + INTERVAL 2 DAY > DATE '2026-11-02'", "{}.d BETWEEN '2026-11-01' AND '2026-11-30'", "{}.d IS NULL",
        "{}.d::text LIKE '%-12-%'", "CASE WHEN {}.k = 1 THEN {}.v > 3 ELSE {}.d IS NULL END", "random() < 2 * {}.k",
        "{}.d < current_date", "{}.k = (SELECT max(x.k) FROM t x)", "{}.k IN (SELECT x.k FROM t x WHERE x.s = 'b')",
    ]
)  # fmt: skip
CONDITIONS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda p: f"({p[0]} AND {p[1]})"),
        st.tuples(inner, inner).map(lambda p: f"({p[0]} OR {p[1]})"),
        inner.map(lambda p: f"(NOT {p})"),
    ),
    max_leaves=5,
)
SHAPES = st.sampled_from(
    [
        "SELECT a.v, a.d, a.k, a.s FROM t a WHERE {0}",
        "SELECT a.v, b.v AS u FROM t a JOIN t b ON a.v = b.v AND {1} WHERE {0}",
        "SELECT a.v, b.v AS u FROM t a LEFT JOIN t b ON a.v = b.v AND {1} WHERE {0}",
        "SELECT a.v, b.v AS u FROM t a LEFT JOIN t b ON a.v = b.v WHERE {0} AND {1}",
        "SELECT a.v, b.v AS u FROM t a RIGHT JOIN t b ON a.v = b.v AND {1} WHERE {0}",
        "SELECT a.v, b.v AS u FROM t a FULL JOIN t b ON a.v = b.v AND {1} WHERE {0}",
        "SELECT a.v FROM t a SEMI JOIN t b ON a.v = b.v AND {1} WHERE {0}",
        "SELECT a.v FROM t a ANTI JOIN t b ON a.v = b.v AND {1} WHERE {0}",
        "SELECT a.v FROM t a WHERE {0} AND EXISTS (SELECT 1 FROM t b WHERE b.v = a.v + 1 AND {1})",
        "SELECT a.v FROM t a WHERE {0} OR a.v NOT IN (SELECT b.v FROM t b WHERE {1})",
        "SELECT a.v FROM t a WHERE {0} UNION ALL SELECT b.v FROM t b WHERE {1}",
        "WITH a AS (SELECT k, d, s, v, w FROM t) SELECT a.v, b.v AS u FROM a, a b WHERE a.v = b.v AND {0} AND {1}",
        "SELECT a.k, count(*) AS n FROM t a GROUP BY a.k, a.d, a.s, a.v, a.w HAVING {0}",
        "SELECT x.v, x.n FROM (SELECT a.*, row_number() OVER (PARTITION BY a.k ORDER BY a.v, a.d, a.s, a.w) AS n "
        "FROM t a) x JOIN t b ON x.v = b.v WHERE x.n < 3 AND x.s = 'b' AND {1}",
        "SELECT a.v, b.v AS u FROM t a ASOF JOIN t b ON a.k = b.k AND a.v >= b.v WHERE {0} AND b.v > 9",
    ]
)


@given(shape=SHAPES, first=CONDITIONS, second=CONDITIONS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_pruned_table_gives_the_same_rows(
    shape: str,
    first: str,
    second: str,
    table: Relation,
    connections: tuple[duckdb.DuckDBPyConnection, duckdb.DuckDBPyConnection],
) -> None:
    sql = shape.format(first.replace("{}", "a"), second.replace("{}", "b"))
    answers = []
    for relation, connection in zip((table, kept(sql, table)), connections, strict=True):
        connection.execute("DROP VIEW IF EXISTS t")
        register_view(connection, relation)
        try:
            answers.append(sorted(map(repr, connection.sql(sql).fetchall())))
        except duckdb.Error:  # a cast of what a pruned file would have held: fewer failures are no difference
            return
    assert answers[0] == answers[1], (sql, len(table.files))


def files(sql: str, table: Relation, *, portable: bool = False) -> int:
    return len(kept(sql, table, portable=portable).files)


@pytest.mark.parametrize(
    ("condition", "left", "portable"),
    [
        ("k = 1", 9, 9),
        ("k = 1 AND v > 3", 9, 9),
        ("k = 1 OR v > 3", 27, 27),
        ("k = 1 AND s = 'b' OR k = 2 AND v = 3", 12, 12),
        ("k IN (1, 2) AND d BETWEEN '2026-11-01' AND '2026-11-30'", 6, 6),
        ("k IS NULL", 9, 9),
        ("NOT (k = 1)", 9, 9),
        ("month(d) = 12", 9, 9),
        ("d >= DATE '2026-12-01' AND k IS NOT NULL", 6, 6),
        ("upper(s) = 'B'", 9, 27),  # may differ between engines
        ("s = 1", 27, 27),  # 'b' is no number
        ("k = 5", 0, 0),
        ("random() < k", 27, 27),
        ("k = (SELECT max(k) FROM t)", 27, 27),
    ],
)
def test_filters_on_partitions_leave_files_out(
    condition: str, left: int, portable: int, table: Relation
) -> None:
    sql = f"SELECT v FROM t WHERE {condition}"
    assert (files(sql, table), files(sql, table, portable=True)) == (left, portable)


def test_a_join_hands_on_what_it_is_joined_with(table: Relation) -> None:
    assert (
        files(
            "SELECT a.v FROM t a JOIN t b ON a.k = b.k AND a.d = b.d WHERE b.k = 1 AND b.d > '2026-12-01'",
            table,
        )
        == 3
    )
    assert files("SELECT a.v FROM t a LEFT JOIN t b ON a.k = b.k WHERE b.k = 1", table) in (9, 27)
    assert files("SELECT (SELECT max(v) FROM t WHERE k = 1) AS x, v FROM t WHERE k = 2", table) == 18


def test_an_empty_choice_of_files_is_an_empty_table(folder: Path, tmp_path: Path) -> None:
    request = QueryRequest(
        "SELECT count(*) AS n, max(d) AS d, min(k) AS k FROM t WHERE d > '2030-01-01'",
        tables=str(folder), engine="duckdb", store=str(tmp_path), verify=True,
    )  # fmt: skip
    outcome = execute(request)
    assert outcome.report.verified
    assert outcome.to_arrow().to_pylist() == [{"n": 0, "d": None, "k": None}]


def test_explain_says_what_is_read_of_all_and_estimates_count_it_only(folder: Path, tmp_path: Path) -> None:
    request = QueryRequest(
        "SELECT v FROM t WHERE k = 1 AND s IS NULL", tables=str(folder), engine="duckdb", store=str(tmp_path)
    )
    plans, notes = explain(request, Share.uniform(1.0, 1.0, 1))
    assert [note for note in notes if note.startswith("t: 3 of 27 files are read, ")]
    assert plans[0].stages[-1].rows == 6


def test_a_partition_that_the_query_leaves_out_may_change_without_another_computation(
    folder: Path, tmp_path: Path, table: Relation
) -> None:
    def version(sql: str) -> str:
        request = QueryRequest(sql, tables=str(tmp_path), engine="duckdb", store=str(tmp_path / "store"))
        store = ParquetCheckpointStore(request.store_place)
        return gather(request, store, SystemClock(), run_id="r").versions["t"]

    for k in (1, 2):
        (tmp_path / f"t/k={k}").mkdir(parents=True)
        pq.write_table(pa.table({"v": [k]}), tmp_path / f"t/k={k}/1.parquet")
    one, both = "SELECT v FROM t WHERE k = 1", "SELECT v FROM t"
    before = version(one), version(both)
    pq.write_table(pa.table({"v": [5, 6]}), tmp_path / "t/k=2/2.parquet")
    assert version(one) == before[0]
    assert version(both) != before[1]


def test_fewer_bytes_are_read(table: Relation, tmp_path: Path) -> None:
    def read(engine: DuckDbEngine, condition: str) -> int:
        sql = f"SELECT sum(v) AS s, count(w) AS n FROM t {condition}"
        place = StorageLocation(tmp_path / condition[-3:])
        Path(place.root).mkdir()
        return engine.run(StageJob(sql, sql, sql, (kept(sql, table),), place)).input_bytes

    with DuckDbEngine.start() as engine:
        whole = read(engine, "WHERE 1=1")
        assert 0 < read(engine, "WHERE k = 1 AND s = 'b'") < whole / 4
