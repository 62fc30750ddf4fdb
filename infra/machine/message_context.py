"""ZeroMQ's contexts, which end when they are closed: never by the garbage collector.

Of a context and sockets that are garbage together it may end the context first, which then waits for its sockets for
ever, in whatever thread the collector happens to run.
"""

from typing import Any

from zmq.sugar.context import Context

_open: "set[Context[Any]]" = set()


def open_context() -> "Context[Any]":
    """Return a new context, for ``close_context``; one that is never closed stays until the process ends."""
    made = Context(io_threads=1)
    _open.add(made)
    return made


def close_context(context: "Context[Any]") -> None:
    """End a context with all its sockets; what they have not sent is lost. May be called twice."""
    if not context.closed:
        context.destroy(linger=0)
    _open.discard(context)
