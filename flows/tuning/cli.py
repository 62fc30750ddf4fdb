"""``ebbflow tune``: a search over hyper-parameters whose trials are elastic trainings."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ebbflow.flows.runs.options import JsonOut
from ebbflow.flows.training.cli import Arguments, Script
from ebbflow.planners.errors import OptionError

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


class PrunerKind(StrEnum):
    halving = "halving"
    curve = "curve"
    none = "none"


class SamplerKind(StrEnum):
    tpe = "tpe"
    random = "random"


def tune(
    script: Script = None,
    arguments: Arguments = None,
    space: Annotated[
        str | None,
        typer.Option(help="YAML: a parameter a line, such as lr: {log: [0.001, 1]}.", metavar="FILE"),
    ] = None,
    metric: Annotated[str | None, typer.Option(help="That the script reports. Default: accuracy.")] = None,
    maximise: Annotated[
        bool | None, typer.Option("--maximise/--minimise", help="Which way is better. Default: more.")
    ] = None,
    trials: Annotated[int | None, typer.Option(help="Default: 20.")] = None,
    nodes: Annotated[
        str | None, typer.Option(help="local:NODESxGPUS, shared by all trials.", metavar="NODES")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="Of each trial. Default: 1.")] = None,
    max_gpus: Annotated[
        int | None, typer.Option(help="Of a trial when there are some to spare. Default: no more.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Of a whole trial: for --pruner curve and the work left.")
    ] = None,
    pruner: Annotated[
        PrunerKind | None,
        typer.Option(metavar="HOW", help="halving (asynchronous, the default), curve, or none."),
    ] = None,
    factor: Annotated[int | None, typer.Option(help="One trial in so many goes on. Default: 3.")] = None,
    sampler: Annotated[SamplerKind | None, typer.Option(metavar="HOW", help="tpe or random.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the sampler.")] = None,
    id: Annotated[str | None, typer.Option("--id", help="Of the search. Default: made up.")] = None,
    folder: Annotated[
        str | None, typer.Option(help="Where searches and runs live, a local folder.", metavar="DIR")
    ] = None,
    resume: Annotated[str | None, typer.Option(help="Go on with this search.", metavar="ID")] = None,
    restart: Annotated[
        bool | None,
        typer.Option(
            "--restart",
            help="With --resume: let trials begin again none of whose checkpoints can be used.",
        ),
    ] = None,
    json: JsonOut = None,
) -> None:
    from ebbflow.flows.runs.command import interruptible
    from ebbflow.flows.tuning.terminal import print_tuning
    from ebbflow.tasks.training.request import default_folder
    from ebbflow.tasks.tuning.request import TuningRequest, read_space
    from ebbflow.tasks.tuning.run import new_search, run_tuning

    given: dict[str, Any] = {
        "maximise": maximise,
        "trials": trials,
        "nodes": nodes,
        "gpus": gpus,
        "max_gpus": max_gpus,
        "epochs": epochs,
        "pruner": pruner.value if pruner else None,
        "factor": factor,
        "sampler": sampler.value if sampler else None,
        "seed": seed,
        "restart": restart,
        "json": json,
    }
    options = {key: value for key, value in given.items() if value is not None}
    place = folder or default_folder()
    if resume is not None:
        if script is not None or space is not None or id is not None or metric is not None:
            raise OptionError("--resume goes on with the script, space, metric and id that are recorded")
        request = TuningRequest.load(place, resume, options)
    else:
        if restart:
            raise OptionError("--restart goes with --resume ID")
        if script is None or space is None:
            raise OptionError(
                "name the script and the space (--space FILE), or a search to go on with (--resume ID)"
            )
        place = place if "://" in place else str(Path(place).expanduser().absolute())
        request = TuningRequest(
            script,
            read_space(space),
            metric or "accuracy",
            tuple(arguments or ()),
            id=id or new_search(),
            folder=place,
            **options,
        )
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
    app.command("tune", help=TUNE_HELP)(tune)
