"""``ebbflow simulate``: schedulers in simulation."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ebbflow.flows.runs.options import without_native_output
from ebbflow.planners.scheduling.catalogue import ENTRIES

app = typer.Typer(
    help="Training jobs in simulation, over the same code that schedules for real.\n\n"
    "[b]Examples[/b]\n\n"
    "    ebbflow simulate training --policy themis,tiresias --report out.html",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()


_TRAINING_HELP = """Simulate GPU schedulers on a workload of training jobs, and compare them.

Without options: the 160 jobs of Pollux' first workload on 16 nodes of 4 GPUs under Tiresias and Optimus.
What has been simulated before, with the same files, options and code, is not simulated again.

[b]Workloads[/b] (--workload; files by their format, or names)

    pollux-1 .. pollux-4         160 jobs each, of Pollux' evaluation (OSDI 2021)

    philly:JOBS[:SEED]           Microsoft's trace in distribution

    tiresias-testbed[:SEED]      480 jobs for 60 GPUs (NSDI 2019)

    themis-w1[:SEED], themis-w2  50 hyper-parameter searches for 64 GPUs; w2: with halving (NSDI 2020)

    FILE.csv                     AdaptDL's columns, Tiresias', or ours: id,arrival_s,gpus,duration_s

    FILE.trace                   of Shockwave or Gavel, with --throughputs; they run in rounds

[b]Policies[/b] (--policy)

{policies}

[b]Examples[/b]

    ebbflow simulate training --policy themis,pollux,tiresias --seeds 3 --report out.html

    ebbflow simulate training --workload philly:1000 --cluster 25x8 --policy tiresias,srsf --json out.json
""".format(policies="\n\n".join(f"    {entry.name:<18} {entry.line}" for entry in ENTRIES))


@app.command(help=_TRAINING_HELP)
def training(
    workload: Annotated[
        str, typer.Option(help="Files or names, separated by commas.", metavar="FILE|NAME,...")
    ] = "pollux-1",
    policy: Annotated[
        str, typer.Option(help="Policies to compare.", metavar="NAME,...")
    ] = "tiresias,optimus",
    cluster: Annotated[
        str,
        typer.Option(
            help="NODESxGPUS, or a YAML file: nodes is a list of groups with count, gpus and, if wanted, type, zone, "
            "rack or per_rack, price, market, name; spot is what nodes of --spot-trace are like; start is a time.",
            metavar="SIZE|FILE",
        ),
    ] = "16x4",
    seeds: Annotated[int, typer.Option(help="Runs of each policy, with seeds 0, 1, ...")] = 1,
    profiles: Annotated[
        Path | None,
        typer.Option(
            help="Folder of applications' profiles (AdaptDL). Default: those shipped.", metavar="DIR"
        ),
    ] = None,
    throughputs: Annotated[
        Path | None, typer.Option(help="Steps per second by GPU type, for traces in rounds.", metavar="FILE")
    ] = None,
    nearest_profile: Annotated[
        bool, typer.Option("--nearest-profile", help="Take the nearest profile for an unknown application.")
    ] = False,
    interval: Annotated[
        float | None,
        typer.Option(help="Seconds between decisions. Default: 60 with profiles, else at every event."),
    ] = None,
    restart_delay: Annotated[
        float | None, typer.Option(help="Seconds that a job waits on each new placement. Default: 30.")
    ] = None,
    interference: Annotated[
        float,
        typer.Option(help="Share of speed lost by spread jobs that share a node with another such job."),
    ] = 0.0,
    spot_trace: Annotated[
        Path | None,
        typer.Option(
            help="Nodes that come and go besides the cluster's: time_ms,add|remove,node without header, or with "
            "header time_s,event,node[,deadline_s,gpus] and events add, remove, notice.",
            metavar="FILE",
        ),
    ] = None,
    notice: Annotated[float, typer.Option(help="Seconds ahead that removals are announced.")] = 0.0,
    prices: Annotated[
        Path | None,
        typer.Option(
            help="Spot price history; zone and type of nodes stand in the YAML file.", metavar="FILE"
        ),
    ] = None,
    failures: Annotated[
        str | None,
        typer.Option(help="Losses per node-hour, and seconds until a node is back.", metavar="RATE[,REPAIR]"),
    ] = None,
    stragglers: Annotated[
        str | None,
        typer.Option(help="Share of slow nodes, and how many times slower.", metavar="SHARE[,FACTOR]"),
    ] = None,
    checkpoint_interval: Annotated[
        float, typer.Option(help="Seconds between checkpoints, where nodes can be lost.")
    ] = 1800.0,
    json: Annotated[
        Path | None, typer.Option(help="Write all results.", metavar="FILE", dir_okay=False)
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write a row for each job.", metavar="FILE", dir_okay=False)
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write a page with pictures.", metavar="FILE", dir_okay=False)
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Simulate again what is in the cache.")] = False,
    jobs: Annotated[int, typer.Option(help="Processes.")] = 1,
) -> None:
    from ebbflow.infra.storage.files import write_text
    from ebbflow.tasks.simulation import request as asked
    from ebbflow.tasks.simulation.inputs import Inputs
    from ebbflow.tasks.simulation.report import csv_text, json_text, notes_of, report_page
    from ebbflow.tasks.simulation.runs import planned, run_all

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
    )
    inputs = Inputs(request)
    runs = planned(inputs)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # threads would only spin over a few dozen numbers
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with without_native_output(), Progress(*columns, console=console) as bar:
        task = bar.add_task("")

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=escape(what), completed=done, total=total)

        records = run_all(inputs, runs, fresh=fresh, processes=jobs, progress=show)
    _print_comparison(records)
    for note in notes_of(records):
        console.print(f"note: {note}", markup=False, highlight=False)
    texts = ((json, json_text), (csv, lambda found, _: csv_text(found)), (report, report_page))
    for path, make in texts:
        if path:
            written = write_text(path, make(records, request.shown()))
            console.print(f"written: {written}", markup=False, highlight=False)


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
