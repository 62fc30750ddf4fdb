"""Options of commands: parsing their values, and those that several commands have.

Also keeps what libraries print by themselves out of a command's output.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.numbers import parse_duration, parse_gib, parse_number, parse_whole, show_duration

if TYPE_CHECKING:
    from ebbflow.planners.model import Share

_MAX_CORES = 10**6
DURATION = "DURATION"  # metavar of options that take 90s, 5m, 2h


def parse_capacity(text: str) -> "Share":
    """Return the share that ``cores=3,memory=6GiB[,nodes=3][,interruption_rate=2]`` describes.

    Raises ``OptionError``.
    """
    from ebbflow.planners.model import Share

    values = {"cores": "3", "memory": "6GiB", "nodes": "", "interruption_rate": "0.05"}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or name.strip() not in values:
            raise OptionError(
                f"capacity must look like cores=3,memory=6GiB,nodes=3,interruption_rate=2; got {part!r}"
            )
        values[name.strip()] = value.strip()
    cores = parse_number(values["cores"], "cores", above=0, max=_MAX_CORES)
    nodes = parse_whole(values["nodes"] or str(int(max(cores, 1))), "nodes", min=1, max=_MAX_CORES)
    try:
        memory = parse_gib(values["memory"])
    except OptionError as error:
        raise OptionError(f"memory {error}") from error
    rate = parse_number(values["interruption_rate"], "interruption_rate", min=0, max=1e9)
    return Share.uniform(cores, memory, nodes, hazard=rate)


def parse_settings(pairs: list[str]) -> dict[str, str]:
    """Return ``{"key": "value"}`` of ``key=value`` texts. Raises ``OptionError``."""
    out = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise OptionError(f"a Spark setting must look like spark.some.key=value; got {pair!r}")
        out[key.strip()] = value.strip()
    return out


@contextmanager
def without_native_output() -> Iterator[None]:
    """Let only Python write to standard output.

    The solver HiGHS prints a line to the process' own standard output now and then, whatever it is told; there it
    would end up in the middle of a table or of JSON. Where Python's standard output is something else already,
    nothing is done.
    """
    number = -1
    with suppress(OSError, ValueError, AttributeError):
        number = sys.stdout.fileno()
    if number != 1:
        yield
        return
    before = sys.stdout
    before.flush()
    copy = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    sys.stdout = open(copy, "w", encoding=before.encoding, errors=before.errors, buffering=1)  # noqa: SIM115
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(copy, 1)
        sys.stdout.close()
        os.close(nowhere)
        sys.stdout = before


class Materialize(StrEnum):
    """Where a query is divided into stages whose results are kept."""

    cost = "cost"
    every_join = "every-join"
    none = "none"


class Runner(StrEnum):
    """Where a run is recorded: on a Prefect server, nowhere, or by what is configured."""

    auto = "auto"
    prefect = "prefect"
    plain = "plain"


def wants_prefect(runner: Runner) -> bool:
    """Tell whether a run is to be recorded on a Prefect server; by ``auto`` where one is configured."""
    return runner is Runner.prefect or (runner is Runner.auto and bool(os.environ.get("PREFECT_API_URL")))


RunnerOption = Annotated[
    Runner,
    typer.Option(
        metavar="HOW",
        help="Recording of the run on a Prefect server: prefect, plain (none), or auto, if one is configured.",
    ),
]
AllowFunctions = Annotated[
    list[str] | None,
    typer.Option(
        help="Functions that the SQL may call though they read files, a network or settings or run code, such as "
        "read_csv; by commas. Repeatable.",
        metavar="NAME[,NAME...]",
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output instead of the table.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done without doing it.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not prompt for confirmation.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Only errors on standard error: no progress, no notes.")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="More detail on standard error.")]


def duration_option(*flags: str, help: str, min: float = 0.0, shown: float | None = None, **more: Any) -> Any:
    """Return an option that takes ``90s``, ``5m``, ``1h30m`` or a number of seconds, and gives seconds.

    Args:
        flags: names of the option; unless given, made of the parameter's name.
        help: a full noun phrase.
        min: the shortest duration, s.
        shown: the default as help shows it, s; ``None`` where ``help`` says it.
        more: further arguments of ``typer.Option``.
    """

    def parse(given: str | float) -> float:
        if isinstance(given, int | float):  # a default
            return float(given)
        try:
            seconds = parse_duration(given)
        except OptionError as error:
            raise typer.BadParameter(str(error)) from error
        if seconds < min:
            raise typer.BadParameter(f"must be at least {show_duration(min)}; got {given}")
        return seconds

    show = False if shown is None else show_duration(shown)
    return typer.Option(*flags, help=help, parser=parse, metavar=DURATION, show_default=show, **more)
