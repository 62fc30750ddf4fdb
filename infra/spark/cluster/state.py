"""State files of local clusters, shared by every process that deals with one."""

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ebbflow.infra.errors import ClusterError
from ebbflow.infra.machine import cgroups, processes
from ebbflow.infra.storage import private, user_files

_FORMAT = 2
Phase = Literal["starting", "up", "killed"]


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One node of a local cluster."""

    id: str
    host: str
    pid: int = 0  # of the worker; leader of its process group and session
    phase: Phase = "starting"
    deadline: float | None = None  # seconds since the Unix epoch; when the node leaves, once it has a notice
    cgroup: str = ""  # its control group, or empty
    namespace: str = ""  # its network namespace; empty: it is on loopback
    memory_group: str = ""  # the control group that limits its memory, kept by whoever has added it; or empty


@dataclass(frozen=True, slots=True)
class ClusterState:
    """What a local cluster consists of."""

    name: str
    uid: str  # unique for ever, unlike the name
    directory: str  # logs and scratch
    host: str  # of the master
    port: int
    ui_port: int
    cores: int  # of each node
    memory: int  # MiB of each node
    owner: int  # process whose end ends the cluster; 0: nobody's
    secret: str = field(repr=False)  # by which its processes and applications know each other
    cpus: float | None = None  # CPU quota of each node; None: not held to any
    cap: str = ""  # how the quota is kept, or why there is none
    cap_version: int = 0  # of the control groups; 0: no quota
    cap_folder: str = ""
    master_pid: int = 0
    started: int = 0  # nodes ever started
    nodes: tuple[NodeRecord, ...] = ()
    network: float = 0.0  # MB/s of each node's link, each way; 0: not limited

    @property
    def master_url(self) -> str:
        return f"spark://{self.host}:{self.port}"

    @property
    def master_ui(self) -> str:
        return f"http://{self.host}:{self.ui_port}"

    @property
    def mark(self) -> str:
        """Return what the marks of all its processes start with."""
        return f"{self.uid}/"

    @property
    def controller(self) -> cgroups.Controller:
        """Return where its nodes' CPU groups are, but for those inside memory groups; only with ``cpus``."""
        return cgroups.Controller(1 if self.cap_version == 1 else 2, Path(self.cap_folder))

    @property
    def alive(self) -> bool:
        """Tell whether its master runs."""
        return processes.carries(self.master_pid, self.mark_of("master"))

    def mark_of(self, node_id: str) -> str:
        return f"{self.uid}/{node_id}"

    def node(self, node_id: str) -> NodeRecord:
        """Return a node's record. Raises ``ClusterError``."""
        for record in self.nodes:
            if record.id == node_id:
                return record
        known = ", ".join(record.id for record in self.nodes) or "none"
        raise ClusterError(f"cluster {self.name!r} has no node {node_id!r}; it has: {known}")

    def with_node(self, node_id: str, **changes: Any) -> "ClusterState":
        """Return the state with one node's fields changed."""
        return replace(self, nodes=tuple(replace(r, **changes) if r.id == node_id else r for r in self.nodes))

    def without_node(self, node_id: str) -> "ClusterState":
        return replace(self, nodes=tuple(r for r in self.nodes if r.id != node_id))


def ebbflow_home() -> Path:
    """Return ``$EBBFLOW_HOME``, or ``~/.cache/ebbflow``."""
    return Path(os.environ.get("EBBFLOW_HOME") or Path.home() / ".cache" / "ebbflow").expanduser().absolute()


class StateFile:
    """One cluster's state file. Reads are atomic; a lock keeps changes of several processes apart."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "state.json"
        self.properties = folder / "spark.conf"  # Spark's, with the cluster's secret

    @classmethod
    def of(cls, name: str) -> "StateFile":
        return cls(ebbflow_home() / "clusters" / name)

    def read(self) -> ClusterState | None:
        """Return the state, or ``None`` without one. Raises ``ClusterError`` for a file it cannot read."""
        try:
            fields = json.loads(self.path.read_text())
            if fields.pop("format") != _FORMAT:
                raise ClusterError(f"{self.path} is of another version of Ebbflow; stop that cluster with it")
            nodes = tuple(NodeRecord(**node) for node in fields.pop("nodes"))
            return ClusterState(**fields, nodes=nodes)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ClusterError(
                f"{self.path} is not a readable state file ({user_files.reason(error)}); delete it"
            ) from error

    def write(self, state: ClusterState) -> None:
        """Replace the state, atomically. Raises ``ClusterError``."""
        try:
            private.make_folder(self.folder)
            handle, temporary = tempfile.mkstemp(dir=self.folder, prefix=".state-")
            with os.fdopen(handle, "w") as file:
                json.dump({"format": _FORMAT, **asdict(state)}, file, indent=1)
            Path(temporary).replace(self.path)
        except OSError as error:
            raise ClusterError(f"{self.path} cannot be written: {error.strerror}") from error

    def update(self, uid: str, change: Callable[[ClusterState], ClusterState]) -> ClusterState:
        """Apply ``change`` under the lock and return the new state.

        Raises ``ClusterError`` when the cluster ``uid`` is no longer there.
        """
        with self.lock():
            state = self.read()
            if state is None or state.uid != uid:
                raise ClusterError(f"cluster {self.folder.name!r} has been stopped")
            changed = change(state)
            self.write(changed)
            return changed

    def write_properties(self, text: str) -> None:
        """Replace the file of Spark's properties, for its user alone. Raises ``ClusterError``."""
        try:
            private.write_secret(self.properties, text)
        except OSError as error:
            raise ClusterError(f"{self.properties} cannot be written: {error.strerror}") from error

    def remove(self) -> None:
        """Remove the file and that of Spark's properties; nothing happens where they are gone."""
        self.path.unlink(missing_ok=True)
        self.properties.unlink(missing_ok=True)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the cluster's lock; it is never held for longer than a file takes to write.

        Raises ``ClusterError``.
        """
        try:
            private.make_folder(self.folder)
            file = private.open_file(self.folder / ".lock", "a")
        except OSError as error:
            raise ClusterError(f"{self.folder} cannot be used: {error.strerror}") from error
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def list_clusters() -> list[ClusterState]:
    """Return the local clusters whose master runs, by name. Unreadable state files are passed over."""
    found = []
    for path in sorted((ebbflow_home() / "clusters").glob("*/state.json")):
        with contextlib.suppress(ClusterError):
            state = StateFile(path.parent).read()
            if state is not None and state.alive:
                found.append(state)
    return found


def find_cluster(master_url: str) -> ClusterState | None:
    """Return the running local cluster whose master has this URL, or ``None``."""
    return next((c for c in list_clusters() if c.master_url == master_url.rstrip("/")), None)
