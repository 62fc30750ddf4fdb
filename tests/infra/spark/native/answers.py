"""What becomes of a statement natively, in every way of dividing it, beside Spark's answer."""

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb

from ebbflow.infra.protocols import Relation
from ebbflow.infra.spark import relations
from ebbflow.infra.spark.engine import SparkEngine
from ebbflow.infra.spark.native.catalyst import NotNativeError, resolved
from ebbflow.infra.spark.native.exchange.costs import Exchanged
from ebbflow.infra.spark.native.exchange.hashes import BUCKET
from ebbflow.infra.spark.native.exchange.merging import merging
from ebbflow.infra.spark.native.exchange.program import Program, Slice
from ebbflow.infra.spark.native.exchange.waves import Waves, waves
from ebbflow.infra.spark.native.programs import program
from ebbflow.infra.spark.native.slices import Cut

SIZES = {"one": 8, "two": 1}
KINDS = (
    "tame",
    "wild",
    "repeated",
)  # with values at which types end, and with keys that are null or not unique


def sessions(spark: SparkEngine, folder: Path) -> dict[str, Any]:
    """Return a session for each kind of tables."""
    found = {kind: spark._session.newSession() for kind in KINDS}
    for kind, session in found.items():
        for name in SIZES:
            session.read.parquet(str(folder / kind / f"{name}.parquet")).createOrReplaceTempView(name)
    return found


def opened(made: Program, tables: Path) -> duckdb.DuckDBPyConnection:
    """Return a new database in which a program's scans are views of the tables."""
    connection = duckdb.connect()
    for number, name in made.scans.items():
        path = tables / f"{name}.parquet"
        connection.execute(f"CREATE VIEW s{number} AS SELECT * FROM read_parquet('{path}')")
    return connection


def answers(made: Program, tables: Path) -> list[list[tuple[Any, ...]]]:
    """Return the rows of a program, as a whole, in slices that read of other tables what their keys need, and in
    ranges of each key's hashes."""
    with opened(made, tables) as connection:
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


def by_several(made: Program, tables: Path) -> list[list[tuple[Any, ...]]]:
    """Return the rows of a program whose groups several tasks merge, if that can be."""
    several = merging(made, made.merge) if made.sliced is not None and not made.full else None
    if several is None:
        return []
    with opened(made, tables) as connection:
        merged(connection, "", sliced(connection, made, tables, "part"), {})
        parts = several.parts(Relation("parts", "file", (), ()), 2)
        try:
            for number, part in enumerate(parts):
                connection.execute(f"CREATE TABLE share{number} AS {part.statement}")
            return [merged(connection, several.split.merge, ["share0", "share1"], {})]
        except (duckdb.BinderException, duckdb.CatalogException, duckdb.ParserException) as error:
            raise AssertionError(f"{error}\n{several}") from error


def divided_in_waves(made: Program) -> Waves | None:
    """Return the waves of a program."""
    scans = {number: Relation(name, "file", (), ()) for number, name in made.scans.items()}
    return waves(made, scans, 1, 0, lambda one: [Slice(Cut(()), (), 0.0, one)])


def in_waves(made: Program, tables: Path) -> list[list[tuple[Any, ...]]]:
    """Return the rows of a program whose aggregates are computed of slices each by itself, if some can be."""
    found = divided_in_waves(made)
    if found is None:
        return []
    with opened(made, tables) as connection:
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
        found, others = answers(made, tables), [*in_waves(made, tables), *by_several(made, tables)]
    except NotNativeError as error:
        return str(error)
    except duckdb.Error:
        return "left to Spark"
    expected = ordered([tuple(row) for row in frame.collect()])
    for rows in [*found, *others]:
        assert ordered(rows) == expected, f"{sql}\n{made.whole}"
    return "united" if made.arms else "equal" if len(found) < 3 else "exchanged"
