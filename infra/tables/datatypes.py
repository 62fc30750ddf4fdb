"""Spark SQL type names of Arrow types, and back."""

import re
from typing import Any

_SIMPLE = {
    "bool": "boolean",
    "int8": "tinyint",
    "int16": "smallint",
    "int32": "int",
    "int64": "bigint",
    # unsigned integers take the next wider signed type, as Spark's Parquet reader does
    "uint8": "smallint",
    "uint16": "int",
    "uint32": "bigint",
    "uint64": "decimal(20,0)",
    "float": "float",
    "double": "double",
    "string": "string",
    "large_string": "string",
    "string_view": "string",
    "binary": "binary",
    "large_binary": "binary",
    "binary_view": "binary",
    "date32[day]": "date",
    "date64[ms]": "date",
}
_LARGEST_PRECISION = 38


def spark_type(dtype: Any) -> str | None:
    """Return the Spark SQL name of an Arrow type, or ``None`` when Spark has none.

    Nanosecond timestamps have none: Spark keeps microseconds.

    Examples:
        >>> import pyarrow as pa
        >>> spark_type(pa.list_(pa.struct([("a", pa.decimal128(15, 2))])))
        'array<struct<a:decimal(15,2)>>'
    """
    import pyarrow as pa

    kind = pa.types
    name = _SIMPLE.get(str(dtype))
    if name:
        return name
    if kind.is_decimal(dtype):
        fits = dtype.precision <= _LARGEST_PRECISION and 0 <= dtype.scale <= dtype.precision
        return f"decimal({dtype.precision},{dtype.scale})" if fits else None
    if kind.is_timestamp(dtype):
        return None if dtype.unit == "ns" else ("timestamp" if dtype.tz else "timestamp_ntz")
    if kind.is_fixed_size_binary(dtype):
        return "binary"
    if kind.is_dictionary(dtype):
        return spark_type(dtype.value_type)
    if isinstance(dtype, pa.BaseExtensionType):
        return spark_type(dtype.storage_type)
    return _nested(dtype)


def arrow_type(name: str) -> Any:
    """Return the Arrow type of a Spark SQL type name. Raises ``ValueError`` for an unknown name."""
    dtype, rest = _parse(name.strip())
    if rest:
        raise ValueError(f"Spark type {name!r} has an unexpected end {rest!r}")
    return dtype


def arrow_schema(columns: Any) -> Any:
    """Return the Arrow schema of ``(name, Spark SQL type)`` pairs."""
    import pyarrow as pa

    return pa.schema([(name, arrow_type(dtype)) for name, dtype in columns])


def _nested(dtype: Any) -> str | None:
    import pyarrow as pa

    kind = pa.types
    if kind.is_map(dtype):
        key, item = spark_type(dtype.key_type), spark_type(dtype.item_type)
        return f"map<{key},{item}>" if key and item else None
    if hasattr(dtype, "value_type") and "list" in str(dtype):
        item = spark_type(dtype.value_type)
        return f"array<{item}>" if item else None
    if kind.is_struct(dtype):
        parts = [(_quoted(field.name), spark_type(field.type)) for field in dtype]
        return f"struct<{','.join(f'{n}:{t}' for n, t in parts)}>" if all(t for _, t in parts) else None
    return None


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"\w+", name) else "`" + name.replace("`", "``") + "`"


_DECIMAL = re.compile(r"(?:decimal|numeric)\s*(?:\(\s*(\d+)\s*(?:,\s*(\d+)\s*)?\))?", re.IGNORECASE)
_LENGTH = re.compile(r"(?:varchar|char)\s*(?:\(\s*\d+\s*\))?", re.IGNORECASE)
_WORD = re.compile(r"\w+")


def _parse(text: str) -> tuple[Any, str]:
    """Read one type from the front of ``text``; return it and what follows."""
    import pyarrow as pa

    if match := _DECIMAL.match(text):
        return pa.decimal128(int(match.group(1) or 10), int(match.group(2) or 0)), text[
            match.end() :
        ].lstrip()
    if match := _LENGTH.match(text):
        return pa.string(), text[match.end() :].lstrip()
    match = _WORD.match(text)
    word = match.group().lower() if match else ""
    rest = text[len(word) :].lstrip()
    if word == "array":
        item, rest = _parse(_after(rest, "<"))
        return pa.list_(item), _after(rest, ">")
    if word == "map":
        key, rest = _parse(_after(rest, "<"))
        value, rest = _parse(_after(rest, ","))
        return pa.map_(key, value), _after(rest, ">")
    if word == "struct":
        return _struct(_after(rest, "<"))
    simple = {
        "boolean": pa.bool_(),
        "tinyint": pa.int8(),
        "byte": pa.int8(),
        "smallint": pa.int16(),
        "short": pa.int16(),
        "int": pa.int32(),
        "integer": pa.int32(),
        "bigint": pa.int64(),
        "long": pa.int64(),
        "float": pa.float32(),
        "real": pa.float32(),
        "double": pa.float64(),
        "string": pa.string(),
        "binary": pa.binary(),
        "date": pa.date32(),
        "timestamp": pa.timestamp("us", tz="UTC"),
        "timestamp_ltz": pa.timestamp("us", tz="UTC"),
        "timestamp_ntz": pa.timestamp("us"),
        "void": pa.null(),
    }
    if word not in simple:
        raise ValueError(f"{text!r} is not a Spark SQL type that a checkpoint can hold")
    return simple[word], rest


def _struct(rest: str) -> tuple[Any, str]:
    import pyarrow as pa

    fields: list[tuple[str, Any]] = []
    while not rest.startswith(">"):
        match = re.match(r"`((?:[^`]|``)*)`|\w+", rest)
        if not match:
            raise ValueError(f"a struct's field must start with a name; got {rest!r}")
        name = match.group() if match.group(1) is None else match.group(1).replace("``", "`")
        dtype, rest = _parse(_after(rest[match.end() :].lstrip(), ":"))
        fields.append((name, dtype))
        if not rest.startswith(">"):
            rest = _after(rest, ",")
    return pa.struct(fields), _after(rest, ">")


def _after(text: str, sign: str) -> str:
    if not text.startswith(sign):
        raise ValueError(f"expected {sign!r} in a Spark type; got {text!r}")
    return text[1:].lstrip()
