"""A small world around ``decide``: a ledger, nodes that come and go, and apps that train, let go late, or die."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from ebbflow.planners.aggregation.demand import AggregationDemand
from ebbflow.planners.capacity.decision import decide
from ebbflow.planners.capacity.leases import SERVICE
from ebbflow.planners.capacity.values import Cycle, Memory, SchedulerInput, Settings
from ebbflow.planners.model.capacity import Node, Notice
from ebbflow.planners.model.fleet import Fleet, Offer, PoolState, Target
from ebbflow.planners.model.ledger import (
    OVER,
    AppEntered,
    AppMoved,
    AppReport,
    AppSpec,
    CapacityChanged,
    Change,
    Decided,
    Ended,
    Event,
    Extended,
    Granted,
    Lease,
    Recalled,
)
from ebbflow.planners.model.ledger_state import State, fold

START = 1_700_000_000.0


def node(id_: str, gpus: int = 4, *, price: float = 1.0, cores: int = 8, type_: str = "local") -> Node:
    return Node(id_, cores, 16.0, instance_type=type_, gpus=gpus, price=price)


def app(
    id_: str, gpus: int = 2, least: int | None = None, most: int | None = None, **more: object
) -> AppSpec:
    kind = more.pop("kind", "training")
    return AppSpec(id_, kind, gpus=gpus, min_gpus=least or gpus, max_gpus=most or gpus, **more)  # type: ignore[arg-type]


@dataclass
class Living:
    """One app's process: it trains on what it holds, and lets go of what is called back ``save`` s later."""

    spec: AppSpec
    work: float = 1e9  # GPU-seconds
    save: float = 2.0  # s
    dies: float = float("inf")  # s since the start, when it falls silent
    deaf: float = float("inf")  # s since the start, from when on it lets go of nothing
    mute: bool = False  # it says nothing of its work
    began: dict[int, float] = field(default_factory=dict)  # when each recall was heard
    done: float = 0.0
    over: bool = False
    fields: dict[str, object] = field(default_factory=dict)


class World:
    """Time passes by ``step``; after each the loop decides and everything is carried out and checked."""

    asks = False  # whether nodes that leave are replaced early only where that is asked for
    aggregation: AggregationDemand | None = None

    def __init__(
        self, settings: Settings, nodes: list[Node], *, seed: int = 0, fleet: Fleet | None = None
    ) -> None:
        self.settings = settings
        self.state = State()
        self.now = START
        self.memory = Memory()
        self.rng = np.random.default_rng(seed)
        self.apps: dict[str, Living] = {}
        self.reports: dict[str, AppReport] = {}
        self.evicted: set[tuple[str, str]] = set()
        self.unreachable: set[str] = set()  # nodes on which nothing can be ended by force
        self.fleet = fleet
        self.offers: dict[str, tuple[Offer, ...]] = {}
        self.cycles: list[tuple[SchedulerInput, Memory, dict[str, object], Cycle]] = []
        self.events: list[Event] = []
        self.recalls: dict[int, tuple[float, float]] = {}  # when, and by when
        self.ghosts: dict[
            int, Lease
        ] = {}  # that ended with their node, and whose processes may live on there
        self.quotas: dict[str, float] = {name: team.gpus for name, team in settings.teams.items()}
        self.write([CapacityChanged(1, tuple(nodes))])

    # --- what others do -------------------------------------------------------------------------------------

    def write(self, changes: list[Change]) -> None:
        for change in changes:
            event = Event(self.state.number + 1, self.now, change)
            fold(self.state, event)
            self.events.append(event)

    def enter(self, spec: AppSpec, **more: object) -> Living:
        living = Living(spec, **more)  # type: ignore[arg-type]
        self.apps[spec.id] = living
        self.write([AppEntered(spec)])
        self.report(living)
        return living

    def capacity(
        self,
        came: tuple[Node, ...] = (),
        left: tuple[str, ...] = (),
        notices: tuple[Notice, ...] | None = None,
    ) -> None:
        kept = self.state.notices.values() if notices is None else notices
        gone = set(left)
        self.write(
            [
                CapacityChanged(
                    self.state.revision + 1, came, left, tuple(n for n in kept if n.node_id not in gone)
                )
            ]
        )
        for lease in list(self.state.leases.values()):
            if lease.node in gone and lease.app in self.apps:
                self.apps[lease.app].began.pop(lease.number, None)

    def notice(self, id_: str, seconds: float) -> None:
        new = Notice(id_, self.now + seconds)
        self.capacity(notices=(*(n for n in self.state.notices.values() if n.node_id != id_), new))

    def finish(self, id_: str) -> None:
        living = self.apps[id_]
        living.over = True
        held = tuple(lease.number for lease in self.state.held(id_))
        self.reports[id_] = AppReport(self.now, (), held, "finished")
        self.ghosts = {number: lease for number, lease in self.ghosts.items() if lease.app != id_}
        self.write([AppMoved(id_, "finished")])

    # --- time -----------------------------------------------------------------------------------------------

    def tick(self, seconds: float) -> Cycle:
        """Let time pass, then decide, act and check once."""
        self._live(seconds)
        return self.cycle()

    def step(self, seconds: float = 1.0) -> Cycle:
        """Let time pass until what has changed meanwhile is decided on; return the last cycle."""
        cycle = self.tick(seconds)
        if cycle.memory.dirty is not None:
            cycle = self.tick(max(cycle.wake - self.now, 0.01))
        return cycle

    def steps(self, count: int, seconds: float = 1.0) -> None:
        for _ in range(count):
            self.step(seconds)

    def cycle(self) -> Cycle:
        fleet = replace(self.fleet, at=self.now) if self.fleet is not None else None
        situation = SchedulerInput(
            self.now,
            self.state,
            dict(self.reports),
            fleet,
            self.offers,
            evicted=frozenset(self.evicted),
            asks=self.asks,
            aggregation=self.aggregation,
        )
        dice = self.rng.bit_generator.state
        cycle = decide(situation, self.settings, self.memory, self.rng)
        frozen = replace(situation, state=copied(self.state))
        self.cycles.append((frozen, self.memory, dict(dice), cycle))
        self.memory = cycle.memory
        self._check(cycle)
        self.write(list(cycle.changes))
        self._after(cycle)
        self.evicted = {(one.app, one.node) for one in cycle.evict if one.node not in self.unreachable}
        for name, node_ in self.evicted:
            living = self.apps.get(name)
            if living is not None:
                for lease in self.state.held(name):
                    if lease.node == node_:
                        living.began.pop(lease.number, None)
        self.ghosts = {n: x for n, x in self.ghosts.items() if (x.app, x.node) not in self.evicted}
        return cycle

    def _live(self, seconds: float) -> None:
        self.now += seconds
        for living in self.apps.values():
            self.report(living, seconds)

    def report(self, living: Living, seconds: float = 0.0) -> None:
        since = self.now - START
        id_ = living.spec.id
        if living.over or since >= living.dies:
            return
        leases = self.state.held(id_)
        living.done += seconds * sum(lease.recalled is None for lease in leases)
        if living.done >= living.work:
            self.finish(id_)
            return
        released = []
        for lease in leases:
            if lease.recalled is not None and since < living.deaf:
                heard = living.began.setdefault(lease.number, self.now)
                if self.now - heard >= living.save:
                    released.append(lease.number)
        ghosts = [n for n, lease in self.ghosts.items() if lease.app == id_]
        if since < living.deaf:  # it hears that the leases are over
            for number in ghosts:
                del self.ghosts[number]
            ghosts.clear()
        holds = (*ghosts, *(lease.number for lease in leases if lease.number not in released))
        phase = "running" if leases else "waiting"
        said = {} if living.mute else {"work_left": living.work - living.done, "work_total": living.work}
        given = {"holds": holds, "released": tuple(released), "phase": phase, **said, **living.fields}
        self.reports[id_] = AppReport(self.now, **given)

    # --- rules ----------------------------------------------------------------------------------------------

    def _check(self, cycle: Cycle) -> None:
        """Check a cycle's changes against the rules that hold at any time."""
        state = self.state
        closed = {n.node_id for n in state.notices.values() if n.kind == "interruption"}
        for change in cycle.changes:
            if isinstance(change, Granted):
                for lease in change.leases:
                    assert lease.node not in closed, f"{lease} is on a node that leaves"
                    assert lease.until > self.now
                    for ghost in self.ghosts.values():
                        over = self.now >= ghost.until + self.settings.termination_grace_s
                        assert over or ghost.node != lease.node, f"{lease} is where {ghost} may still be used"
                    if lease.app != SERVICE:  # which enters with its first lease
                        assert state.apps[lease.app].phase not in {*OVER, "lost"}
            if isinstance(change, Extended):
                for number in change.leases:
                    held = state.leases[number]
                    assert held.recalled is None, f"{held} is called back and extended"
                    assert change.until > held.until
                    assert state.apps[held.app].phase not in {*OVER, "lost"}, f"{held.app} is over or lost"
            if isinstance(change, Ended):
                for number in change.leases:
                    lease = state.leases[number]
                    if state.apps[lease.app].spec.kind == "aggregation":
                        continue
                    self._may_end(lease)
                    if lease.node not in state.nodes and not self._has_let_go(lease):
                        self.ghosts[number] = lease
            if isinstance(change, Recalled):
                assert change.deadline >= self.now
                for number in change.leases:
                    known = state.leases[number].recalled
                    assert known is None or change.deadline < known, "called back twice, not sooner"
                    self.recalls.setdefault(number, (self.now, change.deadline))
        assert cycle.wake > self.now

    def _has_let_go(self, lease: Lease) -> bool:
        report = self.reports.get(lease.app)
        return report is not None and (lease.number in report.released or not report.holds)

    def _may_end(self, lease: Lease) -> None:
        gone = lease.node not in self.state.nodes
        let_go = self._has_let_go(lease)
        forced = (lease.app, lease.node) in self.evicted
        late = self.now >= lease.until + self.settings.termination_grace_s
        assert gone or let_go or forced or late, f"{lease} ends although it may be in use"

    def _after(self, cycle: Cycle) -> None:
        """Check what the changes have led to."""
        state = self.state
        elastic = self.settings.elastic
        for record in state.apps.values():
            spec = record.spec
            if spec.kind == "aggregation":
                continue
            live = [x for x in state.held(spec.id) if x.recalled is None and x.node in state.nodes]
            assert len(live) <= max(spec.max_gpus, spec.gpus), f"{spec.id} holds {len(live)} GPUs"
            quiet = cycle.memory.heartbeats.get(spec.id)
            silent = quiet is None or quiet.quiet >= self.settings.heartbeat_timeout_s
            granted = [
                x for c in cycle.changes if isinstance(c, Granted) for x in c.leases if x.app == spec.id
            ]
            if granted and not silent:
                whole = spec.gpus if not elastic or spec.min_gpus >= spec.max_gpus else spec.min_gpus
                assert len(live) >= whole, f"{spec.id} got {len(granted)} GPUs and has {len(live)} of {whole}"
                if not elastic:
                    assert len(live) == spec.gpus
        for team, most in self.quotas.items():
            if any(isinstance(c, Granted) for c in cycle.changes):
                held = sum(
                    x.recalled is None for x in state.leases.values() if state.apps[x.app].spec.team == team
                )
                got = any(
                    state.apps[x.app].spec.team == team
                    for c in cycle.changes
                    if isinstance(c, Granted)
                    for x in c.leases
                )
                assert not got or held <= most, f"team {team} holds {held} of {most}"

    def live(self, id_: str) -> int:
        """Return the GPUs that an app holds and may use."""
        return sum(lease.recalled is None for lease in self.state.held(id_))

    def placement(self, id_: str) -> dict[str, int]:
        counts: dict[str, int] = {}
        for lease in self.state.held(id_):
            if lease.recalled is None:
                counts[lease.node] = counts.get(lease.node, 0) + 1
        return counts

    def said(self, kind: str) -> list[str]:
        """Return the reasons of all decisions of a kind."""
        return [
            e.change.reason for e in self.events if isinstance(e.change, Decided) and e.change.kind == kind
        ]


def copied(state: State) -> State:
    """Return an independent copy: all values in it are frozen."""
    return replace(
        state,
        nodes=dict(state.nodes),
        notices=dict(state.notices),
        apps=dict(state.apps),
        leases=dict(state.leases),
        booked=dict(state.booked),
    )


def pool(
    name: str, nodes: tuple[Node, ...], planned: int | None = None, most: int = 10, **more: object
) -> PoolState:
    size = len(nodes) if planned is None else planned
    return PoolState(name, size, size, nodes, max_nodes=most, **more)  # type: ignore[arg-type]


def fleet_of(*pools: PoolState, revision: int = 1, at: float = START) -> Fleet:
    return Fleet(revision, at, tuple(sorted(pools, key=lambda p: p.name)))


def applied(fleet: Fleet, target: Target) -> Fleet:
    """Return the fleet as ``FleetControl.apply`` records a target."""
    pools = tuple(
        replace(
            p, planned=target.nodes, requested=target.nodes, on_demand=target.on_demand, draining=target.drain
        )
        if p.name == target.pool
        else p
        for p in fleet.pools
    )
    return replace(fleet, pools=pools)
