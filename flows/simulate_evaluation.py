"""``ebbflow simulate evaluation``: the published evaluations of GPU schedulers, made again."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from ebbflow.flows.native_output import without_native_output

EVALUATION_HELP = """Make the published evaluations of GPU schedulers again, and put their figures beside ours.

Each experiment keeps its result in a file of its own in --out: what has been run with the same code and parameters is
not run again, so that a run that was interrupted goes on where it stopped. Each system gives a page
SYSTEM-evaluation.md in --document, with pictures in its folder evaluation.

    tiresias   480 jobs on 60 GPUs and a trace like Microsoft's, under eight policies (about 2 CPU minutes)

    optimus    60 jobs with parameter servers: ablations, estimate errors, load, cost (about 2 CPU minutes)

    pollux     160 jobs on 64 GPUs: load, interval, interference, fairness, renting nodes (about 7 CPU minutes)

    themis     60 hyper-parameter apps on 64 to 256 GPUs: fairness, packing, errors, lies (about 15 CPU minutes)

[b]Examples[/b]

    ebbflow simulate evaluation --document docs

    ebbflow simulate evaluation --system tiresias --quick --out /tmp/quick --document /tmp/quick
"""


def evaluation(
    system: Annotated[
        str, typer.Option(help="Whose evaluations.", metavar="NAME,...")
    ] = "tiresias,optimus,pollux,themis",
    out: Annotated[Path, typer.Option(help="Folder of the experiments' results.", metavar="DIR")] = Path(
        "evaluation"
    ),
    document: Annotated[
        Path | None, typer.Option(help="Folder of the pages. Default: that of --out.", metavar="DIR")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few jobs and seeds: the pages, without measurements to rely on.")
    ] = False,
) -> None:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # threads would spin over fits of a few numbers
    from ebbflow.tasks.training_sim.evaluation.systems import evaluate, evaluations

    console = Console()
    chosen = evaluations(system)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with without_native_output(), Progress(*columns, console=console) as bar:
        task = bar.add_task("")

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=escape(what), completed=done, total=total)

        written = evaluate(chosen, out, document or out, quick=quick, progress=show)
    for path in written:
        console.print(f"written: {path}", markup=False, highlight=False)
