"""``LogShipper``: what processes write on a node's disk is copied to the run's directory in object storage meanwhile.

A log file becomes a folder of segments. A segment's name is the offset at which it begins, 20 digits; the last one is
written again while it is short, so that a run has few objects and a lost node has lost the last second at most.

Run as ``python -m ebbflow.infra.logs.shipping FOLDER NODE DESTINATION``, this module ships the logs of one node until
its standard input ends; for each byte that comes there it makes a pass at once and answers with one.
"""

import contextlib
import os
import select
import subprocess
import sys
import time
from pathlib import Path

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import InfraError
from ebbflow.infra.storage import private
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.places import StorageLocation

SEGMENT = 1 << 20  # bytes
_EVERY = 1.0  # s between passes
_RETRY = 30.0  # s between passes at most while the storage refuses
_FLUSH = 2.0  # s that a node waits for the last lines
_MODULE = "ebbflow.infra.logs.shipping"


def segment_name(offset: int) -> str:
    """Return the name of the segment that begins at ``offset`` bytes of a log."""
    return f"{offset:020d}"


class LogShipper:
    """Copies the logs of one node.

    Args:
        folder: of the run's logs on this node: ``generation-N/NODE/FILE`` in it are shipped, of this node only.
        node: its name.
        destination: the run's ``logs`` in object storage.
    """

    def __init__(self, folder: Path, node: str, destination: StorageLocation) -> None:
        self._folder, self._node, self._destination = folder, node, destination
        self._shipped: dict[Path, int] = {}  # bytes

    def ship(self) -> None:
        """Copy what is new. Raises ``StorageError``; the next call continues from there."""
        for path in sorted(self._folder.glob(f"generation-*/{self._node}/*")):
            if path.is_file():
                self._ship(path)

    def _ship(self, path: Path) -> None:
        done = self._shipped.get(path, 0)
        size = path.stat().st_size
        name = path.relative_to(self._folder).as_posix()
        while done < size:
            begin = done - done % SEGMENT
            with path.open("rb") as file:
                file.seek(begin)
                content = file.read(SEGMENT)
            with translated(f"write the log {self._destination}/{name}"):
                self._destination.write(f"{name}/{segment_name(begin)}", content)
            done = self._shipped[path] = begin + len(content)


class ShippingProcess:
    """A node's handle on the process that ships its logs.

    Args:
        folder: see ``LogShipper``.
        node: see ``LogShipper``.
        destination: address of the run's logs.
        log: file for what the process itself has to say.
    """

    def __init__(self, folder: Path, node: str, destination: str, log: Path) -> None:
        with private.open_file(log, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE, str(folder), node, destination],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def flush(self) -> None:
        """Wait until what was written before is shipped, for 2 s at most."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(b"f")
            self._process.stdin.flush()
            if select.select([self._process.stdout], [], [], _FLUSH)[0]:
                os.read(self._process.stdout.fileno(), 64)


def main(folder: str, node: str, destination: str) -> None:
    """Ship until standard input ends."""
    os.nice(10)  # the training goes first
    shipper = LogShipper(Path(folder), node, StorageLocation(destination))
    delay, parent, clock = _EVERY, os.getppid(), SystemClock()
    again = 0.0
    while True:
        ready = select.select([0], [], [], _EVERY)[0]
        asked = os.read(0, 64) if ready else None
        ended = asked == b"" or os.getppid() != parent
        if asked or ended or clock.now() >= again:
            try:
                shipper.ship()
                delay = _EVERY
            except (InfraError, OSError) as error:
                print(time.strftime("%H:%M:%S"), error, file=sys.stderr, flush=True)
                again, delay = clock.now() + delay, min(2 * delay, _RETRY)
        if ended:
            return
        if asked:
            os.write(1, b".")


if __name__ == "__main__":
    main(*sys.argv[1:4])
