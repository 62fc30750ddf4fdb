"""What SQL may not do: it reads the tables that its user named, and no other part of the machine or the network."""

import re
from collections.abc import Collection, Iterable

from sqlglot import exp

from ebbflow.planners.errors import ForbiddenSqlError, OptionError
from ebbflow.planners.query.sql.functions import refused

OPTION = "--allow-functions"
_NAME = re.compile(r"[a-z_][a-z0-9_]*")
_SHOWN = 80  # characters of a call
# Statements and clauses that are no part of a query, though some dialects let them stand inside one.
_STATEMENTS = (
    exp.Alter, exp.Analyze, exp.Attach, exp.Block, exp.Cache, exp.Command, exp.Comment, exp.Commit, exp.Copy,
    exp.Create, exp.Declare, exp.Delete, exp.Describe, exp.Detach, exp.Directory, exp.DirectoryStage,
    exp.Drop, exp.Execute, exp.ExecuteSql, exp.Export, exp.Get, exp.Grant, exp.IfBlock, exp.Insert,
    exp.Install, exp.Into, exp.Kill, exp.ListStage, exp.LoadData, exp.Merge, exp.MultitableInserts,
    exp.Pragma, exp.Put, exp.QueryTransform, exp.Refresh, exp.Return, exp.Revoke, exp.Rollback,
    exp.SemanticView, exp.Set, exp.SetItem, exp.Show, exp.StoredProcedure, exp.Summarize, exp.Transaction,
    exp.TruncateTable, exp.Uncache, exp.Update, exp.Use, exp.WhileBlock,
)  # fmt: skip
_TITLES = {
    "querytransform": "TRANSFORM ... USING, which starts programs",
    "into": "SELECT ... INTO, which writes a table",
    "command": "a statement that is no query",
}
# Spark's data sources, which it takes for databases: csv.`/etc/passwd`
_FORMATS = frozenset({
    "avro", "binaryfile", "csv", "delta", "hudi", "iceberg", "image", "jdbc", "json", "kafka", "libsvm", "noop",
    "orc", "parquet", "rate", "socket", "statestore", "text", "xml",
})  # fmt: skip


def checked_functions(given: Iterable[str] | str | None) -> tuple[str, ...]:
    """Return names of functions, sorted and in lower case; each item may hold several by commas.

    Raises ``OptionError`` for what is no function's name.
    """
    items = (given,) if isinstance(given, str) else tuple(given or ())
    names = {part.strip().lower() for item in items for part in str(item).split(",")}
    for name in sorted(names):
        if not _NAME.fullmatch(name):
            raise OptionError(
                f"allow_functions ({OPTION}) must be names of functions such as read_csv, by commas; got {name!r}"
            )
    return tuple(sorted(names))


def check_reach(query: exp.Expr, allowed: Collection[str] = ()) -> None:
    """Raise ``ForbiddenSqlError`` for the first part of ``query`` that reaches beyond the tables it names.

    These are functions that read files, networks, settings or secrets or run code, unless ``allowed`` has their
    names; table functions that are not known to be harmless, likewise; files in the place of tables; statements
    that are no query. Holds for all dialects and both engines, whatever the function is called on.
    """
    for node in query.find_all(*_STATEMENTS, exp.Table, exp.Func):
        if isinstance(node, _STATEMENTS):
            title = _TITLES.get(node.key, node.key.upper())
            raise ForbiddenSqlError(f"a query may not contain {title}: {_short(node)}; leave it out")
        if isinstance(node, exp.Table):
            _check_table(node)
        found = refused(node)
        if found is not None and found[0] not in allowed:
            name, reason = found
            raise ForbiddenSqlError(
                f"{_short(node)} is refused: the function {name} {reason}. SQL may call it only if the user who "
                f"runs it allows it ({OPTION} {name}; allow_functions in Python or in a deployment's own parameters)"
            )


def _check_table(table: exp.Table) -> None:
    if not isinstance(table.this, exp.Identifier | exp.Func):
        raise ForbiddenSqlError(
            f"{_short(table)} is no table: only tables by their names, queries and table functions can be read from"
        )
    if table.name.upper() == "SHOW" and table.alias and isinstance(table.parent, exp.Subquery):
        raise ForbiddenSqlError(f"a query may not contain SHOW: {_short(table)}; leave it out")
    if isinstance(table.this, exp.Identifier) and table.db.lower() in _FORMATS:
        raise ForbiddenSqlError(
            f"{_short(table)} reads a file in the place of a table, which is refused; name the directory of tables "
            f"that are to be read by --tables"
        )


def _short(node: exp.Expr) -> str:
    try:
        text = " ".join(node.sql(comments=False).split())
    except (RecursionError, ValueError):  # too deep or too odd to be written
        text = node.key.upper()
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
