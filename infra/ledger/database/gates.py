"""One lock for all threads of a process that write to one SQLite file.

They queue for it before they want SQLite's own.
"""

import os
import threading
from pathlib import Path

_gates: dict[str, threading.Lock] = {}
_making = threading.Lock()


def gate(path: Path) -> "threading.Lock":
    """Return the lock of the file at ``path``."""
    with _making:
        return _gates.setdefault(os.path.realpath(path), threading.Lock())


def forget() -> None:
    """Begin anew in a child: a thread that is not there may have held one."""
    global _making  # noqa: PLW0603
    _gates.clear()
    _making = threading.Lock()
