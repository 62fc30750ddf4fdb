"""One process at a time runs a run id.

In a local directory the operating system's lock holds: it is exact, and free the moment its holder dies. On S3, and
in directories whose file system has no locks, a *lease* does: a small file that its owner renews, and that counts as
free when it was not renewed for ``ttl`` seconds. What a lease can promise:

- With conditional writes (S3 through boto3, where that is installed) two processes never both get a free lease.
- Without them each writes, waits and reads back what is there. Two that begin within the same second both see the
  later writer win, unless a write takes longer than the wait.
- A holder that was stopped for longer than ``ttl`` may find at its next renewal that another has begun (``check``
  raises then). Until then both run: a lease cannot prevent that. Checkpoints have names of their own, so neither
  overwrites the other's.
- Clocks of the machines must agree to within a quarter of ``ttl``.
"""

import contextlib
import errno
import fcntl
import getpass
import json
import os
import socket
import threading
import uuid
import weakref
from datetime import UTC, datetime
from typing import Any, Self

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import RunLockedError, StorageError
from ebbflow.infra.storage import private
from ebbflow.infra.storage.files import NO_LOCKS
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.lease_files import LeaseFile, lease_file
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError

TTL = 60.0  # seconds
_LOOKED, _LOOKS = 0.05, 10  # s between tries, and tries: for the moment that somebody else's look takes
_DISCARDED = 20  # times in a row that a lock's file may be discarded under our hands
_FILE = "lock"
_LEASE = "lease.json"

_held: "weakref.WeakSet[RunLock]" = weakref.WeakSet()


class RunLock:
    """Holds a run's directory against other processes, on this machine and others.

    Args:
        place: the run's directory.
        run_id: for messages.
        ttl: seconds after which a lease that is not renewed is free.
        heartbeat: renew a lease in the background; without it call ``beat``.

    Raises ``OptionError``.
    """

    def __init__(
        self,
        place: StorageLocation,
        run_id: str,
        *,
        ttl: float = TTL,
        heartbeat: bool = True,
        clock: Clock | None = None,
    ) -> None:
        if not ttl > 0:
            raise OptionError(f"ttl must be > 0 s; got {ttl}")
        self._place = place
        self._run_id = run_id
        self._ttl = ttl
        self._heartbeat = heartbeat
        self._clock = clock or SystemClock()
        self._descriptor: int | None = None
        self._lease: _Lease | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def lingers(self) -> float:
        """Return for how many seconds the lock of a holder that died may still count; 0: it is free at once.

        A lease may look younger than it is by as much as clocks may differ.
        """
        return 0.0 if self._place.local else 1.25 * self._ttl

    @property
    def held(self) -> bool:
        """Tell whether this object holds the run, as far as it knows."""
        return self._descriptor is not None or (self._lease is not None and self._lease.lost is None)

    def acquire(self, *, take_over: bool = False) -> Self:
        """Take the run. Raises ``RunLockedError`` if another process has it, naming it and what to do.

        ``take_over`` takes a lease that is still running: for one whose holder is known to be dead. A lock of the
        operating system cannot be taken over; its holder lives.
        """
        if self.held:
            raise RunLockedError(f"this object holds run {self._run_id!r} already")
        with translated(f"lock the run {self._run_id!r} in {self._place.uri}"):
            if self._place.local and self._lock_file():
                return self
        lease = _Lease(lease_file(self._place, _LEASE, self._clock), self._ttl, self._clock, self._owner())
        with translated(f"lock the run {self._run_id!r} in {self._place.uri}"):
            other = lease.take(take_over)
        if other is not None:
            raise self._leased(other)
        self._lease = lease
        if self._heartbeat:
            self._stop.clear()
            self._thread = threading.Thread(target=self._renew, name=f"lease of {self._run_id}", daemon=True)
            self._thread.start()
        return self

    def look(self) -> None:
        """Raise ``RunLockedError``, which says who, if another process has the run. Takes and makes nothing.

        Somebody may take it right afterwards: ``acquire`` alone decides.
        """
        with translated(f"look who runs {self._run_id!r} in {self._place.uri}"):
            if self._place.local and self._look_at_file():
                return
            there = lease_file(self._place, _LEASE, self._clock).read()
        if there is not None and not _free(there[0], self._clock.now()):
            raise self._leased(there[0])

    def check(self) -> None:
        """Raise ``RunLockedError`` if the run is no longer ours: another took the lease, or it ran out."""
        if self._lease is not None and self._lease.lost is not None:
            raise RunLockedError(f"run {self._run_id!r} was lost: {self._lease.lost}")
        if not self.held:
            raise RunLockedError(f"run {self._run_id!r} is not held by this process; acquire it first")

    def beat(self) -> None:
        """Renew a lease; a lock needs nothing. What goes wrong is told by ``check``."""
        if self._lease is not None:
            self._lease.renew()

    def release(self) -> None:
        """Give the run free; never raises for storage that is away, since a lease runs out by itself."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5.0)
            self._thread = None
        if self._lease is not None:
            with contextlib.suppress(StorageError), translated(f"free the run {self._run_id!r}"):
                self._lease.free()
            self._lease = None
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._close()

    def discard(self) -> None:
        """Give the run free, which nobody needs any more: a lock's file goes with it.

        A lease stays behind as free: between freeing and removing it, another could have taken it.
        """
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._place.path(_FILE))
                os.rmdir(self._place.root)
        self.release()

    def __enter__(self) -> Self:
        return self if self.held else self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()

    def _lock_file(self) -> bool:
        """Lock the file; return whether this file system can. Raises ``RunLockedError``."""
        path = self._place.path(_FILE)
        for _ in range(_DISCARDED):
            locked = self._lock_path(path)
            if locked is not None:
                return locked
        raise RunLockedError(
            f"run {self._run_id!r} is begun and ended by others all the time; try again later"
        )

    def _lock_path(self, path: str) -> bool | None:
        """Do so once; ``None``: the file that was locked has been discarded meanwhile."""
        private.make_folder(self._place.root)
        try:
            descriptor = private.opener(path, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:
            return None  # its directory has gone
        try:
            if not self._flock(descriptor, fcntl.LOCK_EX, _LOOKS):
                os.close(descriptor)
                return False
        except BaseException:
            os.close(descriptor)
            raise
        if not _is_at(descriptor, path):
            os.close(descriptor)
            return None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(self._owner()).encode(), 0)
        self._descriptor = descriptor
        _held.add(self)
        return True

    def _look_at_file(self) -> bool:
        """Look whether the file is locked; return whether this file system can say. Raises ``RunLockedError``."""
        try:
            descriptor = os.open(self._place.path(_FILE), os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return not os.path.exists(self._place.path(_LEASE))
        try:
            return self._flock(descriptor, fcntl.LOCK_SH, 1)
        finally:
            os.close(descriptor)

    def _flock(self, descriptor: int, how: int, tries: int) -> bool:
        """Lock an open file; return whether its file system can. Raises ``RunLockedError`` for one that is held."""
        while True:
            tries -= 1
            try:
                fcntl.flock(descriptor, how | fcntl.LOCK_NB)
                return True
            except OSError as exc:
                if exc.errno in NO_LOCKS:
                    return False
                if exc.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                if not tries:
                    raise RunLockedError(
                        f"{self._held_by(_read(descriptor))}. To take over, stop that process; its lock is free when "
                        "it has ended. Or choose another run id"
                    ) from exc
            self._clock.sleep(_LOOKED)

    def _leased(self, other: dict[str, Any]) -> RunLockedError:
        until = _at(other["beat"] + other["ttl"])
        return RunLockedError(
            f"{self._held_by(other)}. If it is dead its lease ends at {until}, or at once with take_over=True; "
            f"if it lives, stop it or choose another run id"
        )

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _renew(self) -> None:
        while not self._clock.wait(self._stop, self._ttl / 4):
            self.beat()
            if not self.held:
                return

    def _owner(self) -> dict[str, Any]:
        try:
            user = getpass.getuser()
        except (OSError, KeyError):
            user = str(os.getuid())
        return {"host": socket.gethostname(), "pid": os.getpid(), "user": user, "since": self._clock.now()}

    def _held_by(self, other: dict[str, Any]) -> str:
        if "pid" not in other:
            return f"run {self._run_id!r} is being run by another process"
        return (
            f"run {self._run_id!r} is being run by process {other['pid']} of {other['user']} on {other['host']}, "
            f"since {_at(other['since'])}"
        )


class _Lease:
    """One holder's view of a lease file."""

    def __init__(self, file: LeaseFile, ttl: float, clock: Clock, owner: dict[str, Any]) -> None:
        self._file, self._ttl, self._clock = file, ttl, clock
        self._content = owner | {"token": uuid.uuid4().hex, "ttl": ttl}
        self._version = ""
        self._renewed = 0.0
        self.lost: str | None = None

    def take(self, take_over: bool) -> dict[str, Any] | None:
        """Write the lease if it is free; return its content if it is another's."""
        there = self._file.read()
        if there is not None and not take_over and not _free(there[0], self._clock.now()):
            return there[0]
        now = self._clock.now()
        version = self._file.write(self._content | {"beat": now}, there[1] if there else None)
        if version is None:
            there = self._file.read()
            if there is None or there[0].get("token") != self._content["token"]:
                return there[0] if there else {"beat": now, "ttl": self._ttl}
            version = there[1]  # it was written, and the answer was lost on its way
        self._version, self._renewed = version, now
        return None

    def renew(self) -> None:
        if self.lost is not None:
            return
        now = self._clock.now()
        try:
            with translated("renew the lease"):
                version = self._file.write(self._content | {"beat": now}, self._version)
        except StorageError as exc:
            if now - self._renewed > self._ttl:
                self.lost = f"its lease ran out, since it could not be renewed for {self._ttl:g} s ({exc})"
            return
        if version is None:
            with contextlib.suppress(StorageError), translated("read the lease"):
                there = self._file.read()
                if there is not None and there[0].get("token") == self._content["token"]:
                    # an answer was lost on its way, not the lease
                    self._version, self._renewed = there[1], now
                    return
            self.lost = "another process has taken it over"
            return
        self._version, self._renewed = version, now

    def free(self) -> None:
        if self.lost is None:
            self._file.write(self._content | {"beat": self._clock.now(), "free": True}, self._version)


def _free(lease: dict[str, Any], now: float) -> bool:
    return bool(lease.get("free")) or now - lease["beat"] > lease["ttl"]


def _is_at(descriptor: int, path: str) -> bool:
    """Tell whether the open file is the one at ``path``."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)


def _read(descriptor: int) -> dict[str, Any]:
    try:
        content = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _forget_after_fork() -> None:
    """Close a forked child's copies, with which it would hold its parent's lock beyond the parent's death."""
    for lock in list(_held):
        lock._close()


os.register_at_fork(after_in_child=_forget_after_fork)
