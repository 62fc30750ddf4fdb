"""What a fleet must not forget: its plans, its revision, and the notices it was told of.

It is small and is written whole, before anything is asked of AWS. ``FolderStore`` keeps it in a file; whatever can
replace one value by another atomically can be a ``FleetStore``.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import StorageError
from ebbflow.infra.storage import checksums, files, private
from ebbflow.infra.storage.values import Form
from ebbflow.planners.model.capacity import Market, Notice

SETTLING = 60.0
"""Seconds after a request for a gang in which its nodes may not be listed yet."""
_VERSION = 1
_STATES = Form(strict=True)

GangPhase = Literal["asked", "held", "ending"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What one pool is to be."""

    nodes: int
    on_demand: int = 0  # of ``nodes``
    drain: tuple[str, ...] = ()  # nodes that are to leave and were not ended yet
    reason: str = ""
    on_demand_since: float = 0.0  # Unix time, s, of the last change of ``on_demand``


@dataclass(frozen=True, slots=True)
class GangPlan:
    """A gang that was asked for, is held, or is being returned."""

    pool: str
    size: int
    market: Market
    token: str  # makes a repeated request the same request
    phase: GangPhase
    since: float  # Unix time, s, of the request
    fleet: str = ""  # id, once AWS has told it
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ObservedNode:
    """One node as it was last observed. What may change while it is the same node, its price, is left out."""

    id: str
    pool: str
    instance_type: str
    zone: str
    market: Market


@dataclass(frozen=True, slots=True)
class FleetState:
    """All that is kept of one cluster's fleet."""

    cluster: str
    revision: int = field(default=0, metadata={"former": "epoch"})
    plans: Mapping[str, Plan] = field(default_factory=dict)  # by pool
    gangs: Mapping[str, GangPlan] = field(default_factory=dict)  # by name
    seen: tuple[ObservedNode, ...] = ()  # sorted by id
    notices: tuple[Notice, ...] = ()  # sorted by node, one each, of nodes not yet seen too
    short: Mapping[str, float] = field(default_factory=dict)  # pool -> since when, Unix time, s

    def pending_notices(self) -> tuple[Notice, ...]:
        """Return the notices of nodes that are there."""
        there = {node.id for node in self.seen}
        return tuple(notice for notice in self.notices if notice.node_id in there)

    def after(self, later: "FleetState") -> "FleetState":
        """Return ``later`` with this revision, or the next where nodes or their notices differ."""
        changed = (self.seen, self.pending_notices()) != (later.seen, later.pending_notices())
        return replace(later, revision=self.revision + changed)


class FleetStore(Protocol):
    """Keeps one ``FleetState``."""

    def read(self) -> FleetState:
        """Return the present state. Raises ``StorageError``."""
        ...

    def change(self, how: Callable[[FleetState], FleetState]) -> FleetState:
        """Replace the state by ``how`` of it, durably before this returns, with nobody's change in between.

        ``how`` must be quick, and may be called again. Raises ``StorageError``.
        """
        ...


class FolderStore:
    """A ``FleetStore`` in a local directory, one file a cluster. Safe for several threads and processes of a machine.

    A file that cannot be read is an error, not an empty state: a revision counted from 0 lets old decisions pass.
    """

    def __init__(self, folder: str | Path, cluster: str, clock: Clock | None = None) -> None:
        self._cluster = cluster
        self._path = Path(folder).expanduser().absolute() / f"{cluster}.json"
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()

    def read(self) -> FleetState:
        """See ``FleetStore``. Raises ``StorageError``."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return FleetState(self._cluster)
        except OSError as error:
            raise StorageError(f"cannot read the fleet's state {self._path}: {error.strerror}") from error
        try:
            state = _decoded(checksums.unsealed(data))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StorageError(
                f"the fleet's state {self._path} cannot be understood ({type(error).__name__}: {error}); restore it, "
                "or end all programs that use it and delete it: plans are then read from AWS"
            ) from error
        if state.cluster != self._cluster:
            raise StorageError(
                f"{self._path} belongs to the cluster {state.cluster!r}, not {self._cluster!r}"
            )
        return state

    def change(self, how: Callable[[FleetState], FleetState]) -> FleetState:
        """See ``FleetStore``. Raises ``StorageError``."""
        try:
            private.make_folder(self._path.parent)
        except OSError as error:
            raise StorageError(
                f"cannot make the fleet's state directory {self._path.parent}: {error.strerror}"
            ) from error
        with self._lock, files.locked(f"{self._path}.lock", self._clock):
            before = self.read()
            after = how(before)
            if after != before:
                try:
                    files.write_atomic(None, "file", str(self._path), _encoded(after))
                    files.sync_folder(str(self._path.parent))
                except OSError as error:
                    raise StorageError(f"cannot write the fleet's state {self._path}: {error}") from error
            return after


def _encoded(state: FleetState) -> bytes:
    return checksums.sealed({"version": _VERSION, **asdict(state)}, indent=1)


def _decoded(text: Any) -> FleetState:
    if (version := text.pop("version")) != _VERSION:
        raise ValueError(f"version must be {_VERSION}, got {version!r}")
    return _STATES.from_plain(FleetState, text)
