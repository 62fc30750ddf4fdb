"""``ebbflow doctor`` and ``ebbflow demo``."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ebbflow.flows.runs.answers import print_json
from ebbflow.flows.runs.exit_status import ExitStatus
from ebbflow.flows.runs.options import AsJson, Materialize, Runner, wants_prefect
from ebbflow.planners.errors import OptionError

console = Console()


_DOCTOR_HELP = """Check this machine: which packages and programs are installed, what is missing and how to get it.

[b]Examples[/b]

    ebbflow doctor && ebbflow demo

    ebbflow doctor --json

    ebbflow doctor --store s3://bucket/store

Read-only; with --store a file of 1 MiB is written there, read and removed.

Exit status: 0 all that is required is there, 1 something required is missing.
"""


def doctor(
    store: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Store to compare with nodes' memory: whether the memory tier would be on before it, and why, as "
            "measured now. Default: none.",
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Print what is installed and what is missing; exits 1 where something required is missing."""
    from ebbflow.flows.setup.doctor import examine, is_ready, print_checks

    checks = examine(store)
    if json:
        print_json({"ready": is_ready(checks), "checks": [asdict(check) for check in checks]})
    else:
        print_checks(checks, console)
    if not is_ready(checks):
        raise typer.Exit(ExitStatus.FAILED)


_DEMO_HELP = """\
Run the main job for real: queries, a training and a tuning run of two teams on nodes that come and go.

[b]Examples[/b]

    ebbflow demo

    ebbflow demo --query 9 --scale 1      one TPC-H query on Spark workers

    ebbflow demo --query 9 --network 400mbit      a switch of plan

It generates TPC-H data (kept for the next time), brings up Spark workers and GPU nodes of this machine, gives nodes \
notice and kills some, re-plans, holds auctions, launches and terminates nodes, compares the results with DuckDB's, \
writes a report, and leaves no process behind. Wants about 8 GiB of memory and two minutes. With --network \
(as root) the query runs on nodes with limited links, whose number grows: three times with the plan it began with, \
and three times re-planned, which takes some five minutes.

Exit status: 0 done, 1 a step failed, 2 usage error, 3 a result differs from DuckDB's, 130 interrupted.
"""


def demo(
    query: Annotated[
        int | None,
        typer.Option(metavar="N", help="TPC-H query to run alone, as one Prefect flow: 5, 7, 8 or 9."),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="With --query: rate of each node's link, such as 200mbit; as root. Default: none, on loopback.",
        ),
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(help="TPC-H scale factor. Default: 0.1, with --query 1, with --network 2."),
    ] = None,
    report: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="File for the report, .html (a page) or .json (the data). Repeatable. Default: ebbflow-demo.html.",
        ),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Directory of the TPC-H tables. Default: tpch/ in ~/.cache/ebbflow."
        ),
    ] = None,
    materialize: Annotated[
        Materialize | None,
        typer.Option(
            metavar="WHERE",
            help="With --query: where intermediate results are materialized: cost, every-join (as in QOOP, which "
            "shows more switches of plan) or none. Default: cost.",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Parameter of the demo's pipeline, NAME=VALUE.", metavar="NAME=VALUE"),
    ] = None,
    runner: Annotated[
        Runner,
        typer.Option(
            metavar="HOW",
            help="Runner: prefect records the run on a Prefect server, plain does not; auto if one is configured. "
            "With --query always prefect.",
        ),
    ] = Runner.auto,
) -> None:
    from ebbflow.flows.setup.demo import run_demo, run_demo_pipeline
    from ebbflow.planners.model.options import check_report_paths

    reports = check_report_paths(report or "ebbflow-demo.html")
    if query is not None:
        if set_:
            raise OptionError("--set is for the demo's pipeline; with --query there is none")
    elif network is not None:
        raise OptionError("--network is for one query: name it by --query N")
    if query is not None and network is not None:
        from ebbflow.flows.setup.demo_switch import run_demo_switch

        if materialize is not None:
            raise OptionError("--materialize is every-join with --network; leave it out")
        status = run_demo_switch(query, 2.0 if scale is None else scale, network, reports, data_dir, console)
    elif query is not None:
        status = run_demo(
            query,
            1.0 if scale is None else scale,
            reports,
            data_dir,
            (materialize or Materialize.cost).value,
            console,
        )
    else:
        if materialize is not None:
            raise OptionError("--materialize is for one query: name it by --query N")
        status = run_demo_pipeline(
            0.1 if scale is None else scale, reports, data_dir, set_ or [], console, wants_prefect(runner)
        )
    if status:
        raise typer.Exit(status)


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("doctor", help=_DOCTOR_HELP)(doctor)
    app.command("demo", help=_DEMO_HELP)(demo)
