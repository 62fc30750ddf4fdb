"""What holds for every option of every command, new ones too: checked once its text is read, before it runs."""

import unicodedata
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from typer.core import TyperArgument, TyperGroup, TyperOption

from ebbflow.flows.runs.options import DURATION
from ebbflow.infra.storage.user_files import output_problem
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.numbers import MAX_NUMBER, is_number, is_whole, parse_duration

MAX_TEXT = 4096  # characters of an option's text, as of a path
OUTPUT_FILES = frozenset({"json", "report", "html", "csv", "out", "output", "document"})
"""Options of this name and the metavar FILE name a file that is written."""
OUTPUT_DIRECTORIES = frozenset(
    {
        "store",
        "into",
        "out",
        "output",
        "document",
        "spill_dir",
        "runs_dir",
        "state",
        "state_dir",
        "data",
        "data_dir",
        "to",
    }
)
"""Options of this name and the metavar DIR name a directory that is made, or written in."""

_FREE_TEXT = ("SQL|FILE", "ARGS")  # metavars of texts that may be long, and hold line breaks
INPUT_DIRECTORIES = frozenset({"tpcds", "profiles"})
"""Options of this name and the metavar DIR name a directory that is read, and must be there."""

Parameter = TyperOption | TyperArgument


class CheckedGroup(TyperGroup):
    """A group of commands whose options are all checked by ``problem_of``, also those of groups in it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the group's own options, checked."""
        _check_options(self, ctx)
        return super().parse_args(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command, its options checked."""
        found = super().get_command(ctx, cmd_name)
        _check_commands(found, ctx)
        return found


def _check_commands(command: Any, ctx: Any) -> None:
    for one in getattr(command, "commands", {}).values():
        _check_commands(one, ctx)
    if command is not None:
        _check_options(command, ctx)


def _check_options(command: Any, ctx: Any) -> None:
    for parameter in command.get_params(ctx):
        if "process_value" not in vars(parameter):
            parameter.process_value = _checked(parameter, parameter.process_value)


def _checked(parameter: Parameter, read: Callable[..., Any]) -> Callable[..., Any]:
    def process_value(ctx: Any, value: Any) -> Any:
        source = ctx.get_parameter_source(parameter.name)
        typed = source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT", "PROMPT")
        # before typer's own reading, whose messages do not repeat the value
        if (
            typed
            and not parameter.is_eager
            and (problem := problem_of(parameter, value) or _twice(ctx, parameter, value))
        ):
            raise OptionError(f"{_name(parameter)} {problem}")
        if not _needs_reading(parameter, value):
            if parameter.multiple:
                value = () if value is None else []
            return parameter.callback(ctx, parameter, value) if parameter.callback else value
        return read(ctx, value)

    return process_value


def _needs_reading(parameter: Parameter, value: Any) -> bool:
    """Return whether typer's own reading, which imports pydantic, may make something else of ``value``."""
    kind = parameter.type_descriptor.annotation
    if parameter.type_descriptor.parameter_info.parser is not None:
        return True
    if parameter.multiple or parameter.nargs != 1:
        return parameter.required or value not in (None, ())
    if value is None:
        return parameter.required
    if get_origin(kind) is Literal:
        return value not in get_args(kind)
    return type(value) is not kind or not issubclass(kind, str | float | bool | Enum)


def _name(parameter: Parameter) -> str:
    """Return an option's long name, or what a help text calls an argument."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name)
    return max(parameter.opts, key=len)


def problem_of(parameter: Parameter, value: Any) -> str:
    """Return which rule a value, as it was typed, breaks, and the value; empty where it breaks none."""
    if isinstance(value, list | tuple):
        return next(filter(None, (problem_of(parameter, one) for one in value)), "")
    if not isinstance(value, str):
        return ""
    kind = parameter.type_descriptor.annotation
    kind = get_args(kind)[0] if get_origin(kind) is list else kind
    if kind is int:
        return _problem_of_whole(value)
    if parameter.metavar == DURATION:
        return _problem_of_duration(value)
    if kind is float:
        return _problem_of_number(value)
    return _problem_of_text(value, parameter) if kind in (str, Path) else ""


def _problem_of_whole(text: str) -> str:
    if is_whole(text) and abs(int(text)) <= MAX_NUMBER:
        return ""
    return f"must be a whole number, of 15 digits at most; got {_short(text)}"


def _problem_of_number(text: str) -> str:
    if is_number(text) and abs(float(text)) <= MAX_NUMBER:
        return ""
    return f"must be a finite number, at most {MAX_NUMBER:g}; got {_short(text)}"


def _problem_of_duration(text: str) -> str:
    try:
        parse_duration(text)
    except OptionError as error:
        return str(error)
    return ""


def _problem_of_text(text: str, parameter: Parameter) -> str:
    free = parameter.metavar in _FREE_TEXT
    if not text.strip() and parameter.metavar != "ARGS":
        return f"must not be empty; got {text!r}"
    if not free and len(text) > MAX_TEXT:
        return f"must have at most {MAX_TEXT:,} characters; got {len(text):,}: {_short(text)}"
    if any(_forbidden(character, free) for character in text):
        return f"must hold no control characters; got {_short(text)}"
    return place_problem(parameter, text)


def place_problem(parameter: Parameter, text: str) -> str:
    """Return what is wrong with the place that a path names on this machine; empty where nothing is."""
    name, made = parameter.name or "", ""
    if parameter.metavar == "FILE" and name in OUTPUT_FILES and text != "-":
        made = output_problem(text)
    if parameter.metavar == "DIR" and name in OUTPUT_DIRECTORIES and "://" not in text:
        made = output_problem(text, directory=True)
    if parameter.metavar == "DIR" and name in INPUT_DIRECTORIES and not Path(text).expanduser().is_dir():
        return f"must be a directory; there is none at {_short(text)}"
    return f"cannot write to {_short(text)}: {made}" if made else ""


def _twice(ctx: Any, parameter: Parameter, value: Any) -> str:
    """Return what is wrong where two options name the same file to write."""
    if parameter.metavar != "FILE" or parameter.name not in OUTPUT_FILES:
        return ""
    known = ctx.meta.setdefault("ebbflow.outputs", {})
    for path in value if isinstance(value, list | tuple) else [value]:
        if path is None or str(path) == "-":
            continue
        other = known.setdefault(str(Path(path).absolute()), parameter.opts[0])
        if other != parameter.opts[0]:
            return f"must name a file of its own; got that of {other}: {path}"
    return ""


def _forbidden(character: str, free: bool) -> bool:
    if free and character in "\n\r\t\f":
        return False
    return unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")


def _short(text: str, most: int = 60) -> str:
    shown = repr(text)
    return shown if len(shown) <= most else f"{shown[:most]}..."
