"""What values of a pipeline's file can be: each kind reads one, names the rule it breaks, and has a JSON schema.

``read`` returns ``MISSING`` for a value that breaks its rule, after writing that down, so that one look at a file
finds everything that is wrong with it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import inf
from typing import Any, Final, NamedTuple, Protocol

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import numbers
from ebbflow.tasks.pipeline.file.document import Entry, Problems

Schema = dict[str, Any]


_PARAMETER: Schema = {"type": "string", "pattern": r"\$\{parameters\."}


def or_parameter(schema: Schema) -> Schema:
    """Return ``schema``, or a text with a parameter, which is filled in before the value is looked at."""
    return {"anyOf": [schema, _PARAMETER]}


class Missing:
    """The type of ``MISSING``: no value, after a problem was added."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "MISSING"


MISSING: Final = Missing()


class Kind(Protocol):
    """What a value can be."""

    def read(self, entry: Entry, problems: Problems) -> Any:
        """Return the value, or ``MISSING`` after adding to ``problems``."""
        ...

    def schema(self) -> Schema:
        """Return its JSON schema."""
        ...


def refuse(entry: Entry, problems: Problems, rule: str) -> Missing:
    """Add the rule that an entry breaks to ``problems``, and return ``MISSING``."""
    problems.add(entry.line, entry.path, rule)
    return MISSING


# --- scalars ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """A text that is not empty. Numbers and words are taken as they are written."""

    words: str = "a text"
    pattern: str = ""
    choices: tuple[str, ...] = ()
    empty: bool = False  # whether "" will do

    def read(self, entry: Entry, problems: Problems) -> str | Missing:
        if isinstance(entry.value, dict | list) or entry.value is None:
            return refuse(entry, problems, f"must be {self.words}; got {entry.shown()}")
        if self.choices:
            return self._choose(entry, problems)
        if not self.empty and not entry.text.strip():
            return refuse(entry, problems, f"must be {self.words}; got an empty text")
        if "\0" in entry.text or (self.pattern and not re.fullmatch(self.pattern, entry.text)):
            return refuse(entry, problems, f"must be {self.words}; got {entry.shown()}")
        return entry.text

    def _choose(self, entry: Entry, problems: Problems) -> str | Missing:
        if entry.text in self.choices:
            return entry.text
        hint = nearest(entry.text, self.choices)
        return refuse(entry, problems, f"must be one of {', '.join(self.choices)}; got {entry.shown()}{hint}")

    def schema(self) -> Schema:
        if self.choices:
            return or_parameter({"enum": list(self.choices)})
        if self.pattern:
            return or_parameter({"type": "string", "pattern": f"^(?:{self.pattern})$"})
        return {"type": ["string", "number", "boolean"]}


@dataclass(frozen=True)
class Number:
    """A number within bounds."""

    min: float = -inf
    max: float = inf
    above: float | None = None
    whole: bool = False

    def read(self, entry: Entry, problems: Problems) -> float | int | Missing:
        value = entry.value
        right = isinstance(value, int | float) and not isinstance(value, bool)
        if right and self.whole:
            right = value == int(value)  # type: ignore[arg-type]
        if right:
            right = self.min <= value <= self.max  # type: ignore[operator]
        if right and self.above is not None:
            right = value > self.above  # type: ignore[operator]
        if not right:
            return refuse(entry, problems, f"must be {self._rule()}; got {entry.shown()}")
        return int(value) if self.whole else float(value)  # type: ignore[arg-type]

    def _rule(self) -> str:
        rule = "a whole number" if self.whole else "a number"
        if self.above is not None:
            rule += f" > {self.above:g}"
        if self.min > -inf:
            rule += f" >= {self.min:g}"
        return rule + (f" and <= {self.max:g}" if self.max < inf else "")

    def schema(self) -> Schema:
        found: Schema = {"type": "integer" if self.whole else "number"}
        if self.min > -inf:
            found["minimum"] = self.min
        if self.max < inf:
            found["maximum"] = self.max
        if self.above is not None:
            found["exclusiveMinimum"] = self.above
        return or_parameter(found)


@dataclass(frozen=True)
class Flag:
    """``true`` or ``false``."""

    def read(self, entry: Entry, problems: Problems) -> bool | Missing:
        if isinstance(entry.value, bool):
            return entry.value
        return refuse(entry, problems, f"must be true or false; got {entry.shown()}")

    def schema(self) -> Schema:
        return or_parameter({"type": "boolean"})


@dataclass(frozen=True)
class Duration:
    """A time span, in seconds once read."""

    above: bool = True  # whether 0 is too little

    def read(self, entry: Entry, problems: Problems) -> float | Missing:
        if isinstance(entry.value, dict | list | bool) or entry.value is None:
            return refuse(
                entry, problems, f"must be a duration such as 90s, 15m or 1h30m; got {entry.shown()}"
            )
        try:
            seconds = numbers.parse_duration(entry.text)
        except OptionError as error:
            return refuse(entry, problems, str(error))
        if self.above and not seconds > 0:
            return refuse(entry, problems, f"must be longer than 0 s; got {entry.shown()}")
        return seconds

    def schema(self) -> Schema:
        pattern = r"^\s*(?:\d+(?:\.\d+)?\s*(?:ms|s|min|m|h|d)?\s*)+$"
        return or_parameter(
            {"anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": pattern}]}
        )


class DeadlineSpec(NamedTuple):
    """A deadline: so many seconds after the pipeline's beginning, or at a moment."""

    after: float | None = None  # s
    at: float | None = None  # s since the Unix epoch

    def moment(self, began: float) -> float:
        """Return the deadline of a pipeline that began then, in seconds since the Unix epoch."""
        if self.at is not None:
            return self.at
        assert self.after is not None
        return began + self.after


@dataclass(frozen=True)
class Deadline:
    """A duration from the pipeline's beginning, or a moment."""

    def read(self, entry: Entry, problems: Problems) -> DeadlineSpec | Missing:
        rule = (
            "must be a duration from the pipeline's beginning, such as 20m, or a moment with its offset, such as "
            f"2026-11-22T18:00Z; got {entry.shown()}"
        )
        if isinstance(entry.value, dict | list | bool) or entry.value is None:
            return refuse(entry, problems, rule)
        try:
            if re.match(r"\s*\d{4}-\d\d-\d\d", entry.text):
                return DeadlineSpec(at=numbers.parse_moment(entry.text))
            seconds = numbers.parse_duration(entry.text)
        except OptionError:
            return refuse(entry, problems, rule)
        return DeadlineSpec(after=seconds) if seconds > 0 else refuse(entry, problems, rule)

    def schema(self) -> Schema:
        return {"type": ["string", "number"], "examples": ["20m", "2026-11-22T18:00Z"]}


@dataclass(frozen=True)
class Size:
    """An amount of memory, in GiB once read."""

    def read(self, entry: Entry, problems: Problems) -> float | Missing:
        if isinstance(entry.value, dict | list | bool) or entry.value is None:
            return refuse(entry, problems, f"must be a size such as 6GiB or 512MiB; got {entry.shown()}")
        try:
            return numbers.parse_gib(entry.text)
        except OptionError as error:
            return refuse(entry, problems, str(error))

    def schema(self) -> Schema:
        return {"type": ["string", "number"], "examples": ["2GiB", "512MiB"]}


@dataclass(frozen=True)
class Plain:
    """Whatever YAML can say, for options that others check."""

    def read(self, entry: Entry, problems: Problems) -> Any:
        return plain(entry)

    def schema(self) -> Schema:
        return {}


def plain(entry: Entry) -> Any:
    """Return an entry's value without its places."""
    if isinstance(entry.value, dict):
        return {name: plain(one) for name, one in entry.value.items()}
    if isinstance(entry.value, list):
        return [plain(one) for one in entry.value]
    return entry.value


# --- lists and tables ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Items:
    """A list of one kind; a single value stands for a list of it."""

    kind: Kind
    min: int = 0

    def read(self, entry: Entry, problems: Problems) -> tuple[Any, ...] | Missing:
        if isinstance(entry.value, dict) or entry.value is None:
            return refuse(entry, problems, f"must be a list; got {entry.shown()}")
        entries = entry.value if isinstance(entry.value, list) else [entry]
        if len(entries) < self.min:
            return refuse(entry, problems, f"must be a list of {self.min} at least; got {len(entries)}")
        found = tuple(self.kind.read(one, problems) for one in entries)
        return MISSING if any(one is MISSING for one in found) else found

    def schema(self) -> Schema:
        one = self.kind.schema()
        return {"anyOf": [{"type": "array", "items": one, "minItems": self.min}, one]}


@dataclass(frozen=True)
class Named:
    """A table of names, each with a value of one kind."""

    kind: Kind
    pattern: str = r"[A-Za-z][A-Za-z0-9_-]{0,39}"
    rule: str = "a name begins with a letter and holds letters, digits, _ and -, 40 at most"

    def read(self, entry: Entry, problems: Problems) -> dict[str, Any] | Missing:
        if entry.value is None:
            return {}
        if not isinstance(entry.value, dict):
            return refuse(entry, problems, f"must be a table of names; got {entry.shown()}")
        found: dict[str, Any] = {}
        for name, one in entry.value.items():
            if not re.fullmatch(self.pattern, name):
                problems.add(one.line, entry.path, f"{self.rule}; got {name!r:.60}")
                continue
            found[name] = self.kind.read(one, problems)
        return MISSING if any(one is MISSING for one in found.values()) else found

    def schema(self) -> Schema:
        return {
            "type": ["object", "null"],
            "patternProperties": {f"^(?:{self.pattern})$": self.kind.schema()},
            "additionalProperties": False,
        }


def nearest(name: str, known: Sequence[str]) -> str:
    """Return ``; did you mean NAME?`` for the nearest known name, or nothing."""
    close = get_close_matches(name[:60], list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""
