"""How many nodes each pool is to have, and which leave: for the GPUs and cores that work needs, no more, no flapping.

Nodes are added when an app's deadline cannot be met on what there is, and when apps have waited for too long; pools
with the cheapest useful GPU or core (``planners.fleet.market``) grow first. Nodes leave when they have been of no use
for a while, drained first; of those with leases none is taken. Every wish goes through hysteresis
(``scaling.steady``), on-demand nodes where spot is dry (``fallback``) and the guard.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf

from ebbflow.planners.capacity.cycle_state import CycleState
from ebbflow.planners.capacity.demand import (
    Need,
    aggregator_need,
    core_need,
    gpu_need,
    nodes_of_tensors,
    uses_of,
)
from ebbflow.planners.capacity.liveness import LivenessResult
from ebbflow.planners.capacity.replacements import Replacements, successors
from ebbflow.planners.capacity.values import Memory, Scaling, SchedulerInput
from ebbflow.planners.fleet import guard
from ebbflow.planners.fleet.fallback import amended
from ebbflow.planners.fleet.guard import RunMoney
from ebbflow.planners.fleet.market import Interruption
from ebbflow.planners.fleet.scaling.scale_in import may_end, with_drains
from ebbflow.planners.fleet.scaling.steady import StabilizedTarget
from ebbflow.planners.model.capacity import Node, Notice
from ebbflow.planners.model.fleet import Fleet, Offer, PoolState, Target
from ebbflow.planners.model.ledger import Change, Decided


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What is to become of the fleet."""

    targets: tuple[Target, ...] = ()
    changes: tuple[Change, ...] = ()
    pools: Mapping[str, StabilizedTarget] = field(default_factory=dict)
    end: tuple[str, ...] = ()
    wake: float = inf
    sizes: Mapping[tuple[str, str], int] = field(default_factory=dict)  # what a node of a pool has
    replacing: Mapping[str, float] = field(
        default_factory=dict
    )  # leaving node -> when another was last asked for
    replace: tuple[Notice, ...] = ()  # of nodes that others are to be started for now
    lacking: float | None = None  # since when trainings lack aggregators


def scale(
    situation: SchedulerInput,
    scene: CycleState,
    memory: Memory,
    presence: LivenessResult,
    last_logged: MutableMapping[str, str],
) -> FleetPlan:
    """Return the targets of all pools that are to change, with what they were decided on.

    ``last_logged`` is kept up to
    date."""
    fleet, rules = situation.fleet, scene.settings.scaling
    if fleet is None or rules is None:
        return FleetPlan(pools=memory.pools, sizes=memory.sizes, replacing=memory.replacing)
    return _Scaling(situation, scene, memory, presence, last_logged, fleet, rules).run()


class _Scaling:
    """The steps for all pools of one fleet."""

    def __init__(
        self,
        situation: SchedulerInput,
        scene: CycleState,
        memory: Memory,
        presence: LivenessResult,
        last_logged: MutableMapping[str, str],
        fleet: Fleet,
        rules: Scaling,
    ) -> None:
        self.situation, self.scene, self.memory, self.last_logged = situation, scene, memory, last_logged
        self.fleet, self.rules = fleet, rules
        # for who gets nothing by a rule of the guard no node is rented
        self.out = {
            *presence.silent,
            *(one for one in scene.state.apps if last_logged.get(f"guard {one}") == "refused"),
        }
        self.new = guard.new_nodes(situation.offers)
        self.uses = uses_of(situation, scene, memory.plan)
        self.changes: list[Change] = []
        self.held: dict[str, StabilizedTarget] = {}

    def run(self) -> FleetPlan:
        scene, rules = self.scene, self.rules
        pools = [pool for pool in self.fleet.pools if "/" not in pool.name]  # gangs have their own requests
        kinds = {pool.name: self.kind(pool) for pool in pools}
        whats = ("gpus", "cores", "aggregators")
        sorts = {what: [pool for pool in pools if kinds[pool.name] == what] for what in whats}
        gpus = gpu_need(scene, self.memory, rules, self.out)
        aggregators, lacking = aggregator_need(scene, self.memory, rules, self.out)
        needs = {"gpus": gpus, "cores": self.cores(sorts["cores"]), "aggregators": aggregators}
        wishes = {
            name: (nodes, needs[what])
            for what, some in sorts.items()
            for name, nodes in self.spread(some, needs[what], what).items()
        }
        targets = [
            target
            for pool in pools
            if pool.name in wishes and (target := self.target(pool, *wishes[pool.name])) is not None
        ]
        end = tuple(
            id_
            for pool in self.fleet.pools
            for id_ in may_end(pool.draining, pool.nodes, self.uses, self.situation.elsewhere)
        )
        found = self.successors(pools, targets, {name: need for name, (_, need) in wishes.items()})
        self.changes += found.changes
        return FleetPlan(
            tuple(targets),
            tuple(self.changes),
            self.held,
            end,
            min(gpus.soonest, aggregators.soonest, self.next_shrink(), found.wake),
            self.sizes(),
            found.asked,
            found.now,
            lacking,
        )

    def successors(
        self, pools: Sequence[PoolState], targets: Sequence[Target], needs: Mapping[str, Need]
    ) -> Replacements:
        """Return the nodes that others are asked for in place of, within the guard's limits."""
        if not self.situation.asks:
            return Replacements()
        sizes = {pool.name: pool.planned for pool in pools} | {one.pool: one.nodes for one in targets}
        drains = {id_ for one in targets for id_ in one.drain}
        # the ledger hears of notices before the fleet is looked at again
        fleet = replace(self.fleet, notices=(*self.fleet.notices, *self.scene.state.notices.values()))

        def passed(pool: PoolState, nodes: int) -> tuple[int, Sequence[str]]:
            wanted = Target(pool.name, nodes, self.fleet.revision, "", min(pool.on_demand, nodes))
            verdict = self.checked(wanted, self.money(needs[pool.name]), fleet)
            return (verdict.target.nodes if verdict.target else 0), verdict.reasons

        return successors(
            [pool for pool in pools if pool.name in needs],
            fleet.notices,
            sizes,
            drains,
            self.memory.replacing,
            self.scene.now,
            self.scene.state.revision,
            self.last_logged,
            passed,
        )

    # --- pools ----------------------------------------------------------------------------------------------

    def kind(self, pool: PoolState) -> str:
        """Return what a pool is for: as the settings say, else by what its nodes have."""
        return self.rules.purpose(pool) or ("gpus" if self.each(pool, "gpus") > 0 else "cores")

    def each(self, pool: PoolState, what: str) -> int:
        """Return the GPUs or cores of one node, the fewest that one can have; 0 where that is not known."""
        if what == "aggregators":
            return 1
        known = [getattr(node, what) for node in pool.nodes]
        known += [getattr(offer, what) for offer in self.situation.offers.get(pool.name, ())]
        fewest = min((int(one) for one in known if one > 0), default=0)
        # a pool that is empty now is made of nodes like those that it had
        return fewest or (0 if known else self.memory.sizes.get((pool.name, what), 0))

    def sizes(self) -> dict[tuple[str, str], int]:
        """Return what a node of each pool has, as far as that was ever known."""
        kinds = ("gpus", "cores")
        return {(pool.name, one): self.each(pool, one) for pool in self.fleet.pools for one in kinds}

    def used(self, pool: PoolState) -> int:
        """Return the nodes of a pool on which apps hold GPUs, or are to hold some, or have tensors."""
        wanted = {node for one in self.memory.plan.wanted.values() for node, _ in one.placement}
        held = {lease.node for leases in self.scene.mine.values() for lease in leases.values()}
        held |= wanted | nodes_of_tensors(self.scene)
        gone = {*pool.draining, *self.scene.closed}
        return sum(node.id in held and node.id not in gone for node in pool.nodes)

    def spread(self, pools: Sequence[PoolState], need: Need, what: str) -> dict[str, int]:
        """Return how many nodes each pool of GPUs or cores should have, so that all together have what is needed.

        Pools keep what is used. More is asked of the pool with the cheapest useful GPU or core first, less of the
        dearest.
        """
        order = sorted(pools, key=lambda pool: self.cost(pool, what))
        # of a pool of which nothing is known a single node is tried
        each = {pool.name: self.each(pool, what) or max(need.units, 1) for pool in order}
        base = {pool.name: max(self.used(pool), pool.min_nodes) for pool in order}
        missing = need.units - sum(base[pool.name] * each[pool.name] for pool in order)
        for planned_first in (True, False):  # what is planned already before anything new
            for pool in order:
                most = min(pool.planned, pool.max_nodes) if planned_first else pool.max_nodes
                more = min(ceil(max(missing, 0) / each[pool.name]), max(most - base[pool.name], 0))
                base[pool.name] += more
                missing -= more * each[pool.name]
        return base

    def cost(self, pool: PoolState, what: str) -> tuple[bool, float, str]:
        """Return what pools are sorted by: dry ones come last, then dollars per useful hour of a GPU or core."""
        after = self.rules.fallback.after if self.rules.fallback is not None else self.rules.provision_time_s
        dry = pool.short_since is not None and self.scene.now - pool.short_since >= after
        interruption = Interruption(self.rules.provision_time_s)
        offers = self.situation.offers.get(pool.name, ())
        cheapest = min(
            (
                o.price / units / interruption.useful(o.interruptions)
                for o in offers
                if (units := _units(o, what)) > 0
            ),
            default=inf,
        )
        if not offers:
            cheapest = min(
                (n.price / units for n in pool.nodes if (units := _units(n, what)) > 0), default=inf
            )
        return dry, cheapest, pool.name

    def cores(self, pools: Sequence[PoolState]) -> Need:
        """Return the cores that queries need of all pools together: a query works on the nodes of each."""
        there = sum(node.cores for pool in pools for node in pool.nodes if node.id not in self.scene.closed)
        each = {pool.name: max(self.each(pool, "cores"), 1) for pool in pools}
        planned = sum(pool.planned * each[pool.name] for pool in pools)
        return core_need(self.scene, self.rules, there, min(each.values(), default=1), planned)

    # --- one pool -------------------------------------------------------------------------------------------

    def target(self, pool: PoolState, desired: int, need: Need) -> Target | None:
        """Return what a pool is to be now; ``None``: as it is planned."""
        now = self.scene.now
        desired = min(max(desired, pool.min_nodes), pool.max_nodes)
        before = self.memory.pools.get(pool.name)
        # whoever else changed the plan, it is what counts now
        before = StabilizedTarget(pool.planned) if before is None else replace(before, nodes=pool.planned)
        if before.asked > now:
            before = StabilizedTarget(pool.planned)  # the clock was set back
        held = self.rules.steady.settle(before, desired, now)
        self.held[pool.name] = held
        wanted = Target(
            pool.name,
            held.nodes,
            self.fleet.revision,
            f"{need.reason}; {held.reason}",
            # what stands in for spot is the fallback's to count
            min(pool.base if self.rules.fallback else pool.on_demand, held.nodes),
        )
        target = (
            amended(wanted, pool, now, self.rules.fallback, self.fleet.notices)
            if self.rules.fallback
            else wanted
        )
        if not target.drain:
            target = with_drains(
                target, pool, self.uses, notices=self.fleet.notices, elsewhere=self.situation.elsewhere
            )
        key = f"scale {pool.name}"
        if not _changes(target, pool):
            self.last_logged.pop(key, None)
            return None
        verdict = self.checked(target, self.money(need))
        passed = verdict.target if verdict.target is not None and _changes(verdict.target, pool) else None
        self.record(key, pool, target, passed, verdict.reasons, need)
        if passed is not None:  # the next pool shares the limits with what this one is to be
            self.fleet = _planned(self.fleet, passed)
        return passed

    def checked(self, target: Target, run: RunMoney | None, fleet: Fleet | None = None) -> guard.GuardResult:
        return guard.check(
            target,
            fleet or self.fleet,
            self.scene.settings.limits,
            new=self.new,
            uses=self.uses,
            elsewhere=self.situation.elsewhere,
            run=run,
        )

    def record(
        self,
        key: str,
        pool: PoolState,
        target: Target,
        passed: Target | None,
        reasons: Sequence[str],
        need: Need,
    ) -> None:
        """Write a decision down once, not at every look until it is carried out."""
        final = passed or target
        says = f"{final.nodes} {final.on_demand} {' '.join(final.drain)} {passed is not None}"
        if self.last_logged.get(key) == says:
            return
        self.last_logged[key] = says
        inputs = {
            "pool": pool.name,
            "planned": pool.planned,
            "arrived": len(pool.nodes),
            "needs": {app: units for app, units in need.apps.items() if units},
            "wanted": target.nodes,
        }
        if passed is None:
            self.changes.append(
                Decided(
                    "guard",
                    f"{pool.name} stays at {_nodes(pool.planned)}: {'; '.join(reasons) or 'no change is allowed'}",
                    need.app,
                    self.scene.state.revision,
                    inputs=inputs,
                    outcome={"nodes": pool.planned},
                )
            )
            return
        outcome = {"nodes": passed.nodes, "on_demand": passed.on_demand, "drain": list(passed.drain)}
        self.changes.append(
            Decided(
                "scaling",
                f"{pool.name} {becomes(pool, passed)}: {passed.reason}",
                need.app,
                self.scene.state.revision,
                inputs=inputs,
                outcome=outcome,
            )
        )

    def money(self, need: Need) -> RunMoney | None:
        """Return what the run has cost that the need comes from."""
        record = self.scene.state.apps.get(need.app)
        if record is None:
            return None
        run, state = record.spec.pipeline, self.scene.state
        mine = [one for one in state.apps.values() if run and one.spec.pipeline == run] or [record]
        past = self.scene.past()["pipeline"].get(run, 0.0)
        return RunMoney(past + sum(self.scene.dollars(one) for one in mine), need.seconds)

    def next_shrink(self) -> float:
        """Return when a wish for fewer nodes may have lasted for long enough."""
        steady = self.rules.steady
        times = [
            max(held.since + steady.window, max(held.grown, held.shrunk) + steady.hold)
            for held in self.held.values()
            if held.since < inf
        ]
        return min((time for time in times if time > self.scene.now), default=inf)


def becomes(pool: PoolState, target: Target) -> str:
    """Return what a target changes of a pool, for people."""
    if target.nodes > pool.planned:
        return f"scale-out {pool.planned} → {_nodes(target.nodes)}"
    if target.nodes < pool.planned:
        return f"scale-in {pool.planned} → {_nodes(target.nodes)}"
    news = []
    if drained := sorted(set(target.drain) - set(pool.draining)):
        news.append(f"drains {', '.join(drained)}")
    if target.on_demand != pool.on_demand:
        news.append(f"{target.on_demand} of them on-demand instead of {pool.on_demand}")
    return f"stays at {_nodes(target.nodes)}, {' and '.join(news)}"


def _planned(fleet: Fleet, target: Target) -> Fleet:
    """Return the fleet as it is planned with ``target``."""
    pools = [
        replace(pool, planned=target.nodes, on_demand=target.on_demand) if pool.name == target.pool else pool
        for pool in fleet.pools
    ]
    return replace(fleet, pools=tuple(pools))


def _units(one: Node | Offer, what: str) -> int:
    """Return the GPUs or cores of a machine; an aggregator is a whole one."""
    return 1 if what == "aggregators" else int(getattr(one, what))


def _nodes(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"


def _changes(target: Target, pool: PoolState) -> bool:
    """Tell whether a target differs from what the pool is planned to be."""
    return (
        target.nodes != pool.planned
        or target.on_demand != pool.on_demand
        or bool(set(target.drain) - set(pool.draining))
    )
