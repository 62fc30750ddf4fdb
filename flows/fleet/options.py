"""What the commands of ``ebbflow fleet`` share: the options that name a cluster."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ebbflow.flows.runs.answers import fail
from ebbflow.flows.runs.options import duration_option
from ebbflow.infra.errors import InfraError, SettingsError

if TYPE_CHECKING:
    from ebbflow.tasks.fleet.request import FleetRequest

_PANEL = "Cluster"

_OPTIONS: dict[str, Any] = {
    "terraform_output": Annotated[
        str | None,
        typer.Option(
            help="File written by terraform output -json. Default: $EBBFLOW_TERRAFORM_OUTPUT.",
            metavar="FILE",
            rich_help_panel=_PANEL,
        ),
    ],
    "config": Annotated[
        str | None,
        typer.Option(
            help="Configuration file (ebbflow.toml) with the quotas. Default: $EBBFLOW_CONFIG; without either, no "
            "quotas.",
            metavar="FILE",
            rich_help_panel=_PANEL,
        ),
    ],
    "prices": Annotated[
        str | None,
        typer.Option(
            "--on-demand-prices",
            help="TOML file of on-demand prices. Default: the AWS Price List.",
            metavar="FILE",
            rich_help_panel=_PANEL,
        ),
    ],
    "profile": Annotated[
        str | None,
        typer.Option(
            help="AWS profile name. Default: the one of Terraform's output.",
            metavar="NAME",
            rich_help_panel=_PANEL,
        ),
    ],
    "own_credentials": Annotated[
        bool,
        typer.Option(
            "--own-credentials",
            help="Use the caller's own permissions instead of assuming the cluster's capacity role.",
            rich_help_panel=_PANEL,
        ),
    ],
    "endpoint_url": Annotated[
        str | None,
        typer.Option(
            help="Endpoint URL of an AWS emulator. Default: $AWS_ENDPOINT_URL.",
            metavar="URL",
            rich_help_panel=_PANEL,
        ),
    ],
    "state_dir": Annotated[
        str | None,
        typer.Option(
            help="Directory of plans, notices and costs. Default: fleet/ in ~/.cache/ebbflow.",
            metavar="DIR",
            rich_help_panel=_PANEL,
        ),
    ],
}

GRACE = 300.0  # s
Grace = Annotated[
    float,
    duration_option(help="Time in which nodes finish running work before they are terminated.", shown=GRACE),
]


def with_cluster(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that name a cluster, and hand them over as its argument ``request``.

    A request that AWS rejects ends with status 1, a wrong file or option with status 2.
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
