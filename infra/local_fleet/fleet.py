"""``LocalFleet``: nodes of this machine that come and go as cloud nodes do.

*Planned* is what targets said, *requested* what the supervisor is to have, *observed* what has come up and is there.
All of it stands in one file; any process may ``attach`` by the fleet's name.
"""

import atexit
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import ClusterError, PriceError
from ebbflow.infra.local_fleet import begin
from ebbflow.infra.local_fleet.begin import prune
from ebbflow.infra.local_fleet.faults import FaultInjector
from ebbflow.infra.local_fleet.provider.life import finish, look
from ebbflow.infra.local_fleet.state import changes, labels
from ebbflow.infra.local_fleet.state.fleet_state import LocalFleetState
from ebbflow.infra.local_fleet.state.labels import Occupant
from ebbflow.infra.local_fleet.state.pools import LocalPool, check, shared
from ebbflow.infra.local_fleet.state.store import LocalFleetStateFile
from ebbflow.infra.local_fleet.view import NodeView, known, offers
from ebbflow.infra.machine import devices
from ebbflow.infra.machine.network import links
from ebbflow.infra.protocols import ApplyResult, Refusal
from ebbflow.infra.spark.cluster import options
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Capacity, Notice
from ebbflow.planners.model.fleet import Fleet, Offer, PoolState, Target
from ebbflow.planners.model.prices import Series

if TYPE_CHECKING:
    from ebbflow.infra.local_fleet.nodes import FleetNodes


class LocalFleet(FaultInjector):
    """A handle on one fleet. A ``FleetControl``, a ``CapacitySource``, a ``PriceSource``, and what evicts apps.

    Get one by ``start`` or ``attach``. ``close`` lets go of the fleet, ``down`` takes it down; a fleet that is not to
    stay goes down with the process that started it, however that one ends. As a context manager it is taken down at
    the end by whoever started it. Safe for several threads.
    """

    @classmethod
    def start(
        cls,
        pools: Sequence[LocalPool],
        name: str = "local",
        *,
        stay: bool = False,
        gpus: Sequence[str] | None = None,
        network: Sequence[float] = (),
        wait: float | None = 120.0,
        hazard: Callable[[int, float], float] | None = None,
        clock: Clock | None = None,
    ) -> Self:
        """Start a fleet, and wait until its first nodes are up.

        Args:
            pools: what it consists of.
            name: by which others attach; also of the Spark cluster, where there is one.
            stay: whether the fleet survives this process; it then runs until ``down``.
            gpus: that GPU nodes share out, as ``CUDA_VISIBLE_DEVICES`` names them; by default all that this process
                may use, if they are enough for the first nodes. Without any, slots are CPU cores.
            network: bit/s of each link that a node has, one or two; nodes are then in network namespaces on a bridge
                (needs root). Without, they are on loopback.
            wait: for the first nodes, s; ``None``: not at all.
            hazard: estimates losses per node-hour from losses and node-seconds seen; by default their quotient, with
                an hour at least.
            clock: of whoever uses this handle: deadlines are told by it.

        Raises ``OptionError``, or ``ClusterError`` when the name is taken, the nodes do not come up, or their network
        cannot be made.
        """
        options.check(name, 0, 1)
        found = check(pools)
        clock = clock or SystemClock()
        file = LocalFleetStateFile.of(name, clock)
        if network:
            links.check()
        gpus = shared(found, devices.visible(), gpus)
        with file.starting():  # until others see that it runs
            uid = begin.claim(file, name, found, gpus, stay, clock, tuple(network))
            fleet = cls(file, uid, clock, hazard=hazard, mine=not stay)
            if not stay:
                atexit.register(fleet._at_exit)
            try:
                fleet._ensure_supervisor()
            except BaseException:
                fleet.down()
                raise
        with contextlib.suppress(OSError):
            prune(file.folder.parent, clock)
        try:
            if wait is not None:
                fleet.wait(lambda state: all(len(state.seen(p)) >= p.start for p in state.pools), wait)
        except BaseException:
            fleet.down()
            raise
        return fleet

    @classmethod
    def attach(
        cls,
        name: str = "local",
        *,
        hazard: Callable[[int, float], float] | None = None,
        clock: Clock | None = None,
    ) -> Self:
        """Open a fleet that this or another process started. Raises ``ClusterError`` when there is none."""
        options.check(name, 0, 1)
        clock = clock or SystemClock()
        file = LocalFleetStateFile.of(name, clock)
        state = file.read()
        if state is None or not state.up:
            running = ", ".join(fleet.name for fleet in begin.list_fleets()) or "none"
            option = "" if name == "local" else f" --name {name}"
            raise ClusterError(
                f"there is no local fleet {name!r} (running: {running}); "
                f"start it: ebbflow local up --spark 2 --gpu 2{option}"
            )
        return cls(file, state.uid, clock, hazard=hazard)

    # --- FleetControl ---------------------------------------------------------------------------------------

    def observe(self) -> Fleet:
        """See ``FleetControl``. Raises ``ClusterError`` once the fleet is down, ``StorageError``."""
        with contextlib.suppress(ClusterError):
            self._ensure_supervisor()  # what a crash of it took down comes again
        state = look(self._file, self.state, self._providers, self._clock)
        now, by = self._clock.now(), self._shift()
        pools = tuple(_later(state.pool_state(pool, now), by) for pool in state.pools)
        return Fleet(state.revision, now + by, pools, _moved(state.pending_notices(), by))

    def take_notices(self, notices: Sequence[Notice]) -> int:
        """See ``FleetControl``. What is told ends no node: that is what ``notice`` does."""
        heard = _moved(notices, -self._shift())
        return self._change(lambda state: changes.record_notices(state, heard)).revision

    def apply(self, target: Target, *, dry_run: bool = False) -> ApplyResult:
        """See ``FleetControl``. Raises ``OptionError``."""
        state = self.state
        known(state, target.pool)
        if target.nodes < 0 or not 0 <= target.on_demand <= target.nodes:
            raise OptionError(
                f"a target must have nodes >= on_demand >= 0; got {target.nodes} nodes, {target.on_demand} on-demand"
            )
        said = ApplyResult(0)

        def change(current: LocalFleetState) -> LocalFleetState:
            nonlocal said
            later, asked, refused = changes.plan(current, target, self._clock.now())
            said = ApplyResult(current.revision, asked, refused, dry_run)
            return later

        with self._acting:
            look(self._file, state, self._providers, self._clock)
            after = change(self.state) if dry_run else self._change(change)
            if not dry_run:
                self._ensure_supervisor()
        return said if dry_run else replace(said, revision=after.revision)

    def terminate(self, ids: Sequence[str], *, dry_run: bool = False) -> ApplyResult:
        """See ``FleetControl``. The nodes are gone when this returns. Raises ``ClusterError`` for one that stays."""
        said = ApplyResult(0)

        def change(current: LocalFleetState) -> LocalFleetState:
            nonlocal said
            later, asked, refused = changes.end(current, ids, "terminated on request")
            said = ApplyResult(current.revision, asked, refused, dry_run)
            return later

        with self._acting:
            state = look(self._file, self.state, self._providers, self._clock)
            if dry_run:
                change(state)
                return said
            state = self._change(change)
            gone = [node for ask in said.asked if (node := state.node(ask.of)) is not None]
            finish(self._file, state, gone, self._providers, self._clock)
            return replace(said, revision=self.state.revision)

    def remove(self, pool: str, count: int = 1) -> tuple[str, ...]:
        """Plan ``count`` nodes fewer in a pool, within its limits, and terminate its newest nodes; return their ids.

        Of nodes that are planned and not there yet, so many fewer come instead. Raises ``OptionError`` for an unknown
        pool, ``ClusterError`` for a node that outlives SIGKILL.
        """
        known(self.state, pool)
        before = self.state.plans[pool].nodes
        planned = self.add(pool, -count)
        there = [node for node in self.view() if node.pool == pool and node.state != "ending"]
        ids = newest_beyond(there, before, planned)
        if ids:
            self.terminate(ids)
        return ids

    def repair(self, *, dry_run: bool = False) -> ApplyResult:
        """Start another supervisor where there is none: it does the rest, as it does all the time."""
        state = self.state if dry_run else look(self._file, self.state, self._providers, self._clock)
        refused: tuple[Refusal, ...] = ()
        if not dry_run:
            self._ensure_supervisor()
        elif not labels.alive(state.supervisor):
            refused = (
                Refusal(
                    state.name, "its node supervisor is gone; no node is started before another one runs"
                ),
            )
        return ApplyResult(state.revision, (), refused, dry_run)

    def close(self) -> None:
        """Close this handle; the fleet continues. May be called twice."""

    # --- CapacitySource, PriceSource ------------------------------------------------------------------------

    def capacity(self) -> Capacity:
        """See ``CapacitySource``: the nodes of all pools, with the fleet's own revision."""
        fleet = self.observe()
        nodes = sorted((node for pool in fleet.pools for node in pool.nodes), key=lambda node: node.id)
        hazard = self._hazard(*self.state.experience(self._clock.now()))
        network = self.state.network.megabytes if self.state.network is not None else 0.0
        return Capacity(fleet.revision, tuple(nodes), fleet.notices, fleet.at, hazard, network=network)

    def offers(self, pool: str) -> tuple[Offer, ...]:
        """Return what a pool's nodes pretend to cost. Raises ``OptionError`` for an unknown pool."""
        return offers(known(self.state, pool))

    def series(self, zone: str, instance_type: str, start: float) -> Series:
        """Raise ``PriceError``: the prices of local nodes stand still, and nobody has kept them."""
        raise PriceError(
            f"there are no past prices of {instance_type}: the simulated price of local nodes is constant"
        )

    def on_demand(self, instance_type: str) -> float | None:
        """Return what an on-demand node of this type pretends to cost, $/h; ``None`` when there is none."""
        found = [p.price_in("on-demand") for p in self.state.pools if p.instance_type == instance_type]
        return min(found, default=None)

    def problems(self) -> list[str]:
        """Return what keeps pools from starting nodes."""
        return [f"{name}: {plan.failed}" for name, plan in self.state.plans.items() if plan.failed]

    def dollars(self) -> float:
        """Return what all nodes of this fleet have pretended to cost until now."""
        return self.state.dollars(self._clock.now())

    # --- apps -----------------------------------------------------------------------------------------------

    def nodes_for(
        self,
        app: str,
        logs: Path | str | None = None,
        *,
        grace: float = 30.0,
        environment: Mapping[str, str] | None = None,
    ) -> "FleetNodes":
        """Return a ``NodePool`` for one launcher of ``app`` on the fleet's GPU nodes; see ``FleetNodes``.

        Raises ``OptionError``.
        """
        from ebbflow.infra.local_fleet.nodes import FleetNodes

        if not app:
            raise OptionError("an app must have an id")
        return FleetNodes(self, app, logs, grace=grace, environment=environment, clock=self._clock)

    def left_over(self, app: str) -> tuple[Occupant, ...]:
        """Return what runs for ``app`` on any node, whoever started it."""
        return labels.occupants(self.uid, app=app)

    def occupants(self, node: str = "") -> tuple[Occupant, ...]:
        """Return what runs for any app, on all nodes or one."""
        return labels.occupants(self.uid, node)

    def evict(self, app: str, node: str) -> bool:
        """Kill what ``app`` runs on ``node``, in whichever process it was started; true once nothing is left.

        Raises ``OptionError`` for an empty name, and ``ClusterError`` when something outlives SIGKILL for 20 s.
        """
        if not app or not node:
            raise OptionError(f"an app and a node must be named; got {app!r} and {node!r}")
        labels.destroy(labels.below(self.uid, node, app), self._clock)
        return True

    def present(self) -> list[tuple[str, str]]:
        """Return each app with each node on which anything of it runs, whoever started it."""
        return sorted({(one.app, one.node) for one in self.occupants()})


def newest_beyond(there: Sequence[NodeView], before: int, planned: int) -> tuple[str, ...]:
    """Return the ids of the nodes that end where ``planned`` instead of ``before`` nodes are planned."""
    fewer = max(min(before, len(there)) - planned, 0)
    return tuple(node.id for node in sorted(there, key=lambda node: node.since)[len(there) - fewer :])


def _moved(notices: Sequence[Notice], by: float) -> tuple[Notice, ...]:
    return tuple(replace(notice, deadline=notice.deadline + by) for notice in notices)


def _later(state: PoolState, by: float) -> PoolState:
    since = None if state.short_since is None else state.short_since + by
    return replace(state, short_since=since, on_demand_since=state.on_demand_since + by)
