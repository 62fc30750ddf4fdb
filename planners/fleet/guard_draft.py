"""A target on its way through the guard's rules, and what its pool and the others cost and hold."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite

from ebbflow.planners.errors import OptionError
from ebbflow.planners.fleet.scaling.scale_in import NodeUse, leaving
from ebbflow.planners.model.capacity import Market, Node
from ebbflow.planners.model.fleet import Fleet, PoolState, Target

_SLACK = 1e-9  # $/h; sums of prices are not exact


@dataclass(frozen=True, slots=True)
class NewNode:
    """What another node of a pool costs and has. Raises ``OptionError`` for prices below 0."""

    spot: float | None = None  # $/h; None: not known
    on_demand: float | None = None  # $/h; None: not known
    gpus: int = 0

    def __post_init__(self) -> None:
        for name, price in (("spot", self.spot), ("on_demand", self.on_demand)):
            if price is not None and not (price >= 0 and isfinite(price)):
                raise OptionError(f"{name} must be >= 0 $/h; got {price}")

    def price(self, market: Market) -> float | None:
        """Return the price in a market, $/h."""
        return self.spot if market == "spot" else self.on_demand


_UNKNOWN = NewNode()


class Prices:
    """What pools of one fleet cost, $/h. A new node of a gang is one of the pool that it is a gang of."""

    def __init__(self, fleet: Fleet, new: Mapping[str, NewNode]) -> None:
        self._new = {pool.name: _new_of(pool, new) for pool in fleet.pools}
        self._pool_of = {node.id: pool.name for pool in fleet.pools for node in pool.nodes}
        self._gpus: dict[str, set[int]] = {}
        for pool in fleet.pools:
            self._gpus.setdefault(pool.family, set()).update(node.gpus for node in pool.nodes)

    def of(self, nodes: Iterable[Node]) -> float:
        """Return what nodes cost; one without a price of its own costs what a new one does, or 0."""
        return sum(
            node.price or self._new[self._pool_of[node.id]].price(node.market) or 0.0 for node in nodes
        )

    def of_new(self, pool: PoolState, on_demand: int, spot: int) -> float | None:
        """Return what so many more nodes cost; None where a price is not known."""
        one = self._new[pool.name]
        if (on_demand and one.on_demand is None) or (spot and one.spot is None):
            return None
        return on_demand * (one.on_demand or 0.0) + spot * (one.spot or 0.0)

    def of_pools(self, pools: Iterable[PoolState]) -> float:
        """Return what pools cost, with the nodes that are planned or were asked for and are not there yet."""
        total = 0.0
        for pool in pools:
            missing = _missing(pool)
            have = sum(node.market == "on-demand" for node in pool.nodes)
            on_demand = min(max(pool.on_demand - have, 0), missing)
            total += self.of(pool.nodes) + (self.of_new(pool, on_demand, missing - on_demand) or 0.0)
        return total

    def gpus_each(self, pool: PoolState) -> int:
        """Return the GPUs of a node of ``pool`` and its gangs, of the largest where they differ."""
        return max(self._new[pool.name].gpus, *self._gpus[pool.family], 0)

    def gpus(self, pool: PoolState) -> int:
        """Return the GPUs of ``pool`` with those that are planned or were asked for."""
        return sum(node.gpus for node in pool.nodes) + _missing(pool) * self.gpus_each(pool)


def _missing(pool: PoolState) -> int:
    """Return how many nodes may come: a pool that shrinks gives some up only once they are there."""
    return max(pool.planned - len(pool.nodes), pool.requested - len(pool.nodes), 0)


def _new_of(pool: PoolState, new: Mapping[str, NewNode]) -> NewNode:
    return new.get(pool.name) or new.get(pool.family) or _UNKNOWN


class TargetDraft:
    """What is left of a target: ``nodes``, ``on_demand`` and ``drain``; every change leaves a reason."""

    def __init__(
        self,
        target: Target,
        fleet: Fleet,
        prices: Prices,
        uses: Mapping[str, NodeUse],
        elsewhere: frozenset[str],
        most_away: float,
    ) -> None:
        self.target = target
        self.pool = next(pool for pool in fleet.pools if pool.name == target.pool)
        self.others = [pool for pool in fleet.pools if pool.name != target.pool]
        self.kin = [pool for pool in self.others if pool.family == self.pool.family]
        self.is_gang = self.pool.name != self.pool.family
        self.rest = "the pool and its other gangs have" if self.is_gang else "its gangs have"
        self.prices = prices
        self.nodes, self.on_demand = target.nodes, target.on_demand
        self.min_nodes, self.min_on_demand_nodes = 0, 0
        self.drain: list[str] = []
        self.reasons: list[str] = []
        self._uses = uses
        self._most_away = most_away
        told = {notice.node_id for notice in fleet.notices if notice.kind == "interruption"}
        self._gone = told | {id_ for pool in fleet.pools for id_ in pool.draining}
        self._told = told
        self._kept: set[str] = set()  # nodes that hold a last copy
        self._back: list[str] = []  # nodes that were named to leave, and stay for now
        self._safe = elsewhere | {
            name
            for pool in self.others
            for node in pool.nodes
            if node.id not in self._gone
            for name in self._holds(node.id)
        }

    def take_drain(self) -> None:
        """Take over which nodes are to leave, but none that holds the last copy of something."""
        there = {node.id for node in self.pool.nodes}
        copies: dict[str, int] = {}
        for id_ in there - self._gone:
            for name in self._holds(id_):
                copies[name] = copies.get(name, 0) + 1
        named = dict.fromkeys(self.target.drain)
        for id_ in [*named, *(id_ for id_ in self.pool.draining if id_ not in named)]:
            if id_ not in there:
                if id_ in named:
                    self.reasons.append(f"{id_} is not in the pool: not drained")
                continue
            own = 0 if id_ in self._gone else 1
            last = sorted(name for name in self._holds(id_) - self._safe if copies.get(name, 0) <= own)
            if last:
                self._kept.add(id_)
                self.reasons.append(f"{id_} is not drained: it holds the last copy of {last[0]}")
                continue
            for name in self._holds(id_) if own else ():
                copies[name] -= 1
            if id_ in named:
                self.drain.append(id_)

    def lower(self, nodes: float, why: str) -> None:
        """Want ``nodes`` at most, and none below 0."""
        if self.nodes <= nodes:
            return
        wanted = max(int(nodes), 0)
        self.reasons.append(f"{wanted} nodes instead of {self.nodes}: {why}")
        self.nodes = wanted
        self.on_demand = min(self.on_demand, wanted)

    def lift(self, nodes: int, why: str) -> None:
        """Want ``nodes`` at least; of those that were to leave as many stay."""
        if self.nodes >= nodes:
            return
        self.reasons.append(f"{nodes} nodes instead of {self.nodes}: {why}")
        added, self.nodes = nodes - self.nodes, nodes
        self._keep_back(min(added, nodes - len(self.staying())), why)

    def within(self, room: float, why: str) -> None:
        """Want as many nodes as cost at most ``room`` $/h; where that helps, rather fewer of them on-demand.

        What leaves is billed until it is gone, so new nodes wait for it; but no node is taken for it.
        """
        stay = self.staying()
        if self.nodes > len(stay):
            self._afford(stay, room - self.prices.of(self.pool.nodes) + _SLACK, why)
            stay = self.staying()
        if self.nodes > len(stay) or self.prices.of(stay) <= room + _SLACK:
            return
        # as few leave as do: the least number that fits lies in (low, high]
        low, high = max(len(stay) - self.nodes, 0) - 1, len(stay)
        while high - low > 1:
            middle = (low + high) // 2
            gone = set(self._leavers(stay, middle, len(stay) - middle))
            rate = self.prices.of(node for node in stay if node.id not in gone)
            if len(gone) == middle and rate <= room + _SLACK:
                high = middle
            else:
                low = middle
        self.lower(len(stay) - high, why)

    def step_down(self) -> None:
        """Take away no more of what is there than one decision may; what has not arrived may always be given up."""
        there = sum(node.id not in self._gone for node in self.pool.nodes)
        least = min(self.pool.planned, there) - self._most_away
        if self.nodes < least:
            self.lift(int(least), self._away())

    def settle(self) -> None:
        """Name as many nodes to leave as the size needs, or keep the size that those named leave."""
        self._keep_back(len(self._fresh()) - self._most_away, self._away())
        stay = self.staying()
        surplus = len(stay) - self.nodes
        more = self._leavers(stay, int(min(surplus, self._most_away - len(self._fresh()))), self.nodes)
        if more:
            self.drain.extend(more)
            self.reasons.append(f"{', '.join(more)} drained: {self.nodes} nodes must stay")
        place = {id_: at for at, id_ in enumerate(dict.fromkeys(self.target.drain))}
        self.drain.sort(key=lambda id_: place.get(id_, len(place)))
        if surplus > len(more):
            self.nodes += surplus - len(more)
            self.reasons.append(f"{self.nodes} nodes: no further node can be drained now")

    def staying(self) -> list[Node]:
        """Return the pool's nodes that neither leave by themselves nor are to be drained."""
        leave = self._told | set(self.drain) | (set(self.pool.draining) - self._kept)
        return [node for node in self.pool.nodes if node.id not in leave]

    def _fresh(self) -> list[str]:
        """Return the nodes that leave only because of this decision."""
        return [id_ for id_ in self.drain if id_ not in self._gone]

    def _keep_back(self, count: float, why: str) -> None:
        """Let up to ``count`` nodes stay that were to leave, the last named first."""
        fresh = self._fresh()
        back = fresh[max(len(fresh) - int(count), 0) :] if count > 0 else []
        if back:
            self.drain = [id_ for id_ in self.drain if id_ not in back]
            self._back = [*back, *self._back]
            self.reasons.append(f"{', '.join(back)} not drained: {why}")

    def _leavers(self, stay: list[Node], count: int, size: int) -> tuple[str, ...]:
        """Return up to ``count`` nodes of ``stay`` that may leave when ``size`` are left."""
        # those that were named before those that were not
        named = [id_ for id_ in self._back if any(node.id == id_ for node in stay)][: max(count, 0)]
        if len(named) >= count:
            return tuple(named)
        # a node that drains already is no place for a last copy
        rest = [node for node in stay if node.id not in named and node.id not in self._gone]
        base = min(self.on_demand, max(size, 0))
        more = leaving(rest, count - len(named), self._uses, elsewhere=self._safe, on_demand=base)
        return (*named, *more.drain)

    def _afford(self, stay: list[Node], left: float, why: str) -> None:
        """Want no more new nodes than cost at most ``left`` $/h."""
        wanted = self.nodes - len(stay)
        least = min(self.min_on_demand_nodes, self.on_demand)

        def rate(count: int, on_demand: int) -> float | None:
            have = sum(node.market == "on-demand" for node in stay)
            firm = min(max(min(on_demand, len(stay) + count) - have, 0), count)
            return self.prices.of_new(self.pool, firm, count - firm)

        def fits(count: int, on_demand: int) -> bool:
            found = rate(count, on_demand)
            return found is not None and found <= left

        def most(on_demand: int) -> int:
            return next((count for count in range(wanted) if not fits(count + 1, on_demand)), wanted)

        fitting = (one for one in range(self.on_demand, least - 1, -1) if fits(wanted, one))
        # of a sum that is linear in them the ends are enough
        best = next(fitting, None)
        if best is None:
            best = max(least, self.on_demand, key=most)
        count = most(best)
        if count < wanted and rate(count + 1, best) is None:
            why = f"the price of a new node is not known, and {why}"
        # no exchange that would leave the pool below its least
        self._keep_back(
            min(self.min_nodes, self.nodes) - len(stay) - count, "its replacement node exceeds the budget"
        )
        stay = self.staying()
        count = min(count, self.nodes - len(stay))
        if best < self.on_demand:
            self.reasons.append(f"{best} on-demand instead of {self.on_demand}: {why}")
            self.on_demand = best
        self.lower(len(stay) + count, why)

    def _away(self) -> str:
        return f"one decision terminates at most {self._most_away:g} nodes"

    def _holds(self, id_: str) -> frozenset[str]:
        return self._uses[id_].holds if id_ in self._uses else frozenset()
