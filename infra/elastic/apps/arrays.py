"""Reads the input of an application: an ``.npz`` file, local or in object storage."""

import contextlib
import functools
import io
from typing import Any

import numpy as np

from ebbflow.infra.clock import SystemClock

_TRIES = 4  # to read a file from object storage
_AGAIN = 1.0  # seconds before the second one; doubled each time


def opened(path: str) -> Any:
    """Return the arrays of the ``.npz`` file at a path or an address such as ``s3://...``; to be used in ``with``.

    The file at an address is fetched once and kept until another is opened or ``forget`` is called, for each executor
    of a process reads its part of it. Its arrays cannot be written to.

    Raises ``OSError``, and for a damaged file whatever NumPy, zip and zlib make of it.
    """
    if "://" in path:
        return contextlib.nullcontext(_fetched(path))
    return np.load(path, allow_pickle=False)


def forget() -> None:
    """Keep no file any longer."""
    _fetched.cache_clear()


@functools.lru_cache(maxsize=1)
def _fetched(path: str) -> dict[str, Any]:
    with np.load(io.BytesIO(_read(path)), allow_pickle=False) as file:
        found = {name: file[name] for name in file.files}
    for array in found.values():
        array.setflags(write=False)
    return found


def _read(path: str) -> bytes:
    """Return the content of a file in object storage, which may be out of reach for a moment."""
    from ebbflow.infra.storage.places import StorageLocation  # workers start without

    folder, _, name = path.rpartition("/")
    for number in range(_TRIES - 1):
        try:
            return StorageLocation(folder).read(name)
        except (FileNotFoundError, PermissionError):
            raise
        except OSError:
            SystemClock().sleep(_AGAIN * 2**number)
    return StorageLocation(folder).read(name)
