"""What the columns of a result are called: as the author, the engine or the tables call them, each name once."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from sqlglot import exp

from ebbflow.planners.model import Catalogue
from ebbflow.planners.model.tables import distinct_names, renaming_notes
from ebbflow.planners.query.sql.freezing import is_volatile
from ebbflow.planners.query.sql.predicates import sources
from ebbflow.planners.query.sql.translation.rules import UNLIKE

_MADE_UP = re.compile(r"_(col_)?\d+")  # a name that qualifying gives
_WORD = re.compile(r"\w*")


def name_projections(query: exp.Query, *, duckdb: bool) -> None:
    """Name projections without an alias to which qualifying would give a name that is not theirs, in place.

    It calls them by what they are of. So does Spark with a cast of a column, and ORDER BY means the cast then
    (``SELECT CAST(k AS STRING) FROM t ORDER BY k``); to DuckDB that is the column, as it is to Spark with other
    expressions. A subquery would look like one of FROM.
    """
    for select in query.find_all(exp.Select):
        for position, item in enumerate(select.expressions):
            if name := _own_name(select, item, f"_col_{position}", duckdb=duckdb):
                item.replace(exp.Alias(this=item.copy(), alias=exp.to_identifier(name)))


def _own_name(select: exp.Select, item: exp.Expr, made_up: str, *, duckdb: bool) -> str:
    """Return what to call a projection; nothing where qualifying names it right."""
    if isinstance(item, exp.Subquery):
        return "" if item.alias else made_up
    inner = item.unnest()
    if isinstance(inner, exp.Alias | exp.Aliases | exp.Column | exp.Dot | exp.Star | exp.Window):
        return ""
    if duckdb:
        return made_up if inner.output_name else ""
    if not isinstance(inner, exp.Cast):
        return ""
    column = inner.this.unnest()
    if not isinstance(column, exp.Column):
        return made_up
    if column.table and column.table.lower() not in {one.lower() for one in sources(select)}:  # a field
        return made_up
    return column.name


def ordered_by_outputs(query: exp.Query, catalogue: Catalogue, dialect: str) -> exp.Query:
    """Point the ORDER BY of a SELECT DISTINCT at its outputs: above DISTINCT Spark knows no other names. Of other
    SELECTs write out what an expression in it means in Spark's ``dialect``, where DuckDB takes a column of FROM.
    Changes ``query``, which is qualified.

    Before: ``SELECT DISTINCT t.a AS a FROM t ORDER BY t.a``; after: ``... ORDER BY a``. Before:
    ``SELECT -t.a AS a FROM t ORDER BY a + 1``; after: ``... ORDER BY (-t.a) + 1``. Where DuckDB's column is the same,
    nothing changes: above GROUPING SETS Spark may know no columns of FROM.
    """
    for select in query.find_all(exp.Select):
        order = select.args.get("order")
        items = [item for item in select.selects if isinstance(item, exp.Alias)]
        if order is not None and select.args.get("distinct"):
            outputs = {item.this.unnest(): item.alias for item in items}
            for key in order.expressions:
                found = outputs.get(key.this.unnest()) if isinstance(key, exp.Ordered) else None
                if found is not None:
                    key.set("this", exp.column(found))
        elif order is not None and dialect.lower() == "spark":
            _write_out(select, order, {item.alias: item.this for item in items}, catalogue)
    return query


def _write_out(
    select: exp.Select, order: exp.Order, values: Mapping[str, exp.Expr], catalogue: Catalogue
) -> None:
    """Replace names of ``values`` within expressions of ``order`` that columns of FROM have too, where such a column
    is not the value itself, or mark them where a second time the value may be another, or nothing that is allowed."""
    keys = [key for key in order.find_all(exp.Ordered) if not isinstance(key.this, exp.Column)]
    used = [column for key in keys for column in key.find_all(exp.Column) if not column.table]
    start = select.args.get("from_")
    items = [one.this for one in (start, *(select.args.get("joins") or ())) if one is not None]
    items += select.args.get("laterals") or ()
    read = items if used else []
    below = [(one.alias_or_name, name.lower()) for one in read for name in _source_columns(one, catalogue)]
    group = select.args.get("group")
    sets = group is not None and group.find(exp.Rollup, exp.Cube, exp.GroupingSets) is not None
    for column in used:
        value = values.get(column.name)
        owners = [source for source, name in below if name == column.name.lower()]
        if value is None or not owners or _is_column(value, owners, column.name):
            continue
        of_set = sets and not value.find(exp.AggFunc)  # which Spark does not know again
        if of_set or value.find(exp.Window, exp.UDTF, exp.Query) or is_volatile(value):
            column.meta[UNLIKE] = "Spark orders by the SELECT's column"
        else:
            column.replace(exp.paren(value))


def _is_column(value: exp.Expr, owners: Sequence[str], name: str) -> bool:
    inner = value.unnest()
    return isinstance(inner, exp.Column) and inner.name == name and owners == [inner.table]


def _source_columns(source: exp.Expr, catalogue: Catalogue) -> list[str]:
    if source.alias_column_names:
        return list(source.alias_column_names)
    if isinstance(source, exp.Subquery):
        return list(source.this.named_selects)
    return table_columns(source, catalogue) if isinstance(source, exp.Table) else []


def table_columns(table: exp.Table, catalogue: Catalogue) -> list[str]:
    """Return the names of a table's or view's columns, none where they are not known."""
    below: exp.Expr = table
    node = table.parent
    while node is not None:
        with_ = node.args.get("with_")
        for cte in reversed(with_.expressions if with_ is not None and with_ is not below else ()):
            if cte.alias == table.name:
                return list(cte.this.named_selects)
        if isinstance(node, exp.With):
            if node.recursive:
                return []
            before = node.expressions[: next(i for i, c in enumerate(node.expressions) if c is below)]
            for cte in reversed(before):
                if cte.alias == table.name:
                    return list(cte.this.named_selects)
        below, node = node, node.parent
    known = catalogue.get(table.name)
    return [name.lower() for name, _ in known.columns] if known is not None else []


def named(
    qualified: exp.Query, written: exp.Query, catalogue: Catalogue, outputs: Sequence[str] | None
) -> tuple[exp.Query, tuple[str, ...], bool]:
    """Give the result's columns distinct names: the author's, the engine's (``outputs``) for what has none, or, for
    ``*``, the table's. Return the query, what was named otherwise, and whether a column is without such a name.

    Qualifying turns names to lower case, and a Parquet file cannot hold two columns of one name.
    """
    first, original = first_select(qualified), first_select(written)
    stars = any(item.is_star for item in original.selects)
    if stars:
        free = [_is_made_up(item) for item in first.selects]
    else:
        free = [not _alias(item) and not isinstance(item, exp.Column) for item in original.selects]
    cased = _stored_names(first, catalogue) if stars else [item.output_name for item in original.selects]
    # a column that stands for an alias of its SELECT has become what that is of
    again = [not stars and isinstance(item, exp.Column) for item in (first if stars else original).selects]
    wanted_names = [
        wanted if wanted.lower() == item.alias.lower() or (used and _is_made_up(item)) else item.alias
        for item, wanted, used in zip(first.selects, cased, again, strict=False)
    ]
    theirs = outputs is not None and all(
        one or ours.lower() == engine.lower()
        for one, ours, engine in zip(free, wanted_names, outputs, strict=False)
    )
    if outputs is not None and theirs:
        wanted_names = list(outputs)
    items = [
        (item, name)
        for item, name in zip(first.selects, wanted_names, strict=False)
        if isinstance(item, exp.Alias)
    ]
    written_names = [name for _, name in items]
    fresh_names = distinct_names(written_names, first.named_selects)  # ORDER BY may mean those
    renamed: dict[str, str] = {}
    for (item, _), fresh in zip(items, fresh_names, strict=True):
        renamed.setdefault(item.alias, fresh)
        if fresh != item.alias:
            item.set("alias", exp.to_identifier(fresh))
    _follow(qualified, first, {old: new for old, new in renamed.items() if old.lower() != new.lower()})
    return qualified, renaming_notes(written_names, fresh_names), any(free) and not theirs


def named_whole(query: exp.Query, outputs: Sequence[str] | None) -> tuple[exp.Query, bool]:
    """Call the columns of a query that runs whole by the engine's names (``outputs``) where they have none. Return
    also whether such names are missing. Changes ``query``.

    An engine calls such a column as it reads it, and it may be told otherwise than its author wrote: ``today()`` has
    become a literal.
    """
    first = _inner_select(query)
    items = first.expressions if isinstance(first, exp.Select) else []  # else a PIVOT's, no columns
    free = unnamed_items(first)
    if outputs is None:
        return query, bool(free)
    several = [place for place, item in enumerate(items) if _may_be_several(item)]
    if not several and len(outputs) != len(items):
        return query, False
    before, after = (several[0], several[-1]) if several else (len(items), len(items))
    names = dict(zip(map(id, items[:before]), outputs, strict=False))
    names |= dict(zip(map(id, reversed(items[after + 1 :])), reversed(outputs), strict=False))
    for item in free:
        name = names.get(id(item), "")
        if not _WORD.fullmatch(name):  # such a one is from within, and ORDER BY may mean a column by it
            for other in _brought_together(first, item):
                other.replace(exp.alias_(other.copy(), exp.to_identifier(name, quoted=True)))
            item.replace(exp.alias_(item.copy(), exp.to_identifier(name, quoted=True)))
    return query, False


def unnamed_items(select: exp.Query) -> list[exp.Expr]:
    """Return the columns of a SELECT that an engine names, without those that ask for names which were written."""
    return [
        item
        for item in (select.expressions if isinstance(select, exp.Select) else [])
        if not isinstance(item.unnest(), exp.Alias | exp.Aliases | exp.Column | exp.Star)
        and not any(call.name.lower() == "alias" for call in item.find_all(exp.Anonymous))
    ]


def _brought_together(first: exp.Query, item: exp.Expr) -> list[exp.Expr]:
    """Return the columns of other SELECTs that BY NAME brings together with one of ``first`` that is as ``item``."""
    node: exp.Expr = first
    while isinstance(node.parent, exp.SetOperation | exp.Subquery):
        node = node.parent
    by_name = any(one.args.get("by_name") for one in node.find_all(exp.SetOperation))
    others = [one for one in arms(node) if one is not first] if by_name else []
    return [other for one in others for other in one.expressions if other == item]


def arms(node: exp.Expr) -> Iterator[exp.Select]:
    """Yield the SELECTs that set operations of ``node`` are of."""
    node = node.unnest()
    if isinstance(node, exp.SetOperation):
        yield from arms(node.this)
        yield from arms(node.expression)
    elif isinstance(node, exp.Select):
        yield node


def _inner_select(query: exp.Query) -> exp.Query:
    """Return the SELECT that names the output of ``query``, within those of all columns of one query."""
    first = first_select(query)
    start = first.args.get("from_")
    source = start.this if start is not None else None
    alone = not first.args.get("joins") and not first.args.get("laterals")
    if not isinstance(source, exp.Subquery) or not alone or first.expressions != [exp.Star()]:
        return first
    bare = not source.args.get("pivots") and not source.alias_column_names
    return _inner_select(source.this) if bare else first


def _may_be_several(item: exp.Expr) -> bool:
    return item.is_star or item.find(exp.Columns, exp.Star, exp.Explode, exp.Unnest) is not None


def _alias(item: exp.Expr) -> str:
    """Return the name that a projection's author gave it: that of ``count(*) OVER w`` is its window's."""
    return "" if isinstance(item, exp.Window) else item.alias


def _is_made_up(item: exp.Expr) -> bool:
    """Tell whether qualifying has named a projection, or named it as its argument is."""
    if not isinstance(item, exp.Alias):
        return not item.alias or _MADE_UP.fullmatch(item.alias) is not None
    if isinstance(item.this, exp.Column):
        return _MADE_UP.fullmatch(item.alias) is not None
    return _MADE_UP.fullmatch(item.alias) is not None or item.alias == item.this.output_name


def _follow(query: exp.Query, first: exp.Query, renamed: Mapping[str, str]) -> None:
    """Have what names outputs of ``first``, such as ORDER BY, name them as they are called after renaming."""
    owners = {id(first)}
    node = first.parent
    while node is not None:
        owners.add(id(node))
        node = node.parent
    for column in list(query.find_all(exp.Column)) if renamed else ():
        owner = column.find_ancestor(exp.Select, exp.SetOperation)
        if not column.table and column.name in renamed and id(owner) in owners:
            column.set("this", exp.to_identifier(renamed[column.name]))


def _stored_names(select: exp.Query, catalogue: Catalogue) -> list[str]:
    """Return the names of columns taken straight from tables as the tables have them, of others nothing."""
    tables = {t.alias_or_name: catalogue.get(t.name) for t in select.find_all(exp.Table)}
    out = []
    for item in select.selects:
        column = item.unalias()
        table = tables.get(column.table) if isinstance(column, exp.Column) else None
        names = [n for n, _ in table.columns if n.lower() == column.name.lower()] if table is not None else []
        out.append(names[0] if names else "")
    return out


def first_select(query: exp.Query) -> exp.Query:
    """Return the SELECT that names the output of ``query``."""
    node = query.unnest()
    while isinstance(node, exp.SetOperation):
        node = node.this.unnest()
    return cast("exp.Query", node)
