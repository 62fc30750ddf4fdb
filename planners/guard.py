"""What no decision about nodes may break, whoever made it: every ``Target`` passes ``check`` before it is applied.

Refused are targets for an old epoch and those that make no sense. Others are moved to the nearest that the rules allow.
Where rules contradict each other the later of this list wins: what was asked for, the most to add in one decision, the
least that a pool must have, the most that a pool, a team or the cluster may have, money, the most to take away in one
decision, the last copy of anything. So a limit that falls below what is there is reached over several decisions, and a
wrong price cannot end a fleet at once. Checking a verdict's target again changes nothing.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from math import floor, inf, isfinite

from ebbflow.planners.errors import OptionError
from ebbflow.planners.limits import Limits, PoolLimits
from ebbflow.planners.model.capacity import Market, Node
from ebbflow.planners.model.fleet import Fleet, PoolState, Target
from ebbflow.planners.scaling.scale_in import NodeUse, leaving

_SLACK = 1e-9  # dollars per hour; sums of prices are not exact


@dataclass(frozen=True, slots=True)
class NewNode:
    """What a node that a pool would add costs and has. Raises ``OptionError`` for prices below 0."""

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


@dataclass(frozen=True, slots=True)
class RunMoney:
    """What the run that a pool works for has cost, and for how long it is expected to go on."""

    spent: float  # dollars
    seconds: float | None = None  # to its end with the nodes of the target; None: not known


@dataclass(frozen=True, slots=True)
class Verdict:
    """What may be applied, and what of the target was changed or refused, in sentences for people."""

    target: Target | None  # None: nothing of it
    reasons: tuple[str, ...] = ()

    @property
    def unchanged(self) -> bool:
        """Tell whether the target may be applied as it is."""
        return self.target is not None and not self.reasons


def check(
    target: Target,
    fleet: Fleet,
    limits: Limits,
    *,
    new: Mapping[str, NewNode] | None = None,
    uses: Mapping[str, NodeUse] | None = None,
    elsewhere: Collection[str] = (),
    run: RunMoney | None = None,
) -> Verdict:
    """Return what of ``target`` may be applied to ``fleet``.

    ``new`` says by pool what another node costs; with a limit of dollars and no price, a pool does not grow. ``uses``
    says what nodes hold, and ``elsewhere`` what storage has a copy of. A node counts with its own price as long as
    it is billed, so also while it leaves: a pool that replaces nodes at the limit waits until the old ones are gone.
    """
    states = {pool.name: pool for pool in fleet.pools}
    if target.epoch != fleet.epoch:
        return Verdict(
            None, (f"refused: decided for epoch {target.epoch}; the fleet is at epoch {fleet.epoch}",)
        )
    if target.pool not in states:
        known = ", ".join(sorted(states)) or "none"
        return Verdict(None, (f"refused: there is no pool {target.pool!r}; there are {known}",))
    if target.nodes < 0 or not 0 <= target.on_demand <= target.nodes:
        return Verdict(
            None,
            (
                "refused: 0 <= on_demand <= nodes must hold; got"
                f" {target.on_demand} on-demand of {target.nodes} nodes",
            ),
        )
    check_ = _Check(target, fleet, limits, new or {}, uses or {}, frozenset(elsewhere), run)
    return check_.verdict()


def closed(fleet: Fleet) -> dict[str, str]:
    """Return the nodes on which no new work may start, with the reason: those told to leave, and draining ones.

    A rebalance recommendation is no reason: it is a weak signal, and the node may stay for days.
    """
    found = {id_: "it is being drained" for pool in fleet.pools for id_ in pool.draining}
    for notice in fleet.notices:
        if notice.kind == "interruption":
            left = notice.deadline - fleet.at
            found[notice.node_id] = f"it leaves in {left:.0f} s" if left > 0 else "its time is over"
    return found


def open_nodes(fleet: Fleet, epoch: int, nodes: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return which of ``nodes`` new work may be started on, in their order, and why the others may not be used.

    All are refused for an old ``epoch``.
    """
    wanted = tuple(dict.fromkeys(nodes))
    if epoch != fleet.epoch:
        return (), (f"refused: decided for epoch {epoch}; the fleet is at epoch {fleet.epoch}",)
    there = {node.id for pool in fleet.pools for node in pool.nodes}
    shut = {id_: "it is not there" for id_ in wanted if id_ not in there} | closed(fleet)
    good = tuple(id_ for id_ in wanted if id_ not in shut)
    return good, tuple(f"no new work on {id_}: {shut[id_]}" for id_ in wanted if id_ in shut)


class _Check:
    """One target on its way through the rules. ``nodes``, ``on_demand`` and ``drain`` are what is left of it."""

    def __init__(
        self,
        target: Target,
        fleet: Fleet,
        limits: Limits,
        new: Mapping[str, NewNode],
        uses: Mapping[str, NodeUse],
        elsewhere: frozenset[str],
        run: RunMoney | None,
    ) -> None:
        self.target, self.fleet, self.limits = target, fleet, limits
        self.new, self.uses, self.run = new, uses, run
        self.pool = next(pool for pool in fleet.pools if pool.name == target.pool)
        self.others = [pool for pool in fleet.pools if pool.name != target.pool]
        self.own = limits.pools.get(target.pool, PoolLimits())
        self.told = {notice.node_id for notice in fleet.notices if notice.kind == "interruption"}
        gone = self.told | {id_ for pool in fleet.pools for id_ in pool.draining}
        self.safe = elsewhere | {
            name
            for pool in self.others
            for node in pool.nodes
            if node.id not in gone
            for name in self._holds(node.id)
        }
        self.nodes, self.on_demand = target.nodes, target.on_demand
        self.drain: list[str] = []
        self.kept: set[str] = set()  # that hold a last copy
        self.reasons: list[str] = []

    def verdict(self) -> Verdict:
        self._take_drain()
        self._at_most(self.pool.planned + self.limits.grow, "one decision adds {} at most", self.limits.grow)
        self._floor()
        self._ceilings()
        self._money()
        self._step_down()
        self._settle()
        target = replace(self.target, nodes=self.nodes, on_demand=self.on_demand, drain=tuple(self.drain))
        if target != self.target:
            target = replace(target, reason=f"{self.target.reason}; guard: {'; '.join(self.reasons)}")
        return Verdict(target, tuple(self.reasons))

    # --- rules, in their order ----------------------------------------------------------------------------------

    def _take_drain(self) -> None:
        """Take over which nodes are to leave, but none that holds the last copy of something."""
        there = {node.id for node in self.pool.nodes}
        gone = self.told | set(self.pool.draining)
        copies: dict[str, int] = {}
        for id_ in there - gone:
            for name in self._holds(id_):
                copies[name] = copies.get(name, 0) + 1
        for id_ in dict.fromkeys(self.target.drain):
            if id_ not in there:
                self.reasons.append(f"{id_} is not in the pool: not drained")
                continue
            own = 0 if id_ in gone else 1
            last = sorted(n for n in self._holds(id_) - self.safe if copies.get(n, 0) <= own)
            if last:
                self.kept.add(id_)
                self.reasons.append(f"{id_} is not drained: it holds the last copy of {last[0]}")
                continue
            for name in self._holds(id_) if own else ():
                copies[name] -= 1
            self.drain.append(id_)

    def _floor(self) -> None:
        least = max(self.pool.least, self.own.least, self.own.on_demand_least)
        if self.nodes < least:
            self.reasons.append(f"{least} nodes instead of {self.nodes}: the least of the pool")
            self.nodes = least
        if self.on_demand < self.own.on_demand_least:
            self.reasons.append(
                f"{self.own.on_demand_least} on-demand instead of {self.on_demand}: the least of the pool"
            )
            self.on_demand = self.own.on_demand_least

    def _ceilings(self) -> None:
        self._at_most(self.pool.most, "the pool has {} at most", self.pool.most)
        self._at_most(self.own.most, "the pool's limit is {}", self.own.most)
        others = sum(_size(pool) for pool in self.others)
        self._at_most(
            self.limits.nodes - others, f"all pools may have {{}}, others have {others}", self.limits.nodes
        )
        for team, quota in self.limits.teams.items():
            if self.pool.name not in quota.pools:
                continue
            mates = [pool for pool in self.others if pool.name in quota.pools]
            size = sum(_size(pool) for pool in mates)
            self._at_most(
                quota.nodes - size, f"team {team} may have {{}}, its others have {size}", quota.nodes
            )
            each = self._gpus_each(self.pool)
            if each:
                held = sum(self._gpus(pool) for pool in mates)
                self._at_most(
                    floor((quota.gpus - held) / each) if quota.gpus < inf else inf,
                    f"team {team} may have {{}} GPUs, its others have {held}, a node {each}",
                    quota.gpus,
                )
        if self.on_demand > self.own.on_demand_most:
            most = int(self.own.on_demand_most)
            self.reasons.append(f"{most} on-demand instead of {self.on_demand}: the pool's limit")
            self.on_demand = most

    def _money(self) -> None:
        for room, why in self._rooms():
            self._within(room, why)

    def _step_down(self) -> None:
        """Take no more nodes away than one decision may, of the plan and of those that run."""
        least = self.pool.planned - self.limits.shrink
        if self.nodes < least:
            self.reasons.append(
                f"{int(least)} nodes instead of {self.nodes}: one decision takes {self.limits.shrink:g} at most"
            )
            self.nodes = int(least)

    def _settle(self) -> None:
        """Make the nodes that are to leave those that the size needs."""
        stay = self._staying()
        raised = min(self.nodes - self.target.nodes, self.nodes - len(stay))
        if raised > 0:
            self._keep_back(raised, f"{self.nodes} nodes are to be there")
        fresh = [id_ for id_ in self.drain if id_ not in self.told and id_ not in self.pool.draining]
        if len(fresh) > self.limits.shrink:
            self._keep_back(
                len(fresh) - int(self.limits.shrink), f"one decision takes {self.limits.shrink:g} at most"
            )
        stay = self._staying()
        room = self.limits.shrink - sum(
            id_ not in self.told and id_ not in self.pool.draining for id_ in self.drain
        )
        surplus = len(stay) - self.nodes
        if surplus > 0:
            # on-demand nodes beyond what is wanted may go, those within it stay
            more = self._leavers(stay, int(min(surplus, room)))
            if more:
                self.drain.extend(more)
                self.reasons.append(f"{', '.join(more)} drained too: {self.nodes} nodes are to be there")
                surplus -= len(more)
        if surplus > 0:
            self.nodes += surplus
            self.reasons.append(f"{self.nodes} nodes: no more can be drained now")
        self.on_demand = min(self.on_demand, self.nodes)

    # --- money --------------------------------------------------------------------------------------------------

    def _rooms(self) -> list[tuple[float, str]]:
        """Return what the pool may cost at most, $/h, by each limit of money, and how to say it."""
        found: list[tuple[float, str]] = []
        limits = self.limits
        if limits.dollars_per_hour < inf:
            others = self._rate(self.others)
            found.append(
                (
                    limits.dollars_per_hour - others,
                    f"the limit is ${limits.dollars_per_hour:g}/h, others cost ${others:.4g}/h",
                )
            )
        for team, quota in limits.teams.items():
            if self.pool.name in quota.pools and quota.dollars_per_hour < inf:
                mates = self._rate(pool for pool in self.others if pool.name in quota.pools)
                found.append(
                    (
                        quota.dollars_per_hour - mates,
                        f"team {team}'s limit is ${quota.dollars_per_hour:g}/h, its others cost ${mates:.4g}/h",
                    )
                )
        if self.run is not None and limits.dollars_per_run < inf:
            left = limits.dollars_per_run - self.run.spent
            said = f"the run's limit is ${limits.dollars_per_run:g}, ${self.run.spent:.4g} are spent"
            if left <= 0:
                found.append((0.0, said))
            elif self.run.seconds:
                hours = self.run.seconds / 3600
                found.append((left / hours, f"{said}, {hours:.3g} h are to come"))
        return found

    def _within(self, room: float, why: str) -> None:
        """Shrink until the pool costs at most ``room`` $/h."""
        stay = self._staying()
        present = self._sum(self.pool.nodes)
        wanted = self.nodes - len(stay)
        if wanted > 0:
            afford = 0
            while afford < wanted:
                rate = self._added(stay, afford + 1)
                if rate is None:
                    why = f"the price of a new node is not known, and {why}"
                    break
                if present + rate > room + _SLACK:
                    break
                afford += 1
            if afford < wanted:
                self._lower(len(stay) + afford, why)
        if self.nodes > len(stay) or self._sum(stay) <= room + _SLACK:
            return
        # what is there costs too much: as few leave as do
        count = max(len(stay) - self.nodes, 0)
        while count < len(stay):
            more = self._leavers(stay, count)
            if self._sum(node for node in stay if node.id not in more) <= room + _SLACK:
                break
            if len(more) < count:
                break
            count += 1
        self._lower(min(self.nodes, len(stay) - count), why)

    def _added(self, stay: list[Node], count: int) -> float | None:
        """Return what ``count`` more nodes cost, $/h; None where a price is not known."""
        have = sum(node.market == "on-demand" for node in stay)
        on_demand = min(max(min(self.on_demand, len(stay) + count) - have, 0), count)
        return self._price_of(self.pool, on_demand, count - on_demand)

    def _price_of(self, pool: PoolState, on_demand: int, spot: int) -> float | None:
        new = self.new.get(pool.name, NewNode())
        if (on_demand and new.on_demand is None) or (spot and new.spot is None):
            return None
        return on_demand * (new.on_demand or 0.0) + spot * (new.spot or 0.0)

    def _rate(self, pools: Iterable[PoolState]) -> float:
        """Return what pools cost, $/h, with the nodes that are planned and not there yet."""
        total = 0.0
        for pool in pools:
            total += self._sum(pool.nodes)
            missing = max(pool.planned - len(pool.nodes), 0)
            have = sum(node.market == "on-demand" for node in pool.nodes)
            on_demand = min(max(pool.on_demand - have, 0), missing)
            total += self._price_of(pool, on_demand, missing - on_demand) or 0.0
        return total

    def _sum(self, nodes: Iterable[Node]) -> float:
        """Return what nodes cost, $/h; one without a price of its own costs what a new one does."""
        pools = {node.id: pool.name for pool in self.fleet.pools for node in pool.nodes}
        return sum(
            node.price or self.new.get(pools[node.id], NewNode()).price(node.market) or 0.0 for node in nodes
        )

    # --- parts --------------------------------------------------------------------------------------------------

    def _at_most(self, most: float, why: str, shown: float) -> None:
        if self.nodes > most:
            self._lower(max(int(most), 0), why.format(f"{shown:g}"))

    def _lower(self, nodes: int, why: str) -> None:
        if nodes >= self.nodes:
            return
        self.reasons.append(f"{nodes} nodes instead of {self.nodes}: {why}")
        self.nodes = nodes
        self.on_demand = min(self.on_demand, nodes)

    def _staying(self) -> list[Node]:
        """Return the pool's nodes that neither leave by themselves nor are to be drained."""
        leave = self.told | set(self.drain) | (set(self.pool.draining) - self.kept)
        return [node for node in self.pool.nodes if node.id not in leave]

    def _leavers(self, stay: list[Node], count: int) -> tuple[str, ...]:
        """Return up to ``count`` nodes that may leave besides those that do already."""
        if count <= 0:
            return ()
        found = leaving(
            stay, count, self.uses, elsewhere=self.safe, on_demand=min(self.on_demand, self.nodes)
        )
        return found.drain

    def _keep_back(self, count: int, why: str) -> None:
        """Take up to ``count`` nodes back that would be drained, the last named first."""
        back = [
            id_ for id_ in reversed(self.drain) if id_ not in self.told and id_ not in self.pool.draining
        ][:count]
        if back:
            self.drain = [id_ for id_ in self.drain if id_ not in back]
            self.reasons.append(f"{', '.join(back)} not drained: {why}")

    def _holds(self, id_: str) -> frozenset[str]:
        return self.uses.get(id_, NodeUse()).holds

    def _gpus_each(self, pool: PoolState) -> int:
        new = self.new.get(pool.name, NewNode())
        return max([new.gpus, *(node.gpus for node in pool.nodes)])

    def _gpus(self, pool: PoolState) -> int:
        missing = max(pool.planned - len(pool.nodes), 0)
        return sum(node.gpus for node in pool.nodes) + missing * self._gpus_each(pool)


def _size(pool: PoolState) -> int:
    return max(pool.planned, len(pool.nodes))
