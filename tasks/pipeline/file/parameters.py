"""``${parameters.NAME}``: filled in before anything else is read, so that it can stand anywhere."""

import re
from collections.abc import Mapping
from dataclasses import replace

from ebbflow.planners.errors import OptionError
from ebbflow.tasks.pipeline.file.document import Entry, Problems, scalar
from ebbflow.tasks.pipeline.file.kinds import nearest

_TOKEN = re.compile(r"(?<!\$)\$\{parameters\.([^{}]*)\}")


def with_parameters(root: Entry, given: Mapping[str, str], problems: Problems) -> Entry:
    """Return the document with its parameters filled in, those of ``given`` first; adds to ``problems``."""
    table = root.value
    own = table.get("parameters") if isinstance(table, dict) else None
    defaults = own.value if own is not None and isinstance(own.value, dict) else {}
    values = {name: one.text for name, one in defaults.items() if not isinstance(one.value, dict | list)}
    for name, value in given.items():
        if name not in values:
            problems.add(
                own.line if own else root.line,
                "parameters",
                f"{name!r:.60} was set, but the file has no such parameter{nearest(name, list(values))}",
            )
        values[name] = value
    if not isinstance(table, dict):
        return root

    def fill(entry: Entry) -> Entry:
        if isinstance(entry.value, dict):
            return replace(entry, value={name: fill(one) for name, one in entry.value.items()})
        if isinstance(entry.value, list):
            return replace(entry, value=[fill(one) for one in entry.value])
        if "${parameters." not in entry.text:
            return entry
        text = _TOKEN.sub(lambda found: value_of(found, entry), entry.text)
        # quotes are needed around a reference within {...}: what is one alone becomes what it stands for
        plain = not entry.quoted or _TOKEN.fullmatch(entry.text)
        return replace(entry, value=scalar(text) if plain else text, text=text)

    def value_of(found: re.Match[str], entry: Entry) -> str:
        if found[1] not in values:
            problems.add(
                entry.line,
                entry.path,
                f"there is no parameter {found[1]!r:.60}{nearest(found[1], list(values))}",
            )
        return values.get(found[1], "")

    filled = {name: one if name == "parameters" else fill(one) for name, one in table.items()}
    return replace(root, value=filled)


def parse_set(pairs: tuple[str, ...] | list[str]) -> dict[str, str]:
    """Return ``{"name": "value"}`` of ``NAME=VALUE`` texts. Raises ``OptionError``."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise OptionError(f"a parameter is set by NAME=VALUE; got {pair!r}")
        found[name.strip()] = value
    return found
