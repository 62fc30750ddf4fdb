"""Frozen dataclasses to plain JSON values and back, led by their type hints; reports as JSON texts.

A field's JSON key is its name, or ``metadata["json"]``; where that is ``None`` the field is left out. Tuples become
lists; named tuples, and mappings of plain values, objects. Numbers that JSON lacks become ``null``; where the field
is a plain ``float`` they come back as infinity.
"""

import json
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ebbflow.infra.errors import ReportError

T = TypeVar("T")


def to_text(report: Any, form: int, **more: Any) -> str:
    """Return a report as JSON text of format ``form``, with ``more`` keys; what JSON lacks is ``null``."""
    data: dict[str, Any] = {"format": form, **encode(report), **more}
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def from_text(kind: type[T], text: str, form: int) -> T:
    """Read what ``to_text`` wrote. Keys unknown to this version are ignored.

    Raises ``ReportError`` when ``text`` is no report, or of another format than ``form``.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ReportError(f"not a report: {error}") from error
    if not isinstance(data, dict) or data.get("format") != form:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ReportError(f"a report of format {form} is needed; got {found!r:.80}")
    try:
        return decode(kind, data)
    except (KeyError, TypeError, ValueError) as error:
        raise ReportError(f"the report is damaged: {error}") from error


def encode(value: Any) -> Any:
    """Return ``value`` as dictionaries, lists, strings, numbers, booleans and ``None``."""
    if is_dataclass(value) and not isinstance(value, type):
        return {
            key: encode(getattr(value, f.name))
            for f in fields(value)
            if (key := f.metadata.get("json", f.name)) is not None
        }
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise TypeError(f"a report holds plain values only; got {type(value).__name__}")


def decode(kind: type[T], data: Any) -> T:
    """Return the dataclass ``kind`` that ``encode`` turned into ``data``; keys it does not know are ignored.

    Raises ``KeyError`` for a missing field without default and ``TypeError`` for a value of another type.
    """
    if not isinstance(data, dict):
        raise TypeError(f"{kind.__name__} wants an object; got {data!r:.80}")
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for field in fields(kind):  # type: ignore[arg-type]
        key = field.metadata.get("json", field.name)
        if key in data:
            values[field.name] = _decode(hints[field.name], data[key], f"{kind.__name__}.{key}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise KeyError(f"{kind.__name__}.{key}")
    return kind(**values)


def _decode(hint: Any, data: Any, where: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        rest = [a for a in arguments if a is not types.NoneType]
        return None if data is None else _decode(rest[0], data, where)
    if origin is Mapping:
        if not isinstance(data, dict):
            raise TypeError(f"{where} wants an object; got {data!r:.80}")
        return data
    if origin is tuple:
        return _decode_tuple(arguments, data, where)
    if origin is Literal:
        if data not in arguments:
            raise TypeError(f"{where} is one of {', '.join(map(str, arguments))}; got {data!r}")
        return data
    if isinstance(hint, type) and is_dataclass(hint):
        return decode(hint, data)
    if isinstance(hint, type) and issubclass(hint, tuple):
        return _decode_named(hint, data, where)
    if hint is float and data is None:
        return math.inf
    if hint is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if not isinstance(data, hint) or (isinstance(data, bool) and hint is not bool):
        raise TypeError(f"{where} wants {hint.__name__}; got {data!r:.80}")
    return data


def _decode_named(kind: type[tuple[Any, ...]], data: Any, where: str) -> tuple[Any, ...]:
    """Return the named tuple that ``encode`` turned into an object."""
    if not isinstance(data, dict):
        raise TypeError(f"{where} wants an object; got {data!r:.80}")
    hints = get_type_hints(kind)
    return kind(**{name: _decode(hint, data[name], f"{where}.{name}") for name, hint in hints.items()})


def _decode_tuple(arguments: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise TypeError(f"{where} wants a list; got {data!r:.80}")
    if arguments[-1] is Ellipsis:
        return tuple(_decode(arguments[0], item, where) for item in data)
    return tuple(_decode(hint, item, where) for hint, item in zip(arguments, data, strict=True))
