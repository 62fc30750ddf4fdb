"""Columns of a result as the texts of CSV cells and of JSON values.

Whole columns are turned into text at once, by what Arrow knows of their types. Timestamps, dates and times are
ISO 8601, those with a time zone in UTC; bytes are base64; decimals have all their digits.
"""

import base64
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

_ZEROS = ((r"(\.\d*[1-9])0+(Z?)$", r"\1\2"), (r"\.0+(Z?)$", r"\1"))  # that end a fraction of a second


def csv_line(cells: Sequence[str | None]) -> str:
    """Return a line of CSV: NULL is an empty cell, the empty text a quoted one.

    A line of one empty cell is quoted too, since readers skip an empty line.
    """
    if len(cells) == 1 and cells[0] is None:
        return '""\n'
    return ",".join("" if cell is None else _quoted(cell) for cell in cells) + "\n"


def csv_cells(column: "pa.Array") -> list[str | None]:
    """Return a text for each value of a column, and ``None`` for NULL. Lists, structs and maps are JSON."""
    import pyarrow as pa

    column = _decoded(column)
    if pa.types.is_nested(column.type):
        known = column.is_valid().to_pylist()
        return [text if valid else None for text, valid in zip(json_values(column), known, strict=True)]
    return _texts(column)


def json_values(column: "pa.Array") -> list[str]:
    """Return each value of a column as JSON.

    Numbers are numbers with all their digits; those that JSON has no number for are the texts NaN, Infinity and
    -Infinity. A map is an object.
    """
    import pyarrow as pa

    column = _decoded(column)
    kind = column.type
    if pa.types.is_struct(kind):
        names = [json_text(field.name) for field in kind]
        values = zip(*(json_values(part) for part in column.flatten()), strict=True)
        rows = [_object(zip(names, row, strict=True)) for row in values] if names else ["{}"] * len(column)
        return _with_nulls(column, rows)
    if pa.types.is_map(kind):
        first, ends = _ends(column)
        keys = _texts(column.keys.slice(first, ends[-1] - first))
        items = json_values(column.items.slice(first, ends[-1] - first))
        pairs = [(json_text(key or ""), item) for key, item in zip(keys, items, strict=True)]
        return _with_nulls(column, [_object(part) for part in _parts(pairs, first, ends)])
    if pa.types.is_nested(kind):  # a list
        first, ends = _ends(column)
        values = json_values(column.values.slice(first, ends[-1] - first))
        return _with_nulls(column, [f"[{', '.join(part)}]" for part in _parts(values, first, ends)])
    texts = _texts(column)
    if pa.types.is_integer(kind) or pa.types.is_decimal(kind) or pa.types.is_boolean(kind):
        return ["null" if text is None else text for text in texts]
    if pa.types.is_floating(kind):
        return ["null" if t is None else t if t[-1].isdigit() else json_text(t) for t in texts]
    return ["null" if text is None else json_text(text) for text in texts]


def json_text(text: str) -> str:
    """Return a text as JSON has it."""
    return json.dumps(text, ensure_ascii=False)


def json_object(names: Sequence[str], values: Sequence[str]) -> str:
    """Return a row as one line of JSON; ``names`` and ``values`` are JSON already."""
    return _object(zip(names, values, strict=True))


def unique(names: Sequence[str]) -> list[str]:
    """Return the names of columns, a further one of the same name with a number: ``n``, ``n_2``."""
    taken = set(names)
    found: list[str] = []
    for name in names:
        chosen, number = name, 1
        while chosen in found or (number > 1 and chosen in taken):
            number += 1
            chosen = f"{name}_{number}"
        found.append(chosen)
    return found


def _quoted(cell: str) -> str:
    if cell and not any(sign in cell for sign in ',"\n\r') and cell == cell.strip():
        return cell
    return '"' + cell.replace('"', '""') + '"'


def _object(pairs: Any) -> str:
    return "{" + ", ".join(f"{name}: {value}" for name, value in pairs) + "}"


def _decoded(column: "pa.Array") -> "pa.Array":
    """Return a column without what only says how it is stored."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        return _decoded(column.dictionary_decode())
    if isinstance(column, pa.ExtensionArray):
        return _decoded(column.storage)
    if pa.types.is_fixed_size_list(column.type):
        return column.cast(pa.list_(column.type.value_type))
    return column


def _texts(column: "pa.Array") -> list[str | None]:
    """Return the text of each value that is no list, struct or map."""
    import pyarrow as pa

    column = _decoded(column)
    kind = column.type
    if pa.types.is_timestamp(kind) or pa.types.is_time(kind) or pa.types.is_date(kind):
        return _moments(column)
    if pa.types.is_duration(kind):
        return [
            None if value is None else str(value)
            for value in column.cast(pa.duration("us"), safe=False).to_pylist()
        ]
    values = column.to_pylist()
    if pa.types.is_boolean(kind):
        return [None if value is None else "true" if value else "false" for value in values]
    if pa.types.is_decimal(kind):
        return [None if value is None else format(value, "f") for value in values]
    if pa.types.is_floating(kind):
        if kind != pa.float64():
            return [t and _number(t) for t in column.cast(pa.float32()).cast(pa.string()).to_pylist()]
        return [None if value is None else _number(repr(value)) for value in values]
    if values and isinstance(next((v for v in values if v is not None), None), bytes):
        return [None if value is None else base64.b64encode(value).decode() for value in values]
    return [None if value is None else str(value) for value in values]


def _number(text: str) -> str:
    number = float(text)
    if math.isfinite(number):
        return text
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _moments(column: "pa.Array") -> list[str | None]:
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_timestamp(column.type):
        if column.type.tz is not None:
            column = column.cast(pa.timestamp(column.type.unit, "UTC"))
        texts = pc.replace_substring(column.cast(pa.string()), " ", "T")
    else:
        texts = column.cast(pa.string())
    for pattern, instead in _ZEROS:
        texts = pc.replace_substring_regex(texts, pattern, instead)
    found: list[str | None] = texts.to_pylist()
    return found


def _ends(column: "pa.Array") -> tuple[int, list[int]]:
    """Return where the first list of a column begins, and where each ends."""
    first, *ends = column.offsets.to_pylist()
    return first, ends or [first]


def _parts(values: Sequence[Any], first: int, ends: Sequence[int]) -> list[Sequence[Any]]:
    starts = [first, *ends[:-1]]
    return [values[start - first : end - first] for start, end in zip(starts, ends, strict=True)]


def _with_nulls(column: "pa.Array", texts: Sequence[str]) -> list[str]:
    known = column.is_valid().to_pylist()
    return [text if valid else "null" for text, valid in zip(texts, known, strict=False)]
