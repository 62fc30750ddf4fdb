"""Spark's aggregate calls in DuckDB: parts that add up over slices, and what the call is of them."""

from dataclasses import dataclass, field

from ebbflow.infra.spark.native import types
from ebbflow.infra.spark.native.catalyst import Node, NotNativeError
from ebbflow.infra.spark.native.expressions import Translator, Typed, cast, failing, quotient, unscaled
from ebbflow.infra.spark.native.types import Decimal, decimal

_ROUNDED = 11  # digits up to which Spark takes means of decimals in floating point
_DOUBLE = 2**53  # whole numbers up to here are doubles


@dataclass
class Calls:
    """The aggregate calls of one operator.

    ``parts`` are calls of DuckDB's as columns ``a0``, ``a1``, ...; each may be computed of slices, and merged by the
    function beside it, but for those over distinct values.
    """

    writer: Translator
    parts: dict[str, str] = field(default_factory=dict)  # call -> the function that merges it
    distinct: bool = False

    def of(self, node: Node) -> Typed:
        """Return a call's value in terms of ``parts``. Raises ``NotNativeError``."""
        function, *condition = node.children
        distinct = bool(node.fields.get("isDistinct"))
        only = ""
        if condition:
            only = f" FILTER (WHERE {self.writer.of(condition[0]).sql})"
        if function.kind not in ("Count", "Sum", "Average", "Min", "Max"):
            raise NotNativeError(f"the aggregate {function.kind} is not proven to be equal")
        self.distinct = self.distinct or distinct
        found: Typed = getattr(self, f"_{function.kind.lower()}")(
            function, "DISTINCT " if distinct else "", only
        )
        return found

    def _part(self, call: str, merged: str) -> str:
        self.parts.setdefault(call, merged)
        return f"a{list(self.parts).index(call)}"

    def _argument(self, function: Node) -> Typed:
        if len(function.children) != 1:
            raise NotNativeError(f"{function.kind} of several columns is not proven to be equal")
        found = self.writer.of(function.children[0])
        if not types.exact(found.type):
            raise NotNativeError(f"{function.kind} of {found.type} is not proven to be equal")
        return found

    def _count(self, function: Node, distinct: str, only: str) -> Typed:
        if not distinct and all(child.kind == "Literal" for child in function.children):
            if any(child.fields["value"] is None for child in function.children):
                raise NotNativeError("counting nulls is not proven to be equal")
            return Typed(f"CAST({self._part(f'count(*){only}', 'sum')} AS BIGINT)", "long")
        call = f"count({distinct}{self._argument(function).sql}){only}"
        return Typed(f"CAST({self._part(call, 'sum')} AS BIGINT)", "long")

    def _sum(self, function: Node, distinct: str, only: str) -> Typed:
        sql, kind = self._argument(function)
        total = self._total(sql, kind, distinct, only)
        known = decimal(kind)
        if known is not None:
            return Typed(cast(total, types.summed(known).name), types.summed(known).name)
        if kind == "long":  # Spark refuses a sum that leaves 64 bits on its way, whatever it is at the end
            total = failing(self._beyond(sql, only, 2**63 - 1), total)
        return Typed(cast(total, "long"), "long")

    def _total(self, sql: str, kind: str, distinct: str, only: str) -> str:
        known = decimal(kind)
        if known is None and kind not in types.INTEGERS:
            raise NotNativeError(f"the sum of {kind} is not proven to be equal")
        # Parquet has no whole numbers of 128 bits
        scale = known.scale if known else 0
        return self._part(f"CAST(sum({distinct}{sql}){only} AS DECIMAL({types.MOST},{scale}))", "sum")

    def _beyond(self, sql: str, only: str, limit: int) -> str:
        """Return a test that some of the whole numbers might add up to more than ``limit``, in whatever order."""
        top, least = self._part(f"max({sql}){only}", "max"), self._part(f"min({sql}){only}", "min")
        count = self._part(f"count({sql}){only}", "sum")
        most = f"(CAST(greatest({top}, -1 - {least}) AS HUGEINT) + 1)"
        return f"({most} * CAST({count} AS HUGEINT) > {limit})"

    def _average(self, function: Node, distinct: str, only: str) -> Typed:
        sql, kind = self._argument(function)
        known = decimal(kind)
        if known is not None and known.precision <= _ROUNDED:
            raise NotNativeError(f"the mean of {kind}, which Spark rounds twice, is not proven to be equal")
        total = self._total(sql, kind, distinct, only)
        count = f"CAST({self._part(f'count({distinct}{sql}){only}', 'sum')} AS HUGEINT)"
        if known is None:
            quotient_ = f"(CAST({total} AS DOUBLE) / CAST({count} AS DOUBLE))"
            return Typed(failing(self._beyond(sql, only, _DOUBLE), _unless_none(count, quotient_)), "double")
        result = types.averaged(known)
        wide = Decimal(types.MOST, known.scale)
        mean = quotient(unscaled(total, wide), count, result, result.scale - known.scale)
        return Typed(_unless_none(count, mean), result.name)

    def _min(self, function: Node, _: str, only: str) -> Typed:
        sql, kind = self._argument(function)
        return Typed(self._part(f"min({sql}){only}", "min"), kind)

    def _max(self, function: Node, _: str, only: str) -> Typed:
        sql, kind = self._argument(function)
        return Typed(self._part(f"max({sql}){only}", "max"), kind)


def _unless_none(count: str, value: str) -> str:
    return f"(CASE WHEN {count} = 0 THEN NULL ELSE {value} END)"
