"""Standard output and standard error whose reader may be gone before a run ends.

A flow run writes into pipes that Prefect's worker reads. Once the worker is killed, writes raise ``BrokenPipeError``,
and Rich, by which Prefect logs, makes a ``SystemExit`` of it, in whichever thread has logged.
"""

import errno
import logging
import os
import stat
import sys
from typing import Any, TextIO, cast

from rich.console import Console

_GONE = (errno.EPIPE, errno.EIO, errno.ECONNRESET)  # no reader, no terminal, no peer


class LastingStream:
    """A text stream that discards what is written once nobody reads it. Else it is as ``stream``.

    Args:
        stream: has a file descriptor, which is redirected to the null device then, so that others that write to it,
            children included, continue as well.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write ``text`` and return its length. Raises ``OSError`` for other faults than a reader that is gone."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._discard(error)
            return len(text)

    def flush(self) -> None:
        """Flush. Raises as ``write`` does."""
        try:
            self._stream.flush()
        except OSError as error:
            self._discard(error)

    def _discard(self, error: OSError) -> None:
        if error.errno not in _GONE:
            raise error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, self._stream.fileno())
        finally:
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlive_readers() -> None:
    """Let this process continue when nobody reads its standard output and standard error any more.

    This holds to the end of the process, for ``print``, Rich consoles and the logging handlers that there are.
    Files stay as they are: a full disk is an error.
    """
    sys.stdout, sys.stderr = _lasting(sys.stdout), _lasting(sys.stderr)
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler):
                handler.stream = _lasting(handler.stream)
                if isinstance(console := getattr(handler, "console", None), Console):  # Prefect's
                    console.file = _lasting(cast(TextIO, console.file))


def _lasting(stream: TextIO) -> TextIO:
    if isinstance(stream, LastingStream) or not _may_end(stream):
        return stream
    return cast(TextIO, LastingStream(stream))


def _may_end(stream: TextIO) -> bool:
    """Return whether the stream is a pipe, a socket or a terminal."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # none at all, replaced by an object without a file, closed
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or (stat.S_ISCHR(mode) and stream.isatty())
