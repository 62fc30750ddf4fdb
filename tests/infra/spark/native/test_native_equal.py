"""Whatever is computed natively is what Spark computes: random statements, whole and in slices."""

import datetime as dt
import random
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import settings

from ebbflow.infra.protocols import Relation
from ebbflow.infra.spark import relations
from ebbflow.infra.spark.engine import SparkEngine
from ebbflow.infra.spark.native.catalyst import NotNativeError, resolved
from ebbflow.infra.spark.native.exchange.costs import Exchanged
from ebbflow.infra.spark.native.exchange.hashes import BUCKET
from ebbflow.infra.spark.native.exchange.program import Program, Slice
from ebbflow.infra.spark.native.exchange.waves import Waves, waves
from ebbflow.infra.spark.native.programs import program
from ebbflow.infra.spark.native.slices import Cut
from tests.infra.spark.native.statements_random import counted, keyed, statement, table, united

pytestmark = [pytest.mark.spark(shared=True), pytest.mark.timeout(1200)]

SIZES = {"one": 8, "two": 1}
KINDS = (
    "tame",
    "wild",
    "repeated",
)  # with values at which types end, and with keys that are null or not unique


@pytest.fixture(scope="module", name="folder")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    for kind in KINDS:
        (folder / kind).mkdir()
        for number, name in enumerate(SIZES):
            path = folder / kind / f"{name}.parquet"
            table(path, random.Random(number), wild=kind == "wild", repeated=kind == "repeated")
    return folder


def sessions(spark: SparkEngine, folder: Path) -> dict[str, Any]:
    """Return a session for each kind of tables."""
    found = {kind: spark._session.newSession() for kind in KINDS}
    for kind, session in found.items():
        for name in SIZES:
            session.read.parquet(str(folder / kind / f"{name}.parquet")).createOrReplaceTempView(name)
    return found


def answers(made: Program, tables: Path) -> list[list[tuple[Any, ...]]]:
    """Return the rows of a program, as a whole, in slices that read of other tables what their keys need, and in
    ranges of each key's hashes."""
    with duckdb.connect() as connection:
        for number, name in made.scans.items():
            path = tables / f"{name}.parquet"
            connection.execute(f"CREATE VIEW s{number} AS SELECT * FROM read_parquet('{path}')")
        found = [connection.execute(made.whole).fetchall()]
        if made.arms:
            parts = [
                part for n, arm in enumerate(made.arms) for part in sliced(connection, arm, tables, f"arm{n}")
            ]
            found.append(merged(connection, made.arms[0].merge, parts, {}))
        if made.sliced is None:
            return found
        if made.full:
            return found + exchanged(connection, made, tables)
        found.append(merged(connection, made.merge, sliced(connection, made, tables, "part"), {}))
        try:
            return found + exchanged(connection, made, tables)
        except (duckdb.BinderException, duckdb.CatalogException, duckdb.ParserException) as error:
            raise AssertionError(f"{error}\n{made.ways}") from error


def sliced(connection: duckdb.DuckDBPyConnection, made: Program, tables: Path, name: str) -> list[str]:
    """Return the tables of what a program's slices write, each of which reads of other tables what its keys need."""
    if made.sliced is None:
        connection.execute(f"CREATE TABLE {name} AS {made.first}")
        return [name]
    path = tables / f"{made.scans[made.sliced]}.parquet"
    parts = []
    for part in range(3):
        connection.execute(
            f"CREATE OR REPLACE VIEW s{made.sliced} AS SELECT * FROM read_parquet('{path}', "
            f"file_row_number = true) WHERE file_row_number BETWEEN {20 * part} AND {20 * part + 19}"
        )
        narrowed = ranges(connection, made)
        for number, tests in narrowed.items():
            source = f"read_parquet('{tables / f'{made.scans[number]}.parquet'}')"
            connection.execute(
                f"CREATE OR REPLACE VIEW s{number} AS SELECT * FROM {source} WHERE {' AND '.join(tests)}"
            )
        connection.execute(f"CREATE TABLE {name}{part} AS {made.first}")
        for number in narrowed:
            path_of = tables / f"{made.scans[number]}.parquet"
            connection.execute(f"CREATE OR REPLACE VIEW s{number} AS SELECT * FROM read_parquet('{path_of}')")
        parts.append(f"{name}{part}")
    connection.execute(f"CREATE OR REPLACE VIEW s{made.sliced} AS SELECT * FROM read_parquet('{path}')")
    return parts


def divided_in_waves(made: Program) -> Waves | None:
    """Return the waves of a program."""
    scans = {number: Relation(name, "file", (), ()) for number, name in made.scans.items()}
    return waves(made, scans, 1, 0, lambda one: [Slice(Cut(()), (), 0.0, one)])


def in_waves(made: Program, tables: Path) -> list[list[tuple[Any, ...]]]:
    """Return the rows of a program whose aggregates are computed of slices each by itself, if some can be."""
    found = divided_in_waves(made)
    if found is None:
        return []
    with duckdb.connect() as connection:
        for number, name in made.scans.items():
            path = tables / f"{name}.parquet"
            connection.execute(f"CREATE VIEW s{number} AS SELECT * FROM read_parquet('{path}')")
        try:
            for piece in (one for wave in found.pieces for one in wave):
                programs = [one.made for one in piece.slices]
                parts = [
                    sliced(connection, one, tables, f"{piece.name}_{n}_") for n, one in enumerate(programs)
                ]
                rows = " UNION ALL ".join(f"SELECT * FROM {part}" for listed in parts for part in listed)
                connection.execute(f"CREATE VIEW {piece.name} AS {rows}")
            return [connection.execute(found.merge).fetchall()]
        except (duckdb.BinderException, duckdb.CatalogException, duckdb.ParserException) as error:
            raise AssertionError(f"{error}\n{found}") from error


def merged(
    connection: duckdb.DuckDBPyConnection, merge: str, parts: list[str], views: dict[int, str]
) -> list[tuple[Any, ...]]:
    """Return the rows of a program whose parts are tables of these names, once scans are ``views`` again."""
    for number, sql in views.items():
        connection.execute(f"CREATE OR REPLACE VIEW s{number} AS {sql}")
    rows = " UNION ALL ".join(f"SELECT * FROM {part}" for part in parts)
    connection.execute(f"CREATE OR REPLACE VIEW parts AS {rows}")
    return connection.execute(merge or "SELECT * FROM parts").fetchall()


def exchanged(
    connection: duckdb.DuckDBPyConnection, made: Program, tables: Path
) -> list[list[tuple[Any, ...]]]:
    """Return the rows of a program that exchanges all that it can, by each key, and groups of each scan where calls
    read that one only; one range's rows are in two parts."""
    found, ways = [], made.ways
    for key, pairs in enumerate(ways.keys[:2] if ways is not None else ()):
        assert ways is not None
        early = (ways.early(pairs, number) for number in pairs)
        for way, one in enumerate((ways.made(pairs), *early)):
            if one is not None and made.sliced in one.exchanges:
                found += by_hash(connection, made, one, tables, f"{key}_{way}")
    return found


def by_hash(
    connection: duckdb.DuckDBPyConnection, made: Program, way: Exchanged, tables: Path, name: str
) -> list[list[tuple[Any, ...]]]:
    """Return the rows of a program that exchanges so; groups are those of slices."""
    exchanges, split, apart, whole, _ = way
    shown = {n: f"SELECT * FROM read_parquet('{tables / made.scans[n]}.parquet')" for n in exchanges}
    for number, exchange in exchanges.items():
        for part in range(3 if exchange.groups else 1):
            rows = f" LIMIT 20 OFFSET {20 * part}" if exchange.groups else ""
            connection.execute(f"CREATE OR REPLACE VIEW s{number} AS {shown[number]}{rows}")
            into = "INSERT INTO" if part else "CREATE TABLE"
            connection.execute(f"{into} x{name}_{number} {'' if part else 'AS '}{exchange.sql}")
        connection.execute(f"CREATE OR REPLACE VIEW s{number} AS {shown[number]}")
    for number in exchanges:
        connection.execute(f"CREATE OR REPLACE VIEW s{number} AS SELECT * FROM x{name}_{number}")
    found = [connection.execute(whole).fetchall()]
    parts = []
    for low, high, half in ((0, 400, 0), (0, 400, 1), (401, 1023, None)):
        if made.full and half == 1:
            continue
        for number in exchanges:
            own = "" if half is None or made.full or number != made.sliced else f" AND rowid % 2 = {half}"
            connection.execute(
                f"CREATE OR REPLACE VIEW s{number} AS SELECT * FROM x{name}_{number} "
                f'WHERE "{BUCKET}" BETWEEN {low} AND {high}{own}'
            )
        parts.append(f"part{name}_{low}_{half}")
        connection.execute(f"CREATE TABLE {parts[-1]} AS {split.first}")
    found.append(merged(connection, split.merge, parts, shown))
    parts = []
    for low, high in ((0, 400), (401, 1023)):
        for number in exchanges:
            connection.execute(
                f"CREATE OR REPLACE VIEW s{number} AS SELECT * FROM x{name}_{number} "
                f'WHERE "{BUCKET}" BETWEEN {low} AND {high}'
            )
        parts.append(f"apart{name}_{low}")
        connection.execute(f"CREATE TABLE {parts[-1]} AS {apart.first}")
    found.append(merged(connection, apart.merge, parts, shown))
    return found


def ranges(connection: duckdb.DuckDBPyConnection, made: Program) -> dict[int, list[str]]:
    """Return the tests of other scans' rows that a slice's keys allow, by the scan."""
    found: dict[int, list[str]] = {}
    for one in made.narrowings:
        key = f'"{one.column}"'
        low, high, rows, known = connection.execute(
            f"SELECT min({key}), max({key}), count(*), count({key}) FROM s{made.sliced}"
        ).fetchall()[0]
        for number, column in one.others if 0 < rows == known else ():
            literals = (repr(v) if isinstance(v, int) else f"DATE '{v}'" for v in (low, high))
            found.setdefault(number, []).append(f'"{column}" BETWEEN {" AND ".join(literals)}')
    return found


def ordered(rows: list[tuple[Any, ...]]) -> list[str]:
    """Return rows for comparison: the scales of decimals are those of their types, which were compared before, and
    sums of doubles are in the order of tasks."""

    def plain(value: Any) -> Any:
        if isinstance(value, float):
            return f"{value + 0.0:.10g}"
        if isinstance(value, dt.datetime) and value.tzinfo is not None:  # Spark gives what local clocks show
            return value.astimezone().replace(tzinfo=None)
        return value.normalize() if isinstance(value, Decimal) else value

    return sorted(repr([plain(value) for value in row]) for row in rows)


def outcome(session: Any, tables: Path, sql: str) -> str:
    """Return what becomes of a statement; fail where it is computed natively and the answer is not Spark's."""
    try:
        frame = session.sql(sql)
    except Exception:  # of types that do not go together
        return "no statement"
    try:
        made = program(resolved(frame), relations.columns(frame), SIZES, escapes=False)
        found, waved = answers(made, tables), in_waves(made, tables)
    except NotNativeError as error:
        return str(error)
    except duckdb.Error:
        return "left to Spark"
    expected = ordered([tuple(row) for row in frame.collect()])
    for rows in [*found, *waved]:
        assert ordered(rows) == expected, f"{sql}\n{made.whole}"
    return "united" if made.arms else "equal" if len(found) < 3 else "exchanged"


def test_random_statements_have_sparks_answer_or_none(spark: SparkEngine, folder: Path) -> None:
    asked = settings()
    begin = 0 if asked.derandomize else random.randrange(2**40)
    opened = sessions(spark, folder)
    seen: Counter[str] = Counter()
    for seed in range(begin, begin + asked.max_examples):
        kind = ("tame", "wild")[seed % 2]
        seen[outcome(opened[kind], folder / kind, statement(random.Random(seed)))] += 1
    assert seen["equal"] + seen["exchanged"] + seen["united"] > asked.max_examples / 2, seen


@pytest.mark.parametrize("made", [keyed, counted])
def test_slices_and_ranges_of_hashes_read_of_other_tables_only_what_their_keys_need(
    spark: SparkEngine, folder: Path, made: Callable[[random.Random], str]
) -> None:
    asked = settings()
    begin = 0 if asked.derandomize else random.randrange(2**40)
    opened = sessions(spark, folder)
    seen: Counter[str] = Counter()
    for seed in range(begin, begin + asked.max_examples):
        kind = ("tame", "repeated")[seed % 2]
        seen[outcome(opened[kind], folder / kind, made(random.Random(seed)))] += 1
    assert seen["equal"] + seen["exchanged"] > asked.max_examples / 2, seen
    assert seen["exchanged"] > asked.max_examples / 10, seen


def test_unions_are_computed_part_by_part(spark: SparkEngine, folder: Path) -> None:
    opened, seen = sessions(spark, folder), Counter[str]()
    for seed in range(settings().max_examples // 2):
        kind = ("tame", "repeated")[seed % 2]
        seen[outcome(opened[kind], folder / kind, united(random.Random(seed)))] += 1
    assert seen["united"] > settings().max_examples / 4, seen


@pytest.mark.parametrize("sets", ["ROLLUP(s, b)", "CUBE(s, b)", "GROUPING SETS ((s), (s), (b, s), ())"])
def test_sets_of_groups_are_computed_natively(spark: SparkEngine, folder: Path, sets: str) -> None:
    sql = f"SELECT s, b, grouping(s) AS g, count(*) AS n, sum(e) AS v FROM one GROUP BY {sets}"
    assert outcome(sessions(spark, folder)["tame"], folder / "tame", sql) == "equal"


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT upper(s) AS c, lower(s) AS d FROM one WHERE s NOT IN ('ähnlich', '日本語', '😀x')",
        "SELECT CAST(round(e, 0) AS INT) AS c FROM one",
        "SELECT 1 AS c FROM one HAVING true",
        "SELECT 1 AS c FROM one WHERE false HAVING true",
        "SELECT CAST(e AS DECIMAL(21,2)) / CAST(nullif(d, 0) AS DECIMAL(27,2)) AS c FROM one",
    ],
)
def test_what_is_proven_of_some_values_is_computed_natively(
    spark: SparkEngine, folder: Path, sql: str
) -> None:
    assert outcome(sessions(spark, folder)["tame"], folder / "tame", sql) == "equal"


def test_aggregates_of_one_table_are_computed_by_the_same_tasks(spark: SparkEngine, folder: Path) -> None:
    few = "FROM one WHERE i BETWEEN 1 AND 20"
    sql = (
        f"SELECT if((SELECT count(*) {few}) > 3, (SELECT avg(e) {few}), (SELECT avg(d) {few})) AS c, "
        "(SELECT sum(j) FROM one WHERE nullif(j, 0) IS NOT NULL AND i / j > 2) AS v, (SELECT max(s) FROM one) AS m, "
        "(SELECT count(DISTINCT s) FROM one) AS n FROM two WHERE k < 3"
    )
    session = sessions(spark, folder)["tame"]
    frame = session.sql(sql)
    found = divided_in_waves(program(resolved(frame), relations.columns(frame), SIZES, escapes=False))
    assert found is not None
    shared, apart = (one.made.first for one in found.slices)
    assert ("DISTINCT" in shared, "GROUP BY" in apart or "d0" in apart) == (False, True)
    assert (shared.count("WHERE"), shared.count("count(*)"), shared.count("sum(")) == (3, 1, 3)
    assert outcome(session, folder / "tame", sql) == "equal"


RELATED = {
    "an outer join of which groups are grouped again": (
        "WITH m AS (SELECT one.k AS k, count(two.i) AS n FROM one LEFT JOIN two ON one.k = two.k AND two.s NOT LIKE "
        "'%b' GROUP BY one.k) SELECT n, count(*) AS c FROM m GROUP BY n",
        {"one": {"k"}, "two": {"k", "i"}},
    ),
    "rows of which there are others, whatever these list": (
        "SELECT count(*) AS n FROM one WHERE one.s NOT LIKE '%b' AND EXISTS (SELECT *, 1 / 0 AS never FROM two t "
        "WHERE t.k = one.k AND t.i <> one.i) AND NOT EXISTS (SELECT * FROM two u WHERE u.k = one.k AND u.j < 3)",
        {"one": {"k", "i"}, "two": {"k", "i"}},
    ),
    "a subquery tied to a small filtered table": (
        "SELECT sum(one.e) AS v FROM one, two WHERE one.k = two.k AND two.i = 7 AND one.l > (SELECT min(l) FROM one "
        "o WHERE o.k = two.k AND o.j < 40)",
        {"one": {"k", "e", "l"}, "two": {"k"}},
    ),
    "a subquery above a join, tied to its small filtered side": (
        "SELECT sum(one.e) AS v FROM one JOIN (SELECT k FROM two WHERE two.i = 7) few ON one.k = few.k WHERE one.l > "
        "(SELECT min(l) FROM one o WHERE o.k = few.k AND o.j < 40)",
        {"one": {"k", "e", "l"}, "two": {"k"}},
    ),
    "subqueries in a subquery": (
        "SELECT two.s AS s FROM two WHERE two.k IN (SELECT k FROM one WHERE i IN (SELECT i FROM two t WHERE t.j < 30"
        ") AND e > (SELECT min(e) FROM one o WHERE o.k = one.k AND o.i = one.i))",
        {"one": {"k", "i", "e"}, "two": {"k", "s"}},
    ),
}


@pytest.mark.parametrize("kind", RELATED)
def test_what_is_exchanged_has_only_the_columns_and_keys_that_are_needed(
    spark: SparkEngine, folder: Path, kind: str
) -> None:
    sql, needed = RELATED[kind]
    frame = sessions(spark, folder)["tame"].sql(sql)
    plan = resolved(frame)
    made = program(plan, relations.columns(frame), SIZES, escapes=False)
    assert made.ways is not None
    exchanged_, _, apart, _, _ = made.ways.made(made.ways.keys[0])
    for number, one in exchanged_.items():
        assert set(one.columns) <= needed[made.scans[number]]
    if "small" in kind or "subqueries" in kind:
        assert {made.scans[number] for number, one in exchanged_.items() if one.others} == {"one"}
        assert sum(made.scans[number] == "one" for number in exchanged_) == 2
    else:
        assert "LIKE" in "".join(one.sql for one in exchanged_.values())
        assert "LIKE" not in apart.first
        assert apart.first.count("GROUP BY") == 2 * ("groups" in kind)
    for rows in answers(made, folder / "tame"):
        assert ordered(rows) == ordered([tuple(row) for row in frame.collect()])


LEFT, INNER = "one LEFT JOIN two ON one.k = two.k", "two JOIN (SELECT k, i, e, d FROM one) o ON o.k = two.k"
LEAST, OF = "WITH a AS (SELECT min(i) AS m FROM two)", "SELECT m FROM a"


@pytest.mark.parametrize(
    ("sql", "groups"),
    [
        (RELATED["an outer join of which groups are grouped again"][0], {"two": ("k",)}),
        (f"SELECT sum(o.e * (1 - o.d)) AS v FROM {INNER} GROUP BY two.k", {"one": ("k",)}),
        (
            f"SELECT max(o.i) AS v FROM {INNER} AND o.i > two.i AND o.e > 3 GROUP BY two.s",
            {"one": ("k", "i")},
        ),
        (f"SELECT o.i, count(o.d) + o.i AS v FROM {INNER} GROUP BY o.i", {"one": ("k", "i")}),
        (f"SELECT one.k, count(*) AS n FROM {LEFT} GROUP BY one.k", {"one": ("k",), "two": ("k",)}),
        (f"SELECT one.k, count(coalesce(two.i, 0)) AS n FROM {LEFT} GROUP BY one.k", {}),
        (f"SELECT one.k, count(two.i) FILTER (WHERE two.j > 3) AS n FROM {LEFT} GROUP BY one.k", {}),
        (f"SELECT one.k, count(DISTINCT two.i) AS n FROM {LEFT} GROUP BY one.k", {}),
        (f"SELECT one.k, sum(two.e) AS v, sum(one.e) AS w FROM {LEFT} GROUP BY one.k", {}),
        (f"SELECT one.k, count(two.i) AS n, sum(1) AS w FROM {LEFT} GROUP BY one.k", {}),
        (f"SELECT one.k, count(1 + 1) AS n FROM {LEFT} GROUP BY one.k", {}),
        (f"SELECT one.k, two.i FROM {LEFT}", {}),
        (
            f"{LEAST} SELECT one.k, count(CASE WHEN two.i > ({OF}) THEN 1 END) AS n FROM {LEFT} GROUP BY one.k",
            {},
        ),
        (f"{LEAST} SELECT one.k, count(two.i) + ({OF}) AS n FROM {LEFT} GROUP BY one.k", {"two": ("k",)}),
    ],
)
def test_groups_are_exchanged_where_calls_of_one_scan_can_be_combined_above_joins(
    spark: SparkEngine, folder: Path, sql: str, groups: dict[str, tuple[str, ...]]
) -> None:
    frame = sessions(spark, folder)["repeated"].sql(sql)
    made = program(resolved(frame), relations.columns(frame), SIZES, escapes=False)
    assert made.ways is not None
    found = {}
    for number in made.ways.keys[0]:
        if (way := made.ways.early(made.ways.keys[0], number)) is not None:
            found[made.scans[number]] = way.exchanges[number].columns
            assert [n for n, one in way.exchanges.items() if one.groups] == [number]
    assert found == groups
    for rows in answers(made, folder / "repeated") if groups else ():
        assert ordered(rows) == ordered([tuple(row) for row in frame.collect()])


def test_means_of_decimals_and_doubles_of_wide_ones_are_rounded_as_spark_does(
    spark: SparkEngine, tmp_path: Path
) -> None:
    rng, kinds = random.Random(7), ((7, 2), (10, 2), (10, 0), (10, 8), (5, 4))
    # of 32 rows half of the means lie between two decimals, and of ties among 160ths some are less in floating point
    sizes = [*(1, 3, 7, 32, 96, 160, 224) * 20, *(160,) * 40]
    groups = [group for group, count in enumerate(sizes) for _ in range(count)]
    columns: dict[str, Any] = {"g": pa.array(groups, pa.int32())}
    for precision, scale in kinds:
        most = {group: 10 ** rng.randint(1, precision) - 1 for group in set(groups)}
        values = [Decimal(rng.randint(-most[g] // 3, most[g])).scaleb(-scale) for g in groups]
        for last in range(len(groups) - 40 * 160, len(groups), 160):
            odd = 2 * rng.randrange(10 ** min(precision, 7) // 2) + 1
            values[last : last + 160] = [Decimal(odd).scaleb(-scale), *[Decimal(0)] * 159]
        columns[f"v{precision}_{scale}"] = pa.array(values, pa.decimal128(precision, scale))
    means = ", ".join(f"avg({name}) AS {name}" for name in columns if name != "g")
    over = ", ".join(f"avg({name}) OVER (PARTITION BY g) AS {name}" for name in columns if name != "g")
    wide = ((38, 10), (25, 3), (18, 2), (38, 0))
    for precision, scale in wide:
        digits = [rng.randrange(10 ** rng.randint(1, precision)) * rng.choice((-1, 1)) for _ in groups]
        values = [Decimal(f"{number}E-{scale}") for number in digits]
        columns[f"w{precision}_{scale}"] = pa.array(values, pa.decimal128(precision, scale))
    doubles = ", ".join(f"CAST({name} AS DOUBLE) AS {name}" for name in columns if name[0] == "w")
    rounded = ", ".join(f"round(CAST({name} AS DOUBLE), 2) AS r{name}" for name in columns if name[0] == "w")
    statements = (
        f"SELECT g, {means} FROM one GROUP BY g", f"SELECT DISTINCT g, {over} FROM one",
        f"SELECT g, {doubles} FROM one", f"SELECT {rounded} FROM one WHERE abs(w38_10) < 1e20 AND abs(w38_0) < 1e20",
    )  # fmt: skip
    pq.write_table(pa.table(columns), tmp_path / "one.parquet")
    session = spark._session.newSession()
    session.read.parquet(str(tmp_path / "one.parquet")).createOrReplaceTempView("one")
    for sql in statements:
        frame = session.sql(sql)
        made = program(resolved(frame), relations.columns(frame), {"one": 1}, escapes=False)
        with duckdb.connect() as connection:
            connection.execute(f"CREATE VIEW s0 AS SELECT * FROM read_parquet('{tmp_path / 'one.parquet'}')")
            assert ordered(connection.execute(made.whole).fetchall()) == ordered(
                [tuple(r) for r in frame.collect()]
            )


@pytest.mark.parametrize(
    ("filtered", "joined", "held"), [("two", "one", True), ("one", "two", False)], ids=["smaller", "largest"]
)
def test_what_subqueries_leave_of_a_table_is_computed_before_joins(
    spark: SparkEngine, folder: Path, filtered: str, joined: str, held: bool
) -> None:
    session = sessions(spark, folder)["tame"]
    frame = session.sql(
        f"SELECT {joined}.s AS s, count(*) AS n FROM {joined} JOIN (SELECT k FROM {filtered} WHERE {filtered}.i IN "
        f"(SELECT i FROM one WHERE i < 10)) f ON {joined}.k = f.k GROUP BY {joined}.s"
    )
    made = program(resolved(frame), relations.columns(frame), SIZES, escapes=False)
    assert ("m0 AS MATERIALIZED" in made.first) is held
    for rows in answers(made, folder / "tame"):
        assert ordered(rows) == ordered([tuple(row) for row in frame.collect()])


@pytest.mark.parametrize(
    ("sql", "told"),
    [
        ("SELECT sum(x) OVER (ORDER BY k) AS c FROM one", "running sum of doubles"),
        ("SELECT stddev(DISTINCT i) AS c FROM one", "distinct values"),
        ("SELECT avg(CAST(d AS DECIMAL(11,2))) AS c FROM one", "rounds twice"),
        ("SELECT upper(s) AS c FROM one", "left to Spark"),
        ("SELECT s RLIKE 'a+' AS c FROM one", "RLike"),
        ("SELECT CAST(s AS INT) AS c FROM one", "cast from string"),
        ("SELECT CAST(e AS INT) AS c FROM one", "cast from decimal"),
        ("SELECT CAST(99999999999999999999 AS BIGINT) AS c FROM one WHERE k < 0", "cast from decimal"),
        ("SELECT CAST(CAST(3000000000 AS BIGINT) AS INT) AS c FROM one WHERE k < 0", "of constants"),
        ("SELECT substring(s, -2, 1) AS c FROM one", "substring"),
        ("SELECT ntile(4) OVER (ORDER BY k) AS c FROM one", "NTile over a window"),
        ("SELECT sum(i) OVER (ORDER BY k ROWS 2 PRECEDING) AS c FROM one", "frame"),
        ("SELECT sum(w) OVER (PARTITION BY s) AS c FROM one", "more digits"),
        ("SELECT DISTINCT x FROM one", "whole rows with double"),
        ("SELECT s LIKE 'a\\\\_b' AS c FROM one", "escape"),
        ("SELECT i / 0 AS c FROM one WHERE false", "cast of a constant|quotient|left to Spark|equal"),
        ("SELECT k FROM one TABLESAMPLE (50 PERCENT)", "Sample"),
        ("SELECT rand() AS c FROM one", "Rand"),
    ],
)
def test_what_is_not_proven_equal_is_left_to_spark(
    spark: SparkEngine, folder: Path, sql: str, told: str
) -> None:
    found = outcome(sessions(spark, folder)["tame"], folder / "tame", sql)
    assert any(part in found for part in told.split("|")), found
