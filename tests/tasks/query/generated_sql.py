"""Queries made from a grammar of DuckDB's SQL, run by Ebbflow in several stages and by DuckDB alone, and compared."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb

from ebbflow.infra.errors import EngineError
from ebbflow.planners.errors import PlanningError
from ebbflow.tasks.query.opening import OpenedEngine, opened_engine
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import PlainOrchestrator, execute

Columns = tuple[tuple[str, str], ...]  # names and kinds: number, decimal, text, date, list, struct
_COLUMNS: Columns = (
    ("k", "number"), ("n", "number"), ("d", "decimal"), ("s", "text"), ("t", "date"), ("l", "list"), ("r", "struct"),
)  # fmt: skip
TABLES: dict[str, Columns] = {
    "a": _COLUMNS,
    "b": _COLUMNS[:5],
    "c": _COLUMNS[:4],
    "e": _COLUMNS,
}  # e is empty
_ROWS = 9
_TYPES = {
    "number": "INTEGER", "decimal": "DECIMAL(9,2)", "text": "VARCHAR", "date": "DATE", "list": "INTEGER[]",
    "struct": "STRUCT(x INTEGER, y VARCHAR)",
}  # fmt: skip
_VALUES = {
    "number": ("0", "1", "2", "3"),
    "decimal": ("0.50", "1.25", "-2.00"),
    "text": ("'a'", "'B'", "''", "'ab'"),
    "date": ("DATE '2024-02-29'", "DATE '2025-01-01'"),
    "list": ("[1, 2]", "[]", "[NULL, 3]"),
    "struct": ("{'x': 1, 'y': 'a'}", "{'x': NULL, 'y': 'b'}"),
}
_JOINS = (
    "JOIN",
    "JOIN",
    "JOIN",
    "LEFT JOIN",
    "RIGHT JOIN",
    "FULL JOIN",
    "SEMI JOIN",
    "ANTI JOIN",
    "CROSS JOIN",
)


@dataclass(frozen=True)
class Statement:
    """A generated query and the constructs that it has."""

    sql: str
    constructs: frozenset[str]


def fill(folder: Path, rng: random.Random) -> duckdb.DuckDBPyConnection:
    """Write the tables as Parquet files into ``folder``; return a database that has them as views."""
    connection = duckdb.connect()
    for table, columns in TABLES.items():
        typed = ", ".join(f"{name} {_TYPES[kind]}" for name, kind in columns)
        connection.execute(f"CREATE TABLE rows_of_{table} ({typed})")
        for _ in range(0 if table == "e" else _ROWS):
            row = ", ".join(rng.choice((*_VALUES[kind], "NULL")) for _, kind in columns)
            connection.execute(f"INSERT INTO rows_of_{table} VALUES ({row})")
        file = folder / f"{table}.parquet"
        connection.execute(f"COPY rows_of_{table} TO '{file}' (FORMAT parquet)")
        connection.execute(f"CREATE VIEW {table} AS SELECT * FROM '{file}'")
    return connection


class _Grammar:
    """Writes one query; its relations are aliases with the columns they have."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.used: set[str] = set()
        self._aliases = 0

    def query(self) -> str:
        """Return a whole query."""
        if self._may("cte", 0.25):
            if self._may("using", 0.3):  # on columns of one type
                body = self.select(1, ("number", "text"), named=True)
                return f"WITH w AS ({body}) SELECT * FROM (SELECT * FROM w JOIN c USING (n)) v"
            return f"WITH w AS ({self.select(1, named=True)}) SELECT * FROM w"
        if self._may("set operation", 0.2):
            sort = self.rng.choice(("UNION", "UNION ALL", "INTERSECT", "EXCEPT"))
            kind = self.rng.choice(("number", "text", "date"))
            arms = [self.select(1, kinds=(kind, "number")) for _ in range(2)]
            return f"{arms[0]} {sort} {arms[1]}"
        if self._may("natural join", 0.06):
            return "SELECT * FROM b NATURAL JOIN (SELECT n, k AS kk, s FROM c) q"
        if self._may("pivot", 0.05):
            return self.rng.choice((
                "PIVOT c ON k USING sum(n) GROUP BY s",
                "SELECT * FROM (SELECT k, n, s FROM c) PIVOT (count(n) FOR k IN (1, 2))",
                "UNPIVOT (SELECT k, n, s FROM c) ON k, n INTO NAME which VALUE val",
            ))  # fmt: skip
        if self._may("columns", 0.05):
            return "SELECT COLUMNS('k|n') FROM b"
        return self.select(0)

    def select(self, depth: int, kinds: Sequence[str] = (), *, named: bool = False) -> str:
        """Return a SELECT, with columns of ``kinds`` if they are given."""
        source, scope = self._from(depth)
        where = f" WHERE {self.condition(scope, depth)}" if self._may("where", 0.6) else ""
        if not kinds and self._may("grouping", 0.3):
            return self._grouped(source, where, scope, depth, named=named)
        wanted = kinds or [self.rng.choice([k for _, k in scope]) for _ in range(self.rng.randint(1, 3))]
        if not kinds and not named and self._may("star", 0.15):
            return f"SELECT * FROM {source}{where}"
        items = [self.expression(scope, kind, depth) for kind in wanted]
        if not kinds and self._may("window", 0.15):
            column = self._column(scope, "number")
            items.append(f"count({column}) OVER (PARTITION BY {column})")
        if named:
            items = [
                f"{item} AS {name}"
                for item, name in zip([*items, "1"], ("n", "q", "u", "v", "x"), strict=False)
            ]
        distinct = "DISTINCT " if self._may("distinct", 0.15) else ""
        order = (
            f" ORDER BY {self.rng.randint(1, len(items))}" if depth == 0 and self._may("order", 0.2) else ""
        )
        return f"SELECT {distinct}{', '.join(items)} FROM {source}{where}{order}"

    def _grouped(self, source: str, where: str, scope: Columns, depth: int, *, named: bool) -> str:
        key = self.expression(scope, self.rng.choice(("number", "text", "date")), _DEEPEST)
        number, text = self._column(scope, "number"), self._column(scope, "text")
        decimal = self._column(scope, "decimal")
        made = self.rng.choice((
            f"sum({number})", f"min({text})", f"count(DISTINCT {text})", f"avg({decimal})", "count(*)",
            f"max({decimal})", f"sum({decimal}) FILTER (WHERE {number} > 0)",
        ))  # fmt: skip
        name = (" AS n", " AS q") if named else ("", "")
        having = " HAVING count(*) > 1" if self._may("having", 0.2) else ""
        group = f"ROLLUP ({key})" if self._may("rollup", 0.1) else key
        return f"SELECT {key}{name[0]}, {made}{name[1]} FROM {source}{where} GROUP BY {group}{having}"

    def _from(self, depth: int) -> tuple[str, Columns]:
        source, scope = self._relation(depth)
        for _ in range(self.rng.choice((0, 1, 1, 2, 3)) if depth < _DEEPEST else 0):
            join = self.rng.choice(_JOINS)
            self.used.add(join.lower())
            other, more = self._relation(depth)
            if join == "CROSS JOIN":
                source += f" CROSS JOIN {other}"
            else:
                kind = self.rng.choice(("number", "text", "date"))
                source += f" {join} {other} ON {self._column(scope, kind)} = {self._column(more, kind)}"
            if join not in ("SEMI JOIN", "ANTI JOIN"):
                scope += more
        return source, scope

    def _relation(self, depth: int) -> tuple[str, Columns]:
        self._aliases += 1
        alias = f"t{self._aliases}"
        if depth < _DEEPEST - 1 and self._may("derived table", 0.15):
            body, names = self.select(_DEEPEST, ("number", "text", "decimal", "date")), ("n", "s", "d", "t")
            found = tuple(zip(names, ("number", "text", "decimal", "date"), strict=True))
            return f"({body}) AS {alias}({', '.join(names)})", tuple((f"{alias}.{n}", k) for n, k in found)
        table = self.rng.choice(("a", "a", "b", "b", "c", "e"))
        return f"{table} AS {alias}", tuple((f"{alias}.{name}", kind) for name, kind in TABLES[table])

    def condition(self, scope: Columns, depth: int) -> str:
        """Return a predicate over ``scope``."""
        column = self._column(scope, "number")
        if depth < _DEEPEST and self._may("subquery", 0.25):
            inner, has = self._from(_DEEPEST)
            return self.rng.choice((
                f"{column} IN (SELECT {self._column(has, 'number')} FROM {inner})",
                f"{column} NOT IN (SELECT {self._column(has, 'number')} FROM {inner})",
                f"EXISTS (SELECT 1 FROM {inner} WHERE {self._column(has, 'number')} = {column})",
                f"{column} > (SELECT avg({self._column(has, 'number')}) FROM {inner})",
            ))  # fmt: skip
        kind = self.rng.choice(("number", "decimal", "text", "date"))
        value = self._column(scope, kind)
        return self.rng.choice((
            f"{value} {self.rng.choice(('=', '<', '>=', '<>'))} {self.rng.choice(_VALUES[kind])}",
            f"{value} IS NOT NULL",
            f"NOT ({value} IN ({', '.join(_VALUES[kind])}))",
            f"({column} > 0 OR {value} IS NULL)",
            f"{value} IS DISTINCT FROM {self._column(scope, kind)}",
        ))  # fmt: skip

    def expression(self, scope: Columns, kind: str, depth: int) -> str:
        """Return an expression of ``kind`` over ``scope``."""
        column = self._column(scope, kind)
        number = self._column(scope, "number")
        choices: dict[str, tuple[str, ...]] = {
            "number": (f"{column} + 1", f"abs({column})", f"CASE WHEN {column} > 1 THEN {column} % 2 END"),
            "decimal": (f"{column} * 2", f"round({column}, 1)", f"coalesce({column}, 0)"),
            "text": (f"upper({column})", f"{column} || 'z'", f"coalesce({column}, 'none')"),
            "date": (f"{column} + INTERVAL 1 DAY", f"date_trunc('month', {column})"),
            "list": (f"list_sort({column})", f"len({column})", f"{column}[1]"),
            "struct": (f"{column}.x", f"struct_extract({column}, 'y')"),
        }  # fmt: skip
        if kind in ("list", "struct"):
            self.used.add("nested type")
        if depth < _DEEPEST - 1 and kind == "number" and self._may("scalar subquery", 0.1):
            inner, has = self._from(_DEEPEST)
            found = self._column(has, "number")
            return f"(SELECT max({found}) FROM {inner} WHERE {self._column(has, 'number')} <= {number})"
        return self.rng.choice((column, column, *choices[kind]))

    def _column(self, scope: Columns, kind: str) -> str:
        found = [name for name, one in scope if one == kind]
        return self.rng.choice(found) if found else f"CAST(NULL AS {_TYPES[kind]})"

    def _may(self, construct: str, chance: float) -> bool:
        if self.rng.random() >= chance:
            return False
        self.used.add(construct)
        return True


_DEEPEST = 2


def generated(seed: int) -> Statement:
    """Return the query of ``seed``."""
    grammar = _Grammar(random.Random(seed))
    return Statement(grammar.query(), frozenset(grammar.used))


@dataclass(frozen=True)
class Answer:
    """What a query gives: names and rows, sorted, or the error's text; and whether it was planned."""

    names: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    error: str = ""
    planned: bool = False
    stages: int = 0


class Comparison:
    """Runs statements both ways."""

    def __init__(self, folder: Path, opened: OpenedEngine, seed: int) -> None:
        self._tables, self._store, self._opened = folder / "tables", folder / "store", opened
        self._tables.mkdir()
        self._plain = fill(self._tables, random.Random(seed))

    def differences(self, statement: Statement) -> tuple[str, Answer]:
        """Return how Ebbflow's answer differs from DuckDB's, empty if it does not; and Ebbflow's."""
        theirs, ours = self._by_duckdb(statement.sql), self._by_ebbflow(statement.sql)
        if bool(theirs.error) != bool(ours.error):
            return f"DuckDB: {theirs.error or 'an answer'}; Ebbflow: {ours.error or 'an answer'}", ours
        if theirs.names != ours.names:
            return f"columns {theirs.names} of DuckDB, {ours.names} of Ebbflow", ours
        if theirs.rows != ours.rows:
            more, less = Counter(ours.rows) - Counter(theirs.rows), Counter(theirs.rows) - Counter(ours.rows)
            return f"rows {list(less)[:3]} of DuckDB alone, {list(more)[:3]} of Ebbflow alone", ours
        return "", ours

    def _by_duckdb(self, sql: str) -> Answer:
        try:
            result = self._plain.sql(sql)
            return Answer(distinct(result.columns), _rows(result.to_arrow_table()))
        except duckdb.Error as error:
            return Answer(error=f"{type(error).__name__}: {str(error).splitlines()[0]}")

    def _by_ebbflow(self, sql: str) -> Answer:
        request = QueryRequest(
            sql,
            tables=str(self._tables),
            engine="duckdb",
            dialect="duckdb",
            materialize="every-join",
            store=str(self._store),
        )
        try:
            outcome = execute(request, PlainOrchestrator(), opened=self._opened)
        except (PlanningError, EngineError) as error:
            return Answer(error=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        planned = not any("runs whole" in note for plan in outcome.report.plans for note in plan.notes)
        table = outcome.to_arrow()
        return Answer(tuple(table.column_names), _rows(table), "", planned, len(outcome.report.stages))


@contextmanager
def comparison(folder: Path, seed: int = 0) -> Iterator[Callable[[Statement], tuple[str, Answer]]]:
    """Yield ``Comparison.differences`` over tables filled by ``seed`` in ``folder``."""
    request = QueryRequest("SELECT 1", tables=str(folder), engine="duckdb", store=str(folder / "store"))
    with opened_engine(request) as opened:
        yield Comparison(folder, opened, seed).differences


def distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Return ``names`` with a number behind those that are there already: a Parquet file cannot hold two of one."""
    out: list[str] = []
    taken = {name.lower() for name in names}
    for name in names:
        fresh, number = name, 0
        while fresh.lower() in (one.lower() for one in out) or (number and fresh.lower() in taken):
            number += 1
            fresh = f"{name}_{number}"
        out.append(fresh)
    return tuple(out)


def _rows(table: Any) -> tuple[str, ...]:
    columns = [column.to_pylist() for column in table.columns]
    return tuple(
        sorted(repr(tuple(plain_value(value) for value in row)) for row in zip(*columns, strict=True))
    )


def plain_value(value: Any) -> Any:
    """Return a value without what only its type tells: a sum of integers is a decimal in Parquet."""
    if isinstance(value, list):
        return [plain_value(one) for one in value]
    if isinstance(value, tuple):  # an entry of a map
        return tuple(plain_value(one) for one in value)
    if isinstance(value, dict):
        return {key: plain_value(one) for key, one in value.items()}
    if isinstance(value, float):
        return float(f"{value:.12g}")
    if isinstance(value, Decimal):
        return int(value) if value == int(value) else value.normalize()
    return value
