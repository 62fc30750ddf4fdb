"""A store as slow as one wants: each request takes its time, and all of them share one bandwidth."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ebbflow.infra.storage.places import Sink, StorageLocation

FIRST_BYTE = 0.020  # s that a request takes
BANDWIDTH = 50e6  # bytes/s of all requests together


class SlowLocation(StorageLocation):
    """A local directory behind a slow network."""

    bandwidth = BANDWIDTH
    _one = threading.Lock()  # the network is one transfer's at a time

    def _take(self, size: int) -> None:
        with SlowLocation._one:
            time.sleep(FIRST_BYTE + size / self.bandwidth)

    @contextmanager
    def writing(self, name: str) -> Iterator[Sink]:
        """Write a file, and wait as long as its transfer takes."""
        with super().writing(name) as sink:
            yield sink
        self._take(sink.size)

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, slowly."""
        super().write(name, data)
        self._take(len(data))

    def read(self, name: str) -> bytes:
        """Read a file, slowly."""
        data = super().read(name)
        self._take(len(data))
        return data

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Read a part of a file, slowly."""
        data = super().read_range(name, offset, length)
        self._take(len(data))
        return data

    def remove(self, name: str) -> None:
        """Delete a file, which takes a request."""
        super().remove(name)
        self._take(0)
