"""Directories that are built once on a machine, however many processes want them at the same time."""

import json
import shutil
import subprocess
import threading
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import TrainingError
from ebbflow.infra.storage import files, private

TIMEOUT = 3600.0
"""Seconds for one command that builds, and for another process that builds the same."""
_LAST = 12  # lines of a command's output that an error holds
_LONGEST = 300  # characters of a line


def build_once(folder: Path, key: str, build: Callable[[Path], None], clock: Clock) -> Path:
    """Return the directory of ``key`` in ``folder``, filled by ``build`` unless it is there.

    One process at a time builds a key. A directory counts once a file that names it is written, so that a crash
    leaves nothing half: the next process begins with a new one.

    Raises ``StorageError`` where another process builds it for longer than ``TIMEOUT``, and what ``build`` raises.
    """
    pointer = folder / f"{key}.json"
    if (found := _pointed(pointer)) is not None:
        return found
    private.make_folder(folder)
    with files.locked(str(folder / f".{key}.lock"), clock, TIMEOUT):
        if (found := _pointed(pointer)) is not None:
            return found
        for left in folder.glob(f"{key}-*"):
            shutil.rmtree(left, ignore_errors=True)
        target = folder / f"{key}-{uuid.uuid4().hex[:8]}"
        private.make_folder(target)
        try:
            build(target)
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise
        files.write_atomic(None, "file", str(pointer), json.dumps({"directory": target.name}).encode())
        return target


def _pointed(pointer: Path) -> Path | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = pointer.parent / json.loads(pointer.read_text())["directory"]
        return found if found.is_dir() else None
    return None


def run_command(
    command: Sequence[str],
    what: str,
    folder: Path,
    environment: Mapping[str, str],
    secrets: Sequence[str] = (),
    timeout: float = TIMEOUT,
) -> None:
    """Run a command in ``folder`` and pass its output on, with ``***`` in place of ``secrets``.

    It is killed, with all that it has started, after ``timeout`` seconds.

    Raises ``TrainingError`` with the last lines of its output where it fails.
    """
    last: deque[str] = deque(maxlen=_LAST)
    with subprocess.Popen(
        command,
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        late = threading.Event()

        def end() -> None:
            late.set()
            with suppress(psutil.Error):
                for one in (*psutil.Process(process.pid).children(recursive=True), process):
                    one.kill()

        timer = threading.Timer(timeout, end)
        timer.daemon = True
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                shown = redacted(line.rstrip("\n"), secrets)
                print(shown, flush=True)
                if shown.strip():
                    last.append(shown[:_LONGEST])
            process.wait()
        finally:
            timer.cancel()
    if late.is_set():
        raise TrainingError(f"{what} must end within {timeout:g} s, and did not:\n" + "\n".join(last))
    if process.returncode:
        said = "\n".join(last) or "it printed nothing"
        raise TrainingError(f"{what} ended with status {process.returncode}:\n{said}")


def redacted(text: str, secrets: Sequence[str]) -> str:
    """Return a text without the values in ``secrets``."""
    for value in sorted(secrets, key=len, reverse=True):
        if len(value) > 3:  # shorter ones are no secrets, and stand in any text
            text = text.replace(value, "***")
    return text
