"""Frozen dataclasses to plain JSON values and back, led by their type hints.

A field's key is its name, or ``metadata["json"]``; where that is ``None`` the field is left out. A former key,
``metadata["former"]``, is read, too. Tuples become lists, named tuples objects (lists are read as well), and mappings
with other keys than texts lists of pairs. Whatever does not fit raises ``ValueError`` that names the field.
"""

import json
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_NO_TEXT = re.compile("[\ud800-\udfff]")  # UTF-8 cannot carry them
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")  # neither of the ledger's databases takes them in a text


class Form:
    """One way of writing values, and of reading them.

    Args:
        strict: a key that is not known is refused, not dropped; unless ``sparse``, all of them are needed.
        sparse: a field that equals its default is left out, so a default is part of the format.
        named: for a database: NUL is replaced in texts, and numbers that JSON lacks are ``{"$float": "inf"}``;
            else ``null``, which comes back as infinity where the field is a plain ``float``.
    """

    def __init__(self, *, strict: bool, sparse: bool = False, named: bool = False) -> None:
        self._strict, self._sparse, self._named = strict, sparse, named
        self._refused = _UNSTORABLE if named else _NO_TEXT
        self._encoders: dict[Any, Callable[[Any], Any]] = {}
        self._decoders: dict[Any, Callable[[Any], Any]] = {}

    def to_plain(self, value: Any) -> Any:
        """Return a value as dictionaries, lists, strings, numbers, booleans and ``None``."""
        return self._encoder(type(value))(value)

    def from_plain(self, kind: type[T], data: Any) -> T:
        """Return the dataclass that was written as ``data``."""
        return self._decoder(kind)(data)  # type: ignore[no-any-return]

    def parse(self, body: str) -> Any:
        """Return the JSON value of ``body``, with all numbers restored."""
        return json.loads(body, object_hook=_with_floats if self._named else None)

    def plain(self, value: Any) -> Any:
        """Return a value of no certain type as a JSON value; what is numpy's becomes plain numbers and lists."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self._refused.sub("\ufffd", value)
        if isinstance(value, float):
            number = float(value)
            if math.isfinite(number):
                return number
            return {"$float": str(number)} if self._named else None
        if isinstance(value, int):
            return int(value)
        if isinstance(value, Mapping):
            return {self._key(key): self.plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.plain(item) for item in value]
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            return self.plain(value.tolist())
        raise ValueError(f"{value!r:.80} is a {type(value).__name__}, not a plain JSON value")

    def _key(self, key: Any) -> str:
        if isinstance(key, int) and not isinstance(key, bool):
            return str(int(key))
        if not isinstance(key, str):
            raise ValueError(f"key {key!r:.80} must be a string")
        if self._named and key.startswith("$float"):
            raise ValueError(f"key {key!r:.80} must not start with $float")
        return self._refused.sub("\ufffd", key)

    def _encoder(self, kind: Any) -> Callable[[Any], Any]:
        found = self._encoders.get(kind)
        if found is None:
            found = self._encoders[kind] = self._new_encoder(kind)
        return found

    def _new_encoder(self, kind: Any) -> Callable[[Any], Any]:
        origin, arguments = get_origin(kind), get_args(kind)
        if is_dataclass(kind):
            return self._whole_encoder(kind)
        if origin in (Union, types.UnionType):
            (rest,) = (a for a in arguments if a is not types.NoneType)
            some = self._encoder(rest)
            return lambda value: None if value is None else some(value)
        if origin is tuple and arguments[-1] is Ellipsis and _is_made(arguments[0]):
            item = self._encoder(arguments[0])
            return lambda value: [item(one) for one in value]
        if origin is dict or (origin is Mapping and _is_made(arguments[1])):
            item = self._encoder(arguments[1])
            if arguments[0] is str:
                return lambda value: {self.plain(key): item(one) for key, one in value.items()}
            return lambda value: [[self.plain(key), item(one)] for key, one in value.items()]
        if _is_made(kind):
            return lambda value: self.plain(value._asdict())
        return self.plain

    def _whole_encoder(self, kind: Any) -> Callable[[Any], Any]:
        hints = get_type_hints(kind)
        parts = [
            (f.name, key, *(_default(f) if self._sparse else (False, None)), self._encoder(hints[f.name]))
            for key, f in _keys(kind).items()
        ]

        def whole(value: Any) -> dict[str, Any]:
            if type(value) is not kind:
                raise ValueError(f"{value!r:.80} is not a {kind.__name__}")
            found = {}
            for name, key, optional, default, part in parts:
                item = getattr(value, name)
                if optional and type(item) is type(default) and item == default:
                    continue
                try:
                    found[key] = part(item)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
            return found

        return whole

    def _decoder(self, kind: Any) -> Callable[[Any], Any]:
        found = self._decoders.get(kind)
        if found is None:
            found = self._decoders[kind] = self._new_decoder(kind)
        return found

    def _new_decoder(self, kind: Any) -> Callable[[Any], Any]:
        origin, arguments = get_origin(kind), get_args(kind)
        if is_dataclass(kind):
            return self._whole_decoder(kind)
        if origin in (Union, types.UnionType):
            (rest,) = (a for a in arguments if a is not types.NoneType)
            some = self._decoder(rest)
            return lambda data: None if data is None else some(data)
        if origin is tuple:
            if arguments[-1] is Ellipsis:
                return _items(self._decoder(arguments[0]))
            return _row([self._decoder(one) for one in arguments])
        if origin is Literal:
            return _one_of(arguments)
        if origin is not None and issubclass(origin, Mapping):
            if arguments[1] is Any:
                return _typed(dict, "an object")
            return _pairs(arguments[0], self._decoder(arguments[1]))
        if _is_made(kind):
            return _named(kind, {name: self._decoder(hint) for name, hint in get_type_hints(kind).items()})
        return {
            float: _float if self._named else _float_or_null,
            int: _integer if self._strict else _typed(int, "an integer"),
            bool: _typed(bool, "true or false"),
            str: _typed(str, "a string"),
        }[kind]

    def _whole_decoder(self, kind: Any) -> Callable[[Any], Any]:
        hints = get_type_hints(kind)
        keys = _keys(kind)
        parts = {key: self._decoder(hints[f.name]) for key, f in keys.items()}
        every = self._strict and not self._sparse
        needed = [key for key, f in keys.items() if every or not _default(f)[0]]
        renamed = {key: f.name for key, f in keys.items() if key != f.name}
        former = {old: key for key, f in keys.items() if (old := f.metadata.get("former")) is not None}

        def whole(data: Any) -> Any:
            if type(data) is not dict:
                raise ValueError(f"{kind.__name__} wants an object; got {data!r:.80}")
            if former and not former.keys().isdisjoint(data):
                data = {former.get(key, key): item for key, item in data.items()}
            values = {}
            for key, item in data.items():
                part = parts.get(key)
                if part is None:
                    if self._strict:
                        raise ValueError(f"{kind.__name__} has no {key!r:.80}")
                    continue
                try:
                    values[key] = part(item)
                except ValueError as error:
                    raise ValueError(f"{key}: {error}") from None
            for key in needed:
                if key not in values:
                    raise ValueError(f"{kind.__name__} lacks {key!r}")
            for key, name in renamed.items():
                if key in values:
                    values[name] = values.pop(key)
            return kind(**values)

        return whole


def _keys(kind: Any) -> "dict[str, Field[Any]]":
    return {key: f for f in fields(kind) if (key := f.metadata.get("json", f.name)) is not None}


def _is_made(kind: Any) -> bool:
    return is_dataclass(kind) or (isinstance(kind, type) and hasattr(kind, "_asdict"))


def _default(field: "Field[Any]") -> tuple[bool, Any]:
    if field.default is not MISSING:
        return True, field.default
    if field.default_factory is not MISSING:
        return True, field.default_factory()
    return False, None


def _with_floats(found: dict[str, Any]) -> Any:
    if len(found) == 1 and isinstance(name := found.get("$float"), str) and name in _FLOATS:
        return _FLOATS[name]
    return found


def _items(item: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def items(data: Any) -> Any:
        if type(data) is not list:
            raise ValueError(f"wants a list; got {data!r:.80}")
        return tuple(item(one) for one in data)

    return items


def _row(items: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def row(data: Any) -> Any:
        if type(data) is not list or len(data) != len(items):
            raise ValueError(f"wants a list of {len(items)}; got {data!r:.80}")
        return tuple(item(one) for item, one in zip(items, data, strict=True))

    return row


def _named(kind: Any, parts: Mapping[str, Callable[[Any], Any]]) -> Callable[[Any], Any]:
    row = _row(list(parts.values()))

    def named(data: Any) -> Any:
        found = [data[name] for name in parts] if type(data) is dict and parts.keys() <= data.keys() else data
        return kind(*row(found))

    return named


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


def _float_or_null(data: Any) -> float:
    return math.inf if data is None else _float(data)


def _integer(data: Any) -> int:
    if type(data) is not int or not -(2**63) <= data < 2**63:
        raise ValueError(f"wants an integer of 64 bits; got {data!r:.80}")
    return data
