"""Texts that users read are in the field's words: help of commands, errors, reasons, log lines and event texts."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest
import typer

from ebbflow.flows import cli
from tests.docs.sources import FOLDERS

ROOT = Path(__file__).parents[2]

AVOID = {
    r"wish(es|ed)?": "desired capacity",
    r"leads( with| no more| the cluster| this cluster)?": "is the leader (fencing token N)",
    r"the lead": "leader election, the leader lease",
    r"called back|recall(s|ed)?": "preempted, revoked",
    r"(is|are|gave|giving|given|gives) (\w+ )?back": "released, terminated, scale-in",
    r"(is|are|being) returned": "released, terminated",
    r"let go( of)?|lets go": "released",
    r"rent(s|ed|ing)?": "launched, provisioned",
    r"goes on|gone on|go on": "continues, resumes",
    r"in vain": "N failed start attempts",
    r"fallen silent|silent (until|for|since)|been silent": "missed heartbeats",
    r"without a word|nothing was heard": "no heartbeat (heartbeat timeout)",
    r"tak(es?|en) (no )?part": "schedulable, not schedulable: REASON",
    r"left out": "not schedulable: REASON; ignored: REASON",
    r"taken for lost|is lost": "marked lost (heartbeat timeout)",
    r"others come first": "pending (Priority)",
    r"spot is (back|dry|still short)|has been short|is short": "insufficient Spot capacity",
    r"stands still|thawed|frozen|unfrozen": "paused (SIGSTOP), resumed (SIGCONT)",
    r"spared|spares": "protected from preemption",
    r"dear(er|est)": "worst-case price, most expensive offer",
    r"nothing moves": "no allocation changes",
    r"kept as it was found": "allocation unchanged",
    r"described anew|anew": "attributes changed; re-plan, rebuild",
    r"(at|for|old|older|capacity) epoch": "revision",
    r"in place of": "replacement node",
    r"(may not|not) be used any more": "cordoned",
    r"was to be free": "release deadline exceeded",
    r"pretends?": "simulated",
    r"drawn out": "simulated boot delay",
    r"advised|a rebalance advice": "rebalance recommended",
    r"whoever|somebody|nobody|everybody": "the actor: operator, scheduler, another process",
    r"cannot be looked at|a look (at|has)|looked after": "polling failed; reconcile",
    r"wrong input": "usage error",
    r"leaves with status": "exit status",
    r"plugs": "fault injection",
    r"whole or not at all|at once or none": "all-or-nothing",
    r"keeper": "node supervisor",
    r"processors": "CPU cores",
    r"on record": "in the ledger",
    r"could be had|can be had|to be had": "available, launched",
    r"at the cheapest": "cheapest offer",
    r"as people|for people": "the reader",
    r"(?<!DAG )folders?": "directory",
    r"outlooks?": "goodput forecast, remaining work",
}
"""What is not written, and what is instead."""

_AVOID = {re.compile(rf"\b(?:{words})\b", re.I): instead for words, instead in AVOID.items()}
_FILLED = "\N{HORIZONTAL ELLIPSIS}"  # in a text: what is filled in
_NAMES = re.compile(r"[\w:.,*=-]+")  # a key or an identifier, no sentence
_KEYS = {"left out"}  # values in the ledger that look like words; they are renamed with its schema
_FOREIGN = "<frozen "  # how Python names its own modules in tracebacks
_COMMANDS = re.compile(r"^ {4}ebbflow .*$", re.M)  # examples in help: options keep their names


def rooms() -> Iterator[str]:
    """Return all rooms of the code: folders in the four floors, and what lies in a floor itself."""
    for floor in FOLDERS:
        for path in sorted((ROOT / floor).iterdir()):
            if path.is_dir() and any(path.rglob("*.py")):
                yield f"{floor}/{path.name}"


def texts_of(source: str) -> Iterator[tuple[int, str]]:
    """Return the sentences of a module's code with their lines: strings that are no docstring, key or SQL."""
    tree = ast.parse(source)
    skipped = {
        id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)
    } | {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else _FILLED for part in node.values)
            text = "".join(str(part) for part in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            text = node.value
        else:
            continue
        if text not in _KEYS and not _NAMES.fullmatch(text.replace(_FILLED, "")):
            yield node.lineno, _COMMANDS.sub("", text.replace(_FOREIGN, ""))


def wrong(text: str) -> list[str]:
    """Return what a text says that it should not, each with what to write instead."""
    return [f"{hit[0]!r}: {instead}" for words, instead in _AVOID.items() if (hit := words.search(text))]


@cache
def commands() -> dict[str, click.Command]:
    """Return all commands by their names, groups included."""
    found: dict[str, click.Command] = {}

    def add(name: str, command: click.Command) -> None:
        found[name] = command
        for inner, below in getattr(command, "commands", {}).items():
            add(f"{name} {inner}", below)

    add("ebbflow", typer.main.get_command(cli.app))
    return found


@pytest.mark.parametrize("room", sorted(rooms()))
def test_texts_of_a_room_are_in_the_field_s_words(room: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text[:120]!r}: {problem}"
        for path in sorted((ROOT / room).rglob("*.py"))
        for line, text in texts_of(path.read_text(encoding="utf-8"))
        for problem in wrong(text)
    ]
    assert not found, "\n".join(found)


def test_help_of_commands_and_options_is_in_the_field_s_words() -> None:
    found = []
    for name, command in commands().items():
        helps = [command.help or "", *(getattr(option, "help", None) or "" for option in command.params)]
        found += [f"{name}: {problem}" for text in helps for problem in wrong(_COMMANDS.sub("", text))]
    assert not found, "\n".join(found)


def test_a_word_to_avoid_is_found() -> None:
    source = '"""It leads."""\nfail(f"{loop} leads no more")\nkey = "called-back"\n"""It goes on."""\n'
    assert [(line, wrong(text)) for line, text in texts_of(source)] == [
        (2, ["'leads no more': is the leader (fencing token N)"])
    ]
