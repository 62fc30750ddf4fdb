"""One simulated pool: which of its nodes were granted, work, are told to leave, and are gone."""

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from ebbflow.infra.errors import WorkloadError
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Market, Node, Notice
from ebbflow.planners.model.fleet import PoolState
from ebbflow.planners.model.prices import HOUR, Machine
from tests.evaluation.renting.spot_supply import Supply


@dataclass(frozen=True, slots=True)
class SimulatedPool:
    """A pool of one instance type in one zone; what to ask for among several is the planner's choice."""

    name: str
    machine: Machine
    zone: str
    least: int = 0
    most: int = 8
    base: int = 0  # on-demand nodes at any time
    limit: float | None = None  # $/h named for a spot node; None: the list price of on-demand

    def __post_init__(self) -> None:
        if not 0 <= self.base <= self.least <= self.most:
            raise OptionError(
                f"pool {self.name}: 0 <= base <= least <= most must hold;"
                f" got {self.base}, {self.least}, {self.most}"
            )

    @property
    def ceiling(self) -> float:
        """Return the most, $/h, that a spot node of the pool may cost."""
        if self.limit is not None:
            return self.limit
        return inf if self.machine.on_demand is None else self.machine.on_demand


@dataclass(slots=True)
class Stay:
    """A node from its grant on; times are Unix time, s."""

    node: Node
    granted: float
    works: float
    ends: float = inf
    told: float = inf  # when its end is announced
    slot: tuple[int, int] | None = None  # of the presence trace

    def leaving(self, now: float) -> bool:
        """Tell whether its end has been announced."""
        return self.told <= now


@dataclass(frozen=True, slots=True)
class Bill:
    """What a node that is gone has cost; times are Unix time, s."""

    node: Node
    start: float
    end: float
    dollars: float
    interrupted: bool  # it had been told to leave


@dataclass(slots=True)
class PoolLife:
    """What happens to a pool. Whoever calls says what time it is, which never goes back."""

    setting: SimulatedPool
    supply: Supply
    lead: float  # s between notice and end
    boot: float  # s from grant to work
    planned: int
    on_demand: int
    on_demand_since: float
    rng: np.random.Generator
    stays: dict[str, Stay] = field(default_factory=dict)
    draining: list[str] = field(default_factory=list)
    bills: list[Bill] = field(default_factory=list)
    short_since: float | None = None
    granted: int = 0
    turns: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.turns = self.supply.turns(self.setting.ceiling)

    # --- what is there ----------------------------------------------------------------------------------------

    def working(self, now: float) -> list[Stay]:
        """Return the nodes that are of use, those with a notice too."""
        return [stay for stay in self.stays.values() if stay.works <= now]

    def lasting(self, now: float) -> int:
        """Return how many nodes were granted and have no notice."""
        return sum(not stay.leaving(now) for stay in self.stays.values())

    def missing(self, now: float) -> tuple[int, int]:
        """Return the on-demand and the spot nodes that are planned and neither there nor on their way."""
        kept = [stay for stay in self.stays.values() if not stay.leaving(now)]
        room = max(self.planned - len(kept), 0)
        rented = sum(stay.node.market == "on-demand" for stay in kept)
        firm = min(max(self.on_demand - rented, 0), room)
        return firm, room - firm

    def notices(self, now: float) -> list[Notice]:
        """Return the announced ends of nodes that work."""
        return [Notice(stay.node.id, stay.ends) for stay in self.working(now) if stay.leaving(now)]

    def cost(self, stay: Stay, until: float) -> float:
        """Return dollars from the grant until ``until``."""
        if stay.node.market == "on-demand":
            return stay.node.price * (until - stay.granted) / HOUR
        return self.supply.prices.dollars(stay.granted, until)

    def dollars(self, now: float) -> float:
        """Return what all nodes have cost."""
        gone = sum(bill.dollars for bill in self.bills)
        return gone + sum(self.cost(stay, now) for stay in self.stays.values())

    def state(self, now: float) -> PoolState:
        """Return the pool as it is seen."""
        setting = self.setting
        price = self.supply.prices.at(now)
        nodes = (
            stay.node if stay.node.market == "on-demand" else replace(stay.node, price=price)
            for stay in self.working(now)
        )
        return PoolState(
            setting.name,
            self.planned,
            self.planned,
            tuple(sorted(nodes, key=lambda node: node.id)),
            on_demand=self.on_demand,
            min_nodes=setting.least,
            max_nodes=setting.most,
            short_since=self.short_since,
            short_why=self._why(now),
            base=setting.base,
            on_demand_since=self.on_demand_since,
            draining=tuple(self.draining),
        )

    def _why(self, now: float) -> str:
        if self.short_since is None:
            return ""
        if not self.missing(now)[1]:
            return "nodes are on their way"
        if self.supply.affordable(now, self.setting.ceiling):
            return "there is no capacity"
        return f"the price is above the limit of ${self.setting.ceiling:.4g}/h"

    # --- what happens -----------------------------------------------------------------------------------------

    def due(self, now: float) -> float:
        """Return when something happens next if nobody asks for anything; may be infinite."""
        if not self.stays and not self.planned:
            return inf
        found = inf
        for stay in self.stays.values():
            for at in (stay.works, stay.told, stay.ends):
                if now < at < found:
                    found = at
        wanted = self.missing(now)[1]
        if wanted or any(stay.node.market == "spot" for stay in self.stays.values()):
            at = bisect_right(self.turns, now)
            found = min(found, self.turns[at] if at < len(self.turns) else inf)
        return min(found, self.supply.next_slot(now)) if wanted else found

    def happen(self, now: float) -> None:
        """Let all happen that is due now."""
        for id_ in [id_ for id_, stay in self.stays.items() if stay.ends <= now]:
            self.end(id_, now)
        if not self.supply.affordable(now, self.setting.ceiling):
            for stay in self.stays.values():
                if stay.node.market == "spot" and now + self.lead < stay.ends:
                    stay.ends, stay.told = now + self.lead, now
        self.fill(now)

    def fill(self, now: float) -> None:
        """Grant what is planned and can be had."""
        firm, spot = self.missing(now)
        for _ in range(firm):
            self._grant("on-demand", now)
        if spot and self.supply.affordable(now, self.setting.ceiling):
            for _ in range(spot):
                if self.supply.presence is None:
                    self._grant("spot", now)
                    continue
                taken = {stay.slot for stay in self.stays.values() if stay.slot is not None}
                slot = self.supply.take(now, self.lead, taken, self.rng)
                if slot is None:
                    break
                self._grant("spot", now, slot.end, (slot.lap, slot.number))
        self.settle(now)

    def settle(self, now: float) -> None:
        """Note since when there are fewer nodes than planned."""
        short = len(self.working(now)) < self.planned
        if not short:
            self.short_since = None
        elif self.short_since is None:
            self.short_since = now

    def cancel(self, now: float) -> None:
        """Give up nodes that do not work yet and are beyond the plan, the last granted first."""
        for id_ in reversed(list(self.stays)):
            stay = self.stays[id_]
            if self.lasting(now) > self.planned and stay.works > now and not stay.leaving(now):
                self.end(id_, now)

    def end(self, id_: str, now: float) -> None:
        """Take a node away and write its bill."""
        stay = self.stays.pop(id_)
        self.draining = [other for other in self.draining if other != id_]
        self.bills.append(Bill(stay.node, stay.granted, now, self.cost(stay, now), stay.leaving(now)))

    def _grant(
        self, market: Market, now: float, ends: float = inf, slot: tuple[int, int] | None = None
    ) -> None:
        machine, setting = self.setting.machine, self.setting
        if market == "spot":
            price = self.supply.prices.at(now)
        elif machine.on_demand is not None:
            price = machine.on_demand
        else:
            raise WorkloadError(f"pool {setting.name}: {machine.instance_type} has no on-demand price")
        self.granted += 1
        node = Node(
            f"{setting.name}-{self.granted:05d}",
            machine.cores,
            machine.memory,
            instance_type=machine.instance_type,
            market=market,
            zone=setting.zone,
            gpus=machine.gpus,
            price=price,
        )
        self.stays[node.id] = Stay(node, now, now + self.boot, ends, ends - self.lead, slot)
