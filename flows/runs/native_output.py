"""Keeping what libraries print by themselves out of a command's output."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def without_native_output() -> Iterator[None]:
    """Let only Python write to standard output.

    The solver HiGHS prints a line to the process' own standard output now and then, whatever it is told; there it
    would end up in the middle of a table or of JSON. Where Python's standard output is something else already,
    nothing is done.
    """
    number = -1
    with suppress(OSError, ValueError, AttributeError):
        number = sys.stdout.fileno()
    if number != 1:
        yield
        return
    before = sys.stdout
    before.flush()
    copy = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    sys.stdout = open(copy, "w", encoding=before.encoding, errors=before.errors, buffering=1)  # noqa: SIM115
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(copy, 1)
        sys.stdout.close()
        os.close(nowhere)
        sys.stdout = before
