"""``ebbflow simulate``: schedulers in simulation."""

import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ebbflow.flows import aggregation
from ebbflow.flows.runs.options import duration_option, without_native_output
from ebbflow.flows.simulation import memory
from ebbflow.flows.simulation.terminal import show_progress
from ebbflow.planners.model.options import check_report_paths
from ebbflow.planners.scheduling.catalogue import ENTRIES

app = typer.Typer(
    help="Simulate training jobs with the code that schedules real clusters.\n\n"
    "[b]Example[/b]\n\n"
    "    ebbflow simulate training --policy themis,tiresias --report out.html\n\n"
    "    ebbflow simulate aggregation --workload philly:200\n\n"
    "    ebbflow simulate memory --seeds 20",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()
errors = Console(stderr=True)


_TRAINING_HELP = """Simulate GPU schedulers on a workload of training jobs, and compare them.

The default is the 160 jobs of Pollux' first workload on 16 nodes of 4 GPUs with the policies tiresias and optimus. \
Results of earlier simulations with the same files, options and code are taken from the cache.

[b]Workloads[/b] (--workload): names, or files by their format

    pollux-1 .. pollux-4         160 jobs each, of Pollux (OSDI 2021)

    philly:JOBS[:SEED]           jobs distributed as in Microsoft's trace

    tiresias-testbed[:SEED]      480 jobs for 60 GPUs (NSDI 2019)

    themis-w1[:SEED]             50 tuning runs for 64 GPUs (NSDI 2020)

    themis-w2[:SEED]             the same with successive halving

    FILE.csv                     id,arrival_s,gpus,duration_s, or AdaptDL's

    FILE.trace                   Gavel's or Shockwave's; needs --throughputs

[b]Policies[/b] (--policy)

{policies}

[b]Examples[/b]

    ebbflow simulate training --policy themis,pollux --report out.html

    ebbflow simulate training --workload philly:1000 --policy srsf --json

Progress goes to standard error, the comparison to standard output.

Exit status: 0 done, 2 usage error.
"""


def _policies() -> str:
    """Return the policies, a line each, continued below where it is long."""
    wide = 78 - 4 - 19
    found = []
    for entry in ENTRIES:
        first, *rest = textwrap.wrap(entry.line, wide)
        found.append("\n".join([f"    {entry.name:<18} {first}", *(f"    {'':<18} {line}" for line in rest)]))
    return "\n\n".join(found)


_JOBS, _CLUSTER, _OUTPUT = "Workload and policies", "Cluster", "Output"


@app.command(help=_TRAINING_HELP.format(policies=_policies()))
def training(
    workload: Annotated[
        str,
        typer.Option(
            help="Workloads to simulate: files or names, separated by commas.",
            metavar="FILE|NAME,...",
            rich_help_panel=_JOBS,
        ),
    ] = "pollux-1",
    policy: Annotated[
        str,
        typer.Option(
            help="Policies to compare, separated by commas.", metavar="NAME,...", rich_help_panel=_JOBS
        ),
    ] = "tiresias,optimus",
    seeds: Annotated[
        int, typer.Option(help="Number of runs of each policy, with seeds 0, 1, ...", rich_help_panel=_JOBS)
    ] = 1,
    profiles: Annotated[
        Path | None,
        typer.Option(
            help="Directory of application profiles (AdaptDL). Default: the packaged ones.",
            metavar="DIR",
            rich_help_panel=_JOBS,
        ),
    ] = None,
    throughputs: Annotated[
        Path | None,
        typer.Option(
            help="File with the steps per second of each job type by GPU type, for traces in rounds.",
            metavar="FILE",
            rich_help_panel=_JOBS,
        ),
    ] = None,
    communication: Annotated[
        Path | None,
        typer.Option(
            help="Directory with a recorded training MODEL.json for each model whose bids should say what placements "
            "cost it; others bid by a fixed factor. Needs --links.",
            metavar="DIR",
            rich_help_panel=_JOBS,
        ),
    ] = None,
    links: Annotated[
        str,
        typer.Option(
            help="Bandwidth between GPUs of a node, between nodes and, optionally, between racks, such as "
            "64gbit,50gbit.",
            metavar="NODE,RACK[,CROSS]",
            rich_help_panel=_CLUSTER,
        ),
    ] = "",
    nearest_profile: Annotated[
        bool,
        typer.Option(
            "--nearest-profile",
            help="Use the nearest profile for an unknown application.",
            rich_help_panel=_JOBS,
        ),
    ] = False,
    interval: Annotated[
        float | None,
        duration_option(
            help="Interval between decisions. Default: 1m with profiles, else at every event.",
            rich_help_panel=_JOBS,
        ),
    ] = None,
    restart_delay: Annotated[
        float | None,
        duration_option(
            help="Time that a job waits after each new placement. Default: 30s.", rich_help_panel=_JOBS
        ),
    ] = None,
    cluster: Annotated[
        str,
        typer.Option(
            help="Cluster: NODESxGPUS, or a YAML file. In a file, nodes is a list of groups with count, gpus and, "
            "optionally, type, zone, rack or per_rack, price, market and name; spot describes the nodes of "
            "--spot-trace; start is a timestamp.",
            metavar="SIZE|FILE",
            rich_help_panel=_CLUSTER,
        ),
    ] = "16x4",
    interference: Annotated[
        float,
        typer.Option(
            help="Fraction of speed lost by spread jobs that share a node with another such job.",
            rich_help_panel=_CLUSTER,
        ),
    ] = 0.0,
    spot_trace: Annotated[
        Path | None,
        typer.Option(
            help="Availability trace of further nodes: time_ms,add|remove,node without a header, or with the header "
            "time_s,event,node[,deadline_s,gpus] and the events add, remove, notice.",
            metavar="FILE",
            rich_help_panel=_CLUSTER,
        ),
    ] = None,
    notice: Annotated[
        float,
        duration_option(
            help="Time between the notice and the removal of a node of --spot-trace. Default: 0s.",
            rich_help_panel=_CLUSTER,
        ),
    ] = 0.0,
    prices: Annotated[
        Path | None,
        typer.Option(
            help="File with the Spot price history; the YAML file names the nodes' zones and types.",
            metavar="FILE",
            rich_help_panel=_CLUSTER,
        ),
    ] = None,
    failures: Annotated[
        str | None,
        typer.Option(
            help="Node failures: losses per node-hour, and seconds until a node is replaced. Default: none.",
            metavar="RATE[,REPAIR]",
            rich_help_panel=_CLUSTER,
        ),
    ] = None,
    stragglers: Annotated[
        str | None,
        typer.Option(
            help="Slow nodes: their fraction, and how many times slower they are. Default: none.",
            metavar="SHARE[,FACTOR]",
            rich_help_panel=_CLUSTER,
        ),
    ] = None,
    checkpoint_interval: Annotated[
        float,
        duration_option(
            help="Interval between checkpoints, where nodes can be lost.",
            shown=1800.0,
            rich_help_panel=_CLUSTER,
        ),
    ] = 1800.0,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File for all results as JSON.",
            metavar="FILE",
            dir_okay=False,
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option(
            help="File for a table with a row for each job.",
            metavar="FILE",
            dir_okay=False,
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    report: Annotated[
        list[str] | None,
        typer.Option(
            help="File for the report, .html (a page) or .json (the results). Repeatable.",
            metavar="FILE",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print all results as one JSON document on standard output instead of the comparison.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Simulate again instead of reading the cache.")
    ] = False,
    jobs: Annotated[int, typer.Option(help="Number of processes.")] = 1,
) -> None:
    from ebbflow.infra.storage.files import write_text
    from ebbflow.tasks.report.files import write_reports
    from ebbflow.tasks.simulation import request as asked
    from ebbflow.tasks.simulation.inputs import Inputs
    from ebbflow.tasks.simulation.report import csv_text, json_text, notes_of, report_page
    from ebbflow.tasks.simulation.runs import planned, run_all

    reports = check_report_paths(report)
    request = asked.SimulationRequest(
        workload=workload,
        policy=policy,
        cluster=cluster,
        seeds=seeds,
        profiles=profiles,
        throughputs=throughputs,
        interval=interval,
        restart_delay=restart_delay,
        interference=interference,
        checkpoint_interval=checkpoint_interval,
        spot_trace=spot_trace,
        notice=notice,
        prices=prices,
        failures=asked.failures(failures),
        stragglers=asked.stragglers(stragglers),
        nearest=nearest_profile,
        communication=communication,
        links=links,
    )
    inputs = Inputs(request)
    runs = planned(inputs)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # threads would only spin over a few dozen numbers
    with without_native_output(), show_progress(errors) as show:
        records = run_all(inputs, runs, fresh=fresh, processes=jobs, progress=show)
    text = json_text(records, request.shown())
    if json:
        typer.echo(text, nl=False)
    else:
        _print_comparison(records)
        for note in notes_of(records):
            console.print(f"note: {note}", markup=False, highlight=False)
    if output:
        write_text(output, text)
    if csv:
        write_text(csv, csv_text(records))
    write_reports(reports, html=lambda: report_page(records, request.shown()), json=lambda: text)
    for path in filter(None, (output, csv, *reports)):
        errors.print(f"written: {path}", markup=False, highlight=False, soft_wrap=True)


app.command("aggregation", help=aggregation.HELP)(aggregation.aggregation)
app.command("memory", help=memory.HELP)(memory.memory)


def _print_comparison(records: Sequence[dict[str, Any]]) -> None:
    """Print a table for each workload: a row a policy, means over seeds, the best in bold."""
    from ebbflow.tasks.simulation.report import columns_of, compared

    shown = (
        "avg_jct_s",
        "p90_jct_s",
        "makespan_s",
        "worst_rho",
        "unfair_pct",
        "gpu_hours",
        "dollars",
        "policy_seconds",
    )
    for name in dict.fromkeys(record["workload"] for record in records):
        mine = [record for record in records if record["workload"] == name]
        table = Table(title=escape(f"{name}, {mine[0]['submitted']} jobs"), title_justify="left", box=None)
        table.add_column("policy", no_wrap=True, min_width=max(len(record["policy"]) for record in mine))
        columns = columns_of(mine)
        picked = [number for number, column in enumerate(columns) if column[0] in shown]
        for number in picked:
            table.add_column(columns[number][1], justify="right")
        for policy, values, best in compared(mine):
            cells = [f"[b]{values[n]}[/b]" if best[n] else values[n] for n in picked]
            table.add_row(policy, *cells)
        console.print(table)


def register(top: typer.Typer) -> None:
    """Add the group to the command line."""
    top.add_typer(app, name="simulate")
