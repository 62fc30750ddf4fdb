"""What every command that runs something needs: interrupts that clean up, and a quiet Prefect."""

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console

from ebbflow.flows.runs.output_pipes import outlive_readers
from ebbflow.tasks.apps.cancelling import interrupt_process

_FINALIZER = 0.05  # seconds in which a finalizer has ended
_STARTS = 3  # of Prefect's temporary server


@contextmanager
def interruptible(console: Console, consequence: str) -> Iterator[None]:
    """Let SIGTERM and a closed terminal end the block as Ctrl-C does, so that everything is cleaned up.

    An interrupt prints ``consequence`` once that is done. For the main thread only. Output that nobody reads any more
    ends nothing: it is discarded.
    """
    outlive_readers()

    def handler(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, handler)
    try:
        with _delivered_again():
            yield
    except KeyboardInterrupt:
        console.print(f"interrupted; {consequence}")
        raise
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def _delivered_again() -> Iterator[None]:
    """Deliver an interrupt again that came up in a finalizer: Python ignores every exception there, and a user would
    press Ctrl-C in vain."""
    ignored: queue.SimpleQueue[bool] = queue.SimpleQueue()  # one of the few things that a finalizer may use
    before = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            ignored.put(True)
        else:
            before(unraisable)

    def deliver() -> None:
        while ignored.get():
            time.sleep(_FINALIZER)
            interrupt_process()

    threading.Thread(target=deliver, name="ebbflow-interrupts", daemon=True).start()
    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
        ignored.put(False)


def quiet_prefect() -> None:
    """Settings for a run whose progress is shown on a terminal; what the user has set wins."""
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")  # the server has it all


def start_temporary_server() -> None:
    """Start Prefect's temporary server where none is configured, deaf to Ctrl-C.

    A terminal sends Ctrl-C to every process in front. A server that obeyed it could not record that the run was
    interrupted, and Prefect's client would continue asking for it for minutes. Prefect ends it at our exit.
    """
    import httpx
    from prefect.server.api.server import SubprocessASGIServer
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    if settings.api.url is not None or not settings.server.ephemeral.enabled:
        return

    def start() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})  # a child inherits the mask
        for _ in range(_STARTS):  # else the flow run starts one, which hears Ctrl-C, and says what is wrong
            server = SubprocessASGIServer()
            try:
                server.start(settings.server.ephemeral.startup_timeout_seconds)
            except (
                httpx.HTTPError,
                RuntimeError,
            ):  # on a busy machine its first answer may take more than 5 s
                server.stop()
            else:
                break

    # in a thread of its own, because a mask is a thread's: our main thread continues to hear Ctrl-C
    starter = threading.Thread(target=start, name="ebbflow-prefect-server", daemon=True)
    starter.start()
    starter.join()
