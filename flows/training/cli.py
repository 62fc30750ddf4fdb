"""``ebbflow train``: elastic training on nodes that come and go."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ebbflow.flows.runs.exit_status import ExitStatus
from ebbflow.flows.runs.options import AsJson, Runner, RunnerOption, wants_prefect
from ebbflow.flows.runs.request_options import with_options_of
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.training.node_names import node_of
from ebbflow.tasks.training.request import TrainingRequest, default_runs_dir

console = Console()
errors = Console(stderr=True)


TRAIN_HELP = """Train a PyTorch script elastically: it continues when nodes leave, and uses nodes that join.

The script trains inside [b]with ElasticRun.start() as run:[/b] (docs/training.md shows the few lines).

[b]Try it[/b]

    ebbflow train script.py --nodes local:2x1

[b]All of this machine[/b]: a process for each GPU, or for each core where there is none

    ebbflow train script.py --nproc auto

[b]Inject faults[/b]: remove nodes and add one while it runs

    ebbflow train script.py --nodes local:3x1 --fault 20s:kill:node-2 \\
        --fault 35s:notice:node-1:10s --fault 50s:add:1

[b]Arguments of the script follow it[/b]; its options go last, after a double dash (-- --lr 0.1)

    ebbflow train script.py data/ --nodes local:2x2 --max-gpus 4

[b]Any torchrun script, unchanged[/b]: it saves and restores by itself

    ebbflow train train.py --own-checkpoints --nodes local:2x1

[b]A directory with its packages[/b]: packed, unpacked once on each node

    ebbflow train train.py --workdir . --requirements requirements.txt

[b]Resume a run[/b] that was stopped, or whose machine is gone

    ebbflow train --resume script-1121-101500-a1b2

Ctrl-C saves and exits; a second one exits at once. Exit status: 0 finished, 1 failed or not saved, 2 usage error, \
130 interrupted and saved. Finished means that the run's directory has the last checkpoint.
"""

_CODE, _GPUS, _CHECKPOINTS, _FAILURES, _RUN, _OUTPUT = (
    "Code and environment",
    "Nodes and GPUs",
    "Checkpoints",
    "Failures and timeouts",
    "Run",
    "Output",
)
PANELS = {
    **dict.fromkeys(("workdir", "requirements", "setup", "env"), _CODE),
    **dict.fromkeys(
        (
            "nodes",
            "nproc",
            "min_gpus",
            "max_gpus",
            "replica_gpus",
            "cpus_per_slot",
            "adaptive",
            "price",
            "communication",
            "sync",
            "aggregators",
            "mirrors",
            "mirror_every",
            "aggregation_cluster",
        ),
        _GPUS,
    ),
    **dict.fromkeys(
        (
            "name",
            "run_id",
            "runs_dir",
            "resume",
            "restart",
            "repack",
            "runner",
            "own_checkpoints",
            "step_pattern",
        ),
        _RUN,
    ),
    **dict.fromkeys(
        (
            "checkpoint_interval",
            "keep_checkpoints",
            "partial_checkpoint_interval",
            "partial_checkpoint_fraction",
            "partial_checkpoint_memory",
            "final_save_timeout",
            "spill_dir",
        ),
        _CHECKPOINTS,
    ),
    **dict.fromkeys(
        (
            "preflight",
            "interruption_rate",
            "failure_rules",
            "retry_policy",
            "retry_backoff",
            "node_timeout",
            "collective_timeout",
            "termination_grace",
            "at",
        ),
        _FAILURES,
    ),
    **dict.fromkeys(("track", "metrics", "report", "json"), _OUTPUT),
}

Script = Annotated[str | None, typer.Argument(help="Python file to train.", metavar="SCRIPT")]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(help="Arguments of the script; its options go last, after a double dash.", metavar="ARGS"),
]


@with_options_of(TrainingRequest, before={"nproc": "min_gpus", "resume": "restart"}, panels=PANELS)
def train(
    script: Script = None,
    arguments: Arguments = None,
    *,
    nproc: Annotated[
        str | None,
        typer.Option(
            help="Number of processes on this machine instead of --nodes: a number, or auto for one on each GPU, or "
            "on each core where there is none.",
            metavar="PROCESSES",
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            help="ID of a run to resume with its recorded options; options given here override them.",
            metavar="ID",
        ),
    ] = None,
    preflight: Annotated[
        bool | None,
        typer.Option(
            "--preflight/--no-preflight",
            help="Preflight run of 20 steps on one or two GPUs before the training. Default: before larger runs "
            "where it saves GPU time.",
        ),
    ] = None,
    runner: RunnerOption = Runner.auto,
    json: AsJson = False,
    given: dict[str, Any],
) -> None:
    from ebbflow.flows.training.terminal import print_training

    runs_dir = given.pop("runs_dir", None)
    if nproc is not None:
        given["nodes"] = _here(nproc, given.get("nodes"))
    options = given if preflight is None else {**given, "preflight": "always" if preflight else "never"}
    request = _request(script, arguments, runs_dir, resume, options)
    outcome = _run(request, prefect=wants_prefect(runner), resume=resume is not None)
    if json:
        typer.echo(outcome.to_json())
    else:
        print_training(outcome, console)
    for path in request.report:
        errors.print(f"report: {path}", highlight=False, soft_wrap=True)
    if outcome.state == "stopped":
        if outcome.unsaved_steps:
            errors.print(
                f"not saved: {outcome.unsaved_steps} steps, as the reason above says", soft_wrap=True
            )
        errors.print(f"resume with: ebbflow train --resume {outcome.id}" + _where(runs_dir), soft_wrap=True)
        raise typer.Exit(ExitStatus.FAILED if outcome.unsaved_steps else ExitStatus.INTERRUPTED)
    if outcome.state == "failed":
        raise typer.Exit(ExitStatus.FAILED)


def _here(processes: str, nodes: str | None) -> str:
    """Return one node of this machine with so many processes. Raises ``OptionError``."""
    from ebbflow.infra.machine.devices import visible

    if nodes is not None:
        raise OptionError(f"--nproc is for one node of this machine; leave it, or --nodes {nodes}, out")
    return node_of(processes, len(visible()), len(os.sched_getaffinity(0)))


def _where(runs_dir: str | None) -> str:
    return f" --runs-dir {runs_dir}" if runs_dir else ""


def _request(
    script: str | None,
    arguments: list[str] | None,
    runs_dir: str | None,
    resume: str | None,
    options: dict[str, Any],
) -> TrainingRequest:
    from ebbflow.tasks.training.run import check_not_running, new_id

    place = runs_dir or default_runs_dir()
    if resume is not None:
        if script is not None or "run_id" in options:
            raise OptionError(
                "--resume takes the script and the run ID from the recorded run; leave them out"
            )
        found = TrainingRequest.load(place, resume, options)
        check_not_running(found)  # before Prefect or torch take their time
        return found
    if options.get("repack"):
        raise OptionError("--repack goes with --resume ID; a new run packs its code anyway")
    if options.get("restart"):
        raise OptionError("--restart goes with --resume ID; a new run starts at step 0 anyway")
    if script is None:
        raise OptionError("name the script to train, or a run to resume (--resume ID)")
    if "://" not in place:
        place = str(Path(place).expanduser().absolute())
    request = TrainingRequest(script, tuple(arguments or ()), runs_dir=place, **options)
    return request if request.run_id else replace(request, run_id=new_id(request))


def _run(request: TrainingRequest, *, prefect: bool, resume: bool) -> Any:
    from ebbflow.flows.runs.command import interruptible, quiet_prefect, start_temporary_server
    from ebbflow.flows.training.terminal import TrainingScreen
    from ebbflow.tasks.report.training import run_training
    from ebbflow.tasks.training.run import check_new

    if not resume:
        check_new(request)  # before anything is said of it
    with interruptible(errors, "the run's checkpoints are kept"), TrainingScreen(errors) as screen:
        errors.print(
            f"run [bold]{request.run_id}[/] in {request.run_directory}", highlight=False, soft_wrap=True
        )
        if not prefect:
            return run_training(request, screen, resume=resume)
        quiet_prefect()
        start_temporary_server()
        from ebbflow.flows.training.flow import train_attached

        return train_attached(request, screen, resume=resume)


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("train", help=TRAIN_HELP)(train)
