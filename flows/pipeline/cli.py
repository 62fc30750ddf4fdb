"""``ebbflow run``: a pipeline of queries, trainings and tuning runs on one elastic cluster."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from ebbflow.flows.runs.options import RUN_WORK, AllowFunctions, Runner, RunnerOption, wants_prefect
from ebbflow.planners.errors import OptionError

if TYPE_CHECKING:
    from ebbflow.tasks.pipeline.file.spec import Pipeline
    from ebbflow.tasks.pipeline.outcome import PipelineOutcome
    from ebbflow.tasks.pipeline.run import PipelineRequest

console = Console()
errors = Console(stderr=True)

RUN_HELP = """Run a pipeline: SQL queries, trainings and tuning runs of several teams on one elastic cluster.

[b]Look whether a file is right[/b], without running anything

    ebbflow run pipeline.yaml --check

[b]Run it[/b]; results and the report are in a folder of their own

    ebbflow run pipeline.yaml --report pipeline.html

    ebbflow run pipeline.yaml --set tables=s3://lake/tpch

[b]Go on[/b] with a run that was interrupted, or whose machine is gone: finished steps are not repeated

    ebbflow run --resume shop-1121-101500-a1b2

[b]Help with the format[/b]: examples/pipeline.yaml explains all of it; for your editor's completion

    ebbflow run --schema > pipeline.schema.json

Ctrl-C lets all steps save and leave; a second one leaves at once. Status: 0 finished, 1 a step has failed, 2 wrong \
input, 130 interrupted.
"""


def run(
    file: Annotated[str | None, typer.Argument(help="The pipeline's file.", metavar="PIPELINE.yaml")] = None,
    resume: Annotated[str | None, typer.Option(help="Go on with this run.", metavar="ID")] = None,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart",
            help="With --resume: let trainings begin again at step 0 none of whose checkpoints can be used.",
        ),
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Say what is wrong with the file, or what it would do.")
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the format as a JSON schema, for editors.")
    ] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="A parameter of the file, NAME=VALUE. Repeatable.", metavar="NAME=VALUE"),
    ] = None,
    allow_policy: Annotated[
        list[str] | None,
        typer.Option(
            help="A policy that the file names and that may be imported. Repeatable.", metavar="MODULE:NAME"
        ),
    ] = None,
    allow_functions: AllowFunctions = None,
    id: Annotated[
        str | None, typer.Option("--id", help="Of the run, for --resume. Default: made up.")
    ] = None,
    folder: Annotated[
        str | None,
        typer.Option(
            help="Where runs of pipelines live. Default: pipelines/ in ~/.cache/ebbflow.", metavar="DIR"
        ),
    ] = None,
    report: Annotated[
        str | None, typer.Option(help="Write the report as one HTML page here, too.", metavar="FILE")
    ] = None,
    json: Annotated[str | None, typer.Option(help="Write the outcome as JSON.", metavar="FILE")] = None,
    runner: RunnerOption = Runner.auto,
) -> None:
    from ebbflow.flows.pipeline.terminal import plain
    from ebbflow.planners.query.sql.forbidden import checked_functions
    from ebbflow.tasks.capacity.own_policies import checked_names
    from ebbflow.tasks.pipeline.file.parameters import parse_set
    from ebbflow.tasks.pipeline.run import PipelineRequest, check_pipeline

    if schema:
        print_schema()
        return
    if file is None and resume is None:
        raise OptionError(
            "name a pipeline's file (examples/pipeline.yaml is one), or a run to go on with (--resume ID)"
        )
    request = PipelineRequest(
        file or "",
        resume or "",
        id or "",
        parse_set(set_ or []),
        str(Path(folder).expanduser().absolute()) if folder else "",
        report,
        json,
        restart=restart,
        allow_policies=checked_names(allow_policy or []),
        allow_functions=checked_functions(allow_functions),
    )
    if check:
        checked = check_pipeline(request)
        print_pipeline(checked.pipeline, console)
        for one in checked.unchecked:
            console.print(plain(f"not checked: {one}"), soft_wrap=True)
        return
    outcome = run_on_terminal(request, console, prefect=wants_prefect(runner))
    if outcome.state == "stopped":
        raise typer.Exit(130)
    if outcome.state == "failed":
        raise typer.Exit(1)


def print_schema() -> None:
    """Print the format as a JSON schema."""
    import json

    from ebbflow.tasks.pipeline.file.form import json_schema

    typer.echo(json.dumps(json_schema(), indent=1))


def run_on_terminal(request: "PipelineRequest", console: Console, *, prefect: bool) -> "PipelineOutcome":
    """Run a pipeline and show its progress and outcome; as a Prefect flow run if ``prefect``."""
    from ebbflow.flows.pipeline.terminal import PipelineScreen
    from ebbflow.flows.runs.command import interruptible, quiet_prefect, start_temporary_server
    from ebbflow.infra.clock import SystemClock
    from ebbflow.tasks.pipeline.run import run_steps

    clock = SystemClock()
    with (
        interruptible(errors, "checkpoints and finished steps are kept"),
        PipelineScreen(console, clock) as screen,
    ):
        if not prefect:
            outcome = run_steps(request, screen, clock=clock)
        else:
            quiet_prefect()
            screen.note("starting Prefect")
            start_temporary_server()
            from ebbflow.flows.pipeline.flow import run_attached

            outcome = run_attached(request, screen, clock)
    print_outcome(outcome, console)
    if outcome.state == "stopped":
        where = f" --folder {request.folder}" if request.folder else ""
        console.print(
            f"go on with: ebbflow run --resume {outcome.id}{where}", soft_wrap=True, highlight=False
        )
    return outcome


def print_pipeline(pipeline: "Pipeline", console: Console) -> None:
    """Print what a file would run."""
    from ebbflow.flows.pipeline.terminal import plain
    from ebbflow.tasks.drawing.wording import plural
    from ebbflow.tasks.pipeline.file.faults import planned
    from ebbflow.tasks.pipeline.file.spec import LocalSpec

    console.print(
        f"[bold]{pipeline.name}[/] is right: {plural(len(pipeline.steps), 'step')}", highlight=False
    )
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("step", "kind", "team", "GPUs", "waits for"):
        table.add_column(name)
    for step in pipeline.steps.values():
        gpus = "" if step.kind == "query" else str(step.options.get("gpus", 1))
        table.add_row(plain(step.label), step.kind, step.team, gpus, ", ".join(sorted(step.needs)))
    console.print(table)
    if isinstance(pipeline.cluster, LocalSpec):
        for fault in pipeline.cluster.faults:
            console.print(plain(f"on purpose: {planned(fault)}"), soft_wrap=True)


def print_outcome(outcome: "PipelineOutcome", console: Console) -> None:
    """Print what became of a pipeline and its steps."""
    from ebbflow.flows.pipeline.terminal import plain, shown_details
    from ebbflow.tasks.drawing.wording import seconds_text

    colours = {"finished": "green", "failed": "red", "stopped": "yellow", "skipped": "dim"}
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("step", "team", "end", "took", ""):
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
    console.print()
    console.print(table)
    words = f"\n{outcome.display_name}: {outcome.reason}, after {seconds_text(outcome.seconds)}"
    console.print(plain(words), soft_wrap=True)
    console.print(plain(f"results: {outcome.folder}"), soft_wrap=True)
    console.print(plain(f"report: {outcome.report}", "bold"), soft_wrap=True)


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("run", help=RUN_HELP, rich_help_panel=RUN_WORK)(run)


__all__ = ["print_outcome", "register", "run_on_terminal"]
