"""What the tests of flows and command line share."""

import atexit
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TypeVar

from tests.real_command import Done, RealCommand, real_command

JOINED = """
    SELECT name, count(*) AS orders, sum(price) AS total
    FROM orders JOIN customer ON orders.customer = customer.id JOIN nation ON customer.nation = nation.id
    GROUP BY name
"""
TIMEOUT = 120.0  # seconds; what does not happen within them does not happen
COMMAND = (sys.executable, "-P", "-m", "ebbflow.flows.cli")

Found = TypeVar("Found")


@cache
def _forking() -> RealCommand:
    end = ExitStack()
    atexit.register(end.close)
    folder = end.enter_context(tempfile.TemporaryDirectory())
    return end.enter_context(real_command(Path(folder)))


def run_cli(*arguments: str | Path, **variables: str) -> Done:
    """Run the command line in a process of its own, to its end: with ``variables`` it imports everything anew."""
    if not variables:
        return _forking().run([*map(str, arguments)])
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def open_to_others(*roots: Path) -> list[str]:
    """Return what of ``roots`` and below gives any right to others than its user."""
    paths = [path for root in roots for path in (root, *root.rglob("*")) if not path.is_symlink()]
    assert len(paths) >= len(roots)
    return [f"{path.stat().st_mode & 0o777:o} {path}" for path in paths if path.stat().st_mode & 0o077]


def eventually(look: Callable[[], Found], patience: float = TIMEOUT) -> Found:
    """Return the first true value of ``look``, asked again and again for a bounded time."""
    pause = threading.Event()
    for _ in range(int(patience / 0.1)):
        if found := look():
            return found
        pause.wait(0.1)
    raise AssertionError(f"nothing after {patience:g} s")
