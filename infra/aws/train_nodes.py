"""``AwsNodes``: a training's nodes on instances of a fleet, started and ended through Systems Manager.

A ``NodePool`` of the launcher (``infra.training.launcher.pool``). The launcher itself runs inside the cluster's
network, on the Prefect worker or another machine with the nodes' security group: nodes call back to it, by an
encrypted channel. A node makes its key pair itself and tells the public half in the output of the command that
starts it, so that AWS vouches for it and no secret travels: AWS logs commands. A node that is about to leave is told
by its own agent (``infra.aws.node_agent``) and tells the launcher.
"""

import logging
import secrets
import socket
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

from ebbflow.infra.aws.remote import Outcome, RemoteRunner
from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import ClusterError, EngineUnavailableError
from ebbflow.infra.protocols import CapacitySource
from ebbflow.infra.training.channel import keys
from ebbflow.infra.training.channel.wire import Entry, to_json
from ebbflow.infra.training.launcher.pool import Admit, admit_none
from ebbflow.planners.errors import EbbflowError
from ebbflow.planners.model import Capacity, Node

FOLDER = "/var/lib/ebbflow/work"
"""Where a node may write; ``ebbflow-torch-node@.service`` runs there."""
LOGS = f"{FOLDER}/logs"
"""For ``TorchTrainer(logs=...)``: a folder that every node has."""
FORM = 600.0
"""Seconds for ``TorchTrainer(form=...)``: Systems Manager has to know the node first, and torch takes its time."""
NEVER = "it was never started"
"""What ``lost`` says of a node that was not started."""
_POLL = 0.2  # seconds for which a look at the capacity serves: the launcher asks twenty times a second
_AT_ONCE = 16  # nodes started or ended at a time
_CLOSING = 60.0  # seconds for all nodes to be ended
_AVOID = 30.0  # seconds for which ``placement`` is without an instance on which a start failed; then doubled
_MOST_AVOID = 3600.0
_ENDED = ("inactive", "failed", "unknown")  # what systemd says of a unit that does not run

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Record:
    instance: str
    slots: int
    job: Future[None] | None = None  # the last thing asked of its instance
    ended: str = ""  # how it went, once it is gone
    output: str = ""  # what its start said
    stopped: bool = False  # its instance has said that nothing of it runs
    failed: bool = False  # it could not be started, or did not call back


class AwsNodes:
    """Nodes of one run, each alone on its instance. A ``NodePool``; safe for several threads.

    A node called like an instance of the capacity runs on that one, any other name on one that is free and large
    enough, of those where no start failed the smallest; with ``named`` on none. GPUs are slots where instances have
    some, else processors are. A node process ends by itself when its launcher is gone, so nothing is left behind by a
    launcher that was killed.

    Args:
        runner: sends commands to the nodes.
        capacity: the instances there are, such as ``AwsCapacity`` of a pool of kind gpu.
        host: address of this machine inside the cluster's network; by default the one it reaches others from.
        folder: where nodes may write.
        named: whether nodes run only on instances of their name, as those do that somebody else has chosen.
        look: has the instances looked at anew, where one is named that is not known: whoever chose it saw it first.
    """

    def __init__(
        self,
        runner: RemoteRunner,
        capacity: CapacitySource,
        *,
        host: str = "",
        folder: str = FOLDER,
        named: bool = False,
        look: Callable[[], object] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.host = host or own_address()
        self.uid = secrets.token_hex(6)
        self._look_anew = look
        self._runner, self._capacity, self._folder, self._named = runner, capacity, folder, named
        self._clock = clock or SystemClock()
        self._lock = threading.RLock()
        self._nodes: dict[str, _Record] = {}
        self._refused: set[str] = set()  # names for which there was no instance
        self._failures: dict[str, tuple[int, float]] = {}  # instance -> starts that failed, avoided until
        self._seen: tuple[float, Capacity] | None = None
        self._workers = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="ebbflow-nodes")
        self._closed = False

    # --- what the launcher asks ---------------------------------------------------------------------------

    def placement(self, slots: int | None = None) -> dict[str, int]:
        """Return a placement on all instances that are free and not about to leave, ``slots`` on each or all.

        One on which a node could not be started is left out for 30 s, twice as long each time, an hour at most. An
        hour after that the count begins anew.
        """
        with self._lock:
            now = self._clock.now()
            free = [node for node in self._free() if now >= self._failures.get(node.id, (0, 0.0))[1]]
        sizes = {node.id: _size(node) if slots is None else slots for node in free}
        return {name: size for name, size in sizes.items() if size > 0}

    def start(self, name: str, slots: int, entry: Entry, admit: Admit = admit_none) -> None:
        """Start a node; see ``NodePool``. Raises ``ClusterError``."""
        with self._lock:
            if self._closed:
                raise ClusterError("these nodes have been closed")
            old = self._nodes.get(name)
            if old is not None and not old.ended:
                raise ClusterError(f"there is a node {name!r} already")
            self._refused.add(name)
            node = self._choose(name, slots)
            self._refused.discard(name)
            before = [r.job for r in self._nodes.values() if r.instance == node.id and r.job is not None]
            used = any(r.instance == node.id for r in self._nodes.values())
            record = _Record(node.id, slots)
            self._nodes[name] = record
            entry = replace(
                entry,
                address=node.host,
                folder=f"{self._folder}/{self.uid}/{entry.key}",
                cache=f"{self._folder}/cache",
            )
            record.job = self._later(before, lambda: self._start(record, entry, used, admit))

    def lost(self, name: str) -> str:
        """Return how a node went that is gone; empty while it is there."""
        with self._lock:
            record = self._nodes.get(name)
            if record is None:
                return NEVER
            if not record.ended and record.instance not in {node.id for node in self._look().nodes}:
                record.ended = f"its instance {record.instance} is terminated"
            return record.ended

    def failed(self, name: str) -> bool:
        """Tell whether a node could not be started, was given up, or there was no instance for it."""
        with self._lock:
            record = self._nodes.get(name)
            return name in self._refused or (record is not None and record.failed)

    def give_up(self, names: Iterable[str]) -> None:
        """Count nodes as failed that did not call back, or could not prepare the user's code."""
        with self._lock:
            for name in names:
                record = self._nodes.get(name)
                if record is not None and not record.failed:
                    record.failed = True
                    self._avoid(record.instance)

    def paused(self, name: str) -> bool:
        """Return False: from outside nobody can tell."""
        return False

    def end(self, name: str) -> None:
        """End a node; what it runs is killed within seconds."""
        with self._lock:
            record = self._nodes.get(name)
            if record is None:
                return
            there = record.instance in {node.id for node in self._look().nodes}
            record.ended = record.ended or "ended by the launcher"
            if there:
                before = [record.job] if record.job is not None else []
                record.job = self._later(before, lambda: self._stop(record))

    def quiet(self, name: str) -> bool:
        """Tell whether a node that was ended is known to have stopped, or is gone with its instance."""
        with self._lock:
            record = self._nodes.get(name)
            if record is None or record.instance not in {node.id for node in self._look().nodes}:
                return True
            return bool(record.ended) and record.stopped

    def log(self, name: str) -> str:
        """Return what starting the node said; its own log is in the instance's journal."""
        with self._lock:
            record = self._nodes.get(name)
            return record.output if record else ""

    def gone(self, uid: str) -> bool:
        """Tell whether no instance runs a node of the pool that had this ``uid``.

        An instance that cannot be asked counts as one that runs none: its node process ends without its launcher.
        """
        instances = [node.id for node in self._look().nodes]
        try:
            # one that is starting was not there when the earlier nodes were
            found = self._runner.run("torch-node", instances, {"action": "status", "name": uid}, register=0.0)
        except EbbflowError as error:
            log.warning("nodes cannot be queried for an earlier training: %s", error)
            return False
        return all(not o.ok or o.output.strip() in _ENDED for o in found.values())

    def close(self) -> None:
        """End all nodes, within a minute. May be called twice."""
        with self._lock:
            if self._closed:
                return
            for name, record in self._nodes.items():
                if not record.ended:
                    self.end(name)
            self._closed = True
            jobs = [record.job for record in self._nodes.values() if record.job is not None]
        _, late = wait(jobs, timeout=_CLOSING)
        if late:
            log.warning(
                "%s nodes could not be terminated in time; they exit without their launcher", len(late)
            )
        self._workers.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> "AwsNodes":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- how ----------------------------------------------------------------------------------------------

    def _choose(self, name: str, slots: int) -> Node:
        if self._look_anew is not None and all(node.id != name for node in self._look().nodes):
            try:
                self._look_anew()
            except EbbflowError as error:
                log.warning("the instances could not be refreshed for %s: %s", name, error)
            self._seen = None
        free = self._free()
        for node in free:
            if node.id == name:
                if _size(node) >= slots:
                    return node
                raise ClusterError(
                    f"node {name} needs {slots} slots and {node.instance_type} has {_size(node)}"
                )
        if self._named:
            raise ClusterError(f"there is no instance {name}, or it is in use or about to terminate")
        fitting = [node for node in free if _size(node) >= slots]
        if not fitting:
            raise ClusterError(
                f"node {name} needs {slots} slots, and none of the {len(self._look().nodes)} instances is free, "
                "large enough and staying; scale out the fleet first"
            )
        return min(fitting, key=lambda node: (self._failures_of(node.id), _size(node), node.id))

    def _free(self) -> list[Node]:
        taken = {record.instance for record in self._nodes.values() if not record.ended}
        return [node for node in self._look().usable if node.id not in taken]

    def _look(self) -> Capacity:
        now = self._clock.now()
        if self._seen is None or now - self._seen[0] >= _POLL:
            try:
                self._seen = now, self._capacity.capacity()
            except EngineUnavailableError as error:
                raise ClusterError(f"the instances are not known: {error}") from error
        return self._seen[1]

    def _later(self, before: list[Future[None]], act: Callable[[], None]) -> Future[None]:
        """Do one thing after what was asked of the same instance before."""

        def do() -> None:
            wait(before, timeout=2 * _CLOSING)
            act()

        return self._workers.submit(do)

    def _start(self, record: _Record, entry: Entry, used: bool, admit: Admit) -> None:
        if record.ended:
            return
        try:
            if used:  # starting what runs would change nothing
                self._runner.stop_torch(record.instance, self.uid)
            found = self._runner.start_torch(record.instance, self.uid, to_json(entry), token=entry.key)
            self._record_start(record, found)
            if found.ok:
                self._admit(record, found.output, admit)
        except EbbflowError as error:
            self._failed(record, str(error))

    def _record_start(self, record: _Record, found: Outcome) -> None:
        record.output = found.output or str(found)
        if not found.ok:
            self._failed(record, str(found))

    def _admit(self, record: _Record, output: str, admit: Admit) -> None:
        public = keys.announced(output)
        if public:
            admit(public)
        else:
            self._failed(record, "it has told no public key; the cluster's nodes are of an older Ebbflow")

    def _failed(self, record: _Record, why: str) -> None:
        with self._lock:
            record.output, record.failed = record.output or why, True
            self._avoid(record.instance)
            record.ended = record.ended or f"it could not be started: {why}"

    def _avoid(self, instance: str) -> None:
        times = self._failures_of(instance)
        avoided = min(_AVOID * 2.0 ** min(times, 30), _MOST_AVOID)
        self._failures[instance] = times + 1, self._clock.now() + avoided

    def _failures_of(self, instance: str) -> int:
        times, until = self._failures.get(instance, (0, 0.0))
        return times if self._clock.now() < until + _MOST_AVOID else 0

    def _stop(self, record: _Record) -> None:
        try:
            found = self._runner.stop_torch(record.instance, self.uid)
            record.stopped = found.ok or found.status == "gone"
            if not record.stopped:
                log.warning("a node could not be terminated: %s", found)
        except EbbflowError as error:
            log.warning("a node could not be terminated: %s", error)


def own_address() -> str:
    """Return the address from which this machine reaches others; nothing is sent. Raises ``ClusterError``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("169.254.169.254", 80))  # any address beyond this machine does
            return str(probe.getsockname()[0])
        except OSError as error:
            raise ClusterError(f"this machine has no address that nodes could reach: {error}") from error


def _size(node: Node) -> int:
    return node.gpus or node.cores
