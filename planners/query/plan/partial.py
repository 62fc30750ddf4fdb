"""Computing a SELECT from parts of its input: partial results of each part, and a merge of them all.

The partial statement may run on any division of the rows below it; the merge reads the union of what the parts
gave. Sums, counts, minima, maxima and averages are decomposed (Gray et al. 1997: distributive and algebraic
functions); a SELECT without aggregates is only projected early. Everything that judges groups or the whole result
(HAVING, windows, DISTINCT, ORDER BY, LIMIT) belongs to the merge.

Which averages can be put together from the sums and counts of parts.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sqlglot import exp
from sqlglot.errors import SqlglotError

from ebbflow.planners.model import Catalogue
from ebbflow.planners.query.sql.predicates import free_columns, written
from ebbflow.planners.query.views.column_types import Families
from ebbflow.planners.query.views.views import View

_ALIAS = "p"
_MERGES: Mapping[type[exp.Expr], type[exp.AggFunc]] = {
    exp.Sum: exp.Sum,
    exp.Count: exp.Sum,
    exp.Min: exp.Min,
    exp.Max: exp.Max,
}
_ABOVE = ("having", "windows", "distinct", "order", "limit", "offset")
_KNOWN = {"kind", "hint", "expressions", "from_", "joins", "where", "group", "with_", "laterals", *_ABOVE}


@dataclass(frozen=True)
class PartialQuery:
    """A SELECT in two. ``merge`` reads its rows FROM a table called ``source``; whoever uses it sets the name."""

    partial: exp.Select
    merge: exp.Select


_TYPE = re.compile(r"__type_([0-9a-f]{16})_(\d+)\b")


def type_of(fingerprint: str) -> Callable[[str], exp.DataType]:
    """Return types that stand for those of the columns of a checkpoint, until ``bound`` knows them."""

    def named(column: str) -> exp.DataType:
        kind = f"__type_{fingerprint[:16]}_{column.removeprefix('__')}"
        return exp.DataType(this=exp.DType.USERDEFINED, kind=kind)

    return named


def bound(sql: str, columns: Mapping[str, Sequence[tuple[str, str]]]) -> str:
    """Return ``sql`` with the types of checkpoint columns in place; ``columns`` are (name, type) by fingerprint."""
    known = {(fp[:16], name): dtype for fp, found in columns.items() for name, dtype in found}
    return _TYPE.sub(lambda m: known[m[1], f"__{m[2]}"], sql)


def split(select: exp.Select, source: str, type_of: Callable[[str], exp.DataType]) -> PartialQuery | None:
    """Return ``select`` in two, or ``None`` when it cannot be computed from parts.

    ``select`` is not changed; its columns must be qualified. ``type_of`` gives the type of a column of the partial
    result: merged sums are cast to it, so that the result has the types that one statement would give it.
    """
    if not _supported(select):
        return None
    group = select.args.get("group")
    keys = list(group.expressions) if group is not None else []
    calls = list(_aggregates(select))
    if any(not _decomposable(call) for call in calls):
        return None
    builder = _Builder(keys, source, type_of)
    merge = builder.merge(select, grouped=bool(calls) or group is not None)
    if merge is None:
        return None
    return PartialQuery(builder.partial(select, grouped=bool(calls) or group is not None), merge)


class _Builder:
    def __init__(self, keys: list[exp.Expr], source: str, type_of: Callable[[str], exp.DataType]) -> None:
        self._source = source
        self._type_of = type_of
        self._items: dict[str, exp.Expr] = {}  # output name -> expression of the partial SELECT
        self._names: dict[str, str] = {}  # expression text -> output name
        self._keys = {written(key): key for key in keys}

    def partial(self, select: exp.Select, *, grouped: bool) -> exp.Select:
        """Return the partial statement, once ``merge`` has said what it reads."""
        for key in self._keys.values():
            self._column(key)
        out = select.copy()
        for name in (*_ABOVE, "group"):
            out.set(name, None)
        items = [exp.alias_(e.copy(), name) for name, e in self._items.items()]
        out.set("expressions", items or [exp.alias_(exp.Literal.number(1), "__one")])
        if grouped and self._keys:
            out.set("group", exp.Group(expressions=[key.copy() for key in self._keys.values()]))
        return out

    def merge(self, select: exp.Select, *, grouped: bool) -> exp.Select | None:
        out = exp.Select()
        if not all(item.alias_or_name for item in select.selects):
            return None
        items = [
            exp.alias_(self._above(i.unalias().copy(), grouped), i.alias_or_name) for i in select.selects
        ]
        out.set("expressions", items)
        out.set("from_", exp.From(this=exp.alias_(exp.to_table(self._source), _ALIAS, table=True)))
        if grouped and self._keys:
            out.set("group", exp.Group(expressions=[self._column(key) for key in self._keys.values()]))
        for name in _ABOVE:
            part = select.args.get(name)
            if part is not None:
                out.set(name, self._above(part.copy(), grouped))
        # a column that is neither grouped by nor aggregated is not in the partial result
        return None if any(True for _ in free_columns(out)) else out

    def _above(self, node: exp.Expr, grouped: bool) -> exp.Expr:
        """Rewrite what stands above the partial result: group keys and aggregates become its columns."""
        if not grouped:
            for column in list(free_columns(node)):
                node = _replaced(node, column, self._column(column))
            return node
        root = exp.Paren(this=node)
        self._visit(root)
        found: exp.Expr = root.this.pop()
        return found

    def _visit(self, parent: exp.Expr) -> None:
        for key, value in list(parent.args.items()):
            for child in value if isinstance(value, list) else [value]:
                if not isinstance(child, exp.Expr) or isinstance(child, exp.Query):
                    continue
                # what a column is ordered by reads like the column, and says more
                if written(child) in self._keys and not isinstance(child, exp.Identifier | exp.Ordered):
                    child.replace(self._column(child))
                elif _is_aggregate(child) and not (key == "this" and isinstance(parent, exp.Window)):
                    child.replace(self._merged(child))
                else:
                    self._visit(child)

    def _merged(self, call: exp.Expr) -> exp.Expr:
        function = call.this if isinstance(call, exp.Filter) else call
        if isinstance(function, exp.Avg):
            total, count = self._with(call, exp.Sum), self._with(call, exp.Count)
            mean = self._column(call)  # carries nothing but its type: the engine's own rule for averages
            quotient = exp.Div(this=self._sum(self._column(total)), expression=self._sum(self._column(count)))
            return exp.cast(quotient, self._type_of(mean.name))
        column = self._column(call)
        if _MERGES[type(function)] is exp.Sum:
            return self._sum(column)
        return _MERGES[type(function)](this=column)

    def _sum(self, column: exp.Column) -> exp.Expr:
        # without the cast a decimal would grow by ten digits, and so would the scale of an average shrink
        return exp.cast(exp.Sum(this=column), self._type_of(column.name))

    def _with(self, call: exp.Expr, function: type[exp.AggFunc]) -> exp.Expr:
        """Return ``call`` with another function over the same argument."""
        copy = call.copy()
        inner = copy.this if isinstance(copy, exp.Filter) else copy
        other = function(this=inner.this.copy())
        if copy is inner:
            return other
        copy.set("this", other)
        return copy

    def _column(self, expression: exp.Expr) -> exp.Column:
        text = written(expression)
        if text not in self._names:
            name = f"__{len(self._names)}"
            self._names[text] = name
            self._items[name] = expression.copy()
        return exp.column(self._names[text], table=_ALIAS)


def _supported(select: exp.Select) -> bool:
    if any(value for key, value in select.args.items() if key not in _KNOWN):
        return False
    if select.args.get("kind") or select.args.get("laterals") or select.args.get("windows"):
        return False
    group = select.args.get("group")
    if group is not None and any(value for key, value in group.args.items() if key != "expressions"):
        return False  # WITH ROLLUP, ALL
    no_key = exp.Literal | exp.Rollup | exp.Cube | exp.GroupingSets  # by position, or several sets of keys
    if group is not None and any(isinstance(key, no_key) for key in group.expressions):
        return False
    above = [*select.selects, *(select.args.get(k) for k in _ABOVE)]
    parts = [p for p in above if isinstance(p, exp.Expr)]
    if any(isinstance(w.this, exp.Filter) for p in parts for w in p.find_all(exp.Window)):
        return False
    odd = [n for p in parts for n in p.find_all(exp.Star, exp.Explode, exp.Unnest)]
    return all(isinstance(n, exp.Star) and isinstance(n.parent, exp.Count) for n in odd)


def _aggregates(select: exp.Select) -> Iterator[exp.Expr]:
    """Iterate over the aggregate calls above the rows: in the projections, HAVING and ORDER BY."""
    for part in [*select.selects, *(select.args.get(k) for k in _ABOVE)]:
        if isinstance(part, exp.Expr):
            yield from _calls(part)


def _calls(node: exp.Expr) -> Iterator[exp.Expr]:
    if _is_aggregate(node) and not (isinstance(node.parent, exp.Window) and node.arg_key == "this"):
        yield node
        return
    for child in node.iter_expressions():
        yield from _calls(child)


def _is_aggregate(node: exp.Expr) -> bool:
    return isinstance(node, exp.AggFunc) or (
        isinstance(node, exp.Filter) and isinstance(node.this, exp.AggFunc)
    )


def _decomposable(call: exp.Expr) -> bool:
    function = call.this if isinstance(call, exp.Filter) else call
    if type(function) not in (*_MERGES, exp.Avg):
        return False
    if function.expressions or isinstance(function.this, exp.Distinct) or function.this is None:
        return False
    return not any(_is_aggregate(n) for n in function.this.find_all(exp.AggFunc) if n is not function)


def _replaced(root: exp.Expr, node: exp.Expr, new: exp.Expr) -> exp.Expr:
    if node is root:
        return new
    node.replace(new)
    return root


# Spark keeps ten digits more for a sum. Divided by a count, whose type has 20, one of more than 34 digits leaves
# fewer digits after the point than Spark's own average has, which divides without a type between.
_DIGITS = 24


# Spark averages integers in floating point: sums of these take 2^32 rows to overflow, of bigints perhaps two.
_NARROW = (exp.DType.TINYINT, exp.DType.SMALLINT, exp.DType.INT, exp.DType.FLOAT, exp.DType.DOUBLE)


_INTEGERS = 2**31  # literals from here on are bigints


_ARITHMETIC = (exp.Add, exp.Sub, exp.Mul, exp.Div, exp.Neg, exp.Abs)


_Kind = Callable[[exp.Column], exp.DataType | None]


def averages_add_up(view: View, catalogue: Catalogue, families: Families) -> bool:
    """Tell whether each average of ``view`` itself may be a sum over a count: with all digits, without overflow."""
    for select in view.selects():
        sources = {t.alias_or_name: t.name for t in select.find_all(exp.Table) if t.parent_select is select}

        def kind(column: exp.Column, sources: dict[str, str] = sources) -> exp.DataType | None:
            return _kind(view, catalogue, families, sources.get(column.table, ""), column.name)

        calls = [call for call in select.find_all(exp.Avg) if call.parent_select is select]
        if not all(_narrow(call.this, kind) for call in calls):
            return False
    return True


def _kind(
    view: View, catalogue: Catalogue, families: Families, source: str, column: str
) -> exp.DataType | None:
    if source in view.reads_views:  # of its types only the families are sure
        return exp.DataType.build("double") if families.get(source, {}).get(column) == "real" else None
    table = catalogue.get(source)
    written = next((t for n, t in table.columns if n.lower() == column), None) if table is not None else None
    try:
        return exp.DataType.build(written, dialect="spark") if written is not None else None
    except SqlglotError:
        return None


def _narrow(node: exp.Expr | None, kind: _Kind, digits: int = _DIGITS) -> bool:
    """Tell whether a value of ``node`` is a number, but no bigint and no decimal of more than ``digits`` digits."""
    node = node.unnest() if node is not None else exp.Null()
    if isinstance(node, exp.Literal | exp.Null):
        return not node.is_int or int(node.name) < _INTEGERS
    if isinstance(node, exp.Column | exp.Cast):
        found = kind(node) if isinstance(node, exp.Column) else node.to
        if found is None or found.this != exp.DType.DECIMAL:
            return found is not None and found.this in _NARROW
        return bool(found.expressions) and int(found.expressions[0].name) <= digits
    if isinstance(node, exp.Case):
        values = [node.args.get("default"), *(branch.args["true"] for branch in node.args["ifs"])]
    elif isinstance(node, exp.If):
        values = [node.args["true"], node.args.get("false")]
    elif isinstance(node, exp.Coalesce):
        values = [node.this, *node.expressions]
    elif isinstance(node, _ARITHMETIC):  # with decimals, more digits than either operand has
        values, digits = [node.this, node.args.get("expression")], 0
    else:
        return False
    return all(_narrow(value, kind, digits) for value in values)
