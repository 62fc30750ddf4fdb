"""``ebbflow run``: a pipeline of queries, trainings, tuning runs and elastic jobs on one elastic cluster."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ebbflow.flows.runs.answers import print_json
from ebbflow.flows.runs.exit_status import ExitStatus
from ebbflow.flows.runs.options import (
    Runner,
    wants_prefect,
)
from ebbflow.planners.errors import OptionError

if TYPE_CHECKING:
    from ebbflow.tasks.pipeline.file.spec import Pipeline
    from ebbflow.tasks.pipeline.outcome import PipelineOutcome
    from ebbflow.tasks.pipeline.run import CheckedPipeline, PipelineRequest

console = Console()
errors = Console(stderr=True)

RUN_HELP = """Run a pipeline: SQL queries, trainings, tuning runs and elastic jobs of several teams on one cluster.

[b]Check a file[/b] without running anything

    ebbflow run pipeline.yaml --check

[b]Run it[/b]; results and the report are in a directory of the run

    ebbflow run pipeline.yaml --report pipeline.html

    ebbflow run pipeline.yaml --set tables=s3://lake/tpch

[b]Resume[/b] a run that was interrupted, or whose machine is gone; finished steps are not repeated

    ebbflow run --resume shop-1121-101500-a1b2

[b]Format of the file[/b]: examples/pipeline.yaml explains all of it; an editor completes it by the schema

    ebbflow run --schema > pipeline.schema.json

Progress goes to standard error, the summary to standard output. Ctrl-C stops the steps, which save their work; a \
second Ctrl-C exits at once.

Exit status: 0 finished, 1 a step failed, 2 usage error, 130 interrupted (work saved).
"""

_RUN, _OUTPUT, _TRUST = "Options of the run", "Output", "Permissions of the file"


def run(
    file: Annotated[str | None, typer.Argument(help="Pipeline file.", metavar="PIPELINE.yaml")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check the file, show what it would run, and exit.")
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of pipeline files and exit.")
    ] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Value of a parameter of the file. Repeatable.",
            metavar="NAME=VALUE",
            rich_help_panel=_RUN,
        ),
    ] = None,
    runs_dir: Annotated[
        str | None,
        typer.Option(
            help="Directory of all runs. Default: pipelines in $EBBFLOW_HOME (~/.cache/ebbflow).",
            metavar="DIR",
            rich_help_panel=_RUN,
        ),
    ] = None,
    run_id: Annotated[
        str | None,
        typer.Option("--run-id", help="Run ID. Default: generated.", metavar="ID", rich_help_panel=_RUN),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(help="ID of an interrupted run to resume.", metavar="ID", rich_help_panel=_RUN),
    ] = None,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart",
            help="With --resume, restart trainings from step 0 none of whose checkpoints can be read.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    runner: Annotated[
        Runner,
        typer.Option(
            metavar="HOW",
            help="Recording of the run on a Prefect server: prefect, plain (none), or auto, if one is configured.",
            rich_help_panel=_RUN,
        ),
    ] = Runner.auto,
    metrics: Annotated[
        str,
        typer.Option(
            help="Serve /metrics for Prometheus and /healthz at HOST:PORT while it runs, such as 127.0.0.1:9468. "
            "Default: not served.",
            metavar="HOST:PORT",
            rich_help_panel=_OUTPUT,
        ),
    ] = "",
    report: Annotated[
        list[str] | None,
        typer.Option(
            help="File for the report, .html (a page) or .json (the outcome). Repeatable.",
            metavar="FILE",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print the outcome as one JSON document on standard output instead of the summary.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet",
            "-q",
            help="Only errors on standard error: no progress, no notes.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    allow_policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Scheduling policy that the file may import. Repeatable.",
            metavar="MODULE:NAME",
            rich_help_panel=_TRUST,
        ),
    ] = None,
    allow_functions: Annotated[
        list[str] | None,
        typer.Option(
            help="Functions that queries may call though they read files, a network or settings, such as read_csv. "
            "Repeatable.",
            metavar="NAME[,NAME...]",
            rich_help_panel=_TRUST,
        ),
    ] = None,
    allow_workdir: Annotated[
        list[str] | None,
        typer.Option(
            help="Working directory whose elastic applications the file may import. Repeatable.",
            metavar="DIR",
            rich_help_panel=_TRUST,
        ),
    ] = None,
) -> None:
    from ebbflow.planners.query.sql.forbidden import checked_functions
    from ebbflow.tasks.capacity.own_policies import checked_names
    from ebbflow.tasks.pipeline.file.parameters import parse_set
    from ebbflow.tasks.pipeline.run import PipelineRequest, check_pipeline
    from ebbflow.tasks.training.checks import absolute_source

    if schema:
        print_schema()
        return
    if file is None and resume is None:
        raise OptionError(
            "PIPELINE.yaml or --resume RUN_ID is missing; ebbflow init writes a small pipeline.yaml"
        )
    request = PipelineRequest(
        file or "",
        resume or "",
        run_id or "",
        parse_set(set_ or []),
        str(Path(runs_dir).expanduser().absolute()) if runs_dir else "",
        metrics=metrics,
        report=tuple(report or ()),
        restart=restart,
        allow_policies=checked_names(allow_policy or []),
        allow_functions=checked_functions(allow_functions),
        allow_workdirs=tuple(map(absolute_source, allow_workdir or ())),
    )
    if check:
        checked = check_pipeline(request)
        if json:
            print_json(plan_of(checked))
        else:
            print_pipeline(checked, console)
        return
    progress = Console(stderr=True, quiet=quiet)
    outcome = run_on_terminal(
        request, console, prefect=wants_prefect(runner), progress=progress, as_json=json
    )
    if outcome.state == "stopped":
        raise typer.Exit(ExitStatus.INTERRUPTED)
    if outcome.state == "failed":
        raise typer.Exit(ExitStatus.FAILED)


def print_schema() -> None:
    """Print the JSON schema of pipeline files on standard output."""
    from ebbflow.tasks.pipeline.file.form import json_schema

    print_json(json_schema())


def run_on_terminal(
    request: "PipelineRequest",
    console: Console,
    *,
    prefect: bool,
    progress: Console | None = None,
    as_json: bool = False,
) -> "PipelineOutcome":
    """Run a pipeline, show its progress, and print its outcome.

    Args:
        request: the run.
        console: for the summary.
        prefect: whether the run is a Prefect flow run.
        progress: for progress; standard error unless given.
        as_json: whether the summary is the outcome as a JSON document.
    """
    from ebbflow.flows.pipeline.terminal import PipelineScreen
    from ebbflow.flows.runs.command import interruptible, quiet_prefect, start_temporary_server
    from ebbflow.infra.clock import SystemClock
    from ebbflow.tasks.pipeline.run import run_steps

    clock, progress = SystemClock(), progress or errors
    with (
        interruptible(errors, "checkpoints and finished steps are kept"),
        PipelineScreen(progress, clock) as screen,
    ):
        if not prefect:
            outcome = run_steps(request, screen, clock=clock)
        else:
            quiet_prefect()
            screen.note("starting Prefect")
            start_temporary_server()
            from ebbflow.flows.pipeline.flow import run_attached

            outcome = run_attached(request, screen, clock)
    if as_json:
        typer.echo(outcome.to_json(), nl=False)
    else:
        print_outcome(outcome, console)
    if outcome.state == "stopped":
        where = f" --runs-dir {request.runs_dir}" if request.runs_dir else ""
        progress.print(
            f"resume with: ebbflow run --resume {outcome.id}{where}", soft_wrap=True, highlight=False
        )
    return outcome


def plan_of(checked: "CheckedPipeline") -> dict[str, Any]:
    """Return what a file would run, for JSON: its steps in order, scripted faults, and what was not checked."""
    from ebbflow.tasks.pipeline.file.requests import wanted_gpus

    pipeline = checked.pipeline
    return {
        "name": pipeline.name,
        "display_name": pipeline.display_name or pipeline.name,
        "steps": [
            {
                "name": step.name,
                "display_name": step.label,
                "kind": step.kind,
                "team": step.team,
                "gpus": None if step.kind == "query" else wanted_gpus(step),
                "needs": sorted(step.needs),
            }
            for step in pipeline.steps.values()
        ],
        "faults": _faults(pipeline),
        "unchecked": list(checked.unchecked),
    }


def _faults(pipeline: "Pipeline") -> list[str]:
    from ebbflow.tasks.pipeline.file.faults import planned
    from ebbflow.tasks.pipeline.file.spec import LocalSpec

    return (
        [planned(one) for one in pipeline.cluster.faults] if isinstance(pipeline.cluster, LocalSpec) else []
    )


def print_pipeline(checked: "CheckedPipeline", console: Console) -> None:
    """Print what a file would run, and what was not checked."""
    from ebbflow.flows.pipeline.terminal import plain
    from ebbflow.tasks.drawing.wording import plural
    from ebbflow.tasks.pipeline.file.requests import wanted_gpus

    pipeline = checked.pipeline
    console.print(
        f"[bold]{pipeline.name}[/] is valid: {plural(len(pipeline.steps), 'step')}", highlight=False
    )
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("step", "kind", "team", "GPUs", "waits for"):
        table.add_column(name)
    for step in pipeline.steps.values():
        gpus = "" if step.kind == "query" else str(wanted_gpus(step))
        table.add_row(plain(step.label), step.kind, step.team, gpus, ", ".join(sorted(step.needs)))
    console.print(table)
    for fault in _faults(pipeline):
        console.print(plain(f"scripted fault: {fault}"), soft_wrap=True)
    for one in checked.unchecked:
        console.print(plain(f"not checked: {one}"), soft_wrap=True)


def print_outcome(outcome: "PipelineOutcome", console: Console) -> None:
    """Print the outcomes of a pipeline and of its steps."""
    from ebbflow.flows.pipeline.terminal import plain, shown_details
    from ebbflow.tasks.drawing.wording import seconds_text

    colours = {"finished": "green", "failed": "red", "stopped": "yellow", "skipped": "dim"}
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("step", "team", "state", "took", ""):
        table.add_column(name)
    for step in outcome.steps:
        said = ", ".join(f"{name} {value}" for name, value in shown_details(step))
        if step.reason and step.state != "finished":
            said = f"{step.reason}{'; ' + said if said else ''}"
        if step.late:
            said = f"after its deadline; {said}"
        table.add_row(
            plain(step.display_name),
            plain(step.team),
            plain(step.state, colours.get(step.state, "")),
            seconds_text(step.seconds),
            plain(said),
        )
    console.print(table)
    words = f"\n{outcome.display_name}: {outcome.reason}, after {seconds_text(outcome.seconds)}"
    console.print(plain(words), soft_wrap=True)
    console.print(plain(f"results: {outcome.directory}"), soft_wrap=True)
    console.print(plain(f"report: {outcome.report}", "bold"), soft_wrap=True)


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("run", help=RUN_HELP)(run)


__all__ = ["print_outcome", "register", "run_on_terminal"]
