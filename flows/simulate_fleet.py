"""``ebbflow simulate fleet``: what ways to rent machines cost, over real spot prices."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

FLEET_HELP = """Rent machines for training jobs with deadlines, simulated over real spot prices, in several ways.

Planned scaling and market choice against asking for the cheapest machine once and against on-demand: dollars for each
finished job, how often it is in time, interruptions. Prices are AWS's of December 2019 to March 2020; in two of four
worlds nodes also come and go as those of a real pool did. The planners are those of [b]ebbflow fleet[/b], only
the provider is simulated. Each experiment keeps its result in a file of its own in --out and is not run again with
the same code. The page fleet-evaluation.md goes to --document, with pictures in its folder evaluation.

[b]Examples[/b]

    ebbflow simulate fleet --document docs

    ebbflow simulate fleet --quick --out /tmp/quick --document /tmp/quick
"""


def fleet(
    out: Annotated[Path, typer.Option(help="Folder of the experiments' results.", metavar="DIR")] = Path(
        "evaluation"
    ),
    document: Annotated[
        Path | None, typer.Option(help="Folder of the page. Default: that of --out.", metavar="DIR")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few short jobs: the page, without measurements to rely on.")
    ] = False,
) -> None:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # threads would spin over a few numbers
    from ebbflow.tasks.fleet_sim.evaluation import evaluate

    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("")

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=escape(what), completed=done, total=total)

        written = evaluate(out, document or out, quick=quick, progress=show)
    console.print(f"written: {written}", markup=False, highlight=False)
