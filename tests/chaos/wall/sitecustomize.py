"""Gives every Python process that has this folder on its path a wall clock that a test can set.

The file that ``EBBFLOW_TEST_WALL`` names holds the seconds by which ``time.time`` is ahead of the machine's clock; it
is looked at again and again, so that the clock jumps in processes that run, too. Monotonic time stays as it is.
"""

import os
import time

_FILE = os.environ.get("EBBFLOW_TEST_WALL", "")
_LOOK = 0.05  # s between looks at the file


class _Wall:
    def __init__(self, path: str) -> None:
        self._path, self._offset, self._looked = path, 0.0, float("-inf")
        self._time, self._time_ns, self._monotonic = time.time, time.time_ns, time.monotonic

    def offset(self) -> float:
        now = self._monotonic()
        if now - self._looked > _LOOK:
            self._looked = now
            try:
                with open(self._path) as file:
                    self._offset = float(file.read() or 0.0)
            except (OSError, ValueError):  # replaced at this moment: it is looked at again soon
                pass
        return self._offset

    def time(self) -> float:
        return self._time() + self.offset()

    def time_ns(self) -> int:
        return self._time_ns() + int(self.offset() * 1e9)


if _FILE:
    _wall = _Wall(_FILE)
    time.time, time.time_ns = _wall.time, _wall.time_ns
