"""``ebbflow aggregation``: aggregators that trainings of a cluster share; ``ebbflow simulate aggregation``."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ebbflow.flows.runs.answers import print_json
from ebbflow.flows.runs.option_checks import CheckedGroup
from ebbflow.flows.runs.options import AsJson, duration_option

if TYPE_CHECKING:
    from ebbflow.infra.ledger import Ledger

app = typer.Typer(
    cls=CheckedGroup,
    help="Aggregators that trainings of a cluster share: serve, show who serves what, drain.\n\n"
    "[b]Examples[/b]\n\n"
    "    ebbflow aggregation serve a1 --cluster shop\n\n"
    "    ebbflow train fit.py --sync service --aggregation-cluster shop\n\n"
    "    ebbflow aggregation status --cluster shop\n\n"
    "Aggregators and trainings find each other in the ledger. docs/aggregation.md explains.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
console = Console()
messages = Console(stderr=True)

Url = Annotated[
    str | None,
    typer.Option(
        "--ledger",
        help="Address of the ledger: a file, or postgresql://user@host/database; a password goes into "
        "$EBBFLOW_LEDGER or ~/.pgpass, not here. Default: $EBBFLOW_LEDGER, else ledger.db in ~/.cache/ebbflow.",
        metavar="URL",
    ),
]
Cluster = Annotated[str, typer.Option(help="Name of the cluster; a ledger may hold several.", metavar="NAME")]
Within = Annotated[
    float,
    duration_option(help="Time in which other aggregators must have taken the tensors.", shown=120.0),
]

HELP = """Simulate the servers that trainings need for aggregation, private and shared, and compare.

Policies: private (each training its own), periodic and hybrid (shared, scaled once a period), on-demand (shared, \
scaled with every arrival and exit), ideal (servers that are never idle). A trace lacks models and iterations: they \
are drawn from those of AutoPS' evaluation.

[b]Examples[/b]

    ebbflow simulate aggregation --workload philly:200

    ebbflow simulate aggregation --workload philly:200 --slowdown 4 --json

Exit status: 0 done, 2 usage error.
"""


def aggregation(
    workload: Annotated[
        str,
        typer.Option(
            help="Workload to simulate: a file with id,arrival_s,gpus,duration_s, or philly:JOBS[:SEED].",
            metavar="FILE|NAME",
        ),
    ] = "philly:200",
    seed: Annotated[int, typer.Option(help="Seed of models and iterations.", min=0)] = 0,
    loss_limit: Annotated[
        float, typer.Option(help="Maximum fraction of its speed that a training may lose by sharing.")
    ] = 0.1,
    period: Annotated[
        float, duration_option(help="Interval between two scalings of periodic and hybrid.", shown=600.0)
    ] = 600.0,
    threshold: Annotated[
        int, typer.Option(help="Number of missing aggregators that hybrid tolerates within a period.")
    ] = 1,
    slowdown: Annotated[
        float, typer.Option(help="Factor on the time that servers need to sum and update tensors.")
    ] = 1.0,
    json: AsJson = False,
) -> None:
    from ebbflow.tasks.aggregation import AggregationSimulation

    asked = AggregationSimulation(workload, seed, loss_limit, period, threshold, slowdown)
    found = asked.run()
    if json:
        print_json({"asked": asdict(asked), "policies": found})
        return
    table = Table(title=escape(workload), title_justify="left", box=None)
    table.add_column("policy")
    for heading in (
        "server hours",
        "saved",
        "minutes below private",
        "largest ratio",
        "moves",
        "hours over limit",
    ):
        table.add_column(heading, justify="right")
    for one in found:
        table.add_row(
            one["policy"], f"{one['server_hours']:,.0f}", f"{one['saving']:.1%}", f"{one['fraction_below']:.1%}",
            f"{one['largest_ratio']:.2f}", f"{one['moves']}", f"{one['hours_over_limit']:.1f}",
        )  # fmt: skip
    console.print(table)


@app.command()
def serve(
    name: Annotated[
        str, typer.Argument(help="Name of the aggregator, unique in the cluster.", metavar="NAME")
    ],
    url: Url = None,
    cluster: Cluster = "local",
    host: Annotated[
        str, typer.Option(help="Address to listen on; nodes of trainings must reach it.", metavar="HOST")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0: any free one.", min=0, max=65535, metavar="PORT")
    ] = 0,
    threads: Annotated[
        int, typer.Option(help="Number of threads that sum and update tensors.", min=1, max=1024)
    ] = 1,
    node: Annotated[
        str,
        typer.Option(
            help="ID of the node that it is on, for the capacity loop. Default: none.", metavar="NODE"
        ),
    ] = "",
    within: Within = 120.0,
) -> None:
    """Serve trainings of a cluster as an aggregator, in this terminal, until an interrupt or SIGTERM.

    It then gives its tensors to other aggregators while trainings run, and ends. A second signal ends it at once.

    [b]Example[/b]

        ebbflow aggregation serve a1 --cluster shop --host 10.0.0.4 --threads 4
    """
    from ebbflow.tasks import aggregation as service

    with _opened(url, cluster) as ledger:
        service.serve(
            ledger,
            name,
            host,
            port,
            threads,
            within,
            lambda address: _say(f"aggregator {name} serves cluster {cluster} at {address}"),
            node,
        )


@app.command()
def status(url: Url = None, cluster: Cluster = "local", json: AsJson = False) -> None:
    """Show the aggregators of a cluster, the trainings that they serve, and what sharing saves.

    Saved are aggregators, against the private ones that the trainings would have. Without a measured iteration a
    training is still where it began.

    [b]Example[/b]

        ebbflow aggregation status --cluster shop
    """
    from ebbflow.tasks import aggregation as service

    with _opened(url, cluster, create=False) as ledger:
        found = service.service_status(ledger)
    if json:
        print_json(found)
    else:
        _print(found)


@app.command()
def drain(
    name: Annotated[
        str,
        typer.Argument(
            help="Name of the aggregator, as ebbflow aggregation status shows it.", metavar="NAME"
        ),
    ],
    url: Url = None,
    cluster: Cluster = "local",
    within: Within = 120.0,
) -> None:
    """Drain an aggregator: others take its tensors while trainings run, and it ends.

    [b]Example[/b]

        ebbflow aggregation drain a1 --cluster shop --within 90s
    """
    from ebbflow.tasks import aggregation as service

    with _opened(url, cluster, create=False) as ledger:
        service.drain(ledger, name, within)
    _say(f"aggregator {name} gives its tensors to others within {within:g} s")


def _opened(url: str | None, cluster: str, *, create: bool = True) -> "Ledger":
    from ebbflow.infra.ledger import Ledger

    return Ledger.open(url, cluster=cluster, create=create)


def _say(text: str) -> None:
    messages.print(text, highlight=False, soft_wrap=True)


def _print(found: dict[str, Any]) -> None:
    from ebbflow.tasks.drawing.wording import bytes_text

    if not found["aggregators"]:
        loop = f"; the capacity loop can launch {found['launchable']}" if found["launchable"] else ""
        _say(f"no aggregator serves this cluster{loop or '; start one: ebbflow aggregation serve NAME'}")
        return
    table = Table(
        "aggregator", "address", "state", "trainings", "tensors", "held", "updates", "moved away", box=None
    )
    for one in found["aggregators"]:
        table.add_row(
            escape(one["name"]), one["address"], one["state"], escape(", ".join(one["trainings"])),
            str(one["tensors"]), bytes_text(one["bytes"]), str(one["updates"]), str(one["moved"]),
        )  # fmt: skip
    console.print(table)
    table = Table("training", "aggregators", "private servers", "iteration", "update", box=None)
    for one in found["trainings"]:
        times = (
            "" if one[key] is None else f"{one[key] * 1e3:.1f} ms" for key in ("iteration_s", "update_s")
        )
        table.add_row(
            escape(one["training"]), escape(", ".join(one["aggregators"])), str(one["servers"]), *times
        )
    console.print()
    console.print(table)
    console.print(
        f"\n{found['used_aggregators']} aggregators instead of {found['private_servers']} private servers:"
        f" {found['saved']:.0%} saved; in charge: {found['manager'] or 'none'} (term {found['term']})"
    )
    if found["launchable"]:
        console.print(f"the capacity loop can have {found['launchable']} nodes for aggregators")
    if found["dollars"]:
        paid = ", ".join(
            f"{escape(run) or 'none'} ${one:.4f}" for run, one in sorted(found["dollars"].items())
        )
        console.print(f"cost of their nodes so far, by training: {paid}", highlight=False)
    if found["dollars"] is None:
        console.print("cost of their nodes: not known, the account is of another version of Ebbflow")
    if found["finished_dollars"]:
        console.print(f"and of trainings that are over: ${found['finished_dollars']:.4f}", highlight=False)
    if found["missing_aggregators"]:
        _say(f"{found['missing_aggregators']} more aggregators would keep all trainings under the loss limit")


def register(app_: typer.Typer) -> None:
    """Add the commands to the command line."""
    app_.add_typer(app, name="aggregation")
