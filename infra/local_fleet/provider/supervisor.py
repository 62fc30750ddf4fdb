"""The supervisor: the provider of a local fleet's nodes, in a process of its own.

It starts what is planned, as an Auto Scaling group does, also in place of nodes that were lost or have a notice; ends
nodes at their deadlines; takes down what is left on nodes that are gone, and what launchers left that are gone; and
ends everything when the fleet is taken down or its owner is no more. Whatever it does can be done twice, and by the
next supervisor: its orders and its memory are the state.

It also starts the Spark cluster whose workers are the fleet's Spark nodes.

Run as ``python -m ebbflow.infra.local_fleet.provider.supervisor FOLDER UID`` by ``LocalFleet``.
"""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import InfraError
from ebbflow.infra.local_fleet.provider import network, node_memory
from ebbflow.infra.local_fleet.provider.lender_keeper import LenderKeeper
from ebbflow.infra.local_fleet.provider.lending import providers
from ebbflow.infra.local_fleet.provider.life import abandoned, collect, finish, look, sweep, teardown
from ebbflow.infra.local_fleet.provider.provider import NodeProvider
from ebbflow.infra.local_fleet.state import labels
from ebbflow.infra.local_fleet.state.changes import give, missing, take
from ebbflow.infra.local_fleet.state.clock import MachineClock
from ebbflow.infra.local_fleet.state.fleet_state import LocalFleetState, LocalNode, SparkPart, by_number
from ebbflow.infra.local_fleet.state.pools import LocalPool, PoolKind
from ebbflow.infra.local_fleet.state.store import LocalFleetStateFile
from ebbflow.infra.machine import cgroups
from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster
from ebbflow.infra.spark.cluster.state import StateFile
from ebbflow.planners.errors import EbbflowError

LOOK = 0.2  # s between looks at the state and the nodes
_SWEEP = 2.0  # s between looks for processes that nobody answers for
_JOIN = 10.0  # s for a start to notice that the fleet is going down
_AT_ONCE = 4  # nodes that start at a time
_BACK_OFF = (1.0, 60.0)  # s before another start after one that did not work: the first, the most

log = logging.getLogger(__name__)


class NodeSupervisor:
    """Keeps one fleet; ``run`` returns when it is down. ``common`` starts what the nodes of a kind have in common."""

    def __init__(
        self,
        file: LocalFleetStateFile,
        uid: str,
        clock: Clock,
        own: Mapping[PoolKind, NodeProvider] | None = None,
        common: Callable[[LocalFleetState, LocalPool], LocalFleetState] | None = None,
        *,
        look: float = LOOK,
    ) -> None:
        self._file, self._uid, self._clock = file, uid, clock
        self._providers = own or providers(file.folder, clock)
        self._common = common or (lambda state, pool: state)
        self._look = look
        self._lenders = LenderKeeper(file, clock)
        self._starting: dict[str, threading.Thread] = {}
        self._once: dict[PoolKind, threading.Lock] = {kind: threading.Lock() for kind in self._providers}
        self._stop = threading.Event()
        self._problem = ""
        self._swept = 0.0
        self._silent: dict[tuple[str, ...], float] = {}  # occupants whose launcher is gone: since when

    def run(self) -> None:
        """Keep the fleet until it is down."""
        self._drop_half_started()
        while (state := self._read_state()) is not None:
            if not state.up or (state.owner is not None and not labels.alive(state.owner)):
                break
            try:
                self._tick(state)
                self._problem = ""
            except InfraError as error:  # such as a full disk; what is not done now is done at the next look
                if str(error) != self._problem:
                    self._problem = str(error)
                    log.error("%s", error)
            except Exception:  # a defect must not take all nodes down, which the supervisor's end would
                log.exception("polling the nodes failed")
            self._clock.wait(self._stop, self._look)
        self._stop.set()
        teardown(self._file, self._uid, self._providers, self._clock)
        for thread in list(self._starting.values()):
            thread.join(_JOIN)
        self._lenders.close(_JOIN)
        labels.destroy(labels.below(self._uid), self._clock)

    def stop(self) -> None:
        """Let ``run`` return soon, after it has taken everything down; for a supervisor in a thread."""
        self._stop.set()
        with contextlib.suppress(InfraError):
            self._file.change(self._uid, lambda state: replace(state, up=False))

    def _read_state(self) -> LocalFleetState | None:
        """Return the state of this life; ``None`` when it is over.

        A state that cannot be read ends nothing at once.
        """
        for _ in range(50):
            try:
                state = self._file.read()
            except InfraError as error:
                log.error("%s", error)
                self._clock.sleep(self._look)
                continue
            return state if state is not None and state.uid == self._uid else None
        return None

    def _tick(self, state: LocalFleetState) -> None:
        state = look(self._file, state, self._providers, self._clock)
        now = self._clock.now()
        if now - self._swept >= _SWEEP:
            self._swept = now
            sweep(state, self._clock)
            self._lenders.tend(state)
            abandoned(self._file.folder, state, self._clock)
            self._silent = collect(state, self._silent, self._clock)
        for pool in state.pools:
            plan = state.plans[pool.name]
            if missing(state, pool) and max(plan.outage, plan.again) <= now:
                self._fill(pool.name)

    # --- starting -------------------------------------------------------------------------------------------

    def _fill(self, pool: str) -> None:
        """Ask for what is missing in one pool, as far as there is room for starts."""
        free = _AT_ONCE - len(self._starting)
        if free <= 0:
            return
        before = self._file.read()
        known = {node.id for node in before.nodes} if before is not None else set()
        state = self._file.change(self._uid, lambda state: give(state, pool, free, self._clock.now()))
        for node in sorted((n for n in state.nodes if n.id not in known), key=lambda n: by_number(n.id)):
            thread = threading.Thread(target=self._start, args=(node,), name=f"start-{node.id}", daemon=True)
            self._starting[node.id] = thread
            thread.start()

    def _start(self, node: LocalNode) -> None:
        try:
            state = self._file.read()
            pool = state.pool(node.pool) if state is not None else None
            if state is None or pool is None:
                return
            if not self._boot(node, pool.provision_time):
                self._drop(node, "not needed any longer")
                return
            provider = self._providers[pool.kind]
            with self._once[pool.kind]:  # what its nodes have in common is started once
                state = self._common(state, pool)
            arrived = provider.start(state, pool, node)
            state = self._file.change(
                self._uid, lambda b: take(b, node.id, arrived.host, arrived.process, self._clock.now())
            )
            if (found := state.node(node.id)) is None:
                provider.end(state, node)
                self._disconnect(state, node)
            elif found.fate:
                finish(self._file, state, [found], self._providers, self._clock)
        except EbbflowError as error:
            log.warning("%s could not be started: %s", node.id, error)
            self._failed(node, str(error))
        except Exception as error:  # a thread that dies silently would leave the node starting for ever
            log.exception("%s could not be started", node.id)
            self._failed(node, repr(error))
        finally:
            self._starting.pop(node.id, None)

    def _boot(self, node: LocalNode, seconds: float) -> bool:
        """Let the boot time pass and tell whether the node is still wanted then."""
        end = self._clock.now() + seconds
        while True:
            state = self._read_state()
            found = state.node(node.id) if state is not None and state.up else None
            if found is None or found.fate or self._stop.is_set():
                return False
            left = end - self._clock.now()
            if left <= 0:
                return True
            self._clock.wait(self._stop, min(self._look, left))

    def _drop(self, node: LocalNode, why: str) -> None:
        now = self._clock.now()
        self._file.change(self._uid, lambda state: state.without(node.id, why, now, lost=False).short(now))

    def _failed(self, node: LocalNode, why: str) -> None:
        def change(state: LocalFleetState) -> LocalFleetState:
            now, tries = self._clock.now(), state.plans[node.pool].tries + 1
            delay = min(_BACK_OFF[0] * 2.0 ** (tries - 1), _BACK_OFF[1])
            later = state.without(node.id, "it could not be started", now, lost=False)
            return later.planned(node.pool, failed=why, again=now + delay, tries=tries)

        with contextlib.suppress(InfraError):
            state = self._file.read()
            if state is not None and (pool := state.pool(node.pool)) is not None:
                self._providers[pool.kind].end(state, node)
                self._disconnect(state, node)
        with contextlib.suppress(InfraError):
            self._file.change(self._uid, change)

    def _disconnect(self, state: LocalFleetState, node: LocalNode) -> None:
        node_memory.disconnect(state, node, self._clock)
        network.disconnect(state, node)

    def _drop_half_started(self) -> None:
        """End what an earlier supervisor was starting: nobody waits for it any more."""
        state = self._read_state()
        for node in state.nodes if state is not None else ():
            if node.phase == "starting" and state is not None and (pool := state.pool(node.pool)) is not None:
                with contextlib.suppress(InfraError):
                    self._providers[pool.kind].end(state, node)
                    self._disconnect(state, node)
                    self._drop(node, "its start was interrupted")


def main(folder: str, uid: str) -> None:
    """Keep the fleet in ``folder``."""

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    file = LocalFleetStateFile(Path(folder))
    me = labels.own()
    # Before this process is the supervisor: the guardian of the one before ends as soon as it sees the next.
    before = file.read()
    mine = before is not None and before.uid == uid
    guardians = [network.guard(file, before), node_memory.guard(file, before)] if before and mine else []
    state = file.change(uid, lambda b: b if labels.alive(b.supervisor) else replace(b, supervisor=me))
    clock = MachineClock(state.offset)
    if state.supervisor == me:
        NodeSupervisor(file, uid, clock, common=lambda b, pool: ensure_cluster(file, b, pool, clock)).run()
    for guardian in guardians:
        if guardian is not None:
            guardian.release()


_kept: list[LocalSparkCluster] = []  # of this process, the supervisor: a cluster ends with who started it


def ensure_cluster(
    file: LocalFleetStateFile, state: LocalFleetState, pool: LocalPool, clock: Clock
) -> LocalFleetState:
    """Return the state with a cluster for a Spark node of ``pool``; it is started where there is none.

    It ends with this process. Raises ``ClusterError`` and ``EngineUnavailableError``.
    """
    if pool.kind != "spark":
        return state
    current = file.read() or state
    if current.spark is not None:
        cluster_state = StateFile.of(current.spark.name).read()
        if cluster_state is not None and cluster_state.uid == current.spark.uid and cluster_state.alive:
            return current
    workers = max(1, sum(other.start for other in state.pools if other.kind == "spark"))
    machine = len(os.sched_getaffinity(0))
    per_core = (
        cgroups.per_core_quota(machine, workers * pool.cores)
        if pool.cpus_per_slot is None
        else pool.cpus_per_slot
    )
    cluster = LocalSparkCluster.start(
        state.name,
        workers=0,
        cores=pool.cores,
        memory=f"{max(1, round(pool.memory * 1024))}m",
        cpus=min(float(pool.cores), pool.cores * per_core),
        directory=file.folder / "spark",
        host=state.network.host if state.network is not None else "",
        network=state.network.megabytes if state.network is not None else 0.0,
        clock=clock,
    )
    _kept[:] = [cluster]
    part = SparkPart(cluster.name, cluster.state.uid, cluster.master_url)
    return file.change(state.uid, lambda b: replace(b, spark=part))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
