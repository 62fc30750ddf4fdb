"""Runs for the command line: with or without Prefect, with progress on the terminal."""

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

from ebbflow.flows.query.bars import StageBars
from ebbflow.flows.query.terminal import TerminalListener
from ebbflow.infra.query.calibration import calibrate
from ebbflow.infra.query.checkpoints import ParquetCheckpointStore
from ebbflow.planners.query.costs.cost import DEFAULTS
from ebbflow.planners.query.costs.cost import calibrate as fit
from ebbflow.planners.query.plan.qep import Stage
from ebbflow.tasks.query.opening import arrived_capacity, opened_engine
from ebbflow.tasks.query.planning import remember
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import PlainOrchestrator, QueryOutcome, execute


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
        if request.engine == "spark" or prefect:
            bars.note(_starting(request, prefect))
        if not prefect:
            return execute(request, PlainOrchestrator(listener))
        quiet_prefect()
        start_temporary_server()
        from ebbflow.flows.query.flow import run_attached

        return run_attached(request, listener)


def _starting(request: QueryRequest, prefect: bool) -> str:
    """Say what is under way before the first stage, which may take half a minute."""
    engine = f"Spark on {request.master}" if request.engine == "spark" else "DuckDB"
    server = os.environ.get("PREFECT_API_URL") or "a temporary server"
    return f"starting {engine}" + (f" in a Prefect flow run on {server}" if prefect else "")


@contextmanager
def interruptible(console: Console, consequence: str) -> Iterator[None]:
    """Let SIGTERM and a closed terminal end the block as Ctrl-C does, so that everything is cleaned up.

    An interrupt prints ``consequence`` once that is done. For the main thread only.
    """

    def handler(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, handler)
    try:
        yield
    except KeyboardInterrupt:
        console.print(f"interrupted; {consequence}")
        raise
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def quiet_prefect() -> None:
    """Settings for a run whose progress is shown on a terminal; what the user has set wins."""
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")  # the server has it all


def start_temporary_server() -> None:
    """Start Prefect's temporary server where none is configured, deaf to Ctrl-C.

    A terminal sends Ctrl-C to every process in front. A server that obeyed it could not record that the run was
    interrupted, and Prefect's client would go on asking for it for minutes. Prefect ends it at our exit.
    """
    from prefect.server.api.server import SubprocessASGIServer
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    if settings.api.url is not None or not settings.server.ephemeral.enabled:
        return

    def start() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})  # a child inherits the mask
        with suppress(RuntimeError):  # the flow run tries again, and says what is wrong
            SubprocessASGIServer().start(settings.server.ephemeral.startup_timeout_seconds)

    # in a thread of its own, because a mask is a thread's: our main thread goes on hearing Ctrl-C
    starter = threading.Thread(target=start, name="ebbflow-prefect-server", daemon=True)
    starter.start()
    starter.join()


def calibrate_engine(engine: str, master: str, store: str, console: Console) -> None:
    """Measure an engine, remember the figures beside the checkpoints, and print what they make of the rates."""
    request = QueryRequest("SELECT 1", tables=".", engine=engine, master=master, store=store)
    checkpoints = ParquetCheckpointStore(store)
    with console.status(f"measuring {engine}"), opened_engine(request) as opened:
        capacity = arrived_capacity(opened.source)
        measured = calibrate(opened.engine, float(max(capacity.cores, 1)))
    remember(checkpoints, request, measured)
    prior, fitted = DEFAULTS[engine], fit(DEFAULTS[engine], measured)
    table = Table("work", "built-in", "measured here", box=None, header_style="bold")
    for (kind, before), after in zip(asdict(prior.rates).items(), asdict(fitted.rates).values(), strict=True):
        table.add_row(kind.replace("_", " "), f"{before:.2e} s", f"{after:.2e} s")
    table.add_row("statement", f"{prior.latency:.2f} s", f"{fitted.latency:.2f} s")
    console.print(table)
