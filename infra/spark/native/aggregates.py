"""Spark's aggregate calls in DuckDB: parts that add up over slices, and what the call is of them.

Calls over windows are of such parts too, but of all rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ebbflow.infra.spark.native import types
from ebbflow.infra.spark.native.catalyst import RANKS, Node, NotNativeError
from ebbflow.infra.spark.native.expressions import Translator, Typed, cast, failing, quotient, unscaled
from ebbflow.infra.spark.native.types import Decimal, decimal

_ROUNDED = 11  # digits up to which Spark takes means of decimals in floating point
_TOLD = 10  # digits up to which both engines write such a mean alike where it lies between two decimals
_DOUBLE = 2**53  # whole numbers up to here are doubles
_MOMENTS = {
    "VarianceSamp": 1,
    "VariancePop": 0,
    "StddevSamp": 1,
    "StddevPop": 0,
}  # degrees of freedom they lose
_CALLS = ("Count", "CountIf", "Sum", "Average", "Min", "Max", "BoolOr", "BoolAnd", *_MOMENTS)
_EXACT = 15  # digits of decimals that are doubles, each by itself
_LISTED = "flatten(list"  # merges lists, of which each slice has one
_FRAMES = {"RowFrame": "ROWS", "RangeFrame": "RANGE"}
_BOUNDS = {
    "UnboundedPreceding$": "UNBOUNDED PRECEDING",
    "CurrentRow$": "CURRENT ROW",
    "UnboundedFollowing$": "UNBOUNDED FOLLOWING",
}


@dataclass
class Calls:
    """The aggregate calls of one operator.

    ``parts`` are calls of DuckDB's as columns ``a0``, ``a1``, ...; each may be computed of slices, and merged by the
    function beside it. Calls over distinct values are computed when slices are merged, which have kept ``values``.
    Sums of doubles are in the order of rows and slices, as Spark's are in that of its tasks.
    """

    writer: Translator
    parts: dict[str, str] = field(
        default_factory=dict
    )  # call -> the function that merges it, or a call of a value
    values: list[str] = field(
        default_factory=list
    )  # of which distinct ones count: columns ``d0``, ``d1``, ...
    whole: bool = False  # some call can only be computed of all rows
    numbered: bool = False  # some call's value for a row depends on which of rows that are equal comes first
    kinds: dict[str, str] = field(default_factory=dict)  # call -> type of its values

    def of(self, node: Node) -> Typed:
        """Return a call's value in terms of ``parts``. Raises ``NotNativeError``."""
        function, *condition = node.children
        distinct = bool(node.fields.get("isDistinct"))
        only = ""
        if condition:
            only = f" FILTER (WHERE {self.writer.of(condition[0]).sql})"
        if function.kind not in _CALLS:
            raise NotNativeError(f"the aggregate {function.kind} is not proven to be equal")
        self.whole = self.whole or (distinct and bool(condition))
        if function.kind in _MOMENTS:
            return self._moment(function, "DISTINCT " if distinct else "", only)
        found: Typed = getattr(self, f"_{function.kind.lower()}")(
            function, "DISTINCT " if distinct else "", only
        )
        return found

    def over(self, node: Node) -> Typed:
        """Return the value of a call over a window in terms of ``parts``, none of which can be merged.

        Raises ``NotNativeError``.
        """
        function, window = node.children
        if function.kind in RANKS:
            self.numbered = self.numbered or function.kind == "RowNumber"
            rank = self._part(f"{RANKS[function.kind]} OVER ({self._partitions(window)})", "")
            return Typed(f"CAST({rank} AS INTEGER)", "integer")
        if function.kind != "AggregateExpression" or len(function.children) > 1:
            raise NotNativeError(f"{function.kind} over a window is not proven to be equal")
        (call,) = function.children
        if function.fields.get("isDistinct") or call.kind not in _CALLS or call.kind in _MOMENTS:
            raise NotNativeError(f"the aggregate {call.kind} over a window is not proven to be equal")
        kind = self._widened(call).type if call.kind in ("Sum", "Average") else ""
        known = decimal(kind)
        if known is not None and known.precision + 10 > types.MOST:
            raise NotNativeError("a sum over a window may have more digits than are proven to be equal")
        if kind == "double" and any(child.kind == "SortOrder" for child in window.children):
            raise NotNativeError("a running sum of doubles, in an order, is not proven to be equal")
        found: Typed = getattr(self, f"_{call.kind.lower()}")(call, "", f" OVER ({self._framed(window)})")
        return found

    @property
    def adds_up(self) -> bool:
        """Tell whether parts may be merged in any order, and again after that."""
        return not self.whole and not {"double", "list"} & {*self.kinds.values()}

    def _partitions(self, window: Node) -> str:
        """Return a window's partitions and their order."""
        by, order = list[str](), list[str]()
        for child in window.children[:-1]:  # the last one is the frame
            key = self.writer.of(child.children[0] if child.kind == "SortOrder" else child)
            if not types.compared(key.type):
                raise NotNativeError(f"windows by {key.type} are not proven to be equal")
            if child.kind == "SortOrder":
                order.append(f"{key.sql} {direction(child)}")
            else:
                by.append(key.sql)
        clauses = (("PARTITION BY", by), ("ORDER BY", order))
        return " ".join(f"{words} {', '.join(keys)}" for words, keys in clauses if keys)

    def _framed(self, window: Node) -> str:
        """Return a window and which rows around its own a row's call sees."""
        frame = window.children[-1]
        kind, bounds = _FRAMES.get(frame.object("frameType")), [_BOUNDS.get(c.kind) for c in frame.children]
        if kind is None or len(bounds) != 2 or None in bounds:
            raise NotNativeError("a frame of some rows or values is not proven to be equal")
        self.numbered = self.numbered or (kind == "ROWS" and "CURRENT ROW" in bounds)
        return f"{self._partitions(window)} {kind} BETWEEN {bounds[0]} AND {bounds[1]}"

    def _part(self, call: str, merged: str, kind: str = "long") -> str:
        self.parts.setdefault(call, merged)
        self.kinds.setdefault(call, kind)
        return f"a{list(self.parts).index(call)}"

    def _argument(self, function: Node) -> Typed:
        if len(function.children) != 1:
            raise NotNativeError(f"{function.kind} of several columns is not proven to be equal")
        return self.writer.of(function.children[0])

    def _widened(self, function: Node) -> Typed:
        """Return the argument of a sum: Spark has one of floats in doubles."""
        found = self._argument(function)
        return Typed(cast(found.sql, "double"), "double") if found.type == "float" else found

    def _count(self, function: Node, distinct: str, only: str) -> Typed:
        if not distinct and all(child.kind == "Literal" for child in function.children):
            if any(child.fields["value"] is None for child in function.children):
                raise NotNativeError("counting nulls is not proven to be equal")
            return Typed(f"CAST({self._part(f'count(*){only}', 'sum')} AS BIGINT)", "long")
        return Typed(f"CAST({self._counted(self._argument(function).sql, distinct, only)} AS BIGINT)", "long")

    def _countif(self, function: Node, distinct: str, only: str) -> Typed:
        if distinct:
            raise NotNativeError("counting distinct truths is not proven to be equal")
        return Typed(
            f"CAST({self._counted(f'nullif({self._argument(function).sql}, false)', '', only)} AS BIGINT)",
            "long",
        )

    def _boolor(self, function: Node, _: str, only: str) -> Typed:
        return self._truth("bool_or", function, only)

    def _booland(self, function: Node, _: str, only: str) -> Typed:
        return self._truth("bool_and", function, only)

    def _truth(self, call: str, function: Node, only: str) -> Typed:
        return Typed(self._part(f"{call}({self._argument(function).sql}){only}", call, "boolean"), "boolean")

    def _counted(self, sql: str, distinct: str, only: str) -> str:
        merged = f"count(DISTINCT {self._value(sql)})" if distinct else "sum"
        return self._part(f"count({distinct}{sql}){only}", merged)

    def _value(self, sql: str) -> str:
        """Return the column of an argument of which distinct values count."""
        if sql not in self.values:
            self.values.append(sql)
        return f"d{self.values.index(sql)}"

    def _sum(self, function: Node, distinct: str, only: str) -> Typed:
        sql, kind = self._widened(function)
        total = self._total(sql, kind, distinct, only)
        known = decimal(kind)
        if kind == "double":
            return Typed(total, kind)
        if known is not None:
            return Typed(cast(total, types.summed(known).name), types.summed(known).name)
        if kind == "long":  # Spark refuses a sum that leaves 64 bits on its way, whatever it is at the end
            total = failing(self._beyond(sql, kind, only, 2**63 - 1), total)
        return Typed(cast(total, "long"), "long")

    def _total(self, sql: str, kind: str, distinct: str, only: str) -> str:
        known = decimal(kind)
        if kind == "double":
            merged = f"sum(DISTINCT {self._value(sql)})" if distinct else "sum"
            return self._part(f"sum({distinct}{sql}){only}", merged, kind)
        if known is None and kind not in types.INTEGERS:
            raise NotNativeError(f"the sum of {kind} is not proven to be equal")
        # Parquet has no whole numbers of 128 bits
        kept = f"DECIMAL({types.MOST},{known.scale if known else 0})"
        merged = f"CAST(sum(DISTINCT {self._value(sql)}) AS {kept})" if distinct else "sum"
        return self._part(f"CAST(sum({distinct}{sql}){only} AS {kept})", merged, kept.lower())

    def _beyond(self, sql: str, kind: str, only: str, limit: int) -> str:
        """Return a test that some of the whole numbers, or of the digits of decimals, might add up to more than
        ``limit``, in whatever order."""
        top, least = (self._part(f"{word}({sql}){only}", word, kind) for word in ("max", "min"))
        if (digits := decimal(kind)) is not None:
            top, least = unscaled(top, digits), unscaled(least, digits)
        count = self._part(f"count({sql}){only}", "sum")
        most = f"(CAST(greatest({top}, -1 - {least}) AS HUGEINT) + 1)"
        return f"({most} * CAST({count} AS HUGEINT) > {limit})"

    def _average(self, function: Node, distinct: str, only: str) -> Typed:
        sql, kind = self._widened(function)
        known = decimal(kind)
        if known is not None and _TOLD < known.precision <= _ROUNDED:
            raise NotNativeError(f"the mean of {kind}, which Spark rounds twice, is not proven to be equal")
        total = self._total(sql, kind, distinct, only)
        count = f"CAST({self._counted(sql, distinct, only)} AS HUGEINT)"
        if kind == "double":
            return Typed(_unless_none(count, f"({total} / CAST({count} AS DOUBLE))"), kind)
        if known is None:
            quotient_ = f"(CAST({total} AS DOUBLE) / CAST({count} AS DOUBLE))"
            return Typed(
                failing(self._beyond(sql, kind, only, _DOUBLE), _unless_none(count, quotient_)), "double"
            )
        result = types.averaged(known)
        wide = Decimal(types.MOST, known.scale)
        if known.precision <= _ROUNDED:  # Spark divides doubles twice, and rounds what it would write of that
            total = f"CAST({unscaled(total, wide)} AS DOUBLE)"
            mean = f"{total} / CAST({count} AS DOUBLE) / CAST(1e{known.scale} AS DOUBLE)"
            mean = cast(f"CAST({mean} AS VARCHAR)", result.name)
            beyond = self._beyond(sql, kind, only, _DOUBLE)
            return Typed(failing(beyond, _unless_none(count, mean)), result.name)
        mean = quotient(unscaled(total, wide), count, result, result.scale - known.scale)
        return Typed(_unless_none(count, mean), result.name)

    def _moment(self, function: Node, distinct: str, only: str) -> Typed:
        """Return a variance, or its square root: of whole numbers and short decimals exactly, by sums of squares; of
        doubles, of which those would cancel, by each slice's own mean and variance.

        (T. Chan, G. Golub and R. LeVeque, Updating formulae and a pairwise algorithm for computing sample variances,
        1979.)
        """
        (argument,) = function.children
        if distinct or not function.fields.get("nullOnDivideByZero", True):
            raise NotNativeError(f"{function.kind} of distinct values is not proven to be equal")
        sql, kind = self.writer.of(argument.children[0] if argument.kind == "Cast" else argument)
        known = decimal(kind) or (Decimal(19, 0) if kind == "long" else None)
        exact = kind in types.INTEGERS or (known is not None and known.precision <= _EXACT)
        if not exact:
            sql, kind = self._argument(function)
        count = f"CAST({self._counted(sql, '', only)} AS HUGEINT)"
        lost = _MOMENTS[function.kind]
        if kind in ("long", "double"):
            least, most = (self._part(f"{word}({sql}){only}", word, kind) for word in ("min", "max"))
        if exact:
            wide = "BIGINT" if known is None else f"DECIMAL({known.precision},{known.scale})"
            scale = known.scale if known is not None else 0
            squares = f"(CAST({sql} AS {wide}) * CAST({sql} AS {wide}))"
            total = unscaled(self._total(sql, kind, "", only), Decimal(types.MOST, scale))
            of_squares = self._total(squares, f"decimal({types.MOST},{2 * scale})", "", only)
            above = f"({count} * {unscaled(of_squares, Decimal(types.MOST, 2 * scale))} - {total} * {total})"
            below = f"(CAST({count} AS DOUBLE) * CAST({count} - {lost} AS DOUBLE) * CAST(1e{2 * scale} AS DOUBLE))"
            value = f"(CAST({above} AS DOUBLE) / {below})"
            if kind == "long":  # of which doubles are not all
                value = failing(f"greatest({most}, -1 - {least}) > {_DOUBLE}", value)
        elif kind == "double":
            total = self._part(f"sum({sql}){only}", "sum", kind)
            own = f"'n': count({sql}){only}, 's': sum({sql}){only}, 'v': var_pop({sql}){only}"
            slices = self._part(f"[{{{own}}}]", _LISTED, "list")
            mean = f"{total} / CAST({count} AS DOUBLE)"
            squares = f"list_transform({slices}, lambda p: p.n * (p.v + (p.s / p.n - {mean}) ** 2))"
            value = f"(list_sum({squares}) / CAST({count} - {lost} AS DOUBLE))"
            value = failing(f"NOT isfinite({value})", value)  # how it overflows is a matter of order
            value = (
                f"(CASE WHEN {least} = {most} AND isfinite({least}) THEN CAST(0 AS DOUBLE) ELSE {value} END)"
            )
        else:
            raise NotNativeError(f"{function.kind} of {kind} is not proven to be equal")
        root = f"sqrt({value})" if function.kind.startswith("Stddev") else value
        return Typed(f"(CASE WHEN {count} <= {lost} THEN NULL ELSE {root} END)", "double")

    def _min(self, function: Node, _: str, only: str) -> Typed:
        sql, kind = self._argument(function)
        return Typed(self._part(f"min({sql}){only}", "min", kind), kind)

    def _max(self, function: Node, _: str, only: str) -> Typed:
        sql, kind = self._argument(function)
        return Typed(self._part(f"max({sql}){only}", "max", kind), kind)


@dataclass
class Groups:
    """The groups of an aggregate: its keys, and the parts of its calls."""

    keys: Mapping[str, Typed]  # by their text below
    calls: Calls
    early: Mapping[str, str] | None = None  # call -> what it is of groups that were made below joins

    def complete(self, source: str) -> str:
        """Return the groups of ``source``."""
        calls = [f"{self._text(call)} AS a{i}" for i, call in enumerate(self.calls.parts)]
        return _grouped(source, self._named(), calls)

    def _named(self) -> list[tuple[str, str]]:
        """Return the keys' texts and names; of two zeros, a group has the one without a sign."""
        return [
            (f"({text} + CAST(0 AS DOUBLE))" if key.type == "double" else text, key.sql)
            for text, key in self.keys.items()
        ]

    def sliced(self, source: str) -> str:
        """Return the groups of ``source``, a slice, one for each of the values of which distinct ones count."""
        keys = self._named()
        keys += [(text, f"d{i}") for i, text in enumerate(self.calls.values)]
        parts = enumerate(self.calls.parts.items())
        calls = [
            f"{self._text(call)} AS a{i}" for i, (call, how) in parts if how == _LISTED or "(" not in how
        ]
        return _grouped(source, keys, calls)

    def merged(self, parts: str) -> str:
        """Return the groups of what slices have computed, as the relation ``parts``."""
        calls = [f"{self._merging(i)} AS a{i}" for i in range(len(self.calls.parts))]
        return _grouped(parts, [(key.sql, key.sql) for key in self.keys.values()], calls)

    def coarser(self, finer: str, fixed: Mapping[str, str]) -> str:
        """Return what ``sliced`` would of the same rows, of finer groups of theirs; keys, by name, with values that
        are ``fixed`` do not tell them apart."""
        keys = [(fixed.get(key.sql, key.sql), key.sql) for key in self.keys.values()]
        keys += [(f"d{i}", f"d{i}") for i in range(len(self.calls.values))]
        calls = [
            f"{cast(self._merging(i), self.calls.kinds[call])} AS a{i}"
            for i, (call, how) in enumerate(self.calls.parts.items())
            if "(" not in how
        ]
        listed = ", ".join([text if text == name else f"{text} AS {name}" for text, name in keys] + calls)
        by = ", ".join(name for text, name in keys if text == name)
        return f"(SELECT {listed} FROM {finer} {f'GROUP BY {by}' if by else 'HAVING count(*) > 0'})"

    def _merging(self, number: int) -> str:
        """Return what combines the values of a call."""
        call, how = list(self.calls.parts.items())[number]
        merged = f"{how}(a{number}))" if how == _LISTED else how if "(" in how else f"{how}(a{number})"
        return f"coalesce({merged}, 0)" if call.startswith("count(") else merged

    def _text(self, call: str) -> str:
        return call if self.early is None else self.early[call]


def _grouped(source: str, keys: list[tuple[str, str]], calls: list[str]) -> str:
    listed = [text if text == name else f"{text} AS {name}" for text, name in keys] + calls
    by = f" GROUP BY {', '.join(text for text, _ in keys)}" if keys else ""
    return f"(SELECT {', '.join(listed) or 'count(*) AS one'} FROM {source}{by})"


def direction(item: Node) -> str:
    """Return how a key of an order sorts. Raises ``NotNativeError``."""
    way, nulls = item.object("direction"), item.object("nullOrdering")
    if way not in ("Ascending", "Descending") or nulls not in ("NullsFirst", "NullsLast"):
        raise NotNativeError("an order that is unknown")
    return f"{'ASC' if way == 'Ascending' else 'DESC'} NULLS {'FIRST' if nulls == 'NullsFirst' else 'LAST'}"


def _unless_none(count: str, value: str) -> str:
    return f"(CASE WHEN {count} = 0 THEN NULL ELSE {value} END)"
