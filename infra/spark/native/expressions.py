"""Spark's resolved expressions as DuckDB's, those of which generated tests have proven that the values are equal.

What DuckDB computes is what Spark computes, or an error: then Spark SQL runs the stage and has the last word. So a
statement may fail that Spark would answer, and must never answer what Spark would refuse.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from ebbflow.infra.spark.native import types
from ebbflow.infra.spark.native.catalyst import Attribute, Node, NotNativeError
from ebbflow.infra.spark.native.types import Decimal, duckdb_type


class Typed(NamedTuple):
    """An expression in DuckDB's SQL, and the Spark type that its values have."""

    sql: str
    type: str


_CALLED = ("AggregateExpression", "WindowExpression")
Subquery = Callable[[Node], tuple[str, tuple[str, ...]]]  # a subquery's plan: its SQL and its columns' types


@dataclass(frozen=True)
class Translator:
    """Writes expressions.

    Args:
        rules: how the kinds of expressions are written that are proven to be equal.
        subquery: writes the plan of one.
        replaced: what was computed below, by the text that it stands for.
        calls: writes calls of aggregates, or over windows, where there may be any.
        escapes: the statement may name an escape character, which Spark's plan does not show.
        common: what a reference to a common expression means.
    """

    rules: "Mapping[str, Rule]"
    subquery: Subquery
    replaced: Mapping[str, Typed]
    calls: Callable[[Node], Typed] | None = None
    escapes: bool = False
    common: Typed | None = None

    def of(self, node: Node) -> Typed:
        """Return ``node`` in DuckDB's SQL. Raises ``NotNativeError``."""
        if node.kind in _CALLED:
            if self.calls is None:
                raise NotNativeError("an aggregate stands where none can be computed")
            return self.calls(node)
        rule = self.rules.get(node.kind)
        if self.replaced and rule is not None and node.kind not in ("Literal", "Alias"):
            whole = self.replaced.get(self._without().of(node).sql) if _free_of_calls(node) else None
            if whole is not None:
                return whole
        if rule is None:
            raise NotNativeError(f"{node.kind} is not proven to be equal")
        return rule(self, node)

    def _without(self) -> "Translator":
        return replace(self, replaced={}, calls=None)

    def all(self, node: Node) -> list[Typed]:
        """Return the children of ``node``."""
        return [self.of(child) for child in node.children]


Rule: TypeAlias = Callable[[Translator, Node], Typed]


def _free_of_calls(node: Node) -> bool:
    return all(n.kind not in _CALLED for n in node.walk())


def quoted(text: str) -> str:
    """Return ``text`` as a literal. Raises ``NotNativeError``."""
    if "\0" in text:
        raise NotNativeError("a text holds a zero byte")
    return "'" + text.replace("'", "''") + "'"


def identifier(name: str) -> str:
    """Return ``name`` as an identifier."""
    return '"' + name.replace('"', '""') + '"'


def reading(column: Attribute) -> str:
    """Return what reads a column of a file.

    DuckDB (2.0) takes the bounds in a file's footer, which leave NaN out, to hold for all rows: by them it decides
    comparisons, extremes, and whole expressions where both bounds are one. Of what is tried it does not.
    """
    name = identifier(column.name)
    return f"TRY({name})" if column.type in ("float", "double") else name


def cast(sql: str, kind: str) -> str:
    """Return a cast to one of Spark's types."""
    return f"CAST({sql} AS {duckdb_type(kind)})"


def clock_time(sql: str, kind: str) -> str:
    """Return a point in time as what clocks show in UTC. (Casts take each value through a calendar.)"""
    return f"make_timestamp(epoch_us({sql}))" if kind == "timestamp" else sql


def of_clock(sql: str, kind: str) -> str:
    """Return what clocks show in UTC as ``kind``, one of Spark's times."""
    return f"make_timestamptz(epoch_us({sql}))" if kind == "timestamp" else sql


def failing(test: str, value: str) -> str:
    """Return ``value``, or an error where ``test`` holds.

    By a cast, as DuckDB computes subqueries with ``error()``, which is volatile, anew for each row around them.
    """
    return (
        f"(CASE WHEN CAST(CASE WHEN {test} THEN 'Spark decides' ELSE 'true' END AS BOOLEAN) THEN {value} END)"
    )


def unscaled(sql: str, kind: Decimal) -> str:
    """Return a decimal's digits as a whole number of 128 bits."""
    if not kind.scale:
        return f"CAST({sql} AS HUGEINT)"
    ten = f"CAST('1{'0' * kind.scale}' AS DECIMAL({kind.scale + 1},0))"
    return f"CAST(CAST({sql} AS DECIMAL({types.MOST},{kind.scale})) * {ten} AS HUGEINT)"


def quotient(above: str, below: str, result: Decimal, shift: int) -> str:
    """Return ``above``·10^``shift``/``below``, whole numbers of 128 bits, as a decimal, rounded half up."""
    if not 0 <= shift <= types.MOST - 1:
        raise NotNativeError("a quotient has more digits than are proven to be equal")
    ten = f"CAST('1{'0' * shift}' AS HUGEINT)"
    # from inside out: numerator and denominator are computed once each
    whole = failing(
        "d = 0",
        "(CASE WHEN (n < 0) = (d < 0) THEN CAST(1 AS HUGEINT) ELSE CAST(-1 AS HUGEINT) END)"
        " * ((2 * abs(n) + abs(d)) // (2 * abs(d)))",
    )
    digits = whole.replace("abs(n)", f"abs({above} * {ten})").replace("(n < 0)", f"({above} < 0)")
    digits = digits.replace("abs(d)", f"abs({below})").replace("(d < 0)", f"({below} < 0)")
    digits = digits.replace("WHEN d = 0", f"WHEN {below} = 0")
    return scaled(digits, result)


def scaled(digits: str, result: Decimal) -> str:
    """Return a whole number of 128 bits as the digits of a decimal."""
    value = f"CAST({digits} AS DECIMAL({types.MOST},0))"
    if result.scale:
        value = f"({value} * CAST('0.{'0' * (result.scale - 1)}1' AS DECIMAL({result.scale},{result.scale})))"
    return cast(value, result.name)
