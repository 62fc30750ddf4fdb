"""What commands print beside their results: errors, questions and JSON documents."""

import json
import sys
from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from ebbflow.flows.runs.exit_status import ExitStatus


def wants_json(arguments: Sequence[str]) -> bool:
    """Return whether a command line asks for JSON: by ``--json``, or by ``--format json``."""
    own = list(takewhile(lambda text: text != "--", arguments))
    return "--json" in own or "--format=json" in own or ("--format", "json") in pairwise(own)


def print_error(message: str, kind: str, *, as_json: bool) -> None:
    """Print an error on standard error: for a reader, or as an object of JSON.

    Args:
        message: what is wrong and what to do.
        kind: the error's class.
        as_json: whether a program reads it.
    """
    if as_json:
        print(json.dumps({"error": message, "kind": kind}, ensure_ascii=False), file=sys.stderr)
    else:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)


def fail(message: str, status: ExitStatus = ExitStatus.FAILED, kind: str = "Rejected") -> NoReturn:
    """Print an error and end the command with ``status``."""
    print_error(message, kind, as_json=wants_json(sys.argv[1:]))
    raise typer.Exit(status)


def confirm(question: str, yes: bool) -> None:
    """Ask the user on a terminal; the command ends with status 1 unless the answer is yes, or ``yes`` is set."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        fail("nothing was done: no terminal for the confirmation prompt; add --yes")
    if not typer.confirm(question):
        fail("nothing was done")


def print_json(content: Any) -> None:
    """Print ``content`` as one JSON document on standard output."""
    typer.echo(json.dumps(content, indent=1))
