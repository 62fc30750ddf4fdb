"""Views restricted to what their readers want of them.

An engine pushes a reader's filter into a view that it inlines, but not into one that is computed by itself: once for
all its readers, or in parts. So the disjunction of the readers' filters is added to the view. A filter of a reader is
one of all that joins make equal to its column, too (J. Ullman, Principles of Database and Knowledge-Base Systems II,
1989, chapter 11).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import date
from functools import cache
from typing import Any, cast

from sqlglot import exp
from sqlglot.errors import SqlglotError
from sqlglot.optimizer.annotate_types import annotate_types

from ebbflow.planners.model import Catalogue
from ebbflow.planners.query.sql.dialect import spark_sql
from ebbflow.planners.query.sql.freezing import is_volatile
from ebbflow.planners.query.sql.predicates import all_of, any_of, conjuncts, free_columns, has_subquery
from ebbflow.planners.query.sql.references import outside_tables

_UNKNOWN = (exp.DType.UNKNOWN, exp.DType.NULL)
_LOGIC = (exp.And, exp.Or, exp.Not, exp.Paren)
_TESTS = (exp.EQ, exp.NEQ, exp.LT, exp.LTE, exp.GT, exp.GTE, exp.In, exp.Between, exp.Is)
_Types = Callable[[], Mapping[int, tuple[exp.Column, exp.DataType]]]
_SAFE_IN_UNIONS = (exp.EQ, exp.In)  # an arm's own type may order values otherwise than the union's


def restrict_views(query: exp.Query, catalogue: Catalogue) -> exp.Query:
    """Add the readers' filters to every view of ``query``'s WITH.

    Before: ``WITH v AS (SELECT y, sum(x) AS s FROM t GROUP BY y) SELECT ... FROM v AS p, v AS q WHERE p.y = 1 AND
    q.y = 2``; after, in ``v``: ``WHERE (t.y = 1) OR (t.y = 2)``. The readers keep their filters, so adding less, or
    nothing, is always right. Columns must be qualified. Changes ``query`` and returns it.
    """
    with_ = query.args.get("with_")
    if with_ is None or with_.recursive or is_volatile(query):
        return query
    ctes = list(with_.expressions)

    @cache
    def types() -> Mapping[int, tuple[exp.Column, exp.DataType]]:
        return _types(query, catalogue)

    for position in range(len(ctes) - 1, -1, -1):  # readers first: what is added to them counts as well
        name = ctes[position].alias
        readers: list[exp.Expr] = [c.this for c in ctes[position + 1 :]]
        found = [t for body in readers for t in outside_tables(body) if t.name == name and not t.db]
        with_.pop()
        found += [t for t in outside_tables(query) if t.name == name and not t.db]
        query.set("with_", with_)
        filters = [_filters(table, types) for table in found]
        if filters and all(filters):
            body = ctes[position].this
            union = isinstance(body.unnest(), exp.SetOperation)
            _restrict(body, filters, _of_one_type(query, position, catalogue) if union else None)
    return query


def _filters(table: exp.Table, types: _Types) -> list[exp.Expr]:
    """Return tests of a table's own columns that every row used of it passes, those of columns that are equal to them
    in all such rows included. ``types`` returns those of columns."""
    found = [p for p in own_filters(table) if _only_tests(p)]
    others = {t.alias_or_name: t for t in _neighbours(table)}
    seen = set[tuple[str, str, str]]()
    ways: list[tuple[exp.Column, ...]] = [tie for tie in _ties(table) if tie[1].table in others]
    while ways:  # from a column of the table to one that it is equal to
        mine, *_, its = way = ways.pop()
        if (known := (mine.name, its.table, its.name)) in seen:
            continue
        seen.add(known)
        other = others[its.table]
        for test in own_filters(other):
            columns = list(test.find_all(exp.Column))
            same = {c.name for c in columns} == {its.name} and _only_tests(test)
            if same and (kind := _alike(way, types())) is not None and _suits(test, kind):
                found.append(test.transform(lambda n, c=mine: c.copy() if isinstance(n, exp.Column) else n))
        ways += [
            (*way, more) for same, more in _ties(other) if same.name == its.name and more.table in others
        ]
    return list(dict.fromkeys(found))


def _alike(
    columns: Sequence[exp.Column], types: Mapping[int, tuple[exp.Column, exp.DataType]]
) -> exp.DataType | None:
    """Return the one type that columns have; ``None``: they have several, or it is not known."""
    kinds = [types[id(column)][1] for column in columns if id(column) in types]
    known = len(kinds) == len(columns) and not kinds[0].is_type(*_UNKNOWN)
    return kinds[0] if known and all(kind == kinds[0] for kind in kinds) else None


def _suits(test: exp.Expr, kind: exp.DataType) -> bool:
    """Tell whether all constants of a test are of a type's own kind: of other rows it cannot fail then."""
    texts, numbers = kind.is_type(*exp.DataType.TEXT_TYPES), kind.is_type(*exp.DataType.NUMERIC_TYPES)
    for constant in _constants(test):
        plain = constant.this if isinstance(constant, exp.Neg) else constant
        dated = (
            isinstance(constant, exp.Cast) and isinstance(constant.this, exp.Literal) and constant.to == kind
        )
        if isinstance(plain, exp.Literal):
            if not (texts if plain.is_string else numbers):
                return False
        elif not (dated and _is_date(constant.this.this) and kind.is_type("date")):
            return False
    return True


def _constants(test: exp.Expr) -> Iterator[exp.Expr]:
    """Iterate over what a test compares columns with, but for NULLs and truths."""
    if test.find(exp.Column) is None:
        if not isinstance(test, exp.Null | exp.Boolean):
            yield test
    elif not isinstance(test, exp.Column):
        for child in test.iter_expressions():
            yield from _constants(child)


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def _neighbours(table: exp.Table) -> Iterator[exp.Table]:
    """Iterate over the other tables of a table's SELECT."""
    select = cast("exp.Expr", table.parent).parent
    items = [select.args.get("from_"), *(select.args.get("joins") or ())] if select is not None else []
    yield from (
        i.this for i in items if i is not None and isinstance(i.this, exp.Table) and i.this is not table
    )


def _ties(table: exp.Table) -> Iterator[tuple[exp.Column, exp.Column]]:
    """Iterate over the columns of a table, and those of others that they are equal to in every row used of it."""
    alias = table.alias_or_name
    for test in _deciding(table):
        sides = (test.this, test.expression) if isinstance(test, exp.EQ) else ()
        if sides and all(isinstance(side, exp.Column) for side in sides):
            left, right = sides
            if (left.table == alias) != (right.table == alias):
                yield (left, right) if left.table == alias else (right, left)


def _types(query: exp.Query, catalogue: Catalogue) -> dict[int, tuple[exp.Column, exp.DataType]]:
    """Return columns and their types, as far as they can be told, by id(column)."""
    typed = _typed(query, catalogue)
    if typed is None:
        return {}
    pairs = zip(query.find_all(exp.Column), typed.find_all(exp.Column), strict=True)
    return {id(own): (own, same.type) for own, same in pairs if isinstance(same.type, exp.DataType)}


def _typed(query: exp.Query, catalogue: Catalogue) -> exp.Query | None:
    """Return a copy whose expressions have their types; ``None``: they cannot be told."""
    try:
        schema = cast("dict[str, Any]", catalogue.schema())
        return annotate_types(query.copy(), schema=schema, dialect="spark")
    except SqlglotError:
        return None


def _of_one_type(query: exp.Query, position: int, catalogue: Catalogue) -> Collection[str]:
    """Return the columns of a view that have one type in all arms of its unions. Of others an arm may think
    otherwise: the union of 1 and '01' holds texts, of which '01' alone is '01'."""
    typed = _typed(query, catalogue)
    if typed is None:
        return ()
    body = typed.args["with_"].expressions[position].this
    arms = [[item.type for item in arm.selects] for arm in _arms(body)]
    names = body.named_selects
    return {
        name
        for name, *kinds in zip(names, *arms, strict=False)
        if all(isinstance(k, exp.DataType) and not k.is_type(*_UNKNOWN) for k in kinds)
        and len({spark_sql(k) for k in kinds}) == 1
    }


def own_filters(table: exp.Table) -> list[exp.Expr]:
    """Return the conjuncts on ``table`` alone that every row used of it passes. Columns must be qualified."""
    alias = table.alias_or_name
    return [p for p in _deciding(table) if _aliases(p) == {alias}]


def _deciding(table: exp.Table) -> list[exp.Expr]:
    """Return the conjuncts that every row used of ``table`` passes, with rows of others."""
    item = table.parent
    select = item.parent if item is not None else None
    if not isinstance(item, exp.From | exp.Join) or not isinstance(select, exp.Select):
        return []
    if (
        any(value for key, value in table.args.items() if key not in ("this", "alias"))
        or table.alias_column_names
    ):
        return []
    joins = select.args.get("joins") or []
    # by their position, nearest match or place in a hierarchy, rows mean something to each other before any filter
    if any(j.method for j in joins) or any(select.args.get(key) for key in ("connect", "sample", "match")):
        return []
    parts: list[exp.Expr] = []
    if isinstance(item, exp.Join) and item.side not in ("RIGHT", "FULL"):
        parts += conjuncts(
            item.args.get("on")
        )  # whatever the join is, these decide about its right rows alone
    adding = any(j.side in ("RIGHT", "FULL") for j in joins)
    optional = isinstance(item, exp.Join) and (item.side or item.kind not in ("", "INNER", "CROSS"))
    if not adding and not optional:
        where = select.args.get("where")
        parts += conjuncts(where.this) if where is not None else []
        for join in joins:
            if join is not item and not join.side and join.kind in ("", "INNER", "CROSS"):
                parts += conjuncts(join.args.get("on"))
    return [p for p in parts if not has_subquery(p) and not is_volatile(p)]


def _aliases(node: exp.Expr) -> set[str]:
    return {c.table for c in node.find_all(exp.Column)}


def _only_tests(node: exp.Expr) -> bool:
    """Tell whether ``node`` compares bare columns with constants: evaluated on more rows it cannot fail."""
    if node.find(exp.Column) is None or isinstance(node, exp.Column):
        return not is_volatile(node)
    if not isinstance(node, (*_LOGIC, *_TESTS)):
        return False
    return all(_only_tests(child) for child in node.iter_expressions())


def _arms(body: exp.Expr) -> list[exp.Select]:
    """Return the SELECTs that make up a view, nothing when something judges their rows together."""
    arms: list[exp.Select] = []
    stack = [body]
    while stack:
        node = stack.pop()
        if any(node.args.get(key) for key in ("limit", "offset", "with_")):
            return []
        if isinstance(node, exp.Subquery | exp.Paren):
            stack.append(node.this)
        elif isinstance(node, exp.SetOperation):
            stack += [node.expression, node.this]
        elif isinstance(node, exp.Select):
            arms.append(node)
        else:
            return []
    return arms


def _restrict(body: exp.Expr, filters: Sequence[Sequence[exp.Expr]], only: Collection[str] | None) -> None:
    """Restrict the arms of ``body``, by the columns ``only`` where these are given."""
    arms = _arms(body)
    names = arms[0].named_selects if arms else []
    if any(len(arm.selects) != len(names) for arm in arms):
        return
    for arm in arms:
        columns = _pushable(arm, names)
        if only is not None:
            columns = {name: item for name, item in columns.items() if name in only}
        wanted = [_translated(f, columns, only=_SAFE_IN_UNIONS if len(arms) > 1 else _TESTS) for f in filters]
        possible = [w for w in wanted if w is not None]
        if not all(possible):  # one reader wants every row of this arm
            continue
        distinct = {spark_sql(all_of(w)): all_of(w) for w in possible}
        arm.where(any_of(distinct.values()) if distinct else exp.false(), copy=False)


def _pushable(arm: exp.Select, names: Sequence[str]) -> Mapping[str, exp.Expr]:
    """Return, by output name, the columns and constants whose filters may stand in the WHERE of ``arm``."""
    distinct = arm.args.get("distinct")
    if any(arm.args.get(key) for key in ("qualify", "laterals", "windows", "match", "pivots", "sample")):
        return {}
    if distinct is not None and distinct.args.get("on"):
        return {}
    # those of subqueries in the SELECT list are their own
    own = [n for item in arm.selects for n in item.find_all(exp.Window, exp.AggFunc, exp.UDTF, exp.Anonymous)]
    group = arm.args.get("group")
    if any(isinstance(n, exp.Window | exp.UDTF) for n in own):
        return {}
    if group is None and (own or arm.args.get("having") is not None):
        return {}
    items = {name: item.unalias() for name, item in zip(names, arm.selects, strict=True)}
    plain = {n: e for n, e in items.items() if isinstance(e, exp.Column | exp.Literal)}
    if group is None:
        return plain
    keys = {spark_sql(e) for e in group.expressions if isinstance(e, exp.Column)}
    # without a key there is a row even of nothing; a rollup has rows that no input row of that key has
    if not keys or any(value for key, value in group.args.items() if key != "expressions"):
        return {}
    return {n: e for n, e in plain.items() if isinstance(e, exp.Literal) or spark_sql(e) in keys}


def _translated(
    filter_: Sequence[exp.Expr], columns: Mapping[str, exp.Expr], only: tuple[type[exp.Expr], ...]
) -> list[exp.Expr] | None:
    """Return the conjuncts of ``filter_`` over an arm's own columns; ``None`` when no row of it can pass."""
    out = []
    for part in filter_:
        tests = part.find_all(*_TESTS)
        if not all(c.name in columns for c in free_columns(part)) or not all(
            isinstance(t, only) for t in tests
        ):
            continue
        holder = exp.Paren(this=part.copy())
        for column in list(free_columns(holder)):
            column.replace(columns[column.name].copy())
        known = _constant(holder.this)
        if known is False:
            return None
        if known is None:
            out.append(holder.this)
    return out


def _constant(node: exp.Expr) -> bool | None:
    """Return the value of an equality of two literals of one kind; ``None`` for anything else."""
    left, right = node.this, node.args.get("expression")
    if (
        not isinstance(node, exp.EQ)
        or not isinstance(left, exp.Literal)
        or not isinstance(right, exp.Literal)
    ):
        return None
    if left.is_string != right.is_string or (not left.is_string and left.this != right.this):
        return None
    return bool(left.this == right.this)
