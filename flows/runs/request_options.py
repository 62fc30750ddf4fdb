"""What users ask for, as the options of a command and the parameters of a flow."""

import inspect
from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import fields
from functools import wraps
from typing import Annotated, Any, Literal, get_args

import typer

from ebbflow.flows.runs.options import duration_option
from ebbflow.planners.model.options import Declared, declared


def fields_of(request: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that a flow's parameters say something of."""
    return _said({f.name: given.get(f.name) for f in fields(request)})


def _said(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is not left out, as a request's fields have it."""
    said = {name: value for name, value in given.items() if value is not None and value != []}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in said.items()}


def with_options_of(
    request: type,
    *,
    only: Collection[str] = (),
    shown: bool = False,
    before: Mapping[str, str] | None = None,
    panels: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options that a request declares.

    Its own parameters come first, or after them if they are by keyword only; one of an option's name stands in its
    place. Of the others the command gets as ``given`` what was typed.

    Args:
        request: a dataclass.
        only: its options that the command has; all unless given.
        shown: the command gets defaults, too, and help shows them as Typer does.
        before: parameters of the command that stand before an option.
        panels: titles in help under which options stand, by the option; in the order of the panels' first options.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = dict(inspect.signature(command).parameters)
        own.pop("given")
        order = [one for one in own.values() if one.kind is not inspect.Parameter.KEYWORD_ONLY]
        for name, one in declared(request).items():
            order += [own[mine] for mine, other in (before or {}).items() if other == name]
            if name in own:
                order.append(own[name])
            elif name in only or (one.option.command and not only):
                order.append(_parameter(one, shown))
        order += [one for one in own.values() if one not in order]

        @wraps(command)
        def asked(**values: Any) -> None:
            typed = {n: values.pop(n) for n in list(values) if n not in own}
            command(**values, given=_said(typed))

        order = [_under(one, (panels or {}).get(one.name)) for one in order]
        keyword = inspect.Parameter.KEYWORD_ONLY
        asked.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [one.replace(kind=keyword) for one in order]
        )
        asked.__annotations__ = {one.name: one.annotation for one in order}
        return asked

    return decorate


def _parameter(one: Declared, shown: bool) -> inspect.Parameter:
    """Return an option that says nothing unless it is typed, or its default if that is to be ``shown``."""
    default = one.default if shown else None
    kind: Any = Literal[one.choices] if one.choices else one.kind
    kind = list[kind] if one.many else kind
    flags = tuple(filter(None, one.option.flags.split(",")))
    said = (
        duration_option(*flags, help=_help(one, default), shown=default)
        if one.option.unit == "s"
        else typer.Option(*flags, help=_help(one, default), metavar=one.option.metavar or None)
    )
    return inspect.Parameter(
        one.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind | None if default is None else kind, said],
    )


def _under(parameter: inspect.Parameter, panel: str | None) -> inspect.Parameter:
    """Return a parameter that help shows in a panel of this title; several commands may have its option."""
    if panel is None:
        return parameter
    kind, said = get_args(parameter.annotation)
    said = copy(said)
    said.rich_help_panel = panel
    return parameter.replace(annotation=Annotated[kind, said])


def _help(one: Declared, shown: Any) -> str:
    known = one.known_default if shown is None else ""
    return " ".join(f"{text}." for text in (one.option.help, known and f"Default: {known}") if text)
