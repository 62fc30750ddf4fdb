"""Which classes may be sent between actors and kept in snapshots, and how: a registry of names.

A name in a message leads to a class only by what this process has registered itself.
"""

import dataclasses
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path, PosixPath
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ebbflow.infra.errors import ElasticError

Class = TypeVar("Class", bound=type)


class Entry(NamedTuple):
    """How instances of one class become plain values (``take``), and come back (``make``)."""

    name: str
    kind: type
    take: Callable[[Any], Any]
    make: Callable[[Any], Any]


_PLAIN = (tuple, list, dict, set, frozenset, str, bytes, int, float, complex, np.ndarray, np.generic)
_by_kind: dict[type, Entry] = {}
_by_name: dict[str, Entry] = {}


def register(kind: Class) -> Class:
    """Let instances of ``kind`` be sent and kept; return it, so that this can decorate a class.

    Of a data class or named tuple its fields travel, of any other class the instance's attributes; ``__init__`` of
    the latter is not called again. Call it in the module that defines the class, so that workers do as well. Raises
    ``ElasticError`` for a class whose state cannot be seen: one with ``__slots__`` that is no data class, or with
    fields that its constructor does not take.
    """
    name = f"{kind.__module__}:{kind.__qualname__}"
    if dataclasses.is_dataclass(kind):
        fields = dataclasses.fields(kind)
        if not all(field.init for field in fields):
            raise ElasticError(f"{name} has fields that its constructor does not take (init=False)")
        names = [field.name for field in fields]
        _add(Entry(name, kind, _taker(names), _maker(kind, names, any(field.kw_only for field in fields))))
    elif issubclass(kind, tuple) and hasattr(kind, "_fields"):
        _add(Entry(name, kind, list, lambda values: kind(*values)))
    elif issubclass(kind, _PLAIN) or any(vars(base).get("__slots__") for base in kind.__mro__):
        raise ElasticError(f"{name} has a state that cannot be seen; make it a data class or a named tuple")
    else:
        _add(Entry(name, kind, _attributes, lambda values: _filled(kind, values)))
    return kind


def entry_of(kind: type) -> Entry | None:
    """Return how instances of exactly ``kind`` travel; ``None`` if they may not."""
    return _by_kind.get(kind) or (
        _scalar if issubclass(kind, np.generic) and kind is not np.object_ else None
    )


def entry_called(name: Any) -> Entry:
    """Return what was registered under ``name``. Raises ``KeyError`` if nothing was."""
    found = _by_name.get(name) if isinstance(name, str) else None
    if found is None:
        raise KeyError(f"{name!r} is not registered in this process")
    return found


def _add(entry: Entry) -> None:
    _by_kind[entry.kind] = entry
    _by_name[entry.name] = entry  # a module that is loaded again brings its newer class


def _taker(names: list[str]) -> Callable[[Any], Any]:
    if len(names) < 2:
        return lambda value: [getattr(value, name) for name in names]
    taken = attrgetter(*names)
    return lambda value: list(taken(value))


def _maker(kind: type, names: list[str], by_name: bool) -> Callable[[Any], Any]:
    def make(values: Any) -> Any:
        if len(values) != len(names):
            raise ValueError(f"{kind.__qualname__} has {len(names)} fields; got {len(values)}")
        return kind(**dict(zip(names, values, strict=True))) if by_name else kind(*values)

    return make


def _attributes(value: Any) -> dict[str, Any]:
    return dict(getattr(value, "__dict__", {}))


def _filled(kind: type, values: Any) -> Any:
    made: Any = object.__new__(kind)
    if not isinstance(values, dict):
        raise TypeError(f"{kind.__qualname__} is made of attributes; got {type(values).__name__}")
    vars(made).update(values)
    return made


def _take_scalar(value: Any) -> Any:
    return [value.dtype.str, value.tobytes()]


def _make_scalar(fields: Any) -> Any:
    name, data = fields
    dtype = np.dtype(name)
    if dtype.hasobject or len(data) != dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are no {dtype}")
    return np.frombuffer(data, dtype)[0]


_scalar = Entry("scalar", np.generic, _take_scalar, _make_scalar)
for _entry in (
    _scalar,
    Entry("tuple", tuple, list, tuple),
    Entry("set", set, list, set),
    Entry("frozenset", frozenset, list, frozenset),
    Entry("complex", complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    Entry("int", int, str, int),  # beyond 64 bits
    Entry("range", range, lambda r: [r.start, r.stop, r.step], lambda parts: range(*parts)),
    Entry("deque", deque, lambda d: [list(d), d.maxlen], lambda parts: deque(parts[0], parts[1])),
    Entry("ordered", OrderedDict, lambda d: list(map(list, d.items())), OrderedDict),
    Entry("counter", Counter, dict, Counter),
    Entry("path", PosixPath, str, Path),
):
    _add(_entry)
