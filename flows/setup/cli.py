"""``ebbflow doctor`` and ``ebbflow demo``."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ebbflow.flows.runs.answers import print_json
from ebbflow.flows.runs.exit_status import ExitStatus
from ebbflow.flows.runs.options import SET_UP, AsJson, Materialize, Runner, wants_prefect
from ebbflow.planners.errors import OptionError

console = Console()


_DOCTOR_HELP = """Check this machine: which packages and programs are installed, what is missing and how to get it.

[b]Examples[/b]

    ebbflow doctor && ebbflow demo

    ebbflow doctor --json

Read-only. Exit status: 0 all that is required is there, 1 something required is missing.
"""


def doctor(json: AsJson = False) -> None:
    from ebbflow.flows.setup.doctor import examine, is_ready, print_checks

    checks = examine()
    if json:
        print_json({"ready": is_ready(checks), "checks": [asdict(check) for check in checks]})
    else:
        print_checks(checks, console)
    if not is_ready(checks):
        raise typer.Exit(ExitStatus.FAILED)


_DEMO_HELP = """Run the main job for real: two queries and two trainings of two teams on nodes that come and go.

[b]Examples[/b]

    ebbflow demo

    ebbflow demo --query 9 --scale 1      one TPC-H query on Spark workers that come and go

It generates TPC-H data (kept for the next time), brings up Spark workers and GPU nodes of this machine, gives nodes \
notice and kills some, re-plans, holds auctions, launches and terminates nodes, compares the results with DuckDB's, \
writes a report, and leaves no process behind. Wants about 8 GiB of memory and two minutes.

Exit status: 0 done, 2 usage error, 3 a step failed or a result was wrong, 130 interrupted.
"""


def demo(
    query: Annotated[
        int | None, typer.Option(help="Run this TPC-H query alone, as one Prefect flow: 5, 7, 8 or 9.")
    ] = None,
    scale: Annotated[
        float | None, typer.Option(help="TPC-H scale factor. Default: 0.1, with --query 1.")
    ] = None,
    report: Annotated[str, typer.Option(help="HTML report to write.", metavar="FILE")] = "ebbflow-demo.html",
    json: Annotated[str | None, typer.Option(help="JSON report to write.", metavar="FILE")] = None,
    data: Annotated[Path | None, typer.Option(help="Where the data is cached.", metavar="DIR")] = None,
    materialize: Annotated[
        Materialize | None,
        typer.Option(help="With --query: where plans are cut; every-join, as in QOOP, shows more switching."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="A parameter of the demo's pipeline, NAME=VALUE.", metavar="NAME=VALUE"),
    ] = None,
    runner: Annotated[
        Runner,
        typer.Option(
            metavar="HOW",
            help="prefect records the run on a Prefect server, plain does not; auto if one is configured. With "
            "--query always prefect.",
        ),
    ] = Runner.auto,
) -> None:
    from ebbflow.flows.setup.demo import run_demo, run_demo_pipeline

    if query is not None:
        if set_:
            raise OptionError("--set is for the demo's pipeline; with --query there is none")
        right = run_demo(
            query,
            1.0 if scale is None else scale,
            report,
            json,
            data,
            (materialize or Materialize.cost).value,
            console,
        )
    else:
        if materialize is not None:
            raise OptionError("--materialize is for one query: name it by --query N")
        right = run_demo_pipeline(
            0.1 if scale is None else scale, report, json, data, set_ or [], console, wants_prefect(runner)
        )
    if not right:
        raise typer.Exit(3)


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("doctor", help=_DOCTOR_HELP, rich_help_panel=SET_UP)(doctor)
    app.command("demo", help=_DEMO_HELP, rich_help_panel=SET_UP)(demo)
