"""Dataclasses as JSON and back, for what another process has said: nothing but the declared fields is taken.

A decoder that makes values of declared types only cannot be made to run anything, and one that refuses what it does
not know cannot be made to carry on with half an order.
"""

import functools
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from ebbflow.infra.errors import MessageError

T = TypeVar("T")
_LONGEST = 200  # characters of a value in an error


def dumps(value: Any) -> str:
    """Return a dataclass as JSON. Raises ``TypeError`` for what JSON does not have."""
    return json.dumps(asdict(value))


def loads(text: str | bytes, kind: type[T]) -> T:
    """Return the dataclass that ``dumps`` made ``text`` of. Raises ``MessageError``."""
    return build(parse(text), kind)


def parse(text: str | bytes) -> dict[str, Any]:
    """Return a JSON object. Raises ``MessageError`` for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise MessageError(f"a message must be a JSON object in UTF-8: {type(exc).__name__}") from exc
    if not isinstance(found, dict):
        raise MessageError(f"a message must be a JSON object; got {type(found).__name__}")
    return found


def build(value: Any, kind: type[T]) -> T:
    """Return a dataclass from a JSON object. Raises ``MessageError`` for unknown, missing or mistyped fields."""
    found: T = _build(value, kind, kind.__name__)
    return found


def _build(value: Any, kind: Any, where: str) -> Any:
    if kind is Any:
        return value
    if is_dataclass(kind):
        return _dataclass(value, kind, where)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _union(value, get_args(kind), where)
    if origin is Literal:
        if isinstance(value, str) and value in get_args(kind):
            return value
    elif origin is tuple:
        if isinstance(value, list):
            return _tuple(value, get_args(kind), where)
    elif origin is not None and issubclass(origin, Mapping):
        if isinstance(value, dict):
            inner = get_args(kind)[1]
            return {name: _build(one, inner, f"{where}.{name}"[:_LONGEST]) for name, one in value.items()}
    elif kind is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return _finite(value, where)
    elif kind is type(None):
        if value is None:
            return None
    elif kind in (int, str, bool) and type(value) is kind:
        return value
    raise MessageError(f"{where} must be {_name(kind)}; got {repr(value)[:_LONGEST]}")


def _dataclass(value: Any, kind: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise MessageError(f"{where} must be an object; got {repr(value)[:_LONGEST]}")
    known = _fields(kind)
    if unknown := sorted(set(value) - set(known)):
        raise MessageError(f"{where} has no field {unknown[0][:_LONGEST]!r}")
    found = {}
    for name, (inner, required) in known.items():
        if name in value:
            found[name] = _build(value[name], inner, f"{where}.{name}")
        elif required:
            raise MessageError(f"{where} lacks the field {name!r}")
    return kind(**found)


def _union(value: Any, kinds: tuple[Any, ...], where: str) -> Any:
    for kind in kinds:
        try:
            return _build(value, kind, where)
        except MessageError:
            continue
    names = " or ".join(map(_name, kinds))
    raise MessageError(f"{where} must be {names}; got {repr(value)[:_LONGEST]}")


def _tuple(value: list[Any], kinds: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(_build(one, kinds[0], where) for one in value)
    if len(value) != len(kinds):
        raise MessageError(f"{where} must have {len(kinds)} items; got {len(value)}")
    return tuple(_build(one, kind, where) for one, kind in zip(value, kinds, strict=True))


def _finite(value: float, where: str) -> float:
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise MessageError(f"{where} must be a finite number; got {repr(value)[:_LONGEST]}")
    return found


def _name(kind: Any) -> str:
    return "null" if kind is type(None) else getattr(kind, "__name__", None) or str(kind)


@functools.cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Return the type of each field and whether it must be given."""
    hints = typing.get_type_hints(kind)
    return {
        field.name: (hints[field.name], field.default is MISSING and field.default_factory is MISSING)
        for field in fields(kind)
    }
