"""The registry of active queries on a cluster: a small file for each, in a directory that all of them can reach.

A file per query, rather than one database, works on shared file systems and on S3 alike, needs no lock, and
a reader can never be stopped by a holder that hangs. A holder rewrites its file with a growing number every
second or so. Readers measure by their own clock for how long that number has stood still, so the clocks of
different machines, and their steps, do not matter.
"""

import json
import logging
import math
import os
import re
import socket
import threading
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import InfraError
from ebbflow.infra.protocols import Claim
from ebbflow.infra.storage import files, private
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError

_FORMAT = 1
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RegistryIntervals:
    """Seconds. On S3 every look and every sign of life is a request, so they are rarer there."""

    beat: float = 1.0  # between two signs of life
    expiry: float = 5.0  # without one, after which a claim counts no more
    look: float = 0.2  # what ``claims`` returns may be this old
    remains: float = 600.0  # after which a file without signs of life is deleted


LOCAL_PACE = RegistryIntervals()
S3_PACE = RegistryIntervals(beat=5.0, expiry=20.0, look=1.5)


class FileShareRegistry:
    """A ``ShareRegistry`` in ``<folder>/<cluster>``; ``folder`` is local, on a shared file system or on S3."""

    def __init__(
        self,
        folder: StorageLocation,
        cluster: str,
        clock: Clock | None = None,
        pace: RegistryIntervals | None = None,
    ) -> None:
        self._place = folder.under(_name(cluster))
        self._clock = clock or SystemClock()
        self._pace = pace or (LOCAL_PACE if folder.local else S3_PACE)
        self._lock = threading.Lock()
        self._beats: dict[str, tuple[int, float]] = {}  # file name -> (its number, when that was first seen)
        self._looked = -math.inf
        self._found: tuple[Claim, ...] = ()

    def join(self, weight: float, *, limit: float = math.inf, application: str = "") -> "FileShareHandle":
        """Enter a query and keep its claim alive. Raises ``OptionError`` for a weight that is not positive and
        finite, ``StorageError`` when the directory cannot be written."""
        if not 0 < weight < math.inf:
            raise OptionError(f"weight must be > 0 and finite; got {weight}")
        claim = Claim(uuid.uuid4().hex, float(weight), limit, application)
        # the name orders claims by arrival, the same for every reader
        name = f"{max(0, round(self._clock.now() * 1000)):015d}-{claim.id}.json"
        handle = FileShareHandle(self, name, claim)
        handle.begin(self._clock, self._pace.beat)
        self._looked = -math.inf
        return handle

    def claims(self) -> Sequence[Claim]:
        with self._lock:
            now = self._clock.now()
            if now - self._looked >= self._pace.look:
                self._found = tuple(self._look(now))
                self._looked = now
            return self._found

    def _look(self, now: float) -> list[Claim]:
        with translated(f"read the registry of queries {self._place.uri}"):
            names = [
                i.base_name
                for i in self._place.entries()
                if i.is_file and i.base_name.endswith(".json") and not files.hidden(i.base_name)
            ]
            entries = [(name, self._read(name)) for name in names]
        self._beats = {name: self._beats[name] for name in names if name in self._beats}
        found = []
        for name, entry in entries:
            if entry is None:
                continue
            claim, beat, home = entry
            known = self._beats.get(name)
            if known is None or known[0] != beat:
                known = self._beats[name] = (beat, now)
            silent = now - known[1]
            if home.ended or silent > self._pace.remains:
                self._remove(name)
            elif silent <= self._pace.expiry:
                found.append(claim)
        return found

    def _read(self, name: str) -> "tuple[Claim, int, _Home] | None":
        """Return what a file says; ``None`` for one that has just gone or that is not ours to read."""
        try:
            data = json.loads(self._place.read(name))
            if data["format"] != _FORMAT:
                return None
            limit = math.inf if data["limit"] is None else float(data["limit"])
            weight = float(data["weight"])
            if not (0 < weight < math.inf and limit >= 0):
                return None
            claim = Claim(str(data["id"]), weight, limit, str(data["application"]))
            return claim, int(data["beat"]), _Home(str(data["place"]), int(data["pid"]))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            _log.warning("%s is no claim on a cluster and is ignored: %s", self._place.path(name), error)
            return None

    def write(self, name: str, claim: Claim, beat: int) -> None:
        """Write a claim so that readers see the old or the new one. Raises ``StorageError``."""
        home = _Home.mine()
        data = {
            "format": _FORMAT,
            "id": claim.id,
            "weight": claim.weight,
            "limit": claim.limit if math.isfinite(claim.limit) else None,
            "application": claim.application,
            "beat": beat,
            "place": home.place,
            "pid": home.pid,
        }
        content, path = json.dumps(data).encode(), self._place.path(name)
        store = self._place.uri.rsplit("/cache/", 1)[0]
        with translated(f"write to the checkpoint store {store}"):
            if not self._place.local:
                self._place.write(name, content)
                return
            # not synced to disk: after a crash of the machine a claim is void anyway
            private.make_folder(self._place.root)
            temporary = self._place.path(f".{name}.tmp")
            with private.open_file(temporary, "wb") as file:
                file.write(content)
            os.replace(temporary, path)

    def remove(self, name: str) -> None:
        """Delete a claim; never raises."""
        self._remove(name)
        self._looked = -math.inf

    def _remove(self, name: str) -> None:
        try:
            self._place.remove(name)
        except Exception as error:  # it expires by itself
            _log.debug("cannot delete %s: %s", self._place.path(name), error)


class FileShareHandle:
    """A claim in a ``FileShareRegistry``, kept alive by a thread."""

    def __init__(self, registry: FileShareRegistry, name: str, claim: Claim) -> None:
        self.claim = claim
        self._registry = registry
        self._name = name
        self._lock = threading.Lock()
        self._left = threading.Event()
        self._beat = 0

    def begin(self, clock: Clock, every: float) -> None:
        """Write the claim, then continue giving signs of life in the background."""
        self._tell()
        thread = threading.Thread(
            target=self._live, args=(clock, every), name=f"claim-{self.claim.id[:8]}", daemon=True
        )
        thread.start()

    def limit(self, cores: float) -> None:
        """Say that the query can use ``cores`` at most from now on. Raises ``OptionError`` below zero."""
        if not cores >= 0:
            raise OptionError(f"limit must be >= 0 cores; got {cores}")
        if cores == self.claim.limit:
            return
        self.claim = replace(self.claim, limit=cores)
        with suppress(InfraError):  # the next sign of life carries it
            self._tell()

    def leave(self) -> None:
        with self._lock:
            self._left.set()
            self._registry.remove(self._name)

    def _live(self, clock: Clock, every: float) -> None:
        while not clock.wait(self._left, every):
            try:
                self._tell()
            except InfraError as error:
                _log.warning("other queries may take this one for ended: %s", error)

    def _tell(self) -> None:
        with self._lock:
            if not self._left.is_set():
                self._beat += 1
                self._registry.write(self._name, self.claim, self._beat)


@dataclass(frozen=True, slots=True)
class _Home:
    """The process that holds a claim."""

    place: str  # machine and process namespace
    pid: int

    @classmethod
    def mine(cls) -> "_Home":
        return cls(_place(), os.getpid())

    @property
    def ended(self) -> bool:
        """Tell whether the process is known to have ended; of another machine's nothing is known.

        A number that went to another process is not found out here: the claim expires instead.
        """
        if self.place != _place() or self.pid == os.getpid():
            return False
        import psutil  # only where somebody else's claim is in the way

        try:
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            return False


def _place() -> str:
    try:
        namespace = os.readlink("/proc/self/ns/pid")  # the same host name may stand for several containers
    except OSError:
        namespace = ""
    return f"{socket.gethostname()}/{namespace}"


def _name(cluster: str) -> str:
    """Return a folder's name for a cluster: ``spark://10.0.0.1:7077`` becomes ``spark-10.0.0.1-7077``."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", cluster).strip("-.")
    if not name:
        raise OptionError(f"a cluster must have a name; got {cluster!r}")
    return name
