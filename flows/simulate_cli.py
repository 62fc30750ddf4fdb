"""``ebbflow simulate``: QOOP's evaluation, reproduced in simulation."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

app = typer.Typer(
    help="QOOP's evaluation in simulation, over the same planner code that runs real queries.\n\n"
    "[b]Examples[/b]\n\n"
    "    ebbflow simulate queries --out evaluation/              (everything)\n\n"
    "    ebbflow simulate queries --only micro --queries 10 --runs 2 --out /tmp/quick\n\n"
    "    ebbflow simulate families --tpcds DIR                   (plan the workload anew)",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()


class Part(StrEnum):
    motivation = "motivation"
    competitive = "competitive"
    micro = "micro"
    sweeps = "sweeps"
    macro = "macro"


_QUERIES_HELP = """Simulate queries on capacity that changes, and write the evaluation.

Every query runs on the same sequence of capacities under each system; the planner, the re-planner and the
state machine are those of [b]ebbflow query[/b], only time and tasks are simulated. Each part writes a JSON
file of its own into --out, then the document is made from all that are there: parts can be run one by one.

    motivation   volatility of the profiles (figs. 2.3), the example of fig. 2.4

    competitive  ratios of the abstract planner, the lower-bound adversary

    micro        one query alone, QOOP against Clarinet (figs. 2.6 to 2.12)

    sweeps       backtracking, estimate errors, hysteresis, job length (figs. 2.13 to 2.15)

    macro        many jobs on one cluster under seven systems (fig. 2.16)

[b]Example[/b]

    ebbflow simulate queries --only micro --queries 10 --runs 2 --out /tmp/quick
"""


@app.command(help=_QUERIES_HELP)
def queries(
    out: Annotated[
        Path, typer.Option(help="Folder for the JSON files, pictures and evaluation.md.", metavar="DIR")
    ] = Path("evaluation"),
    only: Annotated[
        list[Part] | None, typer.Option(help="Run this part; may be given again. Default: all.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of all that is random.")] = 1,
    runs: Annotated[int, typer.Option(help="Random regions a query and volatility class.")] = 10,
    queries: Annotated[int, typer.Option(help="Queries: those with the most alternative plans.")] = 50,
    mean_seconds: Annotated[
        float, typer.Option(help="Mean time of the queries' best plans at the profile's mean level.")
    ] = 500.0,
    hysteresis: Annotated[
        float, typer.Option(help="Least part of the remaining time that a switch must save.")
    ] = 0.15,
    instances: Annotated[int, typer.Option(help="Instances of the competitive part.")] = 100_000,
    jobs: Annotated[int, typer.Option(help="Processes.")] = 2,
    document: Annotated[
        Path | None,
        typer.Option(help="Where the document goes. Default: evaluation.md in --out.", metavar="FILE"),
    ] = None,
) -> None:
    from ebbflow.tasks.simulation import evaluation
    from ebbflow.tasks.simulation.settings import Settings

    settings = Settings(
        seed=seed,
        runs=runs,
        queries=queries,
        mean_seconds=mean_seconds,
        hysteresis=hysteresis,
        processes=jobs,
    )
    wanted = [part.value for part in (only or list(Part))]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("")

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        for part in wanted:
            evaluation.run_part(part, settings, out, instances=instances, progress=show)
    written = evaluation.write_document(out, document or out / "evaluation.md")
    console.print(f"written: {written}")


@app.command()
def families(
    tpcds: Annotated[
        Path, typer.Option(help="Folder with sf1/*.parquet and queries/q1.sql, ...", metavar="DIR")
    ],
    out: Annotated[Path, typer.Option(help="File to write.", metavar="FILE")] = Path("tpcds-sf500.json.gz"),
) -> None:
    """Plan the TPC-DS queries at scale factor 500 anew: the workload of simulate queries.

    Needs statistics only: those of the tables at scale factor 1 are taken to 500.

    [b]Example[/b]

        ebbflow simulate families --tpcds ~/.cache/ebbflow/tpcds --out tpcds-sf500.json.gz
    """
    from ebbflow.tasks.simulation.families import plan, save

    with console.status("planning") as status:
        found = plan(
            tpcds, progress=lambda name, done, total: status.update(f"planning {name} ({done}/{total})")
        )
    save(found, out)
    console.print(f"{len(found)} families, {sum(len(f.plans) for f in found)} plans: {out}")
