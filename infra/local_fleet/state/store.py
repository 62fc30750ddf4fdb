"""The file that holds a fleet's state, read and changed by every process that deals with the fleet."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import ClusterError, StorageError
from ebbflow.infra.local_fleet.state.fleet_state import LocalFleetState
from ebbflow.infra.spark.cluster.state import ebbflow_home
from ebbflow.infra.storage import checksums, files, private, user_files
from ebbflow.infra.storage.values import Form
from ebbflow.planners.errors import OptionError

FORMAT = 2
STATE, LOCK, STARTING = "fleet.json", ".lock", ".starting"
_STATES = Form(strict=True)
_AGAIN = 5  # attempts at a lock whose directory is being removed
_TICK = 100_000_000  # ns, longer than any file system takes the same time for


class LocalFleetStateFile:
    """The state file of one fleet.

    Reads are whole and cheap; a lock keeps the changes of threads and processes apart.
    """

    def __init__(self, folder: Path, clock: Clock | None = None) -> None:
        self.folder = folder
        self.path = folder / STATE
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._read: tuple[tuple[int, int, int], LocalFleetState] | None = None

    @classmethod
    def of(cls, name: str, clock: Clock | None = None) -> "LocalFleetStateFile":
        return cls(ebbflow_home() / "fleets" / name, clock)

    def read(self) -> LocalFleetState | None:
        """Return the state, or ``None`` without one. Raises ``StorageError`` for a file that cannot be read."""
        try:
            stat = self.path.stat()
            version = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            with self._lock:
                if self._read is not None and self._read[0] == version:
                    return self._read[1]
            # within one tick of the file system's clock a second change could look like the first
            settled = abs(time.time_ns() - stat.st_mtime_ns) > _TICK
            state = decoded(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OptionError) as error:
            raise StorageError(
                f"the fleet's state file {self.path} cannot be understood ({type(error).__name__}: "
                f"{user_files.reason(error)}); end what uses it and delete it"
            ) from error
        except OSError as error:
            raise StorageError(
                f"the fleet's state file {self.path} cannot be read: {error.strerror}"
            ) from error
        if settled:
            with self._lock:
                self._read = version, state
        return state

    def change(self, uid: str, how: Callable[[LocalFleetState], LocalFleetState]) -> LocalFleetState:
        """Replace the state by ``how`` of it, durably before this returns; the revision follows what is seen.

        ``how`` must be quick. Raises ``ClusterError`` when the fleet ``uid`` is no longer there, ``StorageError``.
        """
        with self.locked():
            before = self.read()
            if before is None or before.uid != uid:
                raise ClusterError(f"the fleet {self.folder.name!r} has been taken down")
            after = before.after(how(before))
            if after != before:
                self.write(after)
            return after

    def write(self, state: LocalFleetState) -> None:
        """Replace the state, atomically; only for a holder of the lock. Raises ``StorageError``."""
        try:
            files.write_atomic(None, "file", str(self.path), encoded(state))
            files.sync_folder(str(self.folder))
        except OSError as error:
            raise StorageError(
                f"the fleet's state file {self.path} cannot be written: {error.strerror}"
            ) from error

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Hold the lock of the state."""
        return self._held(LOCK)

    def starting(self) -> contextlib.AbstractContextManager[None]:
        """Keep others from starting the fleet, and from removing its directory."""
        return self._held(STARTING)

    @contextlib.contextmanager
    def _held(self, name: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for attempt in range(_AGAIN):
                try:
                    private.make_folder(self.folder)
                    stack.enter_context(files.locked(str(self.folder / name), self._clock))
                    break
                except FileNotFoundError as error:  # the directory was removed a moment ago
                    if attempt == _AGAIN - 1:
                        raise StorageError(f"{self.folder} cannot be locked: {error.strerror}") from error
                except OSError as error:
                    raise StorageError(f"{self.folder} cannot be made: {error.strerror}") from error
            yield


def encoded(state: LocalFleetState) -> bytes:
    """Return a fleet's state as its file holds it, with a checksum."""
    return checksums.sealed({"format": FORMAT, **asdict(state)}, indent=1)


_RENAMED = {
    "least": "min_nodes",
    "most": "max_nodes",
    "boot": "provision_time",
    "cpus": "cpus_per_slot",
    "shut": "outage",
}


def _rename(row: dict[str, Any]) -> None:
    """Give the fields of format 1 the names of format 2."""
    for part in (*row["pools"], *row["plans"].values()):
        for old in _RENAMED.keys() & part.keys():
            part[_RENAMED[old]] = part.pop(old)


def decoded(data: bytes) -> LocalFleetState:
    """Return the state that ``encoded`` wrote. Raises ``ValueError``, ``KeyError``, ``TypeError`` for other bytes."""
    row = checksums.unsealed(data)
    if (form := row.pop("format")) == 1:
        _rename(row)
    elif form != FORMAT:
        raise ValueError(f"format must be {FORMAT}, got {form!r}")
    state = _STATES.from_plain(LocalFleetState, row)
    if missing := [pool.name for pool in state.pools if pool.name not in state.plans]:
        raise ValueError(f"pool {missing[0]} has no plan")
    return state
