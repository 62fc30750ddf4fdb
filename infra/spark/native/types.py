"""Spark's types in DuckDB, and the rules by which Spark's decimals grow."""

import re
from dataclasses import dataclass
from functools import lru_cache

from ebbflow.infra.spark.native.catalyst import NotNativeError

MOST = 38  # digits of a decimal, in both engines
_LEAST_SCALE = 6  # digits after the point that Spark keeps when a result is too wide
_DUCKDB = {
    "boolean": "BOOLEAN",
    "byte": "TINYINT",
    "short": "SMALLINT",
    "integer": "INTEGER",
    "long": "BIGINT",
    "float": "FLOAT",
    "double": "DOUBLE",
    "string": "VARCHAR",
    "date": "DATE",
    "timestamp": "TIMESTAMP WITH TIME ZONE",
    "timestamp_ntz": "TIMESTAMP",
}
TIMES = ("timestamp", "timestamp_ntz")
INTEGERS = ("integer", "long")
SHORT = ("byte", "short")
_ALIASES = {
    "tinyint": "byte",
    "smallint": "short",
    "int": "integer",
    "bigint": "long",
}  # simpleString's names
_NAMES = {kind: alias for alias, kind in _ALIASES.items()}
_DECIMAL = re.compile(r"decimal\((\d+),(-?\d+)\)")


@dataclass(frozen=True, slots=True)
class Decimal:
    """A decimal type."""

    precision: int
    scale: int

    @property
    def name(self) -> str:
        """Return Spark's name of it."""
        return f"decimal({self.precision},{self.scale})"


@lru_cache(maxsize=1024)
def decimal(kind: str) -> Decimal | None:
    """Return a decimal type by Spark's name, ``None`` for another type."""
    found = _DECIMAL.fullmatch(kind)
    return Decimal(int(found[1]), int(found[2])) if found else None


def normal(kind: str) -> str:
    """Return a type's name in Spark's JSON for its name in SQL.

    >>> normal("bigint")
    'long'
    """
    return _ALIASES.get(kind, kind)


def sql_name(kind: str) -> str:
    """Return the name in Spark's SQL of a type by its name in JSON.

    >>> sql_name("long")
    'bigint'
    """
    return _NAMES.get(kind, kind)


def duckdb_type(kind: str) -> str:
    """Return DuckDB's type for one of Spark's.

    Raises ``NotNativeError`` for types that are not proven to behave alike.
    """
    known = decimal(kind)
    if known is not None and 0 <= known.scale <= known.precision:
        return f"DECIMAL({known.precision},{known.scale})"
    if kind not in _DUCKDB:
        raise NotNativeError(
            f"the type {kind if len(kind) < 20 else 'of a column'} is not proven to be equal"
        )
    return _DUCKDB[kind]


def exact(kind: str) -> bool:
    """Tell whether equality of this type is that of its bytes: of doubles there are two zeros."""
    return kind in ("boolean", *SHORT, *INTEGERS, "string", "date", *TIMES) or decimal(kind) is not None


def compared(kind: str) -> bool:
    """Tell whether both engines order values of this type alike, and hold the same ones for equal: those two zeros,
    and all NaN, which are above all others."""
    return exact(kind) or kind == "double"


def _bounded(precision: int, scale: int) -> Decimal:
    """Return ``DecimalType.adjustPrecisionScale``: what is too wide loses digits after the point, but six."""
    if precision <= MOST:
        return Decimal(precision, scale)
    whole = precision - scale
    return Decimal(MOST, max(MOST - whole, min(scale, _LEAST_SCALE)))


def added(a: Decimal, b: Decimal) -> Decimal:
    """Return the type of a sum or difference."""
    scale = max(a.scale, b.scale)
    return _bounded(max(a.precision - a.scale, b.precision - b.scale) + scale + 1, scale)


def multiplied(a: Decimal, b: Decimal) -> Decimal:
    """Return the type of a product.

    >>> multiplied(Decimal(32, 4), Decimal(16, 2)).name
    'decimal(38,6)'
    """
    return _bounded(a.precision + b.precision + 1, a.scale + b.scale)


def divided(a: Decimal, b: Decimal) -> Decimal:
    """Return the type of a quotient."""
    scale = max(_LEAST_SCALE, a.scale + b.precision + 1)
    return _bounded(a.precision - a.scale + b.scale + scale, scale)


def summed(a: Decimal) -> Decimal:
    """Return the type of a sum over rows."""
    return Decimal(min(MOST, a.precision + 10), a.scale)


def averaged(a: Decimal) -> Decimal:
    """Return the type of a mean over rows."""
    return Decimal(min(MOST, a.precision + 4), min(MOST, a.scale + 4))


def known(kind: str) -> bool:
    """Tell whether columns of this type may be read."""
    found = decimal(kind)
    return kind in _DUCKDB or (found is not None and 0 <= found.scale <= found.precision)
