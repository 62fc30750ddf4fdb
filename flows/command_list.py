"""A group of commands that are listed by name, and imported when they are asked for."""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from ebbflow.flows.runs.option_checks import CheckedGroup


class Listed(NamedTuple):
    """A command as the list of commands shows it.

    Args:
        name: what users type.
        module: where it is written; its ``register(app)`` adds it to a ``Typer``.
        help: the first paragraph of its help.
        panel: title under which it stands.
    """

    name: str
    module: str
    help: str
    panel: str


class _Commands(Mapping[str, Any]):
    """Commands by their names; each is imported when it is looked up first."""

    def __init__(self, listed: Sequence[Listed]) -> None:
        self._listed = {one.name: one for one in listed}
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            app = typer.Typer(rich_markup_mode="rich")
            import_module(self._listed[name].module).register(app)
            self._loaded |= get_group(app).commands
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._listed

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed)

    def __len__(self) -> int:
        return len(self._listed)


class ListedGroup(CheckedGroup):
    """A group of the commands that its class lists. Its help imports none of them, a command only its own module."""

    listed: Sequence[Listed] = ()

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings | {"commands": _Commands(self.listed)})

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands, as they are listed."""
        return list(self.commands)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, with what the list says of each command."""
        shown = copy(self)
        shown.commands = {
            one.name: TyperCommand(one.name, help=one.help, rich_help_panel=one.panel) for one in self.listed
        }
        TyperGroup.format_help(shown, ctx, formatter)
