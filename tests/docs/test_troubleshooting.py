"""Every message that docs/troubleshooting.md quotes is in the code, and every error that it names exists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.sources import FOLDERS, tree

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
_HEADING = re.compile(r"^### `(.+)` \{#[a-z0-9-]+\}$", re.M)
_ANY = "…"  # in a quoted message: what differs from case to case
_VALUE = "\0"  # in a string of the code: what is filled in
_END = "\1"  # of a string of the code


@cache
def strings() -> str:
    """Return the strings of the code, one after the other, values that are filled in marked."""
    found = []
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    found.append(
                        "".join(
                            part.value
                            if isinstance(part, ast.Constant) and isinstance(part.value, str)
                            else _VALUE
                            for part in node.values
                        )
                    )
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return _END.join(dict.fromkeys(found))


def quoted(message: str) -> re.Pattern[str]:
    """Return what fits a string of the code that says a message: its fixed parts, in their order."""
    # what begins with any text would be tried at each character of the code
    return re.compile(f"[^{_END}]*".join(re.escape(part) for part in message.strip(_ANY).split(_ANY)))


def section(message: str) -> str:
    return PAGE.split(f"### `{message}`")[1].split("\n### ")[0].split("\n## ")[0]


MESSAGES = _HEADING.findall(PAGE)


def test_every_entry_is_read() -> None:
    assert len(MESSAGES) == PAGE.count("\n### ") >= 25


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_in_the_code(message: str) -> None:
    assert len(max(message.split(_ANY), key=len)) >= 12
    assert quoted(message).search(strings()), message


@pytest.mark.parametrize("message", MESSAGES)
def test_an_entry_has_a_cause_a_fix_and_an_error_that_exists(message: str) -> None:
    entry = section(message)
    assert "**Cause:** " in entry
    assert "\n**Fix:** " in entry
    if (named := re.search(r"\*\*Error:\*\* `(\w+)`", entry)) is None:
        assert "**Not an error but a reason of the guard.**" in entry
        return
    classes = {
        node.name
        for module in ("ebbflow.infra.errors", "ebbflow.planners.errors")
        for node in ast.walk(tree(ROOT, module))
        if isinstance(node, ast.ClassDef)
    }
    assert named[1] in classes


def test_a_message_that_the_code_does_not_say_is_found() -> None:
    assert not quoted("the moon is … of cheese").search(strings())
    assert not quoted("run … is held").search(f"run {_VALUE} ends{_END}it is held")
    assert quoted("run … is held").search(f"run {_VALUE} is held by {_VALUE}")
