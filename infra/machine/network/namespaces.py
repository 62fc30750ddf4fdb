"""Network namespaces, by name as ``ip netns`` knows them. A thread is in one; what it starts is in it, too."""

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from ebbflow.infra.errors import ClusterError

FOLDER = Path("/run/netns")
TIMEOUT = 30.0  # s for what the kernel does in milliseconds
_CLONE_NEWNET = 0x40000000
_MS_BIND, _MS_REC, _MS_SHARED = 0x1000, 0x4000, 0x100000
_MNT_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)
_T = TypeVar("_T")


def create(name: str) -> None:
    """Make a namespace, in which there is nothing but loopback; one that is there stays. Raises ``ClusterError``."""
    path = FOLDER / name
    if exists(name):
        return
    with _told(f"the network namespace {name} cannot be made"):
        FOLDER.mkdir(mode=0o755, parents=True, exist_ok=True)
        _share()
        path.touch(mode=0o444)
        try:
            _alone(lambda: _make(path))
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def _share() -> None:
    """Make the directory a mount, once, that all look into from wherever they are, as ``ip netns add`` does."""
    try:
        _mount("none", FOLDER, _MS_SHARED | _MS_REC)
    except OSError:  # it is no mount yet
        _mount(str(FOLDER), FOLDER, _MS_BIND)
        _mount("none", FOLDER, _MS_SHARED | _MS_REC)


def _make(path: Path) -> None:
    _check(_libc.unshare(_CLONE_NEWNET))
    _mount("/proc/thread-self/ns/net", path, _MS_BIND)


def exists(name: str) -> bool:
    """Tell whether there is such a namespace, whole: one that was interrupted at its birth is an empty file."""
    with contextlib.suppress(OSError):
        path = FOLDER / name
        return path.stat().st_dev != FOLDER.stat().st_dev
    return False


def names(beginning: str) -> list[str]:
    """Return the namespaces whose names begin so, halves of them too."""
    with contextlib.suppress(OSError):
        return sorted(entry.name for entry in FOLDER.iterdir() if entry.name.startswith(beginning))
    return []


def remove(name: str) -> None:
    """Take a namespace's name away; it is gone with its last process. Nothing happens without one.

    Raises ``ClusterError``.
    """
    path = FOLDER / name
    with _told(f"the network namespace {name} cannot be removed"), contextlib.suppress(FileNotFoundError):
        if exists(name):
            try:
                _check(_libc.umount2(os.fsencode(path), _MNT_DETACH))
            except (
                OSError
            ):  # another process may have been quicker: a fleet's supervisor beside who kills a node
                if exists(name):
                    raise
        path.unlink()


def within(name: str, do: Callable[[], _T], timeout: float = TIMEOUT) -> _T:
    """Return what ``do`` returns, called in a namespace by a thread of its own; "" is where this process is.

    Sockets that it makes and processes that it starts are there for good. Raises what ``do`` raises, and
    ``ClusterError`` for a namespace that is not there, and when it takes more than ``timeout`` seconds.
    """
    if not name:
        return do()

    def entered() -> _T:
        with _told(f"the network namespace {name} cannot be entered"):
            descriptor = os.open(FOLDER / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                _check(_libc.setns(descriptor, _CLONE_NEWNET))
            finally:
                os.close(descriptor)
        return do()

    return _alone(entered, timeout)


def aside(do: Callable[[], _T]) -> _T:
    """Return what ``do`` returns, called in a new namespace without a name, which goes with what ``do`` leaves there.

    Raises what ``do`` raises, and ``OSError`` where this process may not make one.
    """

    def entered() -> _T:
        _check(_libc.unshare(_CLONE_NEWNET))
        return do()

    return _alone(entered)


def _alone(do: Callable[[], _T], timeout: float = TIMEOUT) -> _T:
    """Call ``do`` in a thread that ends with it, so that no other is where that has gone."""
    found: list[_T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(do())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="namespace", daemon=True)
    thread.start()
    thread.join(timeout)
    if failed:
        raise failed[0]
    if not found:
        raise ClusterError(f"the kernel has not done in {timeout:g} s what a network namespace was asked for")
    return found[0]


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ClusterError(f"{what}: {error.strerror or error}") from error


def _mount(source: str, target: Path, flags: int) -> None:
    _check(_libc.mount(source.encode(), os.fsencode(target), b"none", ctypes.c_ulong(flags), None))


def _check(status: int) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
