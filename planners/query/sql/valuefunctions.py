"""Words such as ``current_date`` and ``user``, which engines call as functions where no column is called so."""

from sqlglot import exp

from ebbflow.planners.model import Catalogue
from ebbflow.planners.query.sql.functions import BARE

_ELSEWHERE = {"current_database"}  # words that DuckDB does not take for calls
# names that columns may well have of relations that only the engine knows
_LIKELY = {"current_schema", "user"}


def called_before_names(query: exp.Query, catalogue: Catalogue, *, known: bool) -> exp.Query:
    """Write such words of DuckDB's as calls, before columns are looked up. Changes ``query``.

    Where the columns of all relations are not ``known``, words that are likely to be some of theirs stay.

    Before: ``SELECT user FROM t``; after: ``SELECT user() AS user FROM t``.
    """
    words = BARE - _ELSEWHERE - (set() if known else _LIKELY)
    return _replaced(query, words - _named(query, catalogue, rows=True), duckdb=True)


def called(query: exp.Query, catalogue: Catalogue, dialect: str) -> exp.Query:
    """Write such words as calls in a query that runs whole: not qualified, they look like columns. Changes ``query``.

    Before: ``SELECT localtimestamp AS x FROM t``; after: ``SELECT localtimestamp() AS x FROM t``.
    """
    duckdb = dialect.lower() == "duckdb"
    words = BARE - (_ELSEWHERE if duckdb else set())
    return _replaced(query, words - _named(query, catalogue, rows=duckdb), duckdb=duckdb)


def _named(query: exp.Query, catalogue: Catalogue, *, rows: bool) -> frozenset[str]:
    """Return the names of columns and aliases, and of tables where they stand for ``rows``, in lower case."""
    tables = (catalogue.get(table.name) for table in query.find_all(exp.Table))
    named = {name.lower() for table in tables if table is not None for name, _ in table.columns}
    named |= {node.alias.lower() for node in query.find_all(exp.Alias)}
    named |= {column.name.lower() for node in query.find_all(exp.TableAlias) for column in node.columns}
    for node in query.find_all(exp.Comprehension):
        named |= {one.name.lower() for key in ("expression", "position") if (one := node.args.get(key))}
    if rows:
        named |= {node.alias_or_name.lower() for node in query.find_all(exp.Table, exp.Subquery, exp.UDTF)}
    return frozenset(named)


def _replaced(query: exp.Query, words: frozenset[str], *, duckdb: bool) -> exp.Query:
    """Replace columns of these names by calls; in DuckDB's SQL a result's column is called as the word was."""
    for column in list(query.find_all(exp.Column)):
        word = column.name.lower()
        if word not in words or column.table or column.this.quoted:
            continue
        call = exp.Anonymous(this=word)
        output = duckdb and isinstance(column.parent, exp.Select) and column.arg_key == "expressions"
        column.replace(exp.alias_(call, column.name) if output else call)
    return query
