"""Small file operations shared by the store, the caches and results: atomic writes, locks, listings."""

import errno
import fcntl
import logging
import os
import re
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import ReportError, StorageError
from ebbflow.infra.storage import private


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a table or checkpoint."""

    path: str  # as pyarrow.fs wants it, without scheme
    size: int  # bytes
    modified: float  # seconds since the Unix epoch; 0 when the storage does not tell
    xxh64: str = ""  # of the whole file as it was written; empty for a user's tables, which carry none


In = TypeVar("In")
Out = TypeVar("Out")

PARALLEL_READS = 8
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""Errors of a file system that has no locks."""
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EMLINK)
"""Errors of a file system that has no hard links."""
LOCK_TIMEOUT = 30.0  # seconds
_LOCK_POLL = 0.01  # seconds
_LOCK_TOLD = 1.0  # seconds of waiting after which it is said for whom
_DIGITS = re.compile(r"(\d+)")
_HOLDER = 200  # bytes of a lock file that say who holds it

log = logging.getLogger(__name__)


def hidden(name: str) -> bool:
    """Tell whether readers of a directory must skip ``name`` (``_SUCCESS``, ``.crc``, temporary files)."""
    return name.startswith(("_", ".")) or name.endswith(".crc")


def listing(filesystem: Any, folder: str, *, recursive: bool = False) -> list[Any]:
    """Return the ``pyarrow.fs.FileInfo`` of all in ``folder``, sorted by path; a missing one is empty."""
    from pyarrow.fs import FileSelector

    selector = FileSelector(folder, allow_not_found=True, recursive=recursive)
    for again in (True, True, False):
        try:
            found = filesystem.get_file_info(selector)
            break
        except FileNotFoundError:  # a directory has gone since it was seen
            if not again:
                raise
    # S3 lists the folder's own marker object as well
    return sorted((info for info in found if info.path.rstrip("/") != folder), key=lambda info: info.path)


def natural(path: str) -> list[tuple[int, int, str]]:
    """Return a sort key in which ``data_2`` comes before ``data_10``."""
    pieces = _DIGITS.split(path)
    return [(1, int(p), "") if p.isdigit() else (0, 0, p) for p in pieces]


def entry(info: Any) -> FileEntry:
    """Return the ``FileEntry`` of a ``pyarrow.fs.FileInfo``."""
    return FileEntry(info.path, int(info.size or 0), (info.mtime_ns or 0) / 1e9)


def in_parallel(function: Callable[[In], Out], items: Sequence[In]) -> list[Out]:
    """Return ``function`` of each item, in order, reading a few at a time; the first error is raised."""
    if len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(PARALLEL_READS, len(items))) as pool:
        return list(pool.map(function, items))


def write_atomic(filesystem: Any, scheme: str, path: str, data: bytes, *, public: bool = False) -> None:
    """Write a small file so that readers see the old or the new content, never a part.

    Locally a synced temporary file is renamed; on S3 an upload becomes visible as a whole. It is private, see
    ``private``, unless ``public``: readable by all users of the machine.
    """
    if scheme != "file":
        with filesystem.open_output_stream(path) as out:
            out.write(data)
        return
    with _temporary(path, data, public) as temporary:
        os.replace(temporary, path)


def write_once(path: str, data: bytes) -> bool:
    """Create a local file with ``data`` unless it exists; tell whether this call made it. Atomic."""
    with _temporary(path, data) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as exc:
            # file systems without hard links; callers hold a lock as well
            if exc.errno not in NO_LINKS:
                raise
            if os.path.exists(path):
                return False
            os.replace(temporary, path)
        sync_folder(os.path.dirname(path) or ".")
        return True


@contextmanager
def locked(path: str, clock: Clock, timeout: float = LOCK_TIMEOUT) -> Iterator[None]:
    """Hold the lock file ``path`` (local) against other threads and processes; a dead holder's lock is free.

    Who holds it is logged after a second of waiting. Raises ``StorageError``, which says who, when another holds it
    for longer than ``timeout`` seconds.
    """
    descriptor = private.opener(path, os.O_RDWR | os.O_CREAT)
    try:
        waited = 0.0
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as exc:
                if exc.errno in NO_LOCKS:
                    break  # no locks here; links still let one committer win
                if exc.errno not in (errno.EAGAIN, errno.EACCES, errno.EINTR):
                    raise
            if waited >= timeout:
                raise StorageError(
                    f"cannot lock {path}: {_holder(descriptor)} held it for over {timeout:g} s"
                )
            if waited < _LOCK_TOLD <= waited + _LOCK_POLL:
                log.warning("waiting for %s, which %s holds", path, _holder(descriptor))
            clock.sleep(_LOCK_POLL)
            waited += _LOCK_POLL
        held = f"process {os.getpid()} on {socket.gethostname()}, since {clock.now():.0f}"
        os.pwrite(descriptor, held.ljust(_HOLDER).encode()[:_HOLDER], 0)
        yield
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> str:
    """Return who has written into a lock file last, for people."""
    said, _, since = (
        os.pread(descriptor, _HOLDER, 0).decode(errors="replace").strip(" \0").rpartition(", since ")
    )
    if not said or not since.isdecimal():
        return "another process"
    return f"{said} (since {datetime.fromtimestamp(int(since), UTC):%Y-%m-%d %H:%M:%S} UTC)"


@contextmanager
def _temporary(path: str, data: bytes, public: bool = False) -> Iterator[str]:
    folder, name = os.path.split(path)
    folder = folder or "."
    private.make_folder(folder)
    temporary = os.path.join(folder, f".{name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb", opener=private.opener) as file:
            if public:
                os.fchmod(file.fileno(), 0o644)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)


def sync_folder(folder: str) -> None:
    """Make the names in a local directory durable, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # some file systems cannot sync a directory
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path | str, text: str, *, kept: bool = False) -> Path:
    """Write ``text`` to ``path`` so that readers see the old file or the whole new one, never a part.

    Missing directories are made. It follows the umask, as what a user names does; with ``kept`` it is part of a run
    or store, for its user alone. Raises ``ReportError`` when the directory cannot be written.
    """
    target = Path(path)
    temporary = target.parent / f".{target.name}.{uuid.uuid4().hex}"
    try:
        if kept:
            private.make_folder(target.parent)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "x", encoding="utf-8", opener=private.opener if kept else None) as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ReportError(f"cannot write {target}: {error.strerror or error}") from error
    return target


GIB = 2**30


def home() -> Path:
    """Return Ebbflow's own folder: ``$EBBFLOW_HOME``, or ``~/.cache/ebbflow``."""
    return Path(os.environ.get("EBBFLOW_HOME") or Path.home() / ".cache" / "ebbflow")
