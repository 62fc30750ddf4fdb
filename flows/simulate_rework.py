"""``ebbflow simulate rework``: SCAR's evaluation of partial recovery and partial checkpoints, made again."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

REWORK_HELP = """Lose parameters of models in training, restore them, and count the iterations that this costs.

Logistic regression, matrix factorisation, a small CNN and LDA lose part of their parameters at a random iteration;
checkpoints are whole, or partial and more frequent. Also gradient descent with perturbations, beside SCAR's bounds.
Each experiment keeps its result in a file of its own in --out and is not run again with the same code. All take about
15 CPU minutes, half of it the CNN; the page scar-evaluation.md goes to --document, with pictures in its folder
evaluation. Needs scikit-learn (its digits are the data) and PyTorch.

[b]Examples[/b]

    ebbflow simulate rework --document docs

    ebbflow simulate rework --only mlr,mf --out /tmp/rework     (only these experiments; no page)

    ebbflow simulate rework --quick --out /tmp/quick --document /tmp/quick
"""


def rework(
    out: Annotated[Path, typer.Option(help="Folder of the experiments' results.", metavar="DIR")] = Path(
        "evaluation"
    ),
    document: Annotated[
        Path | None, typer.Option(help="Folder of the page. Default: that of --out.", metavar="DIR")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Experiments whose names begin so.", metavar="NAME,...")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few trials: the page, without measurements to rely on.")
    ] = False,
) -> None:
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # the matrices are small: threads would spin
    from ebbflow.tasks.rework.evaluation import chosen, evaluate

    console = Console()
    some = chosen(only, quick)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("")

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=escape(what), completed=done, total=total)

        written = evaluate(some, out, document or out, quick=quick, progress=show)
    shown = f"written: {written}" if written else f"results: {out / 'scar'}; the page needs all experiments"
    console.print(shown, markup=False, highlight=False)
