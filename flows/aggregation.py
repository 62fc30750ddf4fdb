"""``ebbflow simulate aggregation``: servers of shared aggregation, on a trace of trainings."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ebbflow.flows.runs.answers import print_json
from ebbflow.flows.runs.options import AsJson, duration_option

console = Console()

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
