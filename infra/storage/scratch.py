"""Directories of one process for what it needs only while it runs: spills, sockets, a driver's log.

A process that is killed leaves its own behind, with gigabytes of spills or with secret settings. Each therefore holds
a lock, which the system releases however its process ends, and whoever makes another one removes those of the same
user and kind whose lock is free.
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import tempfile
import weakref
from pathlib import Path

from ebbflow.infra.storage import private
from ebbflow.infra.storage.files import NO_LOCKS
from ebbflow.infra.storage.filesystems import translated

_LOCK = ".lock"
_TRIES = 100  # of making one; each fails only where another process removes it at that moment


class ScratchFolder:
    """A new directory for its user alone, which goes when it is closed or collected, and when its process ends.

    Where the file system has no locks, one of a killed process stays.

    Args:
        kind: what it is for; part of its name.

    Raises ``StorageError`` where the temporary directory cannot take it.
    """

    def __init__(self, kind: str) -> None:
        # a shared temporary directory may have locks that count on one machine alone
        host = hashlib.sha256(platform.node().encode()).hexdigest()[:6]
        prefix = f"ebbflow-{kind}-{host}-"
        try:
            _sweep(Path(tempfile.gettempdir()), prefix)
            self.path, descriptor = _made(prefix)
        except OSError:
            with translated("make a temporary directory"):  # only now: it imports pyarrow
                raise
        self._end = weakref.finalize(self, _remove, self.path, descriptor, os.getpid())

    def close(self) -> None:
        """Remove it with all that is in it; what cannot be removed now is left to the next process."""
        self._end()


def _made(prefix: str) -> tuple[Path, int | None]:
    for _ in range(_TRIES):
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        # a sweep that comes between these two lines takes a directory without a lock for none of ours
        descriptor = private.opener(folder / _LOCK, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(folder / _LOCK)):
                return folder, descriptor
        except OSError as error:
            if error.errno in NO_LOCKS:
                os.close(descriptor)
                (folder / _LOCK).unlink()  # so that a sweep passes it over
                return folder, None
        os.close(descriptor)
        shutil.rmtree(folder, ignore_errors=True)
    raise OSError(f"no directory {prefix}* in {tempfile.gettempdir()} could be locked")


def _sweep(place: Path, prefix: str) -> None:
    """Remove what killed processes of this user have left."""
    for folder in place.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _emptied(folder)
            finally:
                os.close(descriptor)


def _emptied(folder: Path) -> None:
    """Remove a directory, its lock last: where something stays, the next sweep finds it again. Raises ``OSError``."""
    for one in os.scandir(folder):
        if one.is_dir(follow_symlinks=False):
            shutil.rmtree(one, ignore_errors=True)
        elif one.name != _LOCK:
            os.unlink(one)
    if os.listdir(folder) in ([], [_LOCK]):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(folder / _LOCK)
        os.rmdir(folder)


def _remove(folder: Path, descriptor: int | None, process: int) -> None:
    if process == os.getpid():  # and not a fork of it, which has the lock as well
        with contextlib.suppress(OSError):
            _emptied(folder)
    if descriptor is not None:
        with contextlib.suppress(OSError):
            os.close(descriptor)
