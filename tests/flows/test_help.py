"""Help pages of all commands: no line is wider than the terminal, and every option is explained in full sentences."""

import re
from functools import cache

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from ebbflow.flows import cli
from tests.flows.test_words import commands

NOT_YET = (
    "query", "calibrate", "train", "tune", "elastic", "demo", "capacity", "ledger", "report", "nodes", "fleet",
    "data", "bench",
)  # fmt: skip
"""Commands whose help is still to be rewritten; one whose help is in order leaves."""

_EAGER = {"--help", "--install-completion", "--show-completion"}  # Typer's own


def is_to_do(name: str) -> bool:
    """Return whether a command, or the group that it is in, is in ``NOT_YET``."""
    return name.split()[1:2] != [] and name.split()[1] in NOT_YET


@cache
def page(name: str, width: int) -> str:
    """Return the help of a command at a terminal's width."""
    words = name.split()[1:]
    done = CliRunner().invoke(
        cli.app, [*words, "--help"], env={"COLUMNS": str(width), "TERMINAL_WIDTH": str(width)}
    )
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_of_a_help_page_is_wider_than_the_terminal(width: int) -> None:
    found = [
        f"{name}: {line}"
        for name in commands()
        for line in page(name, width).splitlines()
        if cell_len(line) > width
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("width", [80, 120])
def test_examples_and_lists_are_not_broken(width: int) -> None:
    """Lines of examples that are too long would continue at the left edge."""
    found = []
    for name, command in commands().items():
        if is_to_do(name):
            continue
        shown = {" ".join(line.split()) for line in page(name, width).splitlines()}
        for line in re.findall(r"^ {4}(\S.*)$", command.help or "", re.M):
            plain = " ".join(re.sub(r"\[/?b\]", "", line).split())
            if plain not in shown:
                found.append(f"{name}: {plain}")
    assert not found, "\n".join(found)


def test_every_option_has_a_help_text_of_full_sentences() -> None:
    found = []
    for name, command in commands().items():
        if is_to_do(name):
            continue
        for option in command.params:
            text = getattr(option, "help", None) or ""
            if _EAGER & set(option.opts):
                continue
            if not (text[:1].isupper() and text.endswith(".")):
                found.append(f"{name} {option.opts[0]}: {text!r}")
    assert not found, "\n".join(found)
