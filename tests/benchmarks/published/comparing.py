"""Runs the statements of a script by DuckDB alone and by Ebbflow, over the same Parquet files, and compares them."""

import re
import shutil
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import sqlglot

from ebbflow.infra.errors import StageFailedError
from ebbflow.infra.query.duckdbtypes import JSON, quoted, to_spark
from ebbflow.planners.errors import (
    EbbflowError,
    ForbiddenSqlError,
    SqlSyntaxError,
    UnknownTableError,
    UnsupportedQueryError,
)
from ebbflow.tasks.query.opening import OpenedEngine
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import PlainOrchestrator, execute
from tests.benchmarks.published.suites import Script
from tests.tasks.query.generated_sql import distinct, plain_value

DIFFERENCES = ("rows", "order", "names", "answer", "failed", "foreign error", "error class")
_QUERIES = 60  # of a script: some repeat one for thousands of values
_LARGE = 20_000  # rows; of larger results and tables nothing is compared
_SETTINGS = {"threads": 1, "memory_limit": "1GiB", "autoinstall_known_extensions": "false", "TimeZone": "UTC"}
_ALWAYS = "always_there"  # a table beside the script's: Ebbflow refuses directories without one
_END = re.compile(r"(;\s*(--[^\n]*\s*)*)?\Z")  # of a statement, and comments behind it
_ENGINES = r"unknown table '([^']*[./]|(duckdb|pg|pragma|sqlite)_)"  # a file, or a table of the engine's own
_ORDERS = ("reverse", "hash")  # in which rows of tables are stored a second time


@dataclass(frozen=True)
class Outcome:
    """What became of a statement.

    ``kind``: ``same``, ``error`` (both refuse it alike), ``refused`` (Ebbflow alone, with a reason), one of
    ``DIFFERENCES``, or why it is not compared: ``undetermined`` (DuckDB's own answer is another one where rows are
    stored in another order, or a second time), ``large``, ``unsuited`` (no Parquet file can hold what it reads or
    returns), ``timed out``, ``crashed``.
    """

    kind: str
    reason: str = ""
    planned: bool = False
    stages: int = 0


@dataclass(frozen=True)
class Answer:
    """Names and rows in their order, or an error and its class: syntax, names, execution."""

    names: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    error: str = ""
    about: str = ""


class _LargeError(Exception):
    """A table or result has more rows than are compared."""


class _UnsuitedError(Exception):
    """A table cannot be written as a Parquet file."""


class Tables:
    """What a script has made in DuckDB, written as Parquet files of types that Spark has once a query reads it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made = duckdb.connect(config=_SETTINGS)
        self._version = 0
        self._written: set[str] = set()
        self.readers: dict[str, duckdb.DuckDBPyConnection] = {}
        self._stale = True  # what is written, since statements ran
        self.place = folder / "v0"

    def change(self, sql: str) -> None:
        """Run a statement that is no query; one that fails changes nothing."""
        try:
            self._made.execute(sql)
        except (duckdb.Error, RuntimeError):
            return
        finally:
            self._close_readers()
            self._stale = True

    def read_by(self, sql: str) -> None:
        """Write the tables that ``sql`` names, unless they are written already.

        Raises ``_LargeError``, ``_UnsuitedError``.
        """
        if self._stale:
            shutil.rmtree(self.place, ignore_errors=True)
            self._version += 1
            self.place = self._folder / f"v{self._version}"
            self.place.mkdir()
            pq.write_table(pa.table({"a": [1]}), self.place / f"{_ALWAYS}.parquet")
            self._written.clear()
            self._stale = False
        words = {word.lower() for word in re.findall(r"\w+", sql)}
        for name in self._names():
            if name.lower() in words and name not in self._written:
                self._write(name)
                self._written.add(name)
                self._close_readers()

    def _names(self) -> list[str]:
        sql = (
            "SELECT table_name FROM information_schema.tables WHERE table_schema = 'main' "
            "AND table_catalog IN ('memory', 'temp')"
        )
        try:
            return [name for (name,) in self._made.execute(sql).fetchall()]
        except duckdb.Error:  # a transaction that failed
            self._made.rollback()
            return [name for (name,) in self._made.execute(sql).fetchall()]

    def _write(self, name: str) -> None:
        target = str(self.place / f"{name}.parquet").replace("'", "''")
        try:
            if self._made.execute(f"SELECT count(*) FROM {quoted(name)}").fetchall()[0][0] > _LARGE:
                raise _LargeError
            rows = self._made.sql(f"FROM {quoted(name)}")
            # JSON stays: a Parquet file tells of it
            stored = [None if str(kind) == JSON else to_spark(kind)[1] for kind in rows.types]
            casts = zip(rows.columns, stored, strict=True)
            chosen = ", ".join(
                f"CAST({quoted(column)} AS {cast}) AS {quoted(column)}" if cast else quoted(column)
                for column, cast in casts
            )
            self._made.execute(f"COPY (SELECT {chosen} FROM {quoted(name)}) TO '{target}' (FORMAT parquet)")
        except (duckdb.Error, OSError) as error:
            raise _UnsuitedError(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error

    def reader(self, order: str = "") -> duckdb.DuckDBPyConnection:
        """Return a database with the written tables as views, their rows in ``order``."""
        if order not in self.readers:
            connection = duckdb.connect(config=_SETTINGS)
            for name in sorted(self._written):
                target = str(self.place / f"{name}.parquet").replace("'", "''")
                sql = f"SELECT * FROM '{target}'"
                if order:
                    key = "hash(r)" if order == "hash" else "row_number() OVER () DESC"
                    sql = f"SELECT * FROM ({sql}) r ORDER BY {key}"
                connection.execute(f"CREATE VIEW {quoted(name)} AS {sql}")
            self.readers[order] = connection
        return self.readers[order]

    def _close_readers(self) -> None:
        for connection in self.readers.values():
            connection.close()
        self.readers.clear()

    def close(self) -> None:
        self._close_readers()
        self._made.close()


def compare(
    script: Script,
    folder: Path,
    opened: OpenedEngine,
    left_out: Collection[int],
    began: Callable[[int], None],
    done: Callable[[int, Outcome], None],
) -> None:
    """Run ``script`` in ``folder``; ``began`` and ``done`` are told the places of its queries, of which those in
    ``left_out`` are not run."""
    tables = Tables(folder)
    last = [place for place, step in enumerate(script.steps) if step.query][:_QUERIES][-1:]
    try:
        for place, step in enumerate(script.steps[: last[0] + 1 if last else 0]):
            began(place)
            if not step.query:
                tables.change(step.sql)
            elif place not in left_out:
                done(place, _outcome(step.sql, tables, folder, opened))
    finally:
        tables.close()


def _outcome(sql: str, tables: Tables, folder: Path, opened: OpenedEngine) -> Outcome:
    try:
        tables.read_by(sql)
        theirs = _by_duckdb(sql, tables.reader())
    except _LargeError:
        return Outcome("large")
    except _UnsuitedError as error:
        return Outcome("unsuited", str(error))
    if theirs.about == "stored":
        return Outcome("unsuited", theirs.error)
    try:
        ours, stated = _by_ebbflow(sql, tables.place, folder / "store", opened)
    except _UnsuitedError as error:
        return Outcome("unsuited", str(error))
    found = _difference(sql, theirs, ours)
    if found.kind in ("rows", "order", "answer", "failed"):
        for order in ("", *_ORDERS):
            if _difference(sql, theirs, _by_duckdb(sql, tables.reader(order))).kind not in ("same", "error"):
                return Outcome("undetermined")
    return replace(found, planned=stated.planned, stages=stated.stages, reason=found.reason or stated.reason)


def _difference(sql: str, theirs: Answer, ours: Answer) -> Outcome:
    if ours.about == "foreign":
        return Outcome("foreign error", ours.error)
    if theirs.error and ours.error:
        alike = (ours.about == "execution") == (theirs.about == "execution") or ours.about == "refused"
        return Outcome("error" if alike else "error class", "" if alike else f"{theirs.error} / {ours.error}")
    if theirs.error:
        return Outcome("answer", theirs.error)
    if ours.error:
        return Outcome("refused" if ours.about in ("syntax", "refused") else "failed", ours.error)
    if theirs.names != ours.names:
        return Outcome("names", f"{theirs.names} / {ours.names}")
    if theirs.rows == ours.rows:
        return Outcome("same")
    more, less = Counter(ours.rows) - Counter(theirs.rows), Counter(theirs.rows) - Counter(ours.rows)
    if more or less:
        return Outcome("rows", f"{len(theirs.rows)} {list(less)[:3]} / {len(ours.rows)} {list(more)[:3]}")
    return Outcome("order", f"{theirs.rows[:3]} / {ours.rows[:3]}") if _ordered(sql) else Outcome("same")


def _ordered(sql: str) -> bool:
    return bool(sqlglot.parse_one(sql, dialect="duckdb").args.get("order"))


def _by_duckdb(sql: str, connection: duckdb.DuckDBPyConnection) -> Answer:
    """Return DuckDB's answer, in the types that Ebbflow stores results in; what has no place in those is an error
    about ``stored``."""
    sql = _END.sub("", sql)
    try:
        result = connection.sql(sql)
        if result is None:
            return Answer(error="no result", about="execution")
        names = distinct(result.columns)
        casts = [to_spark(kind)[1] for kind in result.types]
        stored = result
        if any(casts):
            parts = [f"CAST(c{i} AS {cast}) AS c{i}" if cast else f"c{i}" for i, cast in enumerate(casts)]
            columns = ", ".join(f"c{i}" for i in range(len(casts)))
            stored = connection.sql(f"SELECT {', '.join(parts)} FROM (\n{sql}\n) AS r({columns})")
        try:
            return Answer(names, _rows(stored.limit(_LARGE + 1).to_arrow_table()))
        except duckdb.Error as error:
            result.limit(_LARGE + 1).to_arrow_table()
            return Answer(error=f"{type(error).__name__}: {str(error).splitlines()[0]}", about="stored")
    except duckdb.Error as error:
        return Answer(error=f"{type(error).__name__}: {str(error).splitlines()[0]}", about=_about(error))
    except (RuntimeError, ValueError, NotImplementedError) as error:  # of Python's types and Arrow's
        return Answer(error=f"{type(error).__name__}: {str(error)[:200]}", about="stored")


def _about(error: duckdb.Error) -> str:
    if isinstance(error, duckdb.ParserException):  # a SyntaxException is of a pattern or a format
        return "syntax"
    return "names" if isinstance(error, duckdb.BinderException | duckdb.CatalogException) else "execution"


def _by_ebbflow(sql: str, tables: Path, store: Path, opened: OpenedEngine) -> tuple[Answer, Outcome]:
    request = QueryRequest(
        sql,
        tables=str(tables),
        engine="duckdb",
        dialect="duckdb",
        materialize="every-join",
        store=str(store),
    )
    try:
        outcome = execute(request, PlainOrchestrator(), opened=opened)
        table = outcome.to_arrow()
        rows = _rows(table)
    except (_LargeError, _UnsuitedError):
        raise
    except EbbflowError as error:
        text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return Answer(error=text, about=_about_ours(error)), Outcome("")
    except Exception as error:
        return Answer(error=f"{type(error).__name__}: {str(error)[:200]}", about="foreign"), Outcome("")
    notes = [note for plan in outcome.report.plans for note in plan.notes]
    whole = [note for note in notes if "runs whole" in note]
    reason = whole[0].partition("the query runs whole: ")[2] or whole[0] if whole else ""
    stated = Outcome("", reason, not whole, len(outcome.report.stages))
    return Answer(tuple(table.column_names), rows), stated


def _about_ours(error: EbbflowError) -> str:
    if isinstance(error, SqlSyntaxError):
        return "syntax"
    if isinstance(error, ForbiddenSqlError | UnsupportedQueryError):
        return "refused"
    text = str(error)
    if isinstance(error, UnknownTableError) and re.match(_ENGINES, text):
        return "refused"  # not of the directory
    if "Parser Error" in text:
        return "syntax"
    told = re.search(r"\b(Binder|Catalog) Error|Error:", text)
    ran = isinstance(error, StageFailedError) if told is None else told[1] is None
    return "execution" if ran else "names"


def _rows(table: Any) -> tuple[str, ...]:
    if table.num_rows > _LARGE:
        raise _LargeError
    try:
        columns = [column.to_pylist() for column in table.columns]
    except (ValueError, OverflowError, pa.ArrowException) as error:  # dates that Python has not, and such
        raise _UnsuitedError(f"{type(error).__name__}: {error}") from error
    return tuple(repr(tuple(map(plain_value, row))) for row in zip(*columns, strict=True))
