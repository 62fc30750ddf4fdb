"""Which files of a working directory are left out of a training's code, by patterns of ``.gitignore``."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

ALWAYS = (
    ".git",
    "__pycache__",
    "*.py[co]",
    ".venv/",
    "venv/",
    ".mypy_cache/",
    ".pytest_cache/",
    ".ruff_cache/",
    ".ipynb_checkpoints/",
    "node_modules/",
    ".DS_Store",
)
"""Left out unless a later pattern takes it back: what is made again anyway, and what belongs to one machine."""


@dataclass(frozen=True, slots=True)
class _Rule:
    pattern: re.Pattern[str]
    excludes: bool
    directories: bool  # whether it holds for directories only


class IgnoreRules:
    """Patterns in order; the last that matches a path decides.

    A line is a pattern of git's (gitignore(5)): ``#`` begins a comment, ``!`` takes a path back, a ``/`` at the end
    means directories only, one at the beginning or in the middle ties the pattern to the root, ``**`` is any number
    of directories. What is within a directory that is left out cannot be taken back.

    >>> rules = IgnoreRules(["*.log", "/data/raw", "!keep.log"])
    >>> rules.excludes("out/a.log"), rules.excludes("keep.log"), rules.excludes("data/raw", directory=True)
    (True, False, True)
    """

    def __init__(self, lines: Iterable[str]) -> None:
        self._rules = [rule for line in lines if (rule := _rule(line)) is not None]

    def excludes(self, path: str, *, directory: bool = False) -> bool:
        """Return whether ``path``, relative to the root with ``/`` between its parts, is left out."""
        for rule in reversed(self._rules):
            if (directory or not rule.directories) and rule.pattern.fullmatch(path):
                return rule.excludes
        return False


def _rule(line: str) -> _Rule | None:
    text = line.rstrip("\r\n")
    if not text.endswith("\\ "):
        text = text.rstrip(" ")
    if not text or text.startswith("#"):
        return None
    excludes = not text.startswith("!")
    text = text if excludes else text[1:]
    directories, text = text.endswith("/"), text.rstrip("/")
    anchored, text = "/" in text, text.removeprefix("/")
    if not text:
        return None
    return _Rule(re.compile(("" if anchored else "(?:.*/)?") + _translated(text)), excludes, directories)


def _translated(text: str) -> str:
    """Return the regular expression of one pattern."""
    found, at = "", 0
    while at < len(text):
        if text.startswith("**/", at) and (at == 0 or text[at - 1] == "/"):
            found, at = found + "(?:.*/)?", at + 3
        elif text[at:] == "**" and (at == 0 or text[at - 1] == "/"):
            found, at = found + ".+", at + 2
        elif text[at] == "*":
            found, at = found + "[^/]*", at + 1
        elif text[at] == "?":
            found, at = found + "[^/]", at + 1
        elif text[at] == "[" and (end := text.find("]", at + 2)) > 0:
            inner = text[at + 1 : end].replace("\\", r"\\")
            inner = "^" + inner[1:] if inner[0] in "!^" else inner
            found, at = f"{found}[{inner}]", end + 1
        else:
            at += text[at] == "\\" and at + 1 < len(text)
            found, at = found + re.escape(text[at]), at + 1
    return found
