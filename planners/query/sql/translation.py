"""DuckDB's SQL for a query in another dialect, if it says all that the query does."""

import re

from sqlglot import ErrorLevel, exp

from ebbflow.planners.errors import UnsupportedQueryError
from ebbflow.planners.query.sql.dialect import QuantileDuckDB

# what sqlglot remarks on though nothing of the result is another: what is so anyway, and what only Snowflake has
_HARMLESS = re.compile(r"RESPECT NULLS is not|Hints are not|timezone handling differences")


def whole_duckdb_sql(tree: exp.Expr, dialect: str) -> str:
    """Return ``tree``, as parsed from ``dialect``, as DuckDB's SQL.

    Raises ``UnsupportedQueryError`` for an argument or a clause that DuckDB has no words for: left out, as sqlglot
    does, it would be another query. Before: ``array_sort(a, f)``; it would be ``list_sort(a)``.
    """
    writer = QuantileDuckDB().generator(comments=False, unsupported_level=ErrorLevel.IGNORE)
    text = str(writer.generate(tree))
    if dialect.lower() != "duckdb":
        for message in writer.unsupported_messages:
            if not _HARMLESS.search(message):
                raise UnsupportedQueryError(f"DuckDB has no words for all of the query: {message}")
    return text
