"""How many bytes cross the links of a local fleet's nodes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.machine.network.plan import beginning

_LOOK = 0.25  # s
_COUNTERS = {"sent": "rx_bytes", "received": "tx_bytes"}  # by nodes: of the machine's ends of their links
_CLOCK = SystemClock()


class Links:
    """Counts the bytes that cross the nodes' links, those of nodes that are gone included."""

    def __init__(self, tag: str) -> None:
        self._prefix = beginning(tag)
        self._first: dict[tuple[str, str], int] = {}
        self._last: dict[tuple[str, str], int] = {}
        self._stop = threading.Event()

    @contextmanager
    def counting(self) -> Iterator["Links"]:
        """Count until the block ends."""
        self._look(self._first)
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join()

    def megabytes(self, way: str) -> float:
        """Return what nodes have ``sent`` or ``received``, all together."""
        return sum(n - self._first.get(key, 0) for key, n in self._last.items() if key[1] == way) / 1e6

    def _run(self) -> None:
        while True:
            self._look(self._last)
            if _CLOCK.wait(self._stop, _LOOK):
                self._look(self._last)
                return

    def _look(self, into: dict[tuple[str, str], int]) -> None:
        for path in Path("/sys/class/net").glob(f"{self._prefix}*"):
            if path.name[len(self._prefix) + 1 :].isdigit():  # a node's, not the bridge
                for way, counter in _COUNTERS.items():
                    try:
                        into[path.name, way] = int((path / "statistics" / counter).read_text())
                    except OSError:  # it went with its node
                        continue
