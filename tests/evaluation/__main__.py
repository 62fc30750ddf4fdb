"""The published evaluations made again: ``python -m tests.evaluation SYSTEM``, in a checkout of the repository."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from ebbflow.flows.runs.options import without_native_output
from ebbflow.planners.errors import EbbflowError
from tests.evaluation import experiments

app = typer.Typer(
    help="Make published evaluations again with the code that plans and schedules for real.\n\n"
    "Each experiment keeps its result in a file of its own in --out: what has been run with the same code and "
    "parameters is not run again, so that a run that was interrupted goes on where it stopped. Pages go to "
    "--document, with pictures in its folder evaluation.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()

Out = Annotated[Path, typer.Option(help="Folder of the experiments' results.", metavar="DIR")]
Document = Annotated[
    Path | None, typer.Option(help="Folder of the page. Default: that of --out.", metavar="DIR")
]
Quick = Annotated[
    bool, typer.Option("--quick", help="Few jobs and seeds: the page, without measurements to rely on.")
]
OUT = Path("evaluation")


@contextmanager
def _progress(column: ProgressColumn | None = None) -> Iterator[experiments.Progress]:
    """Show a bar; yield what moves it. Threads would spin over fits of a few numbers: one is used."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        column or TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with without_native_output(), Progress(*columns, console=console) as bar:
        task = bar.add_task("")

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=escape(what), completed=done, total=total)

        yield show


def _written(path: Path) -> None:
    console.print(f"written: {path}", markup=False, highlight=False, soft_wrap=True)


def _scheduler(system: str, out: Path, document: Path | None, quick: bool) -> None:
    from tests.evaluation.systems import evaluate, evaluations

    with _progress() as show:
        written = evaluate(evaluations(system), out, document or out, quick=quick, progress=show)
    for path in written:
        _written(path)


@app.command()
def tiresias(out: Out = OUT, document: Document = None, quick: Quick = False) -> None:
    """480 jobs on 60 GPUs and a trace like Microsoft's, under eight policies (about 2 CPU minutes)."""
    _scheduler("tiresias", out, document, quick)


@app.command()
def optimus(out: Out = OUT, document: Document = None, quick: Quick = False) -> None:
    """60 jobs with parameter servers: ablations, estimate errors, load, cost (about 2 CPU minutes)."""
    _scheduler("optimus", out, document, quick)


@app.command()
def pollux(out: Out = OUT, document: Document = None, quick: Quick = False) -> None:
    """160 jobs on 64 GPUs: load, interval, interference, fairness, cost of nodes (about 7 CPU minutes)."""
    _scheduler("pollux", out, document, quick)


@app.command()
def themis(out: Out = OUT, document: Document = None, quick: Quick = False) -> None:
    """60 hyper-parameter apps on 64 to 256 GPUs: fairness, packing, errors, lies (about 15 CPU minutes)."""
    _scheduler("themis", out, document, quick)


RENTING_HELP = """Rent machines for training jobs with deadlines, simulated over real spot prices, in several ways.

Planned scaling and market choice against asking for the cheapest machine once and against on-demand: dollars for each
finished job, how often it is in time, interruptions. Prices are AWS's of December 2019 to March 2020; in two of four
worlds nodes also come and go as those of a real pool did. The planners are those of [b]ebbflow fleet[/b], only
the provider is simulated. The page is fleet-evaluation.md.

[b]Examples[/b]

    python -m tests.evaluation renting --document docs

    python -m tests.evaluation renting --quick --out /tmp/quick --document /tmp/quick
"""


@app.command(help=RENTING_HELP, short_help="Ways to rent machines, over real spot prices: dollars a job.")
def renting(out: Out = OUT, document: Document = None, quick: Quick = False) -> None:
    from tests.evaluation.renting.run import evaluate

    with _progress() as show:
        written = evaluate(out, document or out, quick=quick, progress=show)
    _written(written)


SCAR_HELP = """Lose parameters of models in training, restore them, and count the iterations that this costs.

Logistic regression, matrix factorisation, a small CNN and LDA lose part of their parameters at a random iteration;
checkpoints are whole, or partial and more frequent. Also gradient descent with perturbations, beside SCAR's bounds.
All take about 15 CPU minutes, half of it the CNN. Needs scikit-learn (its digits are the data) and PyTorch.

[b]Examples[/b]

    python -m tests.evaluation scar --document docs

    python -m tests.evaluation scar --only mlr,mf --out /tmp/rework     (only these experiments; no page)

    python -m tests.evaluation scar --quick --out /tmp/quick --document /tmp/quick
"""


@app.command(help=SCAR_HELP, short_help="Lost parameters: the iterations that restoring them costs.")
def scar(
    out: Out = OUT,
    document: Document = None,
    only: Annotated[
        str | None, typer.Option(help="Experiments whose names begin so.", metavar="NAME,...")
    ] = None,
    quick: Quick = False,
) -> None:
    from tests.evaluation.scar.run import chosen, evaluate

    some = chosen(only, quick)
    with _progress() as show:
        written = evaluate(some, out, document or out, quick=quick, progress=show)
    if written:
        _written(written)
    else:
        console.print(f"results: {out / 'scar'}; the page needs all experiments", markup=False)


class Part(StrEnum):
    motivation = "motivation"
    competitive = "competitive"
    micro = "micro"
    sweeps = "sweeps"
    macro = "macro"


QOOP_HELP = """Simulate queries on capacity that changes, and write the evaluation.

Every query runs on the same sequence of capacities under each system; the planner, the re-planner and the
state machine are those of [b]ebbflow query[/b], only time and tasks are simulated. Each part writes a JSON
file of its own into --out, then the document is made from all that are there: parts can be run one by one.

    motivation   volatility of the profiles (figs. 2.3), the example of fig. 2.4

    competitive  ratios of the abstract planner, the lower-bound adversary

    micro        one query alone, QOOP against Clarinet (figs. 2.6 to 2.12)

    sweeps       backtracking, estimate errors, hysteresis, job length (figs. 2.13 to 2.15)

    macro        many jobs on one cluster under seven systems (fig. 2.16)

[b]Example[/b]

    python -m tests.evaluation qoop --only micro --queries 10 --runs 2 --out /tmp/quick
"""


@app.command(help=QOOP_HELP, short_help="Queries on capacity that changes, under seven systems.")
def qoop(
    out: Annotated[
        Path, typer.Option(help="Folder for the JSON files, pictures and evaluation.md.", metavar="DIR")
    ] = OUT,
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
        typer.Option(
            help="Where the document goes. Default: evaluation.md in --out.", metavar="FILE", dir_okay=False
        ),
    ] = None,
) -> None:
    from tests.evaluation.qoop import run as evaluation
    from tests.evaluation.qoop.settings import Settings

    settings = Settings(
        seed=seed,
        runs=runs,
        queries=queries,
        mean_seconds=mean_seconds,
        hysteresis=hysteresis,
        processes=jobs,
    )
    with _progress(MofNCompleteColumn()) as show:
        for part in only or list(Part):
            evaluation.run_part(part.value, settings, out, instances=instances, progress=show)
    _written(evaluation.write_document(out, document or out / "evaluation.md"))


@app.command()
def families(
    tpcds: Annotated[
        Path,
        typer.Option(
            help="Tables at scale factor 1 with their queries/q1.sql, ..., as ebbflow data tpcds makes them.",
            metavar="DIR",
        ),
    ],
    out: Annotated[Path, typer.Option(help="File to write.", metavar="FILE", dir_okay=False)] = Path(
        "tpcds-sf500.json.gz"
    ),
) -> None:
    """Plan the TPC-DS queries at scale factor 500 anew: the workload of qoop.

    Needs statistics only: those of the tables at scale factor 1 are taken to 500.

    [b]Example[/b]

        python -m tests.evaluation families --tpcds ~/.cache/ebbflow/tpcds/sf1 --out tpcds-sf500.json.gz
    """
    from tests.evaluation.qoop.families import plan, save

    with console.status("planning") as status:
        found = plan(
            tpcds, progress=lambda name, done, total: status.update(f"planning {name} ({done}/{total})")
        )
    save(found, out)
    console.print(f"{len(found)} families, {sum(len(f.plans) for f in found)} plans: {out}")


if __name__ == "__main__":
    try:
        app()
    except EbbflowError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
