"""``ebbflow tune``: a search over hyper-parameters whose trials are elastic trainings."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ebbflow.flows.runs.options import RUN_WORK
from ebbflow.flows.runs.request_options import with_options_of
from ebbflow.flows.training.cli import Arguments, Script
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.training.request import default_folder
from ebbflow.tasks.tuning.request import TuningRequest, read_space

console = Console()
errors = Console(stderr=True)


TUNE_HELP = """Search for good hyper-parameters: trials are elastic trainings that share the nodes.

The script takes each parameter as an option and reports a metric: [b]run.report(accuracy=...)[/b] after each epoch.

[b]Try it[/b]

    echo 'lr: {log: [0.001, 1]}' > space.yaml

    ebbflow tune script.py --space space.yaml --metric accuracy --trials 20 --nodes local:2x1

[b]Stop by learning curves[/b] instead of successive halving

    ebbflow tune script.py --space space.yaml --metric loss --minimise --pruner curve --epochs 30

[b]Go on[/b] with a search that was stopped

    ebbflow tune --resume search-1a2b3c4d

A parameter is float, log, int or choice. A trial that is stopped gives its GPUs to the next. Status as of train.
"""


@with_options_of(TuningRequest, before={"space": "metric", "resume": "restart"})
def tune(
    script: Script = None,
    arguments: Arguments = None,
    *,
    space: Annotated[
        str | None,
        typer.Option(help="YAML: a parameter a line, such as lr: {log: [0.001, 1]}.", metavar="FILE"),
    ] = None,
    resume: Annotated[str | None, typer.Option(help="Go on with this search.", metavar="ID")] = None,
    given: dict[str, Any],
) -> None:
    from ebbflow.flows.runs.command import interruptible
    from ebbflow.flows.tuning.terminal import print_tuning
    from ebbflow.tasks.tuning.run import new_search, run_tuning

    folder = given.pop("folder", None)
    place = folder or default_folder()
    if resume is not None:
        if script is not None or space is not None or {"id", "metric"} & given.keys():
            raise OptionError("--resume goes on with the script, space, metric and id that are recorded")
        request = TuningRequest.load(place, resume, given)
    else:
        if given.get("restart"):
            raise OptionError("--restart goes with --resume ID")
        if script is None or space is None:
            raise OptionError(
                "name the script and the space (--space FILE), or a search to go on with (--resume ID)"
            )
        place = place if "://" in place else str(Path(place).expanduser().absolute())
        given |= {"id": given.get("id") or new_search(), "folder": place, "arguments": tuple(arguments or ())}
        request = TuningRequest(script, read_space(space), **given)
    console.print(f"search [bold]{request.id}[/] in {request.search_folder}", highlight=False, soft_wrap=True)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=not console.is_terminal)

    with interruptible(errors, "the trials' checkpoints are kept"):
        report = run_tuning(request, say, resume=resume is not None)
    print_tuning(report, console)
    if report.state == "stopped":
        console.print(
            f"go on with: ebbflow tune --resume {report.id}" + (f" --folder {folder}" if folder else ""),
            soft_wrap=True,
        )
        raise typer.Exit(130)
    if report.state == "failed" or report.best is None:
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("tune", help=TUNE_HELP, rich_help_panel=RUN_WORK)(tune)
