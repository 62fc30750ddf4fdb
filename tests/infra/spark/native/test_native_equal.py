"""Whatever is computed natively is what Spark computes: random statements, whole and in slices."""

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

from ebbflow.infra.spark import relations
from ebbflow.infra.spark.engine import SparkEngine
from ebbflow.infra.spark.native.catalyst import resolved
from ebbflow.infra.spark.native.exchange.merging import Merging, merging
from ebbflow.infra.spark.native.programs import program
from tests.infra.spark.native.answers import (
    KINDS,
    SIZES,
    answers,
    divided_in_waves,
    ordered,
    outcome,
    sessions,
)
from tests.infra.spark.native.statements_random import counted, keyed, statement, table, united

pytestmark = [pytest.mark.spark(shared=True), pytest.mark.timeout(1200)]


@pytest.fixture(scope="module", name="folder")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    for kind in KINDS:
        (folder / kind).mkdir()
        for number, name in enumerate(SIZES):
            path = folder / kind / f"{name}.parquet"
            table(path, random.Random(number), wild=kind == "wild", repeated=kind == "repeated")
    return folder


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


@pytest.mark.parametrize(
    ("sets", "rolled_up"),
    {
        "ROLLUP(s, b)": True,
        "CUBE(s, b, k)": True,
        "'x', ROLLUP(s, b)": True,
        "GROUPING SETS ((s), (b), (b, s), ())": True,
        "GROUPING SETS ((s), (b))": False,
        "GROUPING SETS ((s), (s), (b, s), ())": True,
    }.items(),
)
@pytest.mark.parametrize("rows", ["one", "one WHERE i > 100 AND i < 3"])
def test_sets_of_groups_are_computed_natively(
    spark: SparkEngine, folder: Path, sets: str, rolled_up: bool, rows: str
) -> None:
    items = "count(*) AS n, count(b) AS c, sum(e) AS v, avg(i) AS m, max(t) AS x, count(DISTINCT i) AS d"
    sql = f"SELECT s, b, {items}, sum(i) FILTER (WHERE b) AS w, stddev(i) AS z FROM {rows} GROUP BY {sets}"
    session = sessions(spark, folder)["tame"]
    assert outcome(session, folder / "tame", sql) == "equal"
    frame = session.sql(sql)
    made = program(resolved(frame), relations.columns(frame), SIZES, escapes=False)
    assert ("FROM r0" in made.first, "unnest(range(" in made.first) == (rolled_up, not rolled_up)


RANKED = {
    "the first ones of each": ("SELECT k, i FROM (SELECT k, i, {r} AS r FROM one) WHERE r <= 2", True),
    "the first of each, by another name": (
        "SELECT n FROM (SELECT r AS n, i FROM (SELECT i, {r} AS r FROM one) WHERE i > 0) WHERE n = 1", True),
    "of groups": ("SELECT * FROM (SELECT k, i, {r} AS r FROM one GROUP BY k, i) WHERE r < 3 AND i > 5", True),
    "all": ("SELECT k, i, {r} AS r FROM one", False),
    "the last ones": ("SELECT k FROM (SELECT k, {r} AS r FROM one) WHERE r >= 2", False),
    "some, beside a sum of all": (
        "SELECT k, s FROM (SELECT k, {r} AS r, sum(i) OVER (PARTITION BY k) AS s FROM one) WHERE r <= 2", False),
    "some, below a sum of all": (
        "SELECT s FROM (SELECT r, sum(k) OVER () AS s FROM (SELECT k, {r} AS r FROM one)) WHERE r <= 2", False),
}  # fmt: skip


@pytest.mark.parametrize("rank", ["rank()", "dense_rank()"])
@pytest.mark.parametrize(("sql", "limited"), RANKED.values(), ids=RANKED)
def test_slices_keep_rows_of_the_first_ranks(
    spark: SparkEngine, folder: Path, sql: str, limited: bool, rank: str
) -> None:
    text = sql.format(r=f"{rank} OVER (PARTITION BY k ORDER BY i DESC)")
    for kind in ("tame", "repeated"):
        session = sessions(spark, folder)[kind]
        assert outcome(session, folder / kind, text) in ("equal", "exchanged")
    frame = session.sql(text)
    made = program(resolved(frame), relations.columns(frame), SIZES, escapes=False)
    several = merging(made, made.merge)
    first = made.first if several is None else several.split.first
    assert f"{rank} OVER" in made.merge
    assert (f"{rank} OVER" in first) == limited


def test_several_tasks_merge_groups(spark: SparkEngine, folder: Path) -> None:
    session = sessions(spark, folder)["tame"]

    def found(sql: str) -> Merging | None:
        assert outcome(session, folder / "tame", sql) == "equal"
        frame = session.sql(sql)
        made = program(resolved(frame), relations.columns(frame), SIZES, escapes=False)
        return merging(made, made.merge)

    grouped = "SELECT k, b, count(DISTINCT i) AS n, avg(e) AS v FROM one GROUP BY k, b"
    by_keys = found(grouped)
    assert by_keys is not None
    assert (by_keys.by, by_keys.split.merge) == (("g0", "g1"), "")
    windowed = f"SELECT *, sum(n) OVER (PARTITION BY k) AS s FROM ({grouped}) ORDER BY s, k, b, n, v LIMIT 9"
    by_partition = found(windowed)
    assert by_partition is not None
    assert by_partition.by == ("g0",)
    assert "OVER" in by_partition.split.first
    assert "OVER" not in by_partition.split.merge
    assert found("SELECT count(*) AS n FROM one") is None
    assert found(f"SELECT k FROM ({grouped}) WHERE v > (SELECT avg(i) FROM two)") is None


@pytest.mark.parametrize(
    "call",
    [
        "sum(CAST(i AS DOUBLE))",
        "max(grouping(s))",
        "sum(i) FILTER (WHERE grouping(s) = 0)",
        "count(CASE WHEN grouping(s) = 1 THEN 1 END)",
    ],
)
def test_what_tells_sets_apart_is_not_rolled_up(spark: SparkEngine, folder: Path, call: str) -> None:
    session = sessions(spark, folder)["tame"]
    sql = f"SELECT s, {call} AS v FROM one GROUP BY ROLLUP(s)"
    assert outcome(session, folder / "tame", sql) == "equal"
    frame = session.sql(sql)
    made = program(resolved(frame), relations.columns(frame), SIZES, escapes=False)
    assert "unnest(range(" in made.first


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
