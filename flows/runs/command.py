"""What every command that runs something needs: interrupts that clean up, and a quiet Prefect."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console

from ebbflow.flows.runs.output_pipes import outlive_readers

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
