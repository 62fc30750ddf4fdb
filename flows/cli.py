"""The command line: ``ebbflow --help`` lists the commands."""

import gc
import sys
from enum import StrEnum
from typing import Annotated, Protocol, runtime_checkable

import typer

from ebbflow.flows.command_list import Listed, ListedGroup
from ebbflow.flows.runs.answers import print_error, wants_json
from ebbflow.flows.runs.exit_status import status_of
from ebbflow.planners.errors import EbbflowError

RUN_WORK, SET_UP, WATCH, NODES = "Run work", "Set up and try", "Watch and control", "Nodes"


class Commands(ListedGroup):
    """The commands of ``ebbflow``."""

    listed = (
        Listed(
            "query",
            "ebbflow.flows.query.cli",
            "Run a query that re-plans itself while capacity changes.",
            RUN_WORK,
        ),
        Listed(
            "explain",
            "ebbflow.flows.query.cli",
            "Show the candidate plans of a query side by side, without running anything.",
            RUN_WORK,
        ),
        Listed(
            "train",
            "ebbflow.flows.training.cli",
            "Train a PyTorch script elastically: it continues when nodes leave, and uses nodes that join.",
            RUN_WORK,
        ),
        Listed(
            "tune",
            "ebbflow.flows.tuning.cli",
            "Tune hyperparameters: trials are elastic trainings that share the nodes.",
            RUN_WORK,
        ),
        Listed(
            "elastic",
            "ebbflow.flows.elastic",
            "Run a regression, clustering or topic model whose workers come and go while it runs.",
            RUN_WORK,
        ),
        Listed(
            "run",
            "ebbflow.flows.pipeline.cli",
            "Run a pipeline: SQL queries, trainings, tuning runs and elastic jobs of several teams on one cluster.",
            RUN_WORK,
        ),
        Listed(
            "init",
            "ebbflow.flows.setup.init",
            "Write a small pipeline that runs right away: pipeline.yaml, train.py, ebbflow.toml and generated data.",
            RUN_WORK,
        ),
        Listed(
            "calibrate",
            "ebbflow.flows.query.cli",
            "Measure the speed of an engine on this machine or cluster, for better estimates: about 15 s.",
            SET_UP,
        ),
        Listed(
            "doctor",
            "ebbflow.flows.setup.cli",
            "Check this machine: which packages and programs are installed, what is missing and how to get it.",
            SET_UP,
        ),
        Listed(
            "demo",
            "ebbflow.flows.setup.cli",
            "Run the main job for real: queries, a training and a tuning run of two teams on nodes that come and go.",
            SET_UP,
        ),
        Listed(
            "data",
            "ebbflow.flows.setup.data",
            "Parquet tables of TPC-H and TPC-DS, and skewed ones, made once and kept in ~/.cache/ebbflow.",
            SET_UP,
        ),
        Listed("prefect", "ebbflow.flows.setup.deployments", "Deploy Ebbflow's flows to Prefect.", SET_UP),
        Listed(
            "simulate",
            "ebbflow.flows.simulation.cli",
            "Simulate training jobs with the code that schedules real clusters.",
            SET_UP,
        ),
        Listed(
            "communication",
            "ebbflow.flows.communication",
            "Planned communication of trainings: measure links, search a plan, explain it, compare schedulers.",
            SET_UP,
        ),
        Listed(
            "report",
            "ebbflow.flows.report",
            "Show what a cluster did and why: apps, leases, nodes, fairness, money, and each decision with its "
            "reason.",
            WATCH,
        ),
        Listed(
            "apps",
            "ebbflow.flows.apps.cli",
            "The apps of a cluster: queries, trainings and tuning runs that hold or request resources.",
            WATCH,
        ),
        Listed(
            "capacity",
            "ebbflow.flows.capacity.cli",
            "The capacity loop: the controller that assigns GPUs to apps and scales node pools.",
            WATCH,
        ),
        Listed(
            "ledger",
            "ebbflow.flows.ledger.cli",
            "The ledger: the durable event log of apps, nodes, leases and decisions.",
            WATCH,
        ),
        Listed(
            "local",
            "ebbflow.flows.nodes.cli",
            "Spark workers and GPU nodes of this machine, with fault injection.",
            NODES,
        ),
        Listed(
            "memory",
            "ebbflow.flows.memory",
            "Memory that nodes lend each other as a tier before a store: start, show and stop their daemons, and let "
            "Spark read and write such a store.",
            NODES,
        ),
        Listed(
            "aggregation",
            "ebbflow.flows.aggregation",
            "Aggregators that trainings of a cluster share: serve, show who serves what, drain.",
            NODES,
        ),
        Listed(
            "fleet",
            "ebbflow.flows.fleet.cli",
            "Node pools of a cluster on AWS: status, cost, scale-out and scale-in.",
            NODES,
        ),
    )


app = typer.Typer(
    name="ebbflow",
    cls=Commands,
    help="Run SQL queries, PyTorch trainings and pipelines of both on an elastic cluster of several teams.\n\n"
    "[b]First steps[/b]\n\n"
    "    ebbflow doctor                 check this machine\n\n"
    "    ebbflow init shop              write a small pipeline\n\n"
    "    ebbflow query --help           run a query\n\n"
    "Results go to standard output, messages to standard error. Exit status: 0 done, 1 failed or rejected, 2 usage "
    "error, 3 a result differs from DuckDB's, 4 the ledger does not respond, 5 another capacity loop took over, 130 "
    "interrupted.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class LogLevel(StrEnum):
    """How much of its log a command prints."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


class LogFormat(StrEnum):
    """How log lines look."""

    text = "text"
    json = "json"


def _say_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"ebbflow {version('prefect-ebbflow')}")
        raise typer.Exit


@app.callback()
def _about(
    number: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version and exit."),
    ] = False,
    log_level: Annotated[
        LogLevel | None,
        typer.Option(
            metavar="LEVEL",
            help="Level of log lines on standard error: debug, info, warning or error. Default: warning.",
        ),
    ] = None,
    log_format: Annotated[
        LogFormat,
        typer.Option(
            metavar="FORMAT",
            help="Format of log lines: text, or json, an object a line with the ids of run, app and stage. "
            "Default: text.",
            show_default=False,
        ),
    ] = LogFormat.text,
) -> None:
    if log_level is not None or log_format is not LogFormat.text:
        import logging

        form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
        level = log_level or LogLevel.warning
        logging.basicConfig(level=level.upper(), format=form, stream=sys.stderr)
    if log_format is LogFormat.json:
        from ebbflow.infra.logs.json_lines import JsonLines

        for handler in logging.root.handlers:
            handler.setFormatter(JsonLines())


def _release(error: BaseException | None) -> None:
    """Drop the frames that an error's chain holds: Prefect keeps it, and DuckDB complains at exit of what lives."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _run_for_program() -> None:
    """Run the command line; what is wrong with how it is used becomes an object of JSON, too."""
    try:
        status = app(standalone_mode=False)
    except Exception as error:
        if not isinstance(error, _UsageProblem):
            raise
        print_error(error.format_message(), "UsageError", as_json=True)
        sys.exit(error.exit_code)
    sys.exit(status or 0)


@runtime_checkable
class _UsageProblem(Protocol):
    """An exception of Typer's that it would show itself."""

    exit_code: int

    def format_message(self) -> str: ...


def main() -> None:
    """Run the command line; errors of our own family become one message and a status of ``ExitStatus``."""
    gc.set_threshold(
        20_000
    )  # imports free next to nothing: looking for it after 700 objects took a tenth of a start
    as_json = wants_json(sys.argv[1:])
    try:
        (_run_for_program if as_json else app)()
    except EbbflowError as error:
        print_error(str(error), type(error).__name__, as_json=as_json)
        _release(error)
        sys.exit(status_of(error))
    except SystemExit as end:  # typer makes one of an interrupt, too
        _release(end)
        # Under -m, CPython ends itself by SIGINT, whatever the status, once an interrupt came up inside an exec of
        # a text, such as a dataclass's while modules are imported; the next exec clears that mark.
        exec("")  # noqa: S102
        raise


if __name__ == "__main__":
    main()
