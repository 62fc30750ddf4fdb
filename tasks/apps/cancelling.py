"""Cancellation of an app by the ledger: a request that the app's agent finds, and what the agent does then."""

import os
import signal

from ebbflow.planners.model.ledger import AppReport


def cancel_id(app: str) -> str:
    """Return the id under which a cancellation of ``app`` is requested. Apps' ids begin with a letter or digit."""
    return f"_cancel-{app}"


def cancel_request(at: float) -> AppReport:
    """Return a request for the cancellation of the app that is registered at ``at``, s since the Unix epoch."""
    return AppReport(at, message="cancellation requested")


def interrupt_process() -> None:
    """Interrupt this process as Ctrl-C does: work is saved, and the command ends with status 130.

    A process in the background of a shell ignores that signal; it is terminated in order instead.
    """
    ignored = signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None)
    os.kill(os.getpid(), signal.SIGTERM if ignored else signal.SIGINT)
