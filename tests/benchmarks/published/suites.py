"""Reads the statements of published test suites from a checkout of them, in the order in which they build on another.

Nothing of a suite is part of this project: its files stay where its user has them.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from ebbflow.planners.query.sql.references import outside_tables
from tests.benchmarks.published.logictest import steps_of

SUITES = ("duckdb", "spark", "sqlglot")
_QUERY = re.compile(r"[\s(]*(SELECT|WITH|VALUES|FROM|PIVOT|UNPIVOT|TABLE)\b", re.IGNORECASE)
_FAILURES = (SqlglotError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
_COMMENT = re.compile(r"\s*(--[^\n]*(\n|$)|/\*.*?\*/)", re.DOTALL)
_WRITES = re.compile(r"\b(INSERT\s+(OR\s+\w+\s+)?INTO|UPDATE|DELETE\s+FROM|MERGE\s+INTO)\b", re.IGNORECASE)
_ROWS = {
    "INTEGER": ("1", "2", "NULL", "3"),
    "VARCHAR": ("'a'", "'1'", "NULL", "'b'"),
    "DATE": ("DATE '2024-02-29'", "NULL", "DATE '2025-01-01'"),
    "INTEGER[]": ("[1, 2]", "NULL", "[]"),
}
_DIALECTS = "tests/dialects"  # of sqlglot's checkout
_INPUTS = "sql/core/src/test/resources/sql-tests/inputs"  # of Spark's


@dataclass(frozen=True)
class Step:
    """A statement of a script. ``line`` is where it begins in its file; ``query``: its rows are compared."""

    sql: str
    line: int
    query: bool


@dataclass(frozen=True)
class Script:
    """Statements that build on another. ``skipped`` says why they are not run, if they are not."""

    name: str
    steps: tuple[Step, ...] = ()
    skipped: str = ""
    lone: bool = False  # one statement, whose tables nothing makes


def scripts(suite: str, checkout: Path) -> Iterator[Script]:
    """Yield the scripts of ``suite`` whose files are under ``checkout``. Raises ``FileNotFoundError``."""
    yield from {"duckdb": _duckdb, "spark": _spark, "sqlglot": _sqlglot}[suite](checkout)


def is_query(sql: str) -> bool:
    """Tell whether a statement asks for rows and changes nothing."""
    while found := _COMMENT.match(sql):
        sql = sql[found.end() :]
    return _QUERY.match(sql) is not None and _WRITES.search(sql) is None


def _files(checkout: Path, folder: str, *patterns: str) -> list[tuple[str, Path]]:
    root = checkout / folder
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is not there: --from must be a checkout of the suite's repository")
    found = sorted(path for pattern in patterns for path in root.rglob(pattern))
    return [(str(path.relative_to(root)), path) for path in found]


def _duckdb(checkout: Path) -> Iterator[Script]:
    for name, path in _files(checkout, "test/sql", "*.test"):
        steps, skipped = steps_of(path.read_text(errors="replace"))
        yield Script(name, tuple(Step(sql, line, is_query(sql)) for sql, line in steps), skipped)


def _spark(checkout: Path) -> Iterator[Script]:
    """Yield Spark's scripts in DuckDB's dialect, as far as sqlglot can write them so."""
    for name, path in _files(checkout, _INPUTS, "*.sql"):
        steps = []
        for sql, line in _by_semicolons(path.read_text(errors="replace")):
            text = _as_duckdb(sql, "spark")
            steps.append(Step(text, line, is_query(text)))
        yield Script(name, tuple(steps))


def _by_semicolons(text: str) -> Iterator[tuple[str, int]]:
    """Yield statements that end with a line's end, and the lines they begin at; comments of whole lines are none."""
    kept: list[str] = []
    begins = 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith(("--", "#")) or not (kept or line.strip()):
            continue
        begins = begins if kept else number
        kept.append(line)
        if line.rstrip().endswith(";"):
            yield "\n".join(kept).strip().rstrip(";"), begins
            kept = []
    if kept:
        yield "\n".join(kept).strip(), begins


def _as_duckdb(sql: str, dialect: str) -> str:
    """Return a statement in DuckDB's dialect, or as it is where sqlglot cannot write it so."""
    try:
        return ";".join(
            tree.sql("duckdb", comments=False) for tree in sqlglot.parse(sql, dialect=dialect) if tree
        )
    except _FAILURES:
        return sql


def _sqlglot(checkout: Path) -> Iterator[Script]:
    seen: set[str] = set()
    for name, line, sql in _sqlglot_statements(checkout):
        if sql.strip() and sql not in seen:
            seen.add(sql)
            yield Script(f"{name}:{line}", (Step(sql, line, True),), lone=True)


def _sqlglot_statements(checkout: Path) -> Iterator[tuple[str, int, str]]:
    for name, path in _files(checkout, "tests/fixtures", "*.sql"):
        if "tpc" in name:  # TPC-H and TPC-DS are benchmarks of their own
            continue
        text = path.read_text(errors="replace")
        if name == "identity.sql":
            for number, line in enumerate(text.splitlines(), 1):
                yield name, number, line
            continue
        for dialect, sql, number in _fixtures(text):
            yield name, number, sql if dialect == "duckdb" else _as_duckdb(sql, dialect)
    for name, path in _files(checkout, _DIALECTS, "test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(errors="replace"))):
            yield from ((name, number, sql) for sql, number in _texts(node, own=name == "test_duckdb.py"))


def _fixtures(text: str) -> Iterator[tuple[str, str, int]]:
    """Yield the dialect, text and line of each statement of a file of sqlglot's."""
    blocks = re.split(r"\n\s*\n", text)
    line = 1
    for block in blocks:
        told = re.search(r"^# dialect: *(\w+)", block, re.MULTILINE)
        for sql, number in _by_semicolons(block):
            yield told[1] if told else "", sql, line + number - 1
        line += block.count("\n") + 2


def _texts(node: ast.AST, *, own: bool) -> Iterator[tuple[str, int]]:
    """Yield the statements for DuckDB in a node of a test's program: what ``own`` tests validate, and what tests of
    other dialects expect of it."""
    if own and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        first = node.args[0] if node.args else None
        if node.func.attr.startswith("validate_") and isinstance(first, ast.Constant):
            yield str(first.value), node.lineno
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            known = isinstance(key, ast.Constant) and key.value == "duckdb"
            if known and isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value, value.lineno


def with_tables(script: Script) -> Script:
    """Return the script of a lone statement with tables that it can read, as far as one kind of column does.

    An expression becomes the SELECT of it. What is no query leaves nothing.
    """
    import duckdb

    if not script.lone:
        return script
    (step,) = script.steps
    nothing = replace(script, steps=())
    try:
        trees = sqlglot.parse(step.sql, dialect="duckdb")
    except _FAILURES:
        return script if is_query(step.sql) else nothing
    if len(trees) != 1 or trees[0] is None:
        return nothing
    tree: exp.Expr = trees[0]
    if not is_query(step.sql):
        if isinstance(tree, exp.Command | exp.DDL | exp.DML) or not isinstance(tree, exp.Condition):
            return nothing
        tables = " FROM made" if tree.find(exp.Column) else ""
        step = replace(step, sql=f"SELECT {step.sql}{tables}")
        try:
            tree = sqlglot.parse_one(step.sql, dialect="duckdb")
        except _FAILURES:
            return nothing
    found = [replace(script, steps=(*_tables(tree, kind), step)) for kind in _ROWS]
    for one in found:
        with duckdb.connect() as connection:
            try:
                for before in one.steps[:-1]:
                    connection.execute(before.sql)
                connection.sql(step.sql)
            except (duckdb.Error, RuntimeError):
                continue
            return one
    return found[0]


def _tables(tree: exp.Expr, kind: str) -> tuple[Step, ...]:
    """Return statements that make the tables which a statement reads, all columns of ``kind``."""
    columns: dict[str, set[str]] = {}
    names = {}
    for table in outside_tables(tree):
        if not table.db and table.name:
            names[table.alias_or_name.lower()] = table.name.lower()
            columns.setdefault(table.name.lower(), set())
    for column in tree.find_all(exp.Column):
        owners = [names[column.table.lower()]] if column.table.lower() in names else []
        for owner in owners or ([] if column.table else list(columns)):
            columns[owner].add(column.name.lower())
    steps = []
    for table, named in columns.items():
        kept = sorted(name for name in named if name) or ["a"]
        typed = ", ".join(f'"{name}" {kind}' for name in kept)
        rows = ", ".join(
            f"({', '.join(_ROWS[kind][(row + i) % len(_ROWS[kind])] for i in range(len(kept)))})"
            for row in range(len(_ROWS[kind]))
        )
        steps += [f'CREATE TABLE "{table}" ({typed})', f'INSERT INTO "{table}" VALUES {rows}']
    return tuple(Step(sql, 0, False) for sql in steps)


def filled(script: Script, places: Mapping[str, str]) -> Script:
    """Return ``script`` with the places that its statements stand for."""

    def text(sql: str) -> str:
        for word, place in places.items():
            sql = sql.replace(word, place)
        return sql

    return replace(script, steps=tuple(replace(step, sql=text(step.sql)) for step in script.steps))


def chosen(found: Sequence[Script], under: Sequence[str]) -> list[Script]:
    """Return the scripts whose names begin with one of ``under``, all where there is none."""
    return [s for s in found if not under or s.name.startswith(tuple(under))]
