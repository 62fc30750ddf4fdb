"""``FleetNodes``: where the processes of one training, or one trial, run on the nodes of a local fleet."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import ClusterError
from ebbflow.infra.local_fleet.provider import node_memory
from ebbflow.infra.local_fleet.provider.provider import BY, RUNS, work
from ebbflow.infra.local_fleet.state import labels
from ebbflow.infra.local_fleet.state.fleet_state import LocalFleetState, LocalNode
from ebbflow.infra.machine import cgroups, devices
from ebbflow.infra.machine.guardian import Guardian
from ebbflow.infra.storage import files, private
from ebbflow.infra.training.channel.wire import Entry
from ebbflow.infra.training.launcher.pool import Admit, admit_none
from ebbflow.infra.training.local_nodes import LocalNodes


class Hosts(Protocol):
    """What ``FleetNodes`` needs of the fleet whose nodes it uses."""

    @property
    def folder(self) -> Path: ...
    @property
    def uid(self) -> str: ...
    @property
    def state(self) -> LocalFleetState: ...
    def lost(self, id_: str, /) -> str: ...
    def paused(self, id_: str, /) -> bool: ...
    def left_over(self, app: str) -> tuple[labels.Occupant, ...]: ...


class FleetNodes(LocalNodes):
    """A ``NodePool`` whose names are a fleet's node ids: what it starts as ``gpu-1`` runs on the fleet's gpu-1.

    Several pools, of several apps and in several processes, may use one node at once, each with slots of its own. The
    slots of a node are those that the entry's ``devices`` name; without, as many as are asked for of those nobody
    uses. A slot that something still runs on is never shared: the start is refused. Processes know their GPUs by
    ``CUDA_VISIBLE_DEVICES`` where the machine has any, and their slots by ``EBBFLOW_SLOTS``.

    What it has started ends, after ``grace`` seconds to save, when this process is gone.
    """

    def __init__(
        self,
        fleet: Hosts,
        app: str,
        logs: Path | str | None = None,
        *,
        grace: float = 30.0,
        environment: Mapping[str, str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._fleet, self.app, self._grace = fleet, app, grace
        if (network := fleet.state.network) is not None:
            self.host = network.host
        cpus = [
            pool.cpus_per_slot
            for pool in fleet.state.pools
            if pool.kind == "gpu" and pool.cpus_per_slot is not None
        ]
        capped = bool(cpus) and cgroups.find_controller() is not None
        super().__init__(
            logs,
            cpus=max(cpus) if capped else None,
            grace=grace,
            environment=environment,
            gpus=(),
            clock=clock,
        )

    def start(self, name: str, slots: int, entry: Entry, admit: Admit = admit_none) -> None:
        """Start a node process; see ``NodePool``.

        Raises ``ClusterError`` also for a node that is gone, has notice or stands still, and a slot in use.
        """
        self._known_node(name)
        folder = work(self._fleet.folder, name)
        private.make_folder(folder)
        with files.locked(str(folder.parent / f".{name}.lock"), self._clock):  # no other pool looks meanwhile
            super().start(name, slots, entry, admit)
        if why := self._fleet.lost(name):  # while it started: whoever took the node down may have missed this
            self._take(name, why)
            raise ClusterError(f"the node {name} is gone: {why}")

    def lost(self, name: str) -> str:
        """Return how a node went that is gone, or what ran there; empty while both are there."""
        with self._lock:
            started = name in self._nodes
        if started and (why := self._fleet.lost(name)):
            self._take(name, why)
            return why
        return super().lost(name)

    def gone(self, uid: str) -> bool:
        """Tell whether no process of another pool, of this fleet or not, is left on this machine."""
        return not labels.pool_lives(uid)

    def in_use(self) -> dict[str, tuple[int, ...]]:
        """Return the slots that live processes of this pool may use, by node: seen from the processes themselves."""
        found: dict[str, set[int]] = {}
        for one in self._fleet.left_over(self.app):
            if one.pool == self.uid:
                found.setdefault(one.node, set()).update(one.slots)
        return {name: tuple(sorted(slots)) for name, slots in sorted(found.items())}

    # --- how ----------------------------------------------------------------------------------------------

    def _guard(self, grace: float) -> Guardian | None:
        return None  # the fleet's supervisor sees to that

    def _place(self) -> Path:
        folder = self._fleet.folder / RUNS / self.uid
        private.make_folder(folder, exist_ok=False)
        me = labels.own()
        private.write_text(folder / BY, f"{me.pid} {me.ticks}")
        return folder

    def _mark(self, name: str, key: str) -> str:
        return labels.mark(self._fleet.uid, name, self.app, self.uid, key)

    def _share(self, name: str, slots: int, entry: Entry) -> tuple[tuple[str, ...], dict[str, str]]:
        state, node = self._known_node(name)
        pool = state.pool(node.pool)
        assert pool is not None
        taken = {number: one.app for one in labels.occupants(state.uid, name) for number in one.slots}
        numbers = entry.devices or tuple(n for n in range(pool.slots) if n not in taken)[:slots]
        if len(numbers) != slots or not set(numbers) <= set(range(pool.slots)):
            raise ClusterError(
                f"{slots} slots of {name} are requested, and {len(numbers)} are available "
                f"({', '.join(map(str, numbers)) or 'none'}): it has {pool.slots}, and {len(taken)} are in use"
            )
        if used := sorted(set(numbers) & taken.keys()):
            raise ClusterError(f"slot {used[0]} of {name} is still in use by {taken[used[0]]}")
        me = labels.own()
        variables = {
            labels.SLOTS: ",".join(map(str, numbers)),
            labels.OWNER: f"{me.pid} {me.ticks} {self._grace:g}",
        }
        if node.gpus:
            variables[devices.VISIBLE] = ",".join(node.gpus[number] for number in numbers)
        return (), variables

    def _address(self, name: str) -> str:
        _, node = self._known_node(name)
        return node.host

    def _namespace(self, name: str) -> str:
        network = self._fleet.state.network
        return "" if network is None else network.namespace(name)

    def _memory_group(self, name: str) -> Path | None:
        return node_memory.group(self._fleet.state, name)

    def _known_node(self, name: str) -> tuple[LocalFleetState, LocalNode]:
        state = self._fleet.state
        node = state.there(name)
        pool = state.pool(node.pool)
        if pool is None or pool.kind != "gpu":
            raise ClusterError(f"{name} is no node for training; those of the pools of kind 'gpu' are")
        if node.deadline is not None:
            left = max(0.0, node.deadline - self._clock.now())
            raise ClusterError(
                f"no process is started on {name}: interruption pending, it terminates in {left:.0f} s"
            )
        if self._fleet.paused(name):
            raise ClusterError(f"no process is started on {name}: it is paused (SIGSTOP)")
        return state, node

    def _quota(self, name: str, slots: int) -> float:
        state = self._fleet.state
        node = state.node(name)
        pool = state.pool(node.pool) if node is not None else None
        if pool is None or pool.cpus_per_slot is None:
            return float(os.cpu_count() or 1)
        return pool.cpus_per_slot * slots
