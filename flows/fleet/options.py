"""What the commands of ``ebbflow fleet`` share: the options that name a cluster, questions, and exit codes."""

import inspect
import json
import sys
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from ebbflow.infra.errors import InfraError, SettingsError

if TYPE_CHECKING:
    from ebbflow.tasks.fleet.request import FleetRequest

_PANEL = "Cluster"

_OPTIONS: dict[str, Any] = {
    "config": Annotated[
        str | None,
        typer.Option(
            help="What terraform output -json has written. Default: $EBBFLOW_CONFIG.",
            metavar="FILE",
            rich_help_panel=_PANEL,
        ),
    ],
    "limits": Annotated[
        str | None,
        typer.Option(
            help="Budgets and other limits, TOML. Default: $EBBFLOW_LIMITS; without either, none.",
            metavar="FILE",
            rich_help_panel=_PANEL,
        ),
    ],
    "prices": Annotated[
        str | None,
        typer.Option(
            "--on-demand-prices",
            help="On-demand prices of your own, TOML. Default: the AWS Price List.",
            metavar="FILE",
            rich_help_panel=_PANEL,
        ),
    ],
    "profile": Annotated[
        str | None,
        typer.Option(help="Of the AWS configuration.", metavar="NAME", rich_help_panel=_PANEL),
    ],
    "own_credentials": Annotated[
        bool,
        typer.Option(
            "--own-credentials",
            help="Act by your own rights instead of taking on the cluster's capacity role.",
            rich_help_panel=_PANEL,
        ),
    ],
    "endpoint_url": Annotated[
        str | None,
        typer.Option(
            help="Of an emulator of AWS. Default: $AWS_ENDPOINT_URL.", metavar="URL", rich_help_panel=_PANEL
        ),
    ],
    "state": Annotated[
        str | None,
        typer.Option(
            help="Where plans, notices and costs are kept. Default: fleet/ in ~/.cache/ebbflow.",
            metavar="DIR",
            rich_help_panel=_PANEL,
        ),
    ],
}

DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]
Wait = Annotated[
    float,
    typer.Option(
        help="How long nodes may finish what runs on them before they are ended.", metavar="SECONDS", min=0.0
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def with_cluster(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that name a cluster, and hand them over as its argument ``request``.

    What AWS refuses or cannot do ends with status 1; wrong files and options are the caller's, status 2.
    """

    @wraps(command)
    def run(**given: Any) -> None:
        chosen = {name: given.pop(name) for name in _OPTIONS}
        try:
            command(request=_request(chosen), **given)
        except SettingsError:
            raise
        except InfraError as error:
            fail(str(error))

    own = inspect.signature(command).parameters.values()
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=False if name == "own_credentials" else None,
            annotation=annotation,
        )
        for name, annotation in _OPTIONS.items()
    ]
    kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own if p.name != "request"]
    run.__signature__ = inspect.Signature([*kept, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in (*kept, *added)}
    return run


def _request(chosen: dict[str, Any]) -> "FleetRequest":
    from ebbflow.tasks.fleet.request import FleetRequest

    return FleetRequest(**chosen)


def fail(message: str) -> NoReturn:
    """Say what is wrong, and end with status 1."""
    Console(stderr=True).print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    raise typer.Exit(1)


def confirm(question: str, yes: bool) -> None:
    """Ask, on a terminal; end with status 1 unless the answer is yes."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        fail("nothing was done: this is no terminal to ask on; add --yes, or --dry-run to look only")
    if not typer.confirm(question):
        fail("nothing was done")


def print_json(content: Any) -> None:
    """Print ``content`` for programs."""
    typer.echo(json.dumps(content, indent=1))
