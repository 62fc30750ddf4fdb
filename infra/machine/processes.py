"""Processes of a local cluster, found by a mark in their environment.

Every process that belongs to a node carries ``EBBFLOW_NODE=<cluster uid>/<node id>`` and hands it down to
what it starts. A mark, unlike a process id, is never used twice; and unlike a process group, it also covers
the Python daemons of executors, which make groups of their own.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import ClusterError
from ebbflow.infra.machine.network import namespaces
from ebbflow.infra.storage import private

MARK = "EBBFLOW_NODE"
_NAMED = f"\0{MARK}=".encode()
SECRET = (
    "EBBFLOW_LEDGER",
    "EBBFLOW_NODE_SECRET",
    "EBBFLOW_NODE_SECRET_FILE",
)  # of this process alone: an address that may hold a password, and a training node's key
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Variables that, set to 1 before NumPy is imported, keep a process that shares its machine to one thread."""
_READABLE = 10.0  # seconds that a new process has to show its mark; on a busy machine it takes a millisecond
_PAUSE = 0.05  # seconds between looks at processes that are being killed


def inherited(*kept: str) -> dict[str, str]:
    """Return this process' environment as others may have it: scripts and statements of users could tell it.

    Args:
        kept: secrets among the variables that a process of ours needs, which runs nothing of users.
    """
    return {name: value for name, value in os.environ.items() if name in kept or name not in SECRET}


def spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    mark: str,
    log: Path,
    cwd: Path | None = None,
    *,
    namespace: str = "",
) -> subprocess.Popen[bytes]:
    """Start ``command`` in a session of its own with ``mark``; output goes to ``log``.

    It works in ``cwd``, by default the log's directory, and in a network namespace where one is named. It carries its
    mark when this returns. Raises ``ClusterError`` when the program cannot be started.
    """
    private.make_folder(log.parent)
    try:
        with private.open_file(log, "ab") as output:

            def start() -> subprocess.Popen[bytes]:
                return subprocess.Popen(
                    list(command),
                    env={**environment, MARK: mark},
                    cwd=cwd or log.parent,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

            process = namespaces.within(namespace, start)
    except OSError as error:
        raise ClusterError(f"{command[0]} cannot be started: {error}") from error
    # The kernel lets go of the parent before the new program's environment is readable: until then a search for
    # the mark would miss the process.
    end = time.monotonic() + _READABLE
    while not carries(process.pid, mark) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.001)
    return process


def _mark_of(pid: int) -> str | None:
    """Return the mark of a process, empty where it has none; ``None``: it is gone or a zombie, or another user's.

    All processes of the machine are asked again and again: read directly, which takes a fraction of what psutil does.
    """
    with contextlib.suppress(OSError):
        if variables := Path(f"/proc/{pid}/environ").read_bytes():
            return os.fsdecode((b"\0" + variables).partition(_NAMED)[2].partition(b"\0")[0])
    return None


def _process(pid: int, mark: str) -> psutil.Process | None:
    if pid > 0:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if carries(pid, mark):
                return process
    return None


def carries(pid: int, mark: str) -> bool:
    """Tell whether process ``pid`` lives and carries ``mark``, or one below it where it ends in a slash."""
    value = _mark_of(pid)
    return value is not None and (value == mark or (mark.endswith("/") and value.startswith(mark)))


def members(mark: str) -> list[int]:
    """Return the ids of live processes whose mark is ``mark``, or starts with it where it ends in a slash."""
    return [pid for pid in psutil.pids() if carries(pid, mark)]


def destroy(mark: str, leaders: Sequence[int], clock: Clock, timeout: float = 20.0) -> None:
    """SIGKILL all processes with ``mark`` until none is left; the groups of ``leaders`` go at one blow.

    Raises ``ClusterError`` when some are still there after ``timeout`` seconds.
    """
    end = clock.now() + timeout
    seen = {pid: process for pid in {*members(mark), *leaders} if (process := _process(pid, mark))}
    for pid in leaders:
        if pid in seen:
            _kill_group(pid)
    # A process that is being taken down loses its environment, and so its mark, long before it is gone: its
    # threads still have to end, within their CPU quota.
    while left := {pid for pid, process in seen.items() if _lives(process)} | set(members(mark)):
        if clock.now() > end:
            raise ClusterError(f"processes {sorted(left)} are still there {timeout:.0f} s after SIGKILL")
        for pid in left:
            if process := _process(pid, mark):
                seen[pid] = process
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        clock.sleep(_PAUSE)


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def tail(log: Path, lines: int = 15) -> str:
    """Return the last lines of a log; a note when it cannot be read."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"({log} cannot be read: {error.strerror})"
