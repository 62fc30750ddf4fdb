"""One cycle of the capacity loop: what is seen becomes what is to be done, with reasons."""

from collections.abc import Mapping
from dataclasses import replace
from math import inf, isfinite

import numpy as np

from ebbflow.planners.capacity import liveness as present
from ebbflow.planners.capacity import triggers, view
from ebbflow.planners.capacity.admission import over_budget
from ebbflow.planners.capacity.cycle_state import CycleState
from ebbflow.planners.capacity.decision_records import auction_event, guard_events
from ebbflow.planners.capacity.leases import Moves, carry_out, serving, without
from ebbflow.planners.capacity.liveness import LivenessResult
from ebbflow.planners.capacity.policy_call import ask
from ebbflow.planners.capacity.scaling import scale
from ebbflow.planners.capacity.triggers import AuctionInputs
from ebbflow.planners.capacity.values import Cycle, DesiredAllocation, Memory, Plan, SchedulerInput, Settings
from ebbflow.planners.capacity.view import PolicyView
from ebbflow.planners.model.ledger import Change, Decided

AGAIN = 1.0  # s, after which a policy is asked again that wants it at once
FAILED = 10.0  # s, after which a policy is asked again that failed


def decide(situation: SchedulerInput, settings: Settings, memory: Memory, rng: np.random.Generator) -> Cycle:
    """Return what is to be done now. Equal arguments and generators give equal cycles.

    ``memory`` is what the last cycle returned, ``Memory()`` at first, after a crash too. One number is drawn from
    ``rng`` for each auction, the seed that the policy's own generator is made with and that is written down.
    """
    cycle = _Cycle(situation, settings, memory, rng)
    return cycle.run()


class _Cycle:
    """The steps of one cycle, each of which adds changes."""

    def __init__(
        self, situation: SchedulerInput, settings: Settings, memory: Memory, rng: np.random.Generator
    ) -> None:
        self.situation, self.settings, self.memory, self.rng = situation, settings, memory, rng
        self.scene = CycleState.of(situation, settings, memory.draining)
        self.changes: list[Change] = []
        self.last_logged = dict(memory.last_logged)

    def run(self) -> Cycle:
        scene, memory = self.scene, self.memory
        presence = present.look(scene, self.situation, memory)
        self.changes += presence.changes
        lives, crowd = view.lives(scene, memory)
        memory = replace(
            memory,
            heartbeats=presence.heartbeats,
            evicting=presence.evicting,
            left=presence.left,
            ran=lives,
            crowd=crowd,
        )
        if presence.returned:
            memory = replace(memory, plan=without(memory.plan, presence.returned, scene))
        refused, next_spent = over_budget(scene, view.active(scene))
        signs = triggers.signs(scene, presence, refused)
        due = triggers.due(scene, memory, signs)
        memory = replace(memory, dirty=due.dirty)
        reported: list[Change] = []
        if due.now:
            memory, reported = self._auction(memory, presence, refused, signs, due.why)
        moves = carry_out(
            scene,
            memory.plan,
            presence.silent,
            presence.late,
            undecided=due.dirty is not None and not due.now,
        )
        self.changes += moves.changes
        self.changes += reported
        numbers = [scene.state.last_lease, *(lease.number for lease in moves.granted)]
        leased, drain = serving(scene, max(numbers))
        self.changes += leased
        memory = self._settled(memory, moves)
        sized = scale(self.situation, scene, memory, presence, self.last_logged)
        self.changes += sized.changes
        memory = replace(
            memory,
            at=scene.now,
            pools=sized.pools,
            sizes=sized.sizes,
            replacing=sized.replacing,
            last_logged=self.last_logged,
            draining=scene.draining,
            lacking=sized.lacking,
        )
        wake = triggers.wake(scene, memory, presence, min(moves.refresh, next_spent), bool(moves.waiting))
        return Cycle(
            tuple(self.changes),
            sized.targets,
            tuple(presence.evict),
            memory,
            min(wake, max(sized.wake, scene.now + 0.01)),
            sized.end,
            due.now,
            sized.replace,
            drain,
        )

    def _auction(
        self,
        memory: Memory,
        presence: LivenessResult,
        refused: Mapping[str, str],
        found: AuctionInputs,
        why: str,
    ) -> tuple[Memory, list[Change]]:
        """Ask the policy; where it fails the last plan stays."""
        scene, settings, now = self.scene, self.settings, self.scene.now
        stuck = {number for app in presence.silent for number in scene.mine.get(app, ())} | presence.late
        out = {**presence.silent, **refused}
        seen = view.look(scene, memory, memory.ran, memory.crowd, stuck, out, self._most_ever())
        seed = int(self.rng.integers(1 << 32))
        answer = ask(scene, seen, memory, seed)
        decided = replace(memory, decided=now, seen=found, dirty=None)
        if answer.problem:
            reported = self._once(
                "policy",
                Decided(
                    "auction",
                    f"{answer.problem}; every app keeps the allocation of the last auction",
                    revision=scene.state.revision,
                    inputs={"policy": settings.policy.name, "seed": seed},
                    outcome={"failed": True},
                ),
            )
            kept = {
                app: replace(wanted, until=inf)
                for app, wanted in memory.plan.wanted.items()
                if app in seen.records
            }
            kept = self._held(kept, seen)
            plan = Plan(kept, scene.state.revision, memory.plan.at, memory.plan.complete)
            return replace(decided, plan=plan, asked=now + FAILED), reported
        self.last_logged.pop("policy", None)
        rest = {
            app: DesiredAllocation((), inf, why)
            for app, why in seen.left_out.items()
            if app not in presence.silent
        }
        plan = Plan({**answer.wanted, **rest}, scene.state.revision, now, False)
        wake = answer.wake if isfinite(answer.wake) else inf
        decided = replace(
            decided,
            policy=answer.memory,
            plan=plan,
            asked=max(wake, now + AGAIN),
            spared={app: memory.spared.get(app, now) for app in answer.terms.spared},
        )
        reported = [*guard_events(scene, seen, answer, refused, self.last_logged)]
        record = auction_event(scene, seen, answer, memory, seed, why)
        if record is not None:
            reported.append(record.event)
            decided = replace(decided, recorded=now, whole=now if record.whole else memory.whole)
        return decided, reported

    def _held(self, kept: dict[str, DesiredAllocation], seen: PolicyView) -> dict[str, DesiredAllocation]:
        """Add to a plan what apps hold that it does not know: a loop that has just begun takes it over."""
        for app in seen.view.apps:
            if app.id not in kept:
                kept[app.id] = DesiredAllocation(app.held, inf, "allocation unchanged")
        return kept

    def _once(self, key: str, event: Decided) -> list[Change]:
        if self.last_logged.get(key) == event.reason:
            return []
        self.last_logged[key] = event.reason
        return [event]

    def _settled(self, memory: Memory, moves: Moves) -> Memory:
        """Note who waits, and whether the plan is carried out."""
        now = self.scene.now
        waits = {}
        for record in view.active(self.scene):
            id_ = record.spec.id
            wanted = memory.plan.wanted.get(id_)
            if wanted is None or not wanted.placement:
                waits[id_] = min(memory.waits.get(id_, now), now)
        plan = replace(memory.plan, complete=not moves.waiting)
        return replace(memory, plan=plan, waits=waits)

    def _most_ever(self) -> float:
        """Return the number of GPUs that the cluster could have at once."""
        there = sum(node.gpus for node in self.scene.state.nodes.values())
        if self.situation.fleet is None or self.settings.scaling is None:
            return there
        more = 0
        for pool in self.situation.fleet.pools:
            offers = self.situation.offers.get(pool.name.partition("/")[0], ())
            each = max(
                [n.gpus for n in pool.nodes] + [o.gpus for o in offers],
                default=self.memory.sizes.get((pool.name, "gpus"), 0),
            )
            if not each and self.settings.scaling.pools.get(pool.name) == "gpus":
                return inf  # nobody knows yet what its nodes have
            more += max(pool.max_nodes - len(pool.nodes), 0) * each
        return there + more
