"""Tables of known keys: how one is read, what an error says of a key that is not known, and the JSON schema."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ebbflow.tasks.pipeline.file.document import Entry, Problems
from ebbflow.tasks.pipeline.file.kinds import MISSING, Kind, Missing, Schema, nearest, refuse


@dataclass(frozen=True)
class Key:
    """One key of a section."""

    name: str
    kind: Kind
    help: str
    default: Any = MISSING
    required: bool = False
    formerly: tuple[str, ...] = ()  # other names of it, which an error answers with this one

    @property
    def description(self) -> str:
        """Return what the key is, with its default, in a sentence that stands alone."""
        said = self.help.rstrip(".")
        default = "" if "Default: " in said else shown_default(self.default)
        return f"{said}. Default: {default}." if default else f"{said}."


class Values(dict[str, Any]):
    """What a section says, with the place of each value."""

    def __init__(self, entry: Entry, found: Mapping[str, Any]) -> None:
        super().__init__(found)
        self.entry = entry

    def line(self, key: str = "") -> int:
        """Return the line of a key, or of the section where the key is not given."""
        table = self.entry.value
        if key and isinstance(table, dict) and key in table:
            return table[key].line
        return self.entry.line

    def path(self, key: str = "") -> str:
        """Return the path of a key."""
        return f"{self.entry.path}.{key}" if key and self.entry.path else key or self.entry.path


@dataclass(frozen=True)
class Section:
    """A table of known keys. Keys that are not given and have a default get it; others are left out."""

    keys: tuple[Key, ...]
    help: str = ""
    one_of: tuple[tuple[str, ...], ...] = ()  # of each group exactly one key is given
    short: str = ""  # the key that a scalar in place of the table stands for

    def read(self, entry: Entry, problems: Problems) -> Values | Missing:
        table = entry.value
        if self.short and not isinstance(table, dict | list) and table is not None:
            table = {self.short: Entry(entry.line, f"{entry.path}.{self.short}", entry.value, entry.text)}
        if table is None:
            table = {}
        if not isinstance(table, dict):
            return refuse(entry, problems, f"must be a table; got {entry.shown()}")
        before = len(problems.found)
        names = [key.name for key in self.keys]
        for name, one in table.items():
            if name not in names:
                hint = self._nearest(name) or f"; known are {', '.join(names)}"
                problems.add(one.line, entry.path, f"{name!r:.60} is not known here{hint}")
        found: dict[str, Any] = {}
        for key in self.keys:
            if key.name in table:
                found[key.name] = key.kind.read(table[key.name], problems)
            elif key.required:
                problems.add(entry.line, entry.path, f"{key.name} is missing: {key.help}")
            elif key.default is not MISSING:
                found[key.name] = key.default
        for group in self.one_of:
            given = [name for name in group if name in table]
            if len(given) != 1:
                said = " and ".join(given) or "none"
                problems.add(
                    entry.line, entry.path, f"exactly one of {', '.join(group)} must be given; got {said}"
                )
        return MISSING if len(problems.found) > before else Values(entry, found)

    def _nearest(self, name: str) -> str:
        """Return ``; did you mean KEY?``, of a key's other names or of like ones; empty where there is none."""
        for key in self.keys:
            if name in key.formerly:
                return f"; did you mean {key.name}?"
        return nearest(name, [key.name for key in self.keys])

    def schema(self) -> Schema:
        properties = {}
        for key in self.keys:
            properties[key.name] = key.kind.schema() | {"description": key.description}
        found: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
        if required := [key.name for key in self.keys if key.required]:
            found["required"] = required
        if self.one_of:
            found["allOf"] = [{"oneOf": [{"required": [name]} for name in group]} for group in self.one_of]
        if not self.short:
            return found
        return {"anyOf": [found, next(key.kind.schema() for key in self.keys if key.name == self.short)]}


def shown_default(default: Any) -> str:
    """Return a default as people would write it; empty where there is nothing to say."""
    if default is MISSING or default is None or default in ("", (), {}):
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, int | float) else str(default)
