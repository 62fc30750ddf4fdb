"""Runs for the command line: with or without Prefect, with progress on the terminal."""

import os
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from ebbflow.flows.query.bars import StageBars
from ebbflow.flows.query.terminal import TerminalListener
from ebbflow.flows.runs.answers import print_json
from ebbflow.flows.runs.command import quiet_prefect, start_temporary_server
from ebbflow.infra.query.checkpoints import ParquetCheckpointStore
from ebbflow.planners.query.costs.cost import DEFAULTS
from ebbflow.planners.query.costs.fitting import calibrate as fit
from ebbflow.planners.query.plan.qep import Stage
from ebbflow.tasks.query.opening import arrived_capacity, choose_engine, opened_engine
from ebbflow.tasks.query.planning import remember
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import PlainOrchestrator, QueryOutcome
from ebbflow.tasks.report.delivery import execute


def run_on_terminal(
    request: QueryRequest, console: Console, *, prefect: bool, also: Callable[[Stage], Any] | None = None
) -> QueryOutcome:
    """Run ``request`` and show its progress; as a Prefect flow run if ``prefect``.

    ``also`` hears of every stage that starts.
    """
    # PySpark imports a testing module of its own that complains of pandas, which nothing here uses.
    warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
    with StageBars(console) as bars:
        listener = TerminalListener(bars, also)
        if not prefect:
            request = choose_engine(request)
        if request.engine == "spark" or prefect:
            bars.opening(_starting(request, prefect))
        if not prefect:
            return execute(request, PlainOrchestrator(listener))
        quiet_prefect()
        start_temporary_server()
        from ebbflow.flows.query.flow import run_attached

        return run_attached(request, listener)


def _starting(request: QueryRequest, prefect: bool) -> str:
    """Say what is under way before the first stage, which may take half a minute."""
    names = {"spark": f"Spark on {request.master}", "duckdb": "DuckDB", "auto": "the query"}
    engine = names[request.engine]
    server = os.environ.get("PREFECT_API_URL") or "a temporary server"
    return f"starting {engine}" + (f" in a Prefect flow run on {server}" if prefect else "")


def calibrate_engine(engine: str, master: str, store: str, *, as_json: bool = False) -> None:
    """Measure the speed of an engine, keep it beside the checkpoints and print the rates that the planner fits to it.

    The result goes to standard output, progress to standard error.

    Args:
        engine: ``spark`` or ``duckdb``.
        master: Spark master.
        store: directory of the checkpoints, whose queries use the measurements.
        as_json: print one JSON document instead of the table.

    Raises:
        EbbflowError: the engine does not start or tells no times of tasks, or the store cannot be written.
    """
    from ebbflow.infra.query.calibration import calibrate

    request = QueryRequest("SELECT 1", tables=".", engine=engine, master=master, store=store, calibrate=True)
    checkpoints = ParquetCheckpointStore(request.store_place)
    with Console(stderr=True).status(f"measuring {engine}"), opened_engine(request) as opened:
        capacity = arrived_capacity(opened.source)
        measured = calibrate(opened.engine, float(max(capacity.cores, 1)))
    remember(checkpoints, request, measured)
    prior, fitted = DEFAULTS[engine], fit(DEFAULTS[engine], measured)
    if as_json:
        rates = {
            name: {"rates_s": asdict(one.rates), "statement_s": one.latency}
            for name, one in (("built_in", prior), ("measured", fitted))
        }
        print_json({"engine": engine, "store": store, **rates})
        return
    table = Table("work", "built-in", "measured here", box=None, header_style="bold")
    for (kind, before), after in zip(asdict(prior.rates).items(), asdict(fitted.rates).values(), strict=True):
        table.add_row(kind.replace("_", " "), f"{before:.2e} s", f"{after:.2e} s")
    table.add_row("statement", f"{prior.latency:.2f} s", f"{fitted.latency:.2f} s")
    Console().print(table)
