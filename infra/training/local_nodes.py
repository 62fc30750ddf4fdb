"""Nodes of this machine: each a session of processes of its own that can be killed, paused and given notice."""

import contextlib
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import ClusterError
from ebbflow.infra.machine import cgroups, devices, processes
from ebbflow.infra.machine.guardian import Guardian
from ebbflow.infra.protocols.trainings import SETTINGS
from ebbflow.infra.storage import private
from ebbflow.infra.training.channel import keys
from ebbflow.infra.training.channel.wire import ENTRY, Entry, to_json
from ebbflow.infra.training.launcher.pool import Admit, admit_none
from ebbflow.infra.training.process import channel
from ebbflow.planners.errors import OptionError

_NODE = "ebbflow.infra.training.launcher.node"
_NOTICE, _READY = "notice", "ready"  # files in a node's directory; see ``launcher.node``
_NOT_HANDED_DOWN = (
    channel.RUN_ID,
    channel.RUN_FOLDER,
    channel.GENERATION,
    channel.CHANNEL,
    SETTINGS,
    keys.SERVER_KEY,
)
_log = logging.getLogger(__name__)
_STOPPED = ("T", "t")  # the kernel's letters for a process that is stopped, or traced and stopped


@dataclass(slots=True)
class _Record:
    mark: str
    child: subprocess.Popen[bytes]
    folder: Path
    group: Path | None
    slots: int
    gpus: tuple[str, ...]
    quota: float  # CPU cores
    settled: bool = False  # held to its quota
    deadline: float | None = None  # seconds since the Unix epoch
    ended: str = ""  # how it went, once it is gone


_sharing = threading.RLock()  # while GPUs are shared out
_pools: "weakref.WeakSet[LocalNodes]" = weakref.WeakSet()  # of this process: trials of a search have one each


class LocalNodes:
    """A pool of nodes on this machine; it ends with its process, however that one ends.

    Args:
        logs: directory for the nodes' own logs; by default a temporary one that goes with the pool.
        cpus: CPU cores that back one slot, held by control groups; ``None``: no cap.
        grace: seconds that nodes get to save and end once this process is gone.
        environment: on top of this process' own, for all nodes.
        gpus: shared out among the nodes, one a slot, as ``CUDA_VISIBLE_DEVICES`` names them; by default all that this
            process may use. Without any, slots are CPU cores.

    Raises ``OptionError``, or ``ClusterError`` when a cap is asked for and control groups cannot be made.
    """

    host = "127.0.0.1"

    def __init__(
        self,
        logs: Path | str | None = None,
        *,
        cpus: float | None = None,
        grace: float = 30.0,
        environment: Mapping[str, str] | None = None,
        gpus: Sequence[str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        if cpus is not None and not cpus > 0:
            raise OptionError(f"cpus must be > 0; got {cpus}")
        self._controller = cgroups.find_controller() if cpus is not None else None
        if cpus is not None and self._controller is None:
            raise ClusterError("no writable control group with a CPU quota here; leave cpus out")
        self._cpus = cpus
        self._clock = clock or SystemClock()
        self._environment = dict(environment or {})
        self._gpus = tuple(gpus) if gpus is not None else devices.visible({**os.environ, **self._environment})
        self._lock = threading.RLock()
        self._nodes: dict[str, _Record] = {}
        self._pid = os.getpid()
        self.uid = secrets.token_hex(6)
        self.folder = self._place()
        self.logs = Path(logs).absolute() if logs is not None else self.folder / "logs"
        self._closed = False
        self._guardian = self._guard(grace)
        with _sharing:
            _pools.add(self)

    # --- what the launcher asks ---------------------------------------------------------------------------

    def start(self, name: str, slots: int, entry: Entry, admit: Admit = admit_none) -> None:
        """Start a node; see ``NodePool``. Raises ``ClusterError``."""
        with self._lock, _sharing:
            if self._closed:
                raise ClusterError("these nodes have been closed")
            if (old := self._nodes.get(name)) is not None and not self._gone(old):
                raise ClusterError(f"there is a node {name!r} already")
            gpus, variables = self._share(name, slots, entry)
            folder = self.folder / entry.key
            private.make_folder(folder)
            address = self._address(name)
            entry = replace(entry, address=address, folder=str(folder), devices=())  # ``gpus`` says which
            mark = self._mark(name, entry.key)
            command = [sys.executable, "-P", "-m", _NODE]
            pair = keys.KeyPair.make()
            admit(pair.public)  # before the node, which then finds itself known
            variables = {**self._variables(entry, gpus), **variables, keys.NODE_SECRET: pair.secret}
            child = processes.spawn(
                command, variables, mark, self._log(name), cwd=Path.cwd(), namespace=self._namespace(name)
            )
            record = self._nodes[name] = _Record(
                mark, child, folder, None, slots, gpus, self._quota(name, slots)
            )
            try:
                self._hold(name, record, f"ebbflow-{self.uid}-{entry.key}")
            except BaseException:
                self._destroy(record, "it could not be held to its limits")
                raise

    def lost(self, name: str) -> str:
        """Return how a node went that is gone; empty while it is there."""
        with self._lock:
            record = self._nodes.get(name)
            if record is None:
                return "it was never started"
            if record.deadline is not None and not record.ended and record.deadline <= time.time():
                self._destroy(record, "its interruption notice has expired")
            self._settle(record)
            return record.ended if self._gone(record) else ""

    def paused(self, name: str) -> bool:
        """Return whether the node's first process is stopped."""
        with self._lock:
            record = self._nodes.get(name)
        if record is None or record.ended:
            return False
        with contextlib.suppress(OSError):  # read directly: this is asked many times a second
            stat = Path(f"/proc/{record.child.pid}/stat").read_text()
            return stat.rpartition(")")[2].split()[0] in _STOPPED
        return False

    def end(self, name: str) -> None:
        """End a node at once."""
        self._take(name, "ended by the launcher")

    def quiet(self, name: str) -> bool:
        """Return whether no process is left of a node that was ended or lost."""
        with self._lock:
            record = self._nodes.get(name)
            return record is None or (bool(record.ended) and not processes.members(record.mark))

    def log(self, name: str) -> str:
        """Return the last lines of the node's own log."""
        return processes.tail(self._log(name))

    def gone(self, uid: str) -> bool:
        """Return whether no process of another pool of this machine is left."""
        return not processes.members(f"{uid}/")

    def close(self) -> None:
        """End all nodes and remove everything but the logs."""
        with self._lock:
            for record in self._nodes.values():
                if record.group is not None:
                    cgroups.lift(record.group)
            if self._guardian is not None:  # all at one blow
                processes.destroy(f"{self.uid}/", [r.child.pid for r in self._nodes.values()], self._clock)
            for record in self._nodes.values():
                self._destroy(record, "the nodes were closed")
            self._closed = True
            shutil.rmtree(self.folder, ignore_errors=True)
            if self._guardian is not None:
                self._guardian.release()
                self._guardian = None

    # --- what may happen to a node ------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """Take a node away at once: SIGKILL to its agent and all its processes. Raises ``ClusterError``."""
        self._known(name)
        self._take(name, "killed")

    def pause(self, name: str) -> None:
        """Stop (SIGSTOP) all processes of a node, as when its machine hangs. Raises ``ClusterError``."""
        self._signal(name, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """Let a paused node continue. Raises ``ClusterError``."""
        self._signal(name, signal.SIGCONT)

    def notice(self, name: str, seconds: float) -> float:
        """Tell a node (SIGTERM) that it will be killed ``seconds`` from now; returns when, since the Unix epoch.

        Raises ``OptionError`` or ``ClusterError``.
        """
        if not seconds >= 0:
            raise OptionError(f"seconds must be >= 0; got {seconds}")
        with self._lock:
            record = self._known(name)
            record.deadline = time.time() + seconds
            private.write_text(record.folder / _NOTICE, repr(record.deadline))
            os.kill(record.child.pid, signal.SIGTERM)
            return record.deadline

    def pids(self, name: str) -> list[int]:
        """Return the ids of the node's live processes. Raises ``ClusterError``."""
        return processes.members(self._known(name).mark)

    def __enter__(self) -> "LocalNodes":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- how ----------------------------------------------------------------------------------------------

    def _guard(self, grace: float) -> Guardian | None:
        """Return what ends the nodes once this process is gone; ``None`` where somebody else sees to that."""
        groups = f"{self._controller.folder}/ebbflow-{self.uid}-*" if self._controller else ""
        return Guardian(
            "ebbflow.infra.machine.guardian",
            [f"{self.uid}/", str(self._pid), str(grace), groups, str(self.folder)],
            self.folder.parent,
        )

    def _mark(self, name: str, key: str) -> str:
        return f"{self.uid}/{key}"

    def _share(self, name: str, slots: int, entry: Entry) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return the GPUs of a node that starts, and what to add to its environment. Raises ``ClusterError``."""
        return self._free_gpus(name, slots), {}

    def _place(self) -> Path:
        """Return a new directory for what nodes keep."""
        return Path(tempfile.mkdtemp(prefix="ebbflow-nodes-"))

    def _address(self, name: str) -> str:
        """Return at which address other nodes reach a node."""
        return self.host

    def _namespace(self, name: str) -> str:
        """Return the network namespace that a node is in; "" is this process' own."""
        return ""

    def _memory_group(self, name: str) -> Path | None:
        """Return the control group that limits a node's memory; ``None``: nothing limits it."""
        return None

    def _quota(self, name: str, slots: int) -> float:
        return (self._cpus or 1.0) * slots

    def _hold(self, name: str, record: _Record, group: str) -> None:
        """Put a node that starts into its control groups. Raises ``ClusterError``."""
        if (memory := self._memory_group(name)) is not None:
            # what it may have started meanwhile, too
            cgroups.join(memory, [record.child.pid])
            cgroups.join(memory, processes.members(record.mark))
        place = cgroups.inside(self._controller, memory) if self._controller is not None else None
        if place is None and self._controller is not None:
            _log.warning("node %s has no CPU cap: its memory's control group hands down no CPU", name)
        if place is not None:
            # It starts with whole CPU cores: importing is no work of the training.
            record.group = cgroups.create(place, group, max(float(record.slots), record.quota))
            cgroups.join(record.group, [record.child.pid])

    def _settle(self, record: _Record) -> None:
        """Hold a node that has come up to its quota."""
        if self._controller is None or record.group is None or record.settled or record.ended:
            return
        if (record.folder / _READY).exists():
            place = replace(self._controller, folder=record.group.parent)
            cgroups.create(place, record.group.name, record.quota)
            record.settled = True

    def _free_gpus(self, name: str, slots: int) -> tuple[str, ...]:
        for record in self._nodes.values():
            self._gone(record)
        records = [record for pool in _pools for record in list(pool._nodes.values())]
        taken = {gpu for record in records if not record.ended for gpu in record.gpus}
        free = [gpu for gpu in self._gpus if gpu not in taken]
        if self._gpus and len(free) < slots:
            raise ClusterError(
                f"node {name} needs {slots} GPUs and {len(free)} of {len(self._gpus)} are free; ask for fewer slots, "
                f"or set {devices.VISIBLE} to nothing to train on CPU cores"
            )
        return tuple(free[:slots])

    def _variables(self, entry: Entry, gpus: tuple[str, ...]) -> dict[str, str]:
        inherited = {k: v for k, v in processes.inherited().items() if k not in _NOT_HANDED_DOWN}
        inherited.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: processes share the machine
        shown = {devices.VISIBLE: ",".join(gpus)} if gpus else {}
        return {**inherited, **self._environment, **shown, ENTRY: to_json(entry)}

    def _known(self, name: str) -> _Record:
        with self._lock:
            record = self._nodes.get(name)
            if record is None or self._gone(record):
                there = ", ".join(n for n, r in self._nodes.items() if not self._gone(r)) or "none"
                raise ClusterError(f"there is no node {name!r}; there are: {there}")
            return record

    def _gone(self, record: _Record) -> bool:
        if not record.ended and record.child.poll() is not None:
            # What it started may still be there: a machine goes as a whole.
            self._destroy(record, _how(record.child.returncode))
        return bool(record.ended)

    def _take(self, name: str, how: str) -> None:
        with self._lock:
            record = self._nodes.get(name)
            if record is not None:
                self._destroy(record, how)

    def _destroy(self, record: _Record, how: str) -> None:
        if record.ended:
            return
        record.ended = how
        if record.group is not None:
            cgroups.lift(record.group)
        processes.destroy(record.mark, [record.child.pid], self._clock)
        with contextlib.suppress(subprocess.TimeoutExpired):
            record.child.wait(timeout=5)
        if record.group is not None:
            cgroups.remove(record.group, self._clock)
        shutil.rmtree(record.folder, ignore_errors=True)

    def _signal(self, name: str, number: signal.Signals) -> None:
        record = self._known(name)
        for pid in [record.child.pid, *processes.members(record.mark)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _log(self, name: str) -> Path:
        return self.logs / f"{name}.log"


def _how(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"its first process was ended by {signal.Signals(-code).name}"
    return f"its first process ended with status {code}"
