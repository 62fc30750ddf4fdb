"""Frozen dataclasses to plain JSON values and back, led by their type hints.

A field that equals its default is left out, so a default is part of the format. Reading is strict: a key or type that
is not known is refused, never dropped. Numbers that JSON lacks are ``{"$float": "inf"}``. Whatever does not fit
raises ``ValueError`` that names the field.
"""

import json
import math
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")  # neither database takes them in a text
_encoders: dict[Any, Callable[[Any], Any]] = {}
_decoders: dict[Any, Callable[[Any], Any]] = {}


def parse(body: str) -> Any:
    """Return the JSON value of ``body``, with all numbers restored."""
    return json.loads(body, object_hook=_with_floats)


def _with_floats(found: dict[str, Any]) -> Any:
    if len(found) == 1 and isinstance(name := found.get("$float"), str) and name in _FLOATS:
        return _FLOATS[name]
    return found


# --- to JSON ------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Return a value of no certain type as a JSON value; what is numpy's becomes plain numbers and lists."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _UNSTORABLE.sub("\ufffd", value)
    if isinstance(value, float):
        number = float(value)
        return number if math.isfinite(number) else {"$float": str(number)}
    if isinstance(value, int):
        return int(value)
    if isinstance(value, Mapping):
        return {_key(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return plain(value.tolist())
    raise ValueError(f"{value!r:.80} is a {type(value).__name__}, not a plain JSON value")


def _key(key: Any) -> str:
    if isinstance(key, int) and not isinstance(key, bool):
        return str(int(key))
    if not isinstance(key, str):
        raise ValueError(f"key {key!r:.80} must be a string")
    if key.startswith("$float"):
        raise ValueError(f"key {key!r:.80} must not start with $float")
    return _UNSTORABLE.sub("\ufffd", key)


def encoder(kind: Any) -> Callable[[Any], Any]:
    """Return the function that turns values of the type ``kind`` into JSON values."""
    found = _encoders.get(kind)
    if found is None:
        found = _encoders[kind] = _new_encoder(kind)
    return found


def _new_encoder(kind: Any) -> Callable[[Any], Any]:
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        name_of_kind = getattr(kind, "__name__", "value")
        hints = get_type_hints(kind)
        parts = [(f.name, *_default(f), encoder(hints[f.name])) for f in fields(kind)]

        def whole(value: Any) -> dict[str, Any]:
            if type(value) is not kind:
                raise ValueError(f"{value!r:.80} is not a {name_of_kind}")
            found = {}
            for name, optional, default, part in parts:
                item = getattr(value, name)
                if optional and type(item) is type(default) and item == default:
                    continue
                try:
                    found[name] = part(item)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
            return found

        return whole
    if origin in (Union, types.UnionType):
        (rest,) = (a for a in arguments if a is not types.NoneType)
        some = encoder(rest)
        return lambda value: None if value is None else some(value)
    if origin is tuple and arguments[-1] is Ellipsis and is_dataclass(arguments[0]):
        item = encoder(arguments[0])
        return lambda value: [item(one) for one in value]
    if origin is dict:
        item = encoder(arguments[1])
        if arguments[0] is str:
            return lambda value: {plain(key): item(one) for key, one in value.items()}
        return lambda value: [[plain(key), item(one)] for key, one in value.items()]
    return plain


def _default(field: "Field[Any]") -> tuple[bool, Any]:
    if field.default is not MISSING:
        return True, field.default
    if field.default_factory is not MISSING:
        return True, field.default_factory()
    return False, None


# --- from JSON ----------------------------------------------------------------------------------------------


def decoder(kind: Any) -> Callable[[Any], Any]:
    """Return the function that turns JSON values into values of the type ``kind``."""
    found = _decoders.get(kind)
    if found is None:
        found = _decoders[kind] = _new_decoder(kind)
    return found


def _new_decoder(kind: Any) -> Callable[[Any], Any]:
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _whole(kind)
    if origin in (Union, types.UnionType):
        (rest,) = (a for a in arguments if a is not types.NoneType)
        some = decoder(rest)
        return lambda data: None if data is None else some(data)
    if origin is tuple:
        return _items(decoder(arguments[0]))
    if origin is Literal:
        return _one_of(arguments)
    if origin is dict:
        return _pairs(arguments[0], decoder(arguments[1]))
    if origin is not None and issubclass(origin, Mapping):
        return _typed(dict, "an object")
    return {
        float: _float,
        int: _integer,
        bool: _typed(bool, "true or false"),
        str: _typed(str, "a string"),
    }[kind]


def _whole(kind: Any) -> Callable[[Any], Any]:
    hints = get_type_hints(kind)
    parts = {f.name: decoder(hints[f.name]) for f in fields(kind)}
    needed = [f.name for f in fields(kind) if not _default(f)[0]]

    def whole(data: Any) -> Any:
        if type(data) is not dict:
            raise ValueError(f"{kind.__name__} wants an object; got {data!r:.80}")
        values = {}
        for name, item in data.items():
            part = parts.get(name)
            if part is None:
                raise ValueError(f"{kind.__name__} has no {name!r:.80}")
            try:
                values[name] = part(item)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        for name in needed:
            if name not in values:
                raise ValueError(f"{kind.__name__} lacks {name!r}")
        return kind(**values)

    return whole


def _items(item: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def items(data: Any) -> Any:
        if type(data) is not list:
            raise ValueError(f"wants a list; got {data!r:.80}")
        return tuple(item(one) for one in data)

    return items


def _one_of(allowed: tuple[Any, ...]) -> Callable[[Any], Any]:
    def one_of(data: Any) -> Any:
        if data not in allowed:
            raise ValueError(f"wants one of {', '.join(map(str, allowed))}; got {data!r:.80}")
        return data

    return one_of


def _pairs(key: Any, item: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def named(data: Any) -> Any:
        if type(data) is not dict:
            raise ValueError(f"wants an object; got {data!r:.80}")
        return {name: item(one) for name, one in data.items()}

    def paired(data: Any) -> Any:
        if type(data) is not list or any(type(pair) is not list or len(pair) != 2 for pair in data):
            raise ValueError(f"wants a list of pairs; got {data!r:.80}")
        return {make(left): item(right) for left, right in data}

    make = _integer if key is int else lambda left: key(*left)  # else a named tuple
    return named if key is str else paired


def _typed(wanted: type, name: str) -> Callable[[Any], Any]:
    def typed(data: Any) -> Any:
        if type(data) is not wanted:
            raise ValueError(f"wants {name}; got {data!r:.80}")
        return data

    return typed


def _float(data: Any) -> float:
    if type(data) not in (int, float) or (type(data) is int and abs(data) >= 2**1000) or math.isnan(data):
        raise ValueError(f"wants a number; got {data!r:.80}")
    return float(data)


def _integer(data: Any) -> int:
    if type(data) is not int or not -(2**63) <= data < 2**63:
        raise ValueError(f"wants an integer of 64 bits; got {data!r:.80}")
    return data
