"""``ebbflow train``: elastic training on nodes that come and go."""

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ebbflow.flows.runs.options import JsonOut, ReportOut, Runner, RunnerOption, wants_prefect
from ebbflow.planners.errors import OptionError

console = Console()
errors = Console(stderr=True)


class RetryKind(StrEnum):
    by_class = "by-class"
    blind = "blind"


TRAIN_HELP = """Train a PyTorch script elastically: it goes on when nodes leave, and faster when they come.

The script trains inside [b]with ElasticRun.start() as run:[/b] (docs/training.md shows the few lines).

[b]Try it[/b]

    ebbflow train script.py --nodes local:2x1

[b]Take nodes away and bring one back while it runs[/b]

    ebbflow train script.py --nodes local:3x1 --at 20s:kill:node-2 --at 35s:notice:node-1:10s --at 50s:add:1

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


def train(
    script: Script = None,
    arguments: Arguments = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            help="local:NODESxGPUS: nodes of this machine; aws:POOL:NODESxGPUS, aws:POOL/GANG:NODESxGPUS: of the "
            "cluster's fleet. "
            "Default: local:1x1.",
            metavar="NODES",
        ),
    ] = None,
    min_gpus: Annotated[int | None, typer.Option(help="With fewer than these it waits. Default: 1.")] = None,
    max_gpus: Annotated[int | None, typer.Option(help="It uses no more. Default: all there are.")] = None,
    name: Annotated[str | None, typer.Option(help="What people call the run.")] = None,
    id: Annotated[
        str | None, typer.Option("--id", help="Of the run, for its folder and --resume. Default: made up.")
    ] = None,
    folder: Annotated[
        str | None,
        typer.Option(
            help="Where runs live, DIR or s3://bucket/prefix. Default: runs/ in ~/.cache/ebbflow.",
            metavar="DIR",
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            help="Go on with this run, as it was asked for; what is given here goes first.", metavar="ID"
        ),
    ] = None,
    restart: Annotated[
        bool | None,
        typer.Option(
            "--restart",
            help="With --resume: begin again at step 0 where none of the run's checkpoints can be used. Nothing is "
            "deleted.",
        ),
    ] = None,
    adaptive: Annotated[
        bool | None, typer.Option("--adaptive/--no-adaptive", help="Let the batch follow the goodput.")
    ] = None,
    canary: Annotated[
        bool | None,
        typer.Option(
            "--canary/--no-canary",
            help="First a trial of 20 steps on one or two GPUs. Default: before a larger gang.",
        ),
    ] = None,
    checkpoint_every: Annotated[
        float | None,
        typer.Option(help="Seconds. Default: from measured costs and the hazard.", metavar="SECONDS"),
    ] = None,
    keep: Annotated[int | None, typer.Option(help="Full checkpoints that are kept. Default: 2.")] = None,
    running_every: Annotated[
        int | None,
        typer.Option(
            help="Also write all parameters once in so many iterations, those that changed most first: it counts "
            "where all processes are lost at once. Default: not.",
            metavar="ITERATIONS",
        ),
    ] = None,
    running_fraction: Annotated[
        float | None, typer.Option(help="Of the parameters in each of those writes. Default: 0.125.")
    ] = None,
    hazard: Annotated[
        float | None, typer.Option(help="Losses expected per node-hour. Default: learnt from what happens.")
    ] = None,
    price: Annotated[float | None, typer.Option(help="Dollars per GPU-hour, for the account.")] = None,
    failures: Annotated[
        str | None,
        typer.Option(help="Rules of your own before the failure table, TOML or YAML.", metavar="FILE"),
    ] = None,
    retries: Annotated[
        RetryKind | None,
        typer.Option(
            metavar="HOW", help="by-class: what a retry can mend; blind: three times whatever it was."
        ),
    ] = None,
    back_off: Annotated[
        float | None,
        typer.Option(
            help="Seconds before the first retry after a failure of the infrastructure. Default: 120.",
            metavar="SECONDS",
        ),
    ] = None,
    wait_limit: Annotated[
        float | None, typer.Option(help="Seconds to wait for nodes. Default: 3600.", metavar="SECONDS")
    ] = None,
    collective_timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds until a collective that hangs is an error. Default: 60.", metavar="SECONDS"
        ),
    ] = None,
    grace: Annotated[
        float | None, typer.Option(help="Seconds to save and leave in. Default: 30.", metavar="SECONDS")
    ] = None,
    save_within: Annotated[
        float | None,
        typer.Option(
            help="Seconds in which the save of the run's end is tried again before it is spilled. Default: 120.",
            metavar="SECONDS",
        ),
    ] = None,
    spill: Annotated[
        str | None,
        typer.Option(
            help="Folder for a checkpoint that the run's own cannot take, DIR or s3://bucket/prefix. Default: "
            "/var/tmp, then the temporary folder, of the node that saves.",
            metavar="DIR",
        ),
    ] = None,
    cpus: Annotated[
        float | None, typer.Option(help="Processors behind one local GPU slot; needs control groups.")
    ] = None,
    at: Annotated[
        list[str] | None,
        typer.Option(
            help="A scripted fault: 20s:kill:node-2, 35s:notice:node-1:10s, 40s:freeze:node-1, 50s:add:1, "
            "60s:remove:1. Repeatable.",
            metavar="FAULT",
        ),
    ] = None,
    json: JsonOut = None,
    report: ReportOut = None,
    runner: RunnerOption = Runner.auto,
) -> None:
    from ebbflow.flows.training.terminal import print_training

    given: dict[str, Any] = {
        "nodes": nodes,
        "min_gpus": min_gpus,
        "max_gpus": max_gpus,
        "title": name,
        "id": id,
        "adaptive": adaptive,
        "canary": None if canary is None else "always" if canary else "never",
        "checkpoint_every": checkpoint_every,
        "keep": keep,
        "running_every": running_every,
        "running_fraction": running_fraction,
        "hazard": hazard,
        "price": price,
        "failures": failures,
        "retries": retries.value if retries else None,
        "back_off": back_off,
        "wait_limit": wait_limit,
        "collective_timeout": collective_timeout,
        "grace": grace,
        "save_within": save_within,
        "spill": spill,
        "restart": restart,
        "cpus": cpus,
        "at": tuple(at) if at else None,
        "json": json,
        "report": report,
    }
    options = {key: value for key, value in given.items() if value is not None}
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
) -> Any:
    from ebbflow.tasks.training.request import TrainingRequest, default_folder
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


def _run(request: Any, *, prefect: bool, resume: bool) -> Any:
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
    app.command("train", help=TRAIN_HELP)(train)
