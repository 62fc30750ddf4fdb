"""``ebbflow tune``: hyperparameter tuning whose trials are elastic trainings."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ebbflow.flows.runs.exit_status import ExitStatus
from ebbflow.flows.runs.options import AsJson
from ebbflow.flows.runs.request_options import with_options_of
from ebbflow.flows.training.cli import Arguments, Script
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.training.request import default_runs_dir
from ebbflow.tasks.tuning.request import TuningRequest, read_space

console = Console()
errors = Console(stderr=True)


TUNE_HELP = """Tune hyperparameters: trials are elastic trainings that share the nodes.

The script takes each hyperparameter as an option and reports a metric after each epoch: \
[b]run.report(accuracy=...)[/b].

[b]Try it[/b]

    echo 'lr: {log: [0.001, 1]}' > space.yaml

    ebbflow tune script.py --space space.yaml --metric accuracy \\
        --trials 20 --nodes local:2x1

[b]Stop by learning curves[/b] instead of successive halving

    ebbflow tune script.py --space space.yaml --metric loss --minimize \\
        --pruner curve --epochs 30

[b]On several machines[/b], which share the trials; those of one that dies go to the others

    ebbflow tune script.py --space space.yaml --metric accuracy \\
        --run-id rates --study postgresql://db/lab --nodes local:1x4

    ebbflow tune --join rates --study postgresql://db/lab --nodes local:1x8

[b]A directory with its packages[/b]: packed once, the same for all trials

    ebbflow tune train.py --space space.yaml --metric accuracy \\
        --workdir . --requirements requirements.txt

[b]Resume[/b] a tuning run that was stopped

    ebbflow tune --resume tune-1a2b3c4d

A hyperparameter is float, log, int or choice. A trial that is stopped releases its GPUs to the next. Exit status: 0 \
finished, 1 failed, 2 usage error, 130 interrupted and saved.
"""

_CODE = "Code and environment"
_SPACE, _TRIALS, _RUN, _OUTPUT = "Hyperparameters and metric", "Trials and GPUs", "Run", "Output"
PANELS = {
    **dict.fromkeys(("workdir", "requirements", "setup", "env"), _CODE),
    **dict.fromkeys(("space", "metric", "maximize", "sampler", "seed"), _SPACE),
    **dict.fromkeys(
        (
            "trials",
            "nodes",
            "gpus_per_trial",
            "max_gpus",
            "epochs",
            "pruner",
            "reduction_factor",
            "population_interval",
        ),
        _TRIALS,
    ),
    **dict.fromkeys(("run_id", "runs_dir", "study", "join", "heartbeat_timeout", "resume", "restart"), _RUN),
    **dict.fromkeys(("track", "report", "json"), _OUTPUT),
}


@with_options_of(
    TuningRequest, before={"space": "metric", "join": "heartbeat_timeout", "resume": "restart"}, panels=PANELS
)
def tune(
    script: Script = None,
    arguments: Arguments = None,
    *,
    space: Annotated[
        str | None,
        typer.Option(
            help="YAML file of the search space, a hyperparameter a line: lr: {log: [0.001, 1]}.",
            metavar="FILE",
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            help="ID of a tuning run to resume with its recorded options; options given here override them.",
            metavar="ID",
        ),
    ] = None,
    join: Annotated[
        str | None,
        typer.Option(
            help="ID of a tuning run to join, whose study is in --study; options given here are this "
            "process's.",
            metavar="ID",
        ),
    ] = None,
    json: AsJson = False,
    given: dict[str, Any],
) -> None:
    from ebbflow.flows.runs.command import interruptible
    from ebbflow.flows.tuning.terminal import print_tuning
    from ebbflow.tasks.report.tuning import deliver_tuning
    from ebbflow.tasks.tuning.joining import join_tuning
    from ebbflow.tasks.tuning.run import new_tuning_id, run_tuning

    runs_dir = given.pop("runs_dir", None)
    place = runs_dir or default_runs_dir()
    if join is not None:
        if resume is not None or space is not None or arguments or "study" not in given:
            raise OptionError(
                "--join goes with --study DATABASE, and takes space and arguments from the tuning run; leave them, "
                "and --resume, out"
            )
        if runs_dir is not None:
            given["runs_dir"] = place if "://" in place else str(Path(place).expanduser().absolute())
        request = join_tuning(
            given.pop("study"), join, given if script is None else given | {"script": script}
        )
    elif resume is not None:
        if script is not None or space is not None or {"run_id", "metric"} & given.keys():
            raise OptionError(
                "--resume takes the script, space, metric and run ID from the recorded run; leave them out"
            )
        request = TuningRequest.load(place, resume, given)
    else:
        if given.get("restart"):
            raise OptionError("--restart goes with --resume ID or --join ID")
        if script is None or space is None:
            raise OptionError(
                "name the script and the space (--space FILE), or a tuning run to resume (--resume ID)"
            )
        place = place if "://" in place else str(Path(place).expanduser().absolute())
        given |= {
            "run_id": given.get("run_id") or new_tuning_id(),
            "runs_dir": place,
            "arguments": tuple(arguments or ()),
        }
        request = TuningRequest(script, read_space(space), **given)
    errors.print(
        f"tuning run [bold]{request.run_id}[/] in {request.run_directory}", highlight=False, soft_wrap=True
    )

    def notify(text: str) -> None:
        errors.print(text, highlight=False, markup=False, soft_wrap=not errors.is_terminal)

    with interruptible(errors, "the trials' checkpoints are kept"):
        begun = resume is not None or join is not None
        report = deliver_tuning(run_tuning(request, notify, resume=begun), request)
    if json:
        typer.echo(report.to_json())
    else:
        print_tuning(report, console)
    for path in request.report:
        errors.print(f"report: {path}", highlight=False, soft_wrap=True)
    if report.state == "stopped":
        errors.print(
            f"resume with: ebbflow tune --resume {report.id}"
            + (f" --runs-dir {runs_dir}" if runs_dir else ""),
            soft_wrap=True,
        )
        raise typer.Exit(ExitStatus.INTERRUPTED)
    if report.state == "failed" or report.best is None:
        raise typer.Exit(ExitStatus.FAILED)


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("tune", help=TUNE_HELP)(tune)
