"""DuckDB types and Spark SQL types.

Both directions keep the values that Spark would see, so that results of both engines can be compared.
"""

import re
from typing import Any

from ebbflow.infra.tables.datatypes import arrow_type

# DuckDB type -> (Spark type, DuckDB type to store, or None when it is stored as it is)
_FROM_DUCKDB: dict[str, tuple[str, str | None]] = {
    "boolean": ("boolean", None),
    "tinyint": ("tinyint", None),
    "smallint": ("smallint", None),
    "integer": ("int", None),
    "bigint": ("bigint", None),
    # the next wider signed type, as Spark's Parquet reader does
    "utinyint": ("smallint", "SMALLINT"),
    "usmallint": ("int", "INTEGER"),
    "uinteger": ("bigint", "BIGINT"),
    "ubigint": ("decimal(20,0)", "DECIMAL(20,0)"),
    # a sum of integers, which Spark keeps in 64 bits (and fails on overflow, as this cast does)
    "hugeint": ("bigint", "BIGINT"),
    "uhugeint": ("decimal(38,0)", "DECIMAL(38,0)"),
    "float": ("float", None),
    "double": ("double", None),
    "varchar": ("string", None),
    "blob": ("binary", None),
    "date": ("date", None),
    "timestamp": ("timestamp_ntz", None),
    "timestamp_s": ("timestamp_ntz", "TIMESTAMP"),
    "timestamp_ms": ("timestamp_ntz", "TIMESTAMP"),
    "timestamp_ns": ("timestamp_ntz", "TIMESTAMP"),
    "timestamp with time zone": ("timestamp", None),
    "null": ("string", "VARCHAR"),
}
JSON = "JSON"  # text to Spark, and to ``id`` of a type
# what text, or a wider number, tells in full
_RESTORABLE = frozenset({
    "bignum", "bit", "enum", "hugeint", "interval", "json", "time", "time with time zone", "timestamp_ms",
    "timestamp_s", "ubigint", "uhugeint", "uinteger", "usmallint", "utinyint", "uuid",
})  # fmt: skip
_FROM_ARROW = {
    "bool": "BOOLEAN",
    "int8": "TINYINT",
    "int16": "SMALLINT",
    "int32": "INTEGER",
    "int64": "BIGINT",
    "float": "FLOAT",
    "double": "DOUBLE",
    "string": "VARCHAR",
    "binary": "BLOB",
    "date32[day]": "DATE",
    "timestamp[us]": "TIMESTAMP",
    "timestamp[us, tz=UTC]": "TIMESTAMP WITH TIME ZONE",
    "null": "VARCHAR",
}


def quoted(name: str) -> str:
    """Return ``name`` as a DuckDB identifier.

    >>> quoted('a"b')
    '"a""b"'
    """
    return '"' + name.replace('"', '""') + '"'


def to_duckdb(spark_type: str) -> str:
    """Return the DuckDB type of a Spark SQL type name. Raises ``ValueError`` for an unknown name.

    >>> to_duckdb("array<struct<a:decimal(15,2)>>")
    'STRUCT("a" DECIMAL(15,2))[]'
    """
    return _of_arrow(arrow_type(spark_type))


def to_spark(dtype: Any) -> tuple[str, str | None]:
    """Return the Spark SQL type that a DuckDB type becomes, and the DuckDB type to cast to before storing it.

    The second is ``None`` when no cast is needed. What Spark has no type for (times, intervals, enumerations,
    UUIDs, ...) is stored as text.
    """
    kind = _kind(dtype)
    if kind == "decimal":
        sizes = dict(dtype.children)
        return f"decimal({sizes['precision']},{sizes['scale']})", None
    if kind in ("list", "array"):
        inner, cast = to_spark(dict(dtype.children)["child"])
        stored = cast or str(dict(dtype.children)["child"])
        return f"array<{inner}>", f"{stored}[]" if cast or kind == "array" else None
    if kind == "map":
        parts = dict(dtype.children)
        key, key_cast = to_spark(parts["key"])
        value, value_cast = to_spark(parts["value"])
        changed = key_cast or value_cast
        stored = f"MAP({key_cast or parts['key']}, {value_cast or parts['value']})"
        return f"map<{key},{value}>", stored if changed else None
    if kind == "struct":
        fields = [(name, child, *to_spark(child)) for name, child in dtype.children]
        spark = ",".join(f"{_field(name)}:{inner}" for name, _, inner, _ in fields)
        stored = ", ".join(f"{quoted(name)} {cast or child}" for name, child, _, cast in fields)
        return f"struct<{spark}>", f"STRUCT({stored})" if any(f[3] for f in fields) else None
    return _FROM_DUCKDB.get(kind) or _FROM_DUCKDB.get(str(dtype).lower()) or ("string", "VARCHAR")


def restorable(dtype: Any) -> bool:
    """Tell whether what a column of a DuckDB type is stored as can be cast back to it without a loss."""
    kind = _kind(dtype)
    if kind in ("list", "array", "map", "struct"):
        parts = [part for _, part in dtype.children if hasattr(part, "id")]  # an array has its length, too
        return all(to_spark(part)[1] is None or restorable(part) for part in parts)
    return kind in _RESTORABLE


def _kind(dtype: Any) -> str:
    return "json" if str(dtype) == JSON else str(dtype.id).lower()


def _field(name: str) -> str:
    return name if re.fullmatch(r"\w+", name) else "`" + name.replace("`", "``") + "`"


def _of_arrow(dtype: Any) -> str:
    import pyarrow as pa

    kind = pa.types
    if kind.is_decimal(dtype):
        return f"DECIMAL({dtype.precision},{dtype.scale})"
    if kind.is_list(dtype):
        return f"{_of_arrow(dtype.value_type)}[]"
    if kind.is_map(dtype):
        return f"MAP({_of_arrow(dtype.key_type)}, {_of_arrow(dtype.item_type)})"
    if kind.is_struct(dtype):
        return f"STRUCT({', '.join(f'{quoted(f.name)} {_of_arrow(f.type)}' for f in dtype)})"
    return _FROM_ARROW[str(dtype)]
