"""Row groups that no row of a statement is in are in no slice, and rows that joins drop are not exchanged."""

import datetime as dt
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbflow.infra.protocols import Relation, StageJob
from ebbflow.infra.spark import relations
from ebbflow.infra.spark.engine import SparkEngine
from ebbflow.infra.spark.native.catalyst import resolved
from ebbflow.infra.spark.native.exchange import division, within
from ebbflow.infra.spark.native.exchange.division import Division
from ebbflow.infra.spark.native.exchange.program import Program
from ebbflow.infra.spark.native.exchange.within import Within, learned, needed
from ebbflow.infra.spark.native.objects import Rows
from ebbflow.infra.spark.native.programs import program
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables.parquet import discover

pytestmark = [pytest.mark.spark(shared=True), pytest.mark.timeout(280)]

FIRST = dt.date(2026, 1, 1)


@pytest.fixture(scope="module", name="tables")
def _tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Relation]:
    """Return a table of a hundred days, ten a row group, and three of other rows."""
    folder = tmp_path_factory.mktemp("within")
    days = [FIRST + dt.timedelta(n // 10) for n in range(1000)]
    columns = {
        "day": days,
        "k": range(1000),
        "c": [n % 100 for n in range(1000)],
        "x": [n / 4 for n in range(1000)],
    }
    made = {
        "events": pa.table(columns),
        "kinds": pa.table({"kind": range(4), "name": ["a", "b", "a", "c"]}),
        "customers": pa.table({"c": range(100), "kind": [n % 4 for n in range(100)]}),
    }
    for name, table in made.items():
        (folder / name).mkdir()
        pq.write_table(table, folder / name / "a.parquet", row_group_size=100)
    return {relation.name: relation for relation in discover(StorageLocation(str(folder)))}


def planned(spark: SparkEngine, tables: dict[str, Relation], sql: str) -> tuple[Program, Any]:
    """Return a statement's program, and Spark's frame of it."""
    session = spark._session.newSession()
    for relation in tables.values():
        session.read.parquet(relation.files[0].path).createOrReplaceTempView(relation.name)
    frame = session.sql(sql)
    sizes = {"events": 8_000, "kinds": 1, "customers": 1_000}
    return program(resolved(frame), relations.columns(frame), sizes, escapes=False), frame


@pytest.mark.parametrize(
    ("where", "groups"),
    [
        ("day >= DATE '2026-02-05' AND day < DATE '2026-02-20'", range(3, 5)),
        ("day BETWEEN '2026-02-05' AND '2026-02-07' AND x > 1", range(3, 4)),
        ("day = DATE '2026-03-01'", range(5, 6)),
        ("day IN (DATE '2026-01-02', DATE '2026-01-15')", range(2)),
        ("k > 899", range(9, 10)),
        ("450 >= k AND k > CAST(210 AS BIGINT)", range(2, 5)),
        ("k = 2000", range(0)),
        ("k > 100 OR day = DATE '2026-01-01'", None),
        ("c = 5", None),  # which each row group may have
        ("k + 1 > 900", None),
        ("k <> 5", None),
        ("true", None),
    ],
)
def test_row_groups_that_a_tables_own_tests_exclude_are_in_no_slice(
    spark: SparkEngine, tables: dict[str, Relation], where: str, groups: range | None
) -> None:
    made, frame = planned(spark, tables, f"SELECT count(*) AS n, sum(k) AS v FROM events WHERE {where}")
    path = tables["events"].files[0].path
    expected = None if groups is None else [(Rows(path, 100 * n, 100 * n + 99), 100) for n in groups]
    assert needed(tables["events"], made.within) == expected
    rows = (
        " OR ".join(f"file_row_number BETWEEN {100 * n} AND {100 * n + 99}" for n in groups or ()) or "false"
    )
    read = f"SELECT * FROM read_parquet('{path}', file_row_number = true) WHERE {'true' if groups is None else rows}"
    with duckdb.connect() as connection:
        connection.execute(f"CREATE VIEW s0 AS {read}")
        assert connection.execute(made.whole).fetchall() == [tuple(row) for row in frame.collect()]


def test_slices_share_the_row_groups_that_are_needed(
    spark: SparkEngine, tables: dict[str, Relation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(division, "_SMALLEST", 1)
    found: list[Any] = []
    whole = Division.way

    def way(self: Division, *rest: Any) -> Any:
        found.append(whole(self, *rest))
        return found[-1]

    monkeypatch.setattr(Division, "way", way)
    output = StorageLocation(str(tmp_path / "output"))
    Path(output.root).mkdir()
    sql = "SELECT day, sum(x) AS v, stddev(k) AS s FROM events WHERE k BETWEEN 700 AND 899 GROUP BY day"
    job = StageJob("within", "within", sql, (tables["events"],), output, native=True)
    result = spark.run(job)
    assert (result.native, result.rows) == (True, 20)
    assert [[(some.first, some.last) for some in one.cut.rows] for one in found[0]] == [
        [(700, 799)],
        [(800, 899)],
    ]
    told = pq.read_table(output.root).sort_by("day").to_pylist()
    assert told[0] == {
        "day": dt.date(2026, 3, 12),
        "v": sum(range(700, 710)) / 4,
        "s": pytest.approx(3.02765035),
    }


@pytest.mark.parametrize(
    ("joined", "expected"),
    [
        ("JOIN kinds ON events.k = kinds.kind WHERE kinds.name = 'c'", (Within("k", 3, 3),)),
        ("JOIN kinds ON kinds.kind = events.k AND kinds.name <> 'c'", (Within("k", 0, 2),)),
        ("JOIN kinds ON events.k = kinds.kind WHERE kinds.name = 'nothing'", ()),
        ("JOIN kinds ON events.k = kinds.kind WHERE 1 / (kinds.kind - 1) > 0", ()),  # which fails of some
        (
            "JOIN customers ON events.c = customers.c WHERE customers.kind = 1",
            (),
        ),  # each row group has all keys
        ("LEFT JOIN kinds ON events.k = kinds.kind AND kinds.name = 'c'", ()),
        ("JOIN kinds ON events.k = kinds.kind", ()),
    ],
)
def test_small_tables_tell_which_keys_slices_of_a_large_one_need(
    spark: SparkEngine,
    tables: dict[str, Relation],
    monkeypatch: pytest.MonkeyPatch,
    joined: str,
    expected: tuple[Within, ...],
) -> None:
    monkeypatch.setattr(within, "_LARGE", 1)
    made, _ = planned(spark, tables, f"SELECT count(*) AS n, sum(x) AS v FROM events {joined}")
    scans = {number: tables[name] for number, name in made.scans.items()}
    assert made.sliced is not None
    assert learned(scans[made.sliced], made.learnable, scans) == expected


def test_rows_that_a_join_below_an_aggregate_drops_are_not_exchanged(
    spark: SparkEngine, tables: dict[str, Relation]
) -> None:
    made, _ = planned(
        spark,
        tables,
        "SELECT customers.c, m.n FROM customers JOIN (SELECT events.c AS c, count(*) AS n FROM events JOIN kinds ON "
        "events.k = kinds.kind WHERE kinds.name = 'a' GROUP BY events.c) m ON m.c = customers.c WHERE n > 0",
    )
    assert made.ways is not None
    exchanges = made.ways.made(made.ways.keys[0]).exchanges
    numbers = {name: number for number, name in made.scans.items()}
    one = exchanges[numbers["events"]]
    assert one.others == (numbers["kinds"],)
    with duckdb.connect() as connection:
        for name, number in numbers.items():
            connection.execute(
                f"CREATE VIEW s{number} AS SELECT * FROM read_parquet('{tables[name].files[0].path}')"
            )
        assert sorted(k for (k, *_) in connection.execute(one.sql).fetchall() if k is not None) == [0, 2]


@pytest.mark.parametrize(
    "below",
    [
        "(SELECT * FROM events ORDER BY x LIMIT 5) e JOIN kinds ON e.k = kinds.kind",
        "events e LEFT JOIN kinds ON e.k = kinds.kind AND kinds.name = 'a'",
    ],
    ids=["a limit", "an outer join"],
)
def test_rows_that_something_below_the_join_counts_are_exchanged(
    spark: SparkEngine, tables: dict[str, Relation], below: str
) -> None:
    made, _ = planned(
        spark,
        tables,
        "SELECT customers.c, m.n FROM customers JOIN (SELECT e.c AS c, count(*) AS n FROM "
        f"{below} GROUP BY e.c) m ON m.c = customers.c WHERE n > 0",
    )
    for way in made.ways.keys if made.ways is not None else ():
        assert made.ways is not None
        assert all(not one.others for one in made.ways.made(way).exchanges.values())


def test_variances_are_those_of_all_rows_however_they_are_cut(
    spark: SparkEngine, tables: dict[str, Relation]
) -> None:
    calls = "var_pop(x - x + 0.1D) AS v, stddev(x) AS s, variance(CAST(k AS DOUBLE)) AS w"
    sql = f"SELECT {calls} FROM events WHERE k < 4"
    made, frame = planned(spark, tables, sql)
    with duckdb.connect() as connection:
        for number, test in enumerate(("k < 3", "k = 3", "k > 3 AND k < 4")):
            source = f"read_parquet('{tables['events'].files[0].path}')"
            connection.execute(f"CREATE OR REPLACE VIEW s0 AS SELECT * FROM {source} WHERE {test}")
            into = "INSERT INTO parts" if number else "CREATE TABLE parts AS"
            connection.execute(f"{into} {made.first}")
        found = connection.execute(made.merge).fetchone()
    assert found is not None
    assert found[0] == 0.0
    assert found == pytest.approx(tuple(frame.collect()[0]), rel=1e-12)


def test_variances_of_what_is_no_double_are_sparks(spark: SparkEngine, tables: dict[str, Relation]) -> None:
    made, frame = planned(spark, tables, f"SELECT variance(k + {2**60}) AS v FROM events WHERE k IN (0, 1)")
    assert frame.collect()[0][0] == 0.0
    with duckdb.connect() as connection:
        connection.execute(
            f"CREATE VIEW s0 AS SELECT * FROM read_parquet('{tables['events'].files[0].path}')"
        )
        with pytest.raises(duckdb.Error, match="Spark decides"):
            connection.execute(made.whole)
