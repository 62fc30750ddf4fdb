"""The command line: ``ebbflow --help`` lists the commands."""

import logging
import sys
from enum import StrEnum
from importlib.metadata import version
from typing import Annotated, Protocol, runtime_checkable

import typer

from ebbflow.flows import elastic as elastic_cli
from ebbflow.flows import report as report_cli
from ebbflow.flows import simulation as simulate_cli
from ebbflow.flows.apps import cli as apps_cli
from ebbflow.flows.capacity import cli as capacity_cli
from ebbflow.flows.fleet import cli as fleet_cli
from ebbflow.flows.ledger import cli as ledger_cli
from ebbflow.flows.nodes import cli as local_cli
from ebbflow.flows.pipeline import cli as pipeline_cli
from ebbflow.flows.query import cli as query_cli
from ebbflow.flows.runs.answers import print_error, wants_json
from ebbflow.flows.runs.exit_status import status_of
from ebbflow.flows.runs.option_checks import CheckedGroup
from ebbflow.flows.runs.options import NODES, SET_UP, WATCH
from ebbflow.flows.setup import cli as setup_cli
from ebbflow.flows.setup import data as data_cli
from ebbflow.flows.setup import deployments as prefect_cli
from ebbflow.flows.setup import init as init_cli
from ebbflow.flows.training import cli as train_cli
from ebbflow.flows.tuning import cli as tune_cli
from ebbflow.planners.errors import EbbflowError

app = typer.Typer(
    name="ebbflow",
    cls=CheckedGroup,
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
query_cli.register(app)
train_cli.register(app)
tune_cli.register(app)
elastic_cli.register(app)
pipeline_cli.register(app)
init_cli.register(app)
report_cli.register(app)
app.add_typer(apps_cli.app, name="apps", rich_help_panel=WATCH)
app.add_typer(capacity_cli.app, name="capacity", rich_help_panel=WATCH)
app.add_typer(ledger_cli.app, name="ledger", rich_help_panel=WATCH)
app.add_typer(local_cli.app, name="local", rich_help_panel=NODES)
app.add_typer(fleet_cli.app, name="fleet", rich_help_panel=NODES)
setup_cli.register(app)
app.add_typer(data_cli.app, name="data", rich_help_panel=SET_UP)
app.add_typer(prefect_cli.app, name="prefect", rich_help_panel=SET_UP)
app.add_typer(simulate_cli.app, name="simulate", rich_help_panel=SET_UP)


class LogLevel(StrEnum):
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


def _say_version(wanted: bool) -> None:
    if wanted:
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
) -> None:
    if log_level is not None:
        form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
        logging.basicConfig(level=log_level.upper(), format=form, stream=sys.stderr)


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
