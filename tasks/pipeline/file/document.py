"""A YAML document whose every value knows its line, so that an error can say where it stands.

Only what the format needs is YAML here: mappings, lists and scalars. Plain scalars are read by the rules of YAML 1.2
(``no`` and ``on`` are words, ``1:30`` is text), tags and duplicate keys are refused, aliases are followed.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from ebbflow.infra.storage import user_files, user_yaml
from ebbflow.planners.errors import PipelineFileError

Scalar = str | int | float | bool | None

MOST_BYTES = 2**20  # of a file
_MOST_VALUES = 20_000  # aliases may stand for more values than the file has bytes
_INT = re.compile(r"[-+]?[0-9]{1,18}")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]{1,3})?")
_TAGS = frozenset(("str", "int", "float", "bool", "null", "map", "seq", "timestamp", "merge", "value"))
_WORDS: Mapping[str, Scalar] = {"": None, "~": None, "null": None, "true": True, "false": False}


@dataclass(frozen=True, slots=True)
class Entry:
    """One value: what it is, and where it stands."""

    line: int  # from 1
    path: str  # such as ``queries.features.deadline``; empty for the whole document
    value: "Scalar | dict[str, Entry] | list[Entry]"
    text: str = ""  # a scalar as it is written
    quoted: bool = False  # and so a text, whatever it looks like

    def shown(self) -> str:
        """Return the value for an error, shortened."""
        if isinstance(self.value, dict):
            return "a table" if self.value else "an empty table"
        if isinstance(self.value, list):
            return "a list" if self.value else "an empty list"
        if self.value is None:
            return "nothing"
        shown = repr(self.text)
        return shown if len(shown) <= 80 else f"{shown[:77]}..."


@dataclass(slots=True)
class Problems:
    """What is wrong with a file, found so far."""

    source: str
    found: list[tuple[int, str]] = field(default_factory=list)  # (line, sentence)

    def add(self, line: int, path: str, rule: str) -> None:
        """Write down that what stands at ``path`` breaks ``rule``."""
        one = (line, f"{self.source}:{line}: {path + ': ' if path else ''}{rule}")
        if one not in self.found:
            self.found.append(one)

    def check(self) -> None:
        """Raise ``PipelineFileError`` that names all of them, in order of their lines."""
        if self.found:
            raise PipelineFileError("\n".join(text for _, text in sorted(self.found, key=lambda one: one[0])))


def read_document(text: str, source: str) -> Entry:
    """Return the document in ``text``; ``source`` names it in errors. Raises ``PipelineFileError``."""
    if len(text.encode("utf-8", "surrogatepass")) > MOST_BYTES:
        raise PipelineFileError(f"{source}:1: a pipeline's file has at most {MOST_BYTES:,} bytes")
    try:
        root = yaml.compose(text, Loader=user_yaml.BoundedLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise PipelineFileError(
            f"{source}:{line}: this is not YAML: {error.problem or error.context}"
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        said = " ".join(str(error).split())
        raise PipelineFileError(f"{source}:1: this is not YAML: {said:.200}") from error
    except user_yaml.TooDeepError as error:
        raise PipelineFileError(f"{source}:{error.line}: values are nested too deeply") from None
    if root is None:
        raise PipelineFileError(
            f"{source}:1: the file is empty; examples/pipeline.yaml shows what it can hold"
        )
    problems = Problems(source)
    entry = _Builder(problems).build(root, "", ())
    problems.check()
    return entry


def read_text(path: Path) -> str:
    """Return a file's text. Raises ``PipelineFileError``."""
    return user_files.read_text(
        path, max_bytes=MOST_BYTES, error=lambda said: PipelineFileError(f"the pipeline {said}")
    )


class _Builder:
    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._count = 0

    def build(self, node: yaml.Node, path: str, above: tuple[int, ...]) -> Entry:
        line = node.start_mark.line + 1
        self._count += 1
        if self._count > _MOST_VALUES:
            self._problems.add(line, path, f"a pipeline has at most {_MOST_VALUES:,} values")
            self._problems.check()
        if id(node) in above:
            self._problems.add(line, path, "an alias must not stand for what it is a part of")
            return Entry(line, path, None)
        if node.tag and node.tag.removeprefix("tag:yaml.org,2002:") not in _TAGS:
            self._problems.add(line, path, f"tags are not read here; got {node.tag:.60}")
        inside = (*above, id(node))
        if isinstance(node, yaml.MappingNode):
            return Entry(line, path, self._table(node, path, inside))
        if isinstance(node, yaml.SequenceNode):
            items = [self.build(one, f"{path}[{n}]", inside) for n, one in enumerate(node.value)]
            return Entry(line, path, items)
        assert isinstance(node, yaml.ScalarNode)
        quoted = node.style is not None  # or a block
        return Entry(line, path, node.value if quoted else scalar(node.value), node.value, quoted)

    def _table(self, node: yaml.MappingNode, path: str, inside: tuple[int, ...]) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                self._problems.add(line, path, "a key must be a word, not a list or a table")
                continue
            name = key.value
            if name in found:
                self._problems.add(
                    line, path, f"{name} stands here twice; the first is in line {found[name].line}"
                )
                continue
            entry = self.build(value, f"{path}.{name}" if path else name, inside)
            # an empty value's own mark may be beyond its key's line
            found[name] = replace(entry, line=line) if entry.value is None else entry
        return found


def scalar(text: str) -> Scalar:
    """Return what a scalar without quotes means."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and math.isfinite(number := float(text)):
        return number
    return text
