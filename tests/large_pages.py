"""Large pages for a process that others are forks of: a fork, and its end, go through the tables of all its pages."""

import ctypes
from pathlib import Path

_SIZE = 2 << 20  # bytes of a large page
_COLLAPSE = 25  # of madvise; Linux 6.1
_FULL = 0.5  # of a region: what has less in memory would grow


def use_large_pages() -> None:
    """Move this process's memory, as far as it is not of files, to large pages where the system can."""
    madvise = ctypes.CDLL(None).madvise
    begin = end = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *words = line.split()
        if first == "Rss:" and begin < end and int(words[0]) << 10 > _FULL * (end - begin):
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _COLLAPSE)
        elif not first.endswith(":"):  # a region's first line
            ours = words[0] == "rw-p" and words[3] == "0"
            low, high = (int(one, 16) // _SIZE * _SIZE for one in first.split("-"))
            begin, end = (low + _SIZE, high) if ours else (0, 0)
