"""On-demand nodes in place of spot ones while spot is dry, and back.

A pool is *dry* when fewer nodes have arrived than were asked for, for ``after`` seconds. The missing ones are then
asked for on-demand. After ``hold`` seconds spot is tried again: spot nodes are asked for beside what there is. As
many on-demand nodes as have come are drained; when ``after`` seconds are over the attempt ends, nothing was lost, and
the next one is made ``hold`` seconds later. Where the pool has no room for more nodes one on-demand node is drained
first, and its place stays short until spot or, after ``after`` seconds, on-demand fills it.

Nothing is remembered here: the on-demand nodes that a pool plans and has, and the times of ``PoolState``, say how far
it is, so a restart changes nothing. Other policies size the pool; ``amended`` only adds to their target. It is for
groups that take no percentage of on-demand nodes above the base, as Terraform's module spot-pool has it by default.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Node, Notice
from ebbflow.planners.model.fleet import PoolState, Target


@dataclass(frozen=True, slots=True)
class Fallback:
    """When to give spot up, and when to try it again. Raises ``OptionError`` for values outside their rules."""

    after: float = 300.0  # seconds for which spot may be short
    hold: float = 1800.0  # seconds of on-demand before spot is tried again
    step: int | None = None  # spot nodes that are tried at once; None: as many as on-demand ones stand in

    def __post_init__(self) -> None:
        if not (self.after >= 0 and self.hold >= 0 and (self.step is None or self.step >= 1)):
            raise OptionError(
                "after >= 0, hold >= 0 and step >= 1 or None must hold; got "
                f"{self.after}, {self.hold}, {self.step}"
            )


def amended(
    target: Target,
    pool: PoolState,
    now: float,
    rule: Fallback | None = None,
    notices: Collection[Notice] = (),
) -> Target:
    """Return ``target`` with the on-demand nodes that a dry spot market makes necessary.

    ``target`` is what the pool is to be otherwise: its ``nodes`` count, its ``on_demand`` is the least number of
    on-demand nodes, and ``pool.base`` is another. ``now`` is in seconds since the Unix epoch. Nodes with a firm
    notice, and those that are drained, count as gone. Raises ``OptionError`` for a target of another pool.
    """
    if target.pool != pool.name:
        raise OptionError(f"the target is of pool {target.pool!r}, the state of pool {pool.name!r}")
    return _Amendment(target, pool, now, rule or Fallback(), notices).target()


class _Amendment:
    def __init__(
        self, target: Target, pool: PoolState, now: float, rule: Fallback, notices: Collection[Notice]
    ) -> None:
        self.wanted = target
        self.pool = pool
        self.now = now
        self.rule = rule
        leaving = {n.node_id for n in notices if n.kind == "interruption"} | {*pool.draining, *target.drain}
        staying = [node for node in pool.nodes if node.id not in leaving]
        self.on_demand = sorted((n for n in staying if n.market == "on-demand"), key=_dearest)
        self.arrived = len(staying)
        self.floor = min(target.nodes, max(target.on_demand, pool.base))
        self.planned = min(target.nodes, max(pool.on_demand, self.floor))

    def target(self) -> Target:
        short = self.pool.short_since
        dry = short is not None and self.now - short >= self.rule.after
        missing = self.wanted.nodes - self.arrived
        # more on-demand nodes run than are planned: spot is being tried again
        trying = len(self.on_demand) - self.planned
        if dry and missing > 0:
            return self._spot_is_dry(missing, self.now - (short or 0.0))
        if trying > 0 and self.pool.on_demand >= self.floor:
            return self._tried(trying, dry)
        if self.planned > self.floor and short is None:
            return self._held()
        return self._with(self.planned)

    def _spot_is_dry(self, missing: int, seconds: float) -> Target:
        on_demand = min(self.wanted.nodes, max(self.floor, len(self.on_demand)) + missing)
        if on_demand <= self.planned:
            return self._with(self.planned)  # asked for already: on-demand is short too
        why = f" ({self.pool.short_why})" if self.pool.short_why else ""
        return self._with(
            on_demand,
            f"insufficient Spot capacity for {seconds:.0f} s{why}: {on_demand} on-demand nodes instead",
        )

    def _tried(self, surplus: int, dry: bool) -> Target:
        nodes = self.wanted.nodes
        if (extra := self.arrived - nodes) > 0:
            drain = tuple(node.id for node in self.on_demand[: min(surplus, extra)])
            return self._with(
                self.planned,
                f"Spot capacity is available again: {len(drain)} on-demand nodes are drained",
                drain=drain,
            )
        if dry:
            kept = min(nodes, len(self.on_demand))
            return self._with(kept, "insufficient Spot capacity: the on-demand nodes stay")
        if self.pool.planned > nodes:
            return self._with(self.planned, nodes=min(self.pool.planned, nodes + surplus))
        # the pool has been sized anew meanwhile
        return self._tries(surplus, self.planned)

    def _held(self) -> Target:
        return self._tries(self.planned - self.floor, self.planned)

    def _tries(self, most: int, on_demand: int) -> Target:
        """Try up to ``most`` spot nodes, once on-demand nodes have stood in for long enough."""
        held = self.now - self.pool.on_demand_since
        if self.pool.short_since is not None or held < self.rule.hold or not self.on_demand:
            return self._with(on_demand)
        wanted = self.wanted.nodes
        some = most if self.rule.step is None else min(most, self.rule.step)
        some = min(some, max(0, self.pool.max_nodes - wanted)) if self.pool.max_nodes else some
        left = max(self.floor, min(on_demand, len(self.on_demand) - max(1, some)))
        if some:
            why = f"on-demand for {held:.0f} s: requesting {some} Spot nodes"
            return self._with(left, why, nodes=wanted + some)
        why = f"on-demand for {held:.0f} s, max_nodes reached: one is replaced by a Spot node"
        return self._with(left, why, drain=(self.on_demand[0].id,))

    def _with(
        self, on_demand: int, why: str = "", nodes: int | None = None, drain: tuple[str, ...] = ()
    ) -> Target:
        reason = f"{self.wanted.reason}; {why}" if why else self.wanted.reason
        size = self.wanted.nodes if nodes is None else nodes
        return replace(
            self.wanted,
            nodes=size,
            on_demand=min(on_demand, size),
            drain=(*self.wanted.drain, *drain),
            reason=reason,
        )


def _dearest(node: Node) -> tuple[float, str]:
    return -node.price, node.id
