"""Options of a request, each once: name, type and default are a field's of its dataclass, all else stands beside it.

Commands (``flows/runs/request_options.py``) and the keys of a pipeline's file
(``tasks/pipeline/file/option_keys.py``) are made of them, and ``check`` keeps their rules.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.numbers import show_duration

Value = TypeVar("Value")

_KEY = "option"


@dataclass(frozen=True)
class Option:
    """What is said of an option beside its field. Bounds hold for numbers."""

    help: str = ""  # a noun phrase without full stop
    unless: str | None = (
        ""  # what holds when it is not given; "": the default; None: that goes without saying
    )
    in_file: str = ""  # what a pipeline's file says, where ``help`` is for commands only
    metavar: str = ""  # FILE and DIR: a path
    flags: str = ""  # of the command, by commas, unless made of the name
    unit: str = ""  # s: a duration
    above: float | None = None
    min: float | None = None
    max: float | None = None
    command: bool = True  # whether commands have it


def option(default: Value | Callable[[], Value], help: str = "", **attributes: Any) -> Value:
    """Return the field of a request; ``attributes`` are further fields of ``Option``.

    A callable ``default`` makes one for each request.
    """
    metadata = {_KEY: Option(help, **attributes)}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def option_like(request: type, name: str, *, command: bool = False) -> Any:
    """Return a field with the default and the rule of another request's; ``command``: whether commands have it."""
    other = next(f for f in fields(request) if f.name == name)
    return option(other.default, **{**vars(other.metadata[_KEY]), "command": command})


@dataclass(frozen=True)
class Declared:
    """An option with what its field says."""

    name: str
    option: Option
    kind: type  # of a value, or of one of several
    default: Any  # None where it is made anew, and where there is none
    choices: tuple[str, ...] = ()
    many: bool = False

    @property
    def known_default(self) -> str:
        """Return what holds when it is not given, in words; empty where the help says it or nothing does."""
        unless = self.option.unless
        if unless or unless is None or self.choices or self.kind is bool or not self.default:
            return unless or ""
        if self.option.unit == "s":
            return show_duration(self.default)
        return f"{self.default:g}" if self.kind in (int, float) else str(self.default)

    @property
    def rule(self) -> str:
        """Return what a value must be; empty where anything of its type is right."""
        option = self.option
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        bounds = [
            f"{sign} {bound:.15g}{f' {option.unit}' if option.unit else ''}"
            for sign, bound in ((">", option.above), (">=", option.min), ("<=", option.max))
            if bound is not None
        ]
        if not bounds:
            return ""
        if self.kind is int:
            return f"a whole number {' and '.join(bounds)}"
        return " and ".join(bounds if option.max is not None else [*bounds, "finite"])

    def fits(self, value: Any) -> bool:
        """Tell whether a value keeps the rule."""
        option = self.option
        if self.choices:
            return value in self.choices
        right = int if self.kind is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, right) or not math.isfinite(value):
            return False
        above = -math.inf if option.above is None else option.above
        least = -math.inf if option.min is None else option.min
        return value > above and least <= value <= (math.inf if option.max is None else option.max)


@cache
def declared(request: type) -> Mapping[str, Declared]:
    """Return the options that a request's dataclass declares, in the order of its fields."""
    hints = get_type_hints(request)
    return {f.name: _declared(f, hints[f.name]) for f in fields(request) if _KEY in f.metadata}


def _declared(one: Any, hint: Any) -> Declared:
    if get_origin(hint) in (Union, UnionType):  # with None
        hint = get_args(hint)[0]
    default = None if one.default is MISSING else one.default
    if get_origin(hint) is Literal:
        return Declared(one.name, one.metadata[_KEY], str, default, choices=get_args(hint))
    if get_origin(hint) is tuple:
        return Declared(one.name, one.metadata[_KEY], get_args(hint)[0], default, many=True)
    return Declared(one.name, one.metadata[_KEY], hint, default)


REPORT_ENDINGS = (".html", ".json")


def check_report_paths(report: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return the files that a report is written to, each once; one path may stand for itself.

    Raises ``OptionError`` for a file whose ending is not of ``REPORT_ENDINGS``: it names the format.
    """
    paths = (report,) if isinstance(report, str) else tuple(report or ())
    for path in paths:
        if not isinstance(path, str) or not path.lower().endswith(REPORT_ENDINGS):
            raise OptionError(
                f"report must name files that end in .html (the page) or .json (the data); got {path!r:.300}"
            )
    return tuple(dict.fromkeys(paths))


def address_of(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``, ``:PORT`` (this machine alone) or ``PORT``. Raises ``OptionError``."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not 0 <= int(port) <= 65535:
        raise OptionError(f"metrics must be HOST:PORT, such as 127.0.0.1:9464; got {text!r}")
    return host.strip("[]") or "127.0.0.1", int(port)


def check_metrics(address: str) -> None:
    """Raise ``OptionError`` for an address that metrics cannot be served at; an empty text is none."""
    if address:
        address_of(address)


def check(request: object) -> None:
    """Raise ``OptionError`` for the first option of a request whose value breaks its rule."""
    kind: Any = type(request)
    for one in declared(kind).values():
        value = getattr(request, one.name)
        if one.rule and not (value is None and one.default is None) and not one.fits(value):
            raise OptionError(f"{one.name} must be {one.rule}; got {value!r}")
