"""``ebbflow elastic``: applications on executors that move between workers."""

import json as json_module
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ebbflow.flows.runs.options import RUN_WORK

console = Console()

HELP = """Run a regression, clustering or topic model whose workers come and go while it runs.

[b]Try it[/b]: from 2 to 4 worker processes and back

    ebbflow elastic mlr --workers 2 --fault 3s:resize:4 --fault 6s:resize:2

[b]Kill one[/b] and let another hand over

    ebbflow elastic kmeans --workers 3 --fault 2s:kill:n1 --fault 4s:leave:n2

APP is mlr (an .npz file with x and y), kmeans (x and start) or lda (document and word of each token).
docs/elastic-executors.md explains.
"""


def elastic(
    app: Annotated[str, typer.Argument(help="Application: mlr, kmeans or lda.", metavar="APP")],
    data: Annotated[str, typer.Option(help="An .npz file; demo makes one up.", metavar="FILE")] = "demo",
    groups: Annotated[int, typer.Option(help="Classes, clusters or topics.")] = 10,
    executors: Annotated[int, typer.Option(help="About four for each worker that may ever be there.")] = 16,
    iterations: Annotated[int, typer.Option(help="Of all data; for lda epochs.")] = 200,
    staleness: Annotated[
        int, typer.Option(help="Of mlr: iterations that a read may miss; 0 waits for all.")
    ] = 0,
    workers: Annotated[int, typer.Option(help="At the start.")] = 2,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            help="Fault to inject, TIME:VERB:ARGUMENT: 10s:resize:4, 20s:kill:n1, 30s:leave:n2. Repeatable.",
            metavar="FAULT",
        ),
    ] = None,
    folder: Annotated[str | None, typer.Option(help="Keeps snapshots and logs.", metavar="DIR")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest snapshot in --folder.")
    ] = False,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart",
            help="With --resume: begin again where snapshots are there and none is whole. Nothing is deleted.",
        ),
    ] = False,
    partial: Annotated[
        bool, typer.Option("--partial", help="After a loss, bring back only what was lost (mlr, kmeans).")
    ] = False,
    json: Annotated[str | None, typer.Option(help="Write the report as JSON.", metavar="FILE")] = None,
) -> None:
    from ebbflow.infra.packages import require

    require("zmq", "an elastic job", "train")
    from ebbflow.infra.storage.files import write_text
    from ebbflow.tasks.elastic.run import ElasticRequest, parse_fault, run_elastic

    faults = tuple(parse_fault(text) for text in fault or ())
    request = ElasticRequest(
        app,
        data,
        groups,
        executors,
        iterations,
        staleness,
        workers,
        faults,
        folder,
        resume,
        restart,
        partial,
    )
    with tempfile.TemporaryDirectory(prefix="ebbflow-") as place:
        report = run_elastic(
            request,
            Path(place),
            lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True),
        )
    console.print(f"objective {report['objective']:.6g} after {report['seconds']:.1f} s")
    if json:
        write_text(Path(json), json_module.dumps(report, indent=1) + "\n")


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("elastic", help=HELP, rich_help_panel=RUN_WORK)(elastic)
