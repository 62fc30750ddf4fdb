"""What users ask for, as the options of a command and the parameters of a flow."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import wraps
from typing import Annotated, Any, Literal

import typer

from ebbflow.planners.model.options import Declared, declared

RENAMED = {"json": "json_report", "report": "html_report"}
"""Fields that flows have by another name: pydantic reserves the name json."""


def fields_of(request: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that a flow's parameters say something of."""
    return _said({f.name: given.get(RENAMED.get(f.name, f.name)) for f in fields(request)})


def _said(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is not left out, as a request's fields have it."""
    said = {name: value for name, value in given.items() if value is not None and value != []}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in said.items()}


def asking(request: type, **before: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options that a request declares.

    Its own parameters come first, or after them if they are by keyword only; those that ``before`` names stand before
    an option, and one of an option's name in its place. Of the others the command gets, as ``given``, what was typed.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = dict(inspect.signature(command).parameters)
        own.pop("given")
        order = [one for one in own.values() if one.kind is not inspect.Parameter.KEYWORD_ONLY]
        for name, one in declared(request).items():
            order += [own[mine] for mine, other in before.items() if other == name]
            if name in own:
                order.append(own[name])
            elif one.said.command:
                order.append(_parameter(one))
        order += [one for one in own.values() if one not in order]

        @wraps(command)
        def asked(**values: Any) -> None:
            typed = {n: values.pop(n) for n in list(values) if n not in own}
            given = {
                n: tuple(v) if isinstance(v, list) else v for n, v in typed.items() if v not in (None, [])
            }
            command(**values, given=given)

        keyword = inspect.Parameter.KEYWORD_ONLY
        asked.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [one.replace(kind=keyword) for one in order]
        )
        asked.__annotations__ = {one.name: one.annotation for one in order}
        return asked

    return decorate


def _parameter(one: Declared) -> inspect.Parameter:
    """Return an option that says nothing unless it is typed, so that the request's default holds."""
    kind: Any = Literal[one.choices] if one.choices else one.kind
    said = typer.Option(
        *filter(None, [one.said.flags]), help=_help(one), metavar=one.said.metavar or _metavar(one)
    )
    return inspect.Parameter(
        one.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[(list[kind] if one.many else kind) | None, said],
    )


def _metavar(one: Declared) -> str | None:
    return "HOW" if one.choices else "SECONDS" if one.said.unit == "s" else None


def _help(one: Declared) -> str:
    text = f"Seconds {one.said.help}".strip() if one.said.unit == "s" else one.said.help
    sentences = [text, one.known_default and f"Default: {one.known_default}"]
    return " ".join(f"{sentence}." for sentence in sentences if sentence)
