"""``ebbflow elastic``: applications on executors that move between workers."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ebbflow.flows.runs.answers import print_json
from ebbflow.flows.runs.options import AsJson, Quiet
from ebbflow.flows.runs.output_pipes import outlive_readers

console = Console()

HELP = """Run a regression, clustering or topic model whose workers come and go while it runs.

[b]From 2 to 4 worker processes and back[/b]

    ebbflow elastic mlr --workers 2 --fault 3s:resize:4 --fault 6s:resize:2

[b]Kill one worker and let another hand over its executors[/b]

    ebbflow elastic kmeans --workers 3 --fault 2s:kill:n1 --fault 4s:leave:n2

[b]An application of your own, with arguments of its class[/b]

    ebbflow elastic sums.py:Sums --workdir . --set target=40

APP is mlr (an .npz file with x and y), kmeans (x and start), lda (document and word of each token) or FILE.py:CLASS.
docs/elastic-executors.md explains. Events go to standard error, the objective to standard output.
"""

_DATA, _WORKERS, _OUTPUT = "Data and model", "Workers", "State and output"


def elastic(
    app: Annotated[
        str, typer.Argument(help="Application: mlr, kmeans, lda or FILE.py:CLASS.", metavar="APP")
    ],
    input: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="An .npz file. Default: generated data.", rich_help_panel=_DATA),
    ] = None,
    classes: Annotated[
        int, typer.Option(help="Number of classes, clusters or topics.", rich_help_panel=_DATA)
    ] = 10,
    workdir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Directory of FILE.py:CLASS. Default: the present directory.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Argument of the class of FILE.py:CLASS, as YAML has it. Repeatable.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    iterations: Annotated[
        int,
        typer.Option(help="Number of iterations over all data; of lda, epochs.", rich_help_panel=_DATA),
    ] = 200,
    staleness: Annotated[
        int,
        typer.Option(
            help="Iterations that a read of mlr may miss; 0 waits for all workers.", rich_help_panel=_DATA
        ),
    ] = 0,
    workers: Annotated[int, typer.Option(help="Initial number of workers.", rich_help_panel=_WORKERS)] = 2,
    executors: Annotated[
        int,
        typer.Option(
            help="Number of executors; about four for each worker there may ever be.",
            rich_help_panel=_WORKERS,
        ),
    ] = 16,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            help="Fault to inject, TIME:VERB:ARGUMENT: 10s:resize:4, 20s:kill:n1, 30s:leave:n2. Repeatable.",
            metavar="FAULT",
            rich_help_panel=_WORKERS,
        ),
    ] = None,
    partial_recovery: Annotated[
        bool,
        typer.Option(
            "--partial-recovery",
            help="Recovery of only the lost parameters after a loss (mlr, kmeans). Default: of all.",
            rich_help_panel=_WORKERS,
        ),
    ] = False,
    state_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Directory of snapshots and logs. Default: a temporary one.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Resume from the newest snapshot in --state-dir.", rich_help_panel=_OUTPUT
        ),
    ] = False,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart",
            help="With --resume: restart from the beginning if no snapshot is usable. Nothing is deleted.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    report: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE", help="File for the report, FILE.json. Repeatable.", rich_help_panel=_OUTPUT
        ),
    ] = None,
    json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    from ebbflow.infra.packages import require

    require("zmq", "an elastic job", "train")
    from ebbflow.infra.storage.files import write_text
    from ebbflow.planners.errors import OptionError
    from ebbflow.tasks.elastic.request import ElasticRequest
    from ebbflow.tasks.elastic.run import parse_fault, report_text, run_elastic
    from ebbflow.tasks.pipeline.file.document import scalar
    from ebbflow.tasks.pipeline.file.parameters import parse_set

    for path in report or ():
        if not path.lower().endswith(".json"):
            raise OptionError(f"--report of an elastic job must end in .json; got {path!r:.200}")
    request = ElasticRequest(
        app,
        input=input,
        classes=classes,
        executors=executors,
        iterations=iterations,
        staleness=staleness,
        workers=workers,
        faults=tuple(parse_fault(text) for text in fault or ()),
        state_dir=state_dir,
        resume=resume,
        restart=restart,
        partial_recovery=partial_recovery,
        workdir=workdir or "",
        parameters={name: scalar(text) for name, text in parse_set(set_ or []).items()},
    )
    outlive_readers()
    messages = Console(stderr=True, quiet=quiet)
    with tempfile.TemporaryDirectory(prefix="ebbflow-") as place:
        found = run_elastic(
            request,
            Path(place),
            lambda text: messages.print(escape(text), highlight=False, soft_wrap=True),
        )
    for path in report or ():
        write_text(Path(path), report_text(found))
    if json:
        print_json(found)
    else:
        objective = "" if found["objective"] is None else f"objective {found['objective']:.6g} "
        console.print(f"{objective}after {found['seconds']:.1f} s")


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("elastic", help=HELP)(elastic)
