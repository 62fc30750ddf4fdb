"""Names that FROM gives to columns, made those of a derived table; and columns that only an engine knows."""

from sqlglot import exp

from ebbflow.planners.model import Catalogue
from ebbflow.planners.query.sql.naming import arms, first_select, table_columns, unnamed_items

_SCHEMAS = ("main", "pg_catalog", "system")


def expand_column_aliases(query: exp.Query, catalogue: Catalogue, *, fewer: bool) -> exp.Query:
    """Return a qualified query whose tables and views have no column aliases in FROM.

    Before: ``SELECT t.x FROM a AS t(x)``; after: ``SELECT t.x FROM (SELECT t.k AS x, t.v AS v FROM a AS t) AS t``.
    ``fewer``: the first columns alone may have other names, as in DuckDB. Changes ``query``. Raises ``ValueError``
    where the columns of such a table are not known.
    """
    for table in list(query.find_all(exp.Table)):
        names = table.alias_column_names
        if not names or not isinstance(table.this, exp.Identifier):
            continue
        columns = table_columns(table, catalogue)
        fits = len(names) <= len(columns) if fewer else len(names) == len(columns)
        if not fits or any(said for key, said in table.args.items() if key not in ("this", "alias")):
            raise ValueError(f"columns of {table.name} have other names in FROM")
        alias = table.alias
        items = [
            exp.alias_(exp.column(column, table=alias), name)
            for column, name in zip(columns, [*names, *columns[len(names) :]], strict=True)
        ]
        bare = exp.alias_(exp.Table(this=table.this.copy()), alias, table=True)
        named = exp.TableAlias(this=exp.to_identifier(alias))
        table.replace(exp.Subquery(this=exp.select(*items).from_(bare), alias=named))
    return query


def expanded_by_engine(query: exp.Query) -> str:
    """Return why only an engine knows the columns of a query that is not qualified yet, if that is so."""
    if query.find(exp.Columns) is not None:
        return "COLUMNS(...) names columns that the engine looks up"
    if any(isinstance(node.this, exp.Pivot) for node in query.find_all(exp.Subquery)):
        return "the columns of PIVOT ... ON and UNPIVOT ... ON follow from the rows"
    for pivot in query.find_all(exp.Pivot):
        if pivot.args.get("group") or any(isinstance(field.this, exp.Tuple) for field in pivot.fields):
            return "only the engine knows the columns of a PIVOT of several columns, or with GROUP BY"
    if any(node.name.lower() == "alias" for node in query.find_all(exp.Anonymous)):
        return "alias(...) tells the names that its author wrote"
    if any(join.method == "ASOF" and join.args.get("using") for join in query.find_all(exp.Join)):
        return "the last column of ASOF JOIN ... USING is compared, not equal"
    if any(isinstance(source.this, exp.Lateral) for source in query.find_all(exp.From)):
        return "a LATERAL that is first in FROM has no columns but those around its query"
    if any(
        isinstance(dot.expression, exp.Func) and _starts_with_name(dot) for dot in query.find_all(exp.Dot)
    ):
        return "a function behind a dot is a method of what is before it"
    if any(map(_orders_by_several, query.find_all(exp.Select))):
        return "ORDER BY names one of several columns of a name"
    for node in query.find_all(exp.CTE, exp.Subquery):
        if node.alias_column_names and any(map(_takes_all_of_function, arms(node.this))):
            return "only the engine knows the columns of * of a table function, which get other names"
    return _named_by_engine(query)


def _named_by_engine(query: exp.Query) -> str:
    """Return that the columns of a set operation are brought together by names which only an engine gives, if they
    are."""
    for operation in query.find_all(exp.SetOperation):
        if operation.args.get("by_name") and any(map(unnamed_items, arms(operation))):
            return "only the engine knows the names of columns that BY NAME brings together"
    return ""


def _starts_with_name(dot: exp.Dot) -> bool:
    """Tell whether the call at the end of ``dot`` is behind what may be a column's name, which is no schema's."""
    first: exp.Expr = dot
    while isinstance(first, exp.Dot):
        first = first.this
    return isinstance(first, exp.Identifier) and first.name.lower() not in _SCHEMAS


def _orders_by_several(select: exp.Select) -> bool:
    """Tell whether an ORDER BY has a name that the SELECT gives to columns that are not the same."""
    order = select.args.get("order")
    keys = (key.this if isinstance(key, exp.Ordered) else key for key in order.expressions) if order else ()
    names = {key.name.lower() for key in keys if isinstance(key, exp.Column) and not key.table}
    return any(
        len({item.unalias() for item in select.selects if item.alias_or_name.lower() == name}) > 1
        for name in names
    )


def orders_by_arms(query: exp.Query, dialect: str) -> str:
    """Return that a set operation of a qualified query is ordered by what its SELECTs compute and do not name, if it
    is: DuckDB takes that."""
    for operation in query.find_all(exp.SetOperation) if dialect.lower() == "duckdb" else ():
        order = operation.args.get("order")
        names = {name.lower() for name in first_select(operation).named_selects}
        for key in order.expressions if order is not None else ():
            sorted_by = key.this if isinstance(key, exp.Ordered) else key
            while isinstance(sorted_by, exp.Collate | exp.Paren):
                sorted_by = sorted_by.this
            named = (
                isinstance(sorted_by, exp.Column) and not sorted_by.table and sorted_by.name.lower() in names
            )
            if not named and not isinstance(sorted_by, exp.Literal | exp.Var):  # a number, ALL
                return "a set operation is ordered by more than the names of its columns"
    return ""


def _takes_all_of_function(select: exp.Select) -> bool:
    start = select.args.get("from_")
    sources = [start.this] if start is not None else []
    sources += [join.this for join in select.args.get("joins") or ()]
    unknown = any(
        not isinstance(one.this, exp.Identifier) and not one.alias_column_names
        for one in sources
        if isinstance(one, exp.Table)
    )
    return unknown and any(item.is_star for item in select.expressions)
