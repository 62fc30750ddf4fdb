"""``ebbflow train``: elastic training on nodes that come and go."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ebbflow.flows.runs.options import RUN_WORK, Runner, RunnerOption, wants_prefect
from ebbflow.flows.runs.request_options import with_options_of
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.training.request import TrainingRequest, default_folder

console = Console()
errors = Console(stderr=True)


TRAIN_HELP = """Train a PyTorch script elastically: it goes on when nodes leave, and faster when they come.

The script trains inside [b]with ElasticRun.start() as run:[/b] (docs/training.md shows the few lines).

[b]Try it[/b]

    ebbflow train script.py --nodes local:2x1

[b]Take nodes away and bring one back while it runs[/b]

    ebbflow train script.py --nodes local:3x1 --fault 20s:kill:node-2 --fault 35s:notice:node-1:10s --fault 50s:add:1

[b]Arguments of the script follow it[/b]; its options go last, after a double dash (-- --lr 0.1)

    ebbflow train script.py data/ --nodes local:2x2 --max-gpus 4

[b]Go on with a run[/b] that was stopped, or whose machine is gone

    ebbflow train --resume script-1121-101500-a1b2

Ctrl-C saves and leaves; a second one leaves at once. Status: 0 finished, 1 failed or not saved, 2 wrong input, 130 \
interrupted and saved. Finished means that the run's folder has the last checkpoint.
"""

Script = Annotated[str | None, typer.Argument(help="A Python file.", metavar="SCRIPT")]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(help="Of the script; its options go last, after a double dash.", metavar="ARGS"),
]


@with_options_of(TrainingRequest, before={"resume": "restart"})
def train(
    script: Script = None,
    arguments: Arguments = None,
    *,
    resume: Annotated[
        str | None,
        typer.Option(
            help="Go on with this run, as it was asked for; what is given here goes first.", metavar="ID"
        ),
    ] = None,
    canary: Annotated[
        bool | None,
        typer.Option(
            "--canary/--no-canary",
            help="First a trial of 20 steps on one or two GPUs. Default: before a larger gang.",
        ),
    ] = None,
    runner: RunnerOption = Runner.auto,
    given: dict[str, Any],
) -> None:
    from ebbflow.flows.training.terminal import print_training

    folder = given.pop("folder", None)
    options = given if canary is None else {**given, "canary": "always" if canary else "never"}
    request = _request(script, arguments, folder, resume, options)
    outcome = _run(request, prefect=wants_prefect(runner), resume=resume is not None)
    print_training(outcome, console)
    if request.report:
        console.print(f"report: {request.report}", highlight=False, soft_wrap=True)
    if outcome.state == "stopped":
        if outcome.unsaved_steps:
            console.print(
                f"not saved: {outcome.unsaved_steps} steps, as the reason above says", soft_wrap=True
            )
        console.print(f"go on with: ebbflow train --resume {outcome.id}" + _where(folder), soft_wrap=True)
        raise typer.Exit(1 if outcome.unsaved_steps else 130)
    if outcome.state == "failed":
        raise typer.Exit(1)


def _where(folder: str | None) -> str:
    return f" --folder {folder}" if folder else ""


def _request(
    script: str | None,
    arguments: list[str] | None,
    folder: str | None,
    resume: str | None,
    options: dict[str, Any],
) -> TrainingRequest:
    from ebbflow.tasks.training.run import new_id, nobody_runs

    place = folder or default_folder()
    if resume is not None:
        if script is not None or "id" in options:
            raise OptionError("--resume goes on with the script and the id that are recorded; leave them out")
        found = TrainingRequest.load(place, resume, options)
        nobody_runs(found)  # before Prefect or torch take their time
        return found
    if options.get("restart"):
        raise OptionError("--restart goes with --resume ID; a new run begins at step 0 anyway")
    if script is None:
        raise OptionError("name the script to train, or a run to go on with (--resume ID)")
    if "://" not in place:
        place = str(Path(place).expanduser().absolute())
    request = TrainingRequest(script, tuple(arguments or ()), folder=place, **options)
    return request if request.id else replace(request, id=new_id(request))


def _run(request: TrainingRequest, *, prefect: bool, resume: bool) -> Any:
    from ebbflow.flows.runs.command import interruptible, quiet_prefect, start_temporary_server
    from ebbflow.flows.training.terminal import TrainingScreen
    from ebbflow.tasks.report.training import run_training

    with interruptible(errors, "the run's checkpoints are kept"), TrainingScreen(console) as screen:
        console.print(f"run [bold]{request.id}[/] in {request.run_folder}", highlight=False, soft_wrap=True)
        if not prefect:
            return run_training(request, screen, resume=resume)
        quiet_prefect()
        start_temporary_server()
        from ebbflow.flows.training.flow import train_attached

        return train_attached(request, screen, resume=resume)


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("train", help=TRAIN_HELP, rich_help_panel=RUN_WORK)(train)
