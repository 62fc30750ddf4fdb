"""A fleet of rented nodes on a virtual clock, from real spot prices and presence traces.

Implements ``FleetControl``. What is modelled:

- A spot request is fulfilled when the price of its type and zone is at or below the limit, and, where there is a
  presence trace, while the trace has a node that is not taken; whoever gets a node lives that node's life.
- A node is told when the price rises above the limit, or that its stay will end, and is gone ``notice`` seconds
  later. Nodes of the trace that leave sooner than that are not given out any more.
- A node works ``boot`` seconds after it was granted and is paid for from the grant on: a spot node at each moment's
  price, an on-demand node at the list price.
- A pool asks again by itself until it has what is planned, as an Auto Scaling group does, also for nodes with a
  notice (capacity rebalancing).

Not modelled: capacity for on-demand (there always is), EC2's refund of a first hour that it interrupts, minimum
charges, taxes, disks and traffic, rebalance recommendations, price effects of one's own demand, and requests that the
provider throttles or refuses for other reasons.
"""

from collections.abc import Mapping, Sequence
from math import inf

import numpy as np

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import WorkloadError
from ebbflow.infra.protocols import ApplyResult, ProviderCall, Refusal
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Notice
from ebbflow.planners.model.fleet import Fleet, Target
from tests.evaluation.renting.fleet_pool import Bill, PoolLife, SimulatedPool
from tests.evaluation.renting.spot_supply import Supply

NOTICE = 120.0  # s, EC2's between an interruption notice and the end
BOOT = 120.0  # s, assumed between the grant of a machine and its being of use


class SimulatedFleet:
    """Nodes that come and go as ``supplies`` (by zone and type) say; for one thread.

    Nothing happens between two calls: each first lets everything happen that is due by the clock. Equal clocks,
    calls and seeds give equal fleets.

    Raises ``WorkloadError`` for a pool whose place has no supply, or no price yet.
    """

    def __init__(
        self,
        clock: Clock,
        pools: Sequence[SimulatedPool],
        supplies: Mapping[tuple[str, str], Supply],
        *,
        seed: int = 0,
        notice: float = NOTICE,
        boot: float = BOOT,
    ) -> None:
        if not (notice >= 0 and boot >= 0):
            raise OptionError(f"notice and boot must be >= 0 s; got {notice}, {boot}")
        self._clock, self._now = clock, clock.now()
        rng = np.random.default_rng(seed)
        self._pools: dict[str, PoolLife] = {}
        for pool in sorted(pools, key=lambda pool: pool.name):
            place = pool.zone, pool.machine.instance_type
            if pool.name in self._pools:
                raise OptionError(f"pools must have unique names; got {pool.name} twice")
            if place not in supplies or not supplies[place].prices.covers(self._now):
                raise WorkloadError(
                    f"pool {pool.name}: no price of {place[1]} in {place[0]} at {self._now:.0f} s"
                )
            self._pools[pool.name] = PoolLife(
                pool, supplies[place], notice, boot, pool.least, pool.base, self._now, rng
            )
        self._heard: dict[str, Notice] = {}
        for life in self._pools.values():
            life.fill(self._now)
        self._revision, self._shown = 1, self._sight()

    # --- FleetControl ---------------------------------------------------------------------------------------

    def observe(self) -> Fleet:
        """Return the fleet as it is now. The revision grows with every change of working nodes or notices."""
        self._advance()
        pools = tuple(pool.state(self._now) for pool in self._pools.values())
        return Fleet(self._revision, self._now, pools, self._notices())

    def take_notices(self, notices: Sequence[Notice]) -> int:
        """Note that nodes will leave; return the revision. Those of nodes that are not there are dropped."""
        self._advance()
        present = {id_ for pool in self._pools.values() for id_ in pool.stays}
        for notice in notices:
            known = self._heard.get(notice.node_id)
            if notice.node_id in present and (known is None or _firmness(notice) < _firmness(known)):
                self._heard[notice.node_id] = notice
        self._look()
        return self._revision

    def apply(self, target: Target, *, dry_run: bool = False) -> ApplyResult:
        """Plan what ``target`` says. Raises ``OptionError`` for an unknown pool."""
        self._advance()
        pool = self._pools.get(target.pool)
        if pool is None:
            raise OptionError(f"pool must be one of {', '.join(self._pools)}; got {target.pool!r}")
        if target.revision != self._revision:
            why = f"decided for revision {target.revision}; the fleet is at {self._revision}"
            return ApplyResult(self._revision, refused=(Refusal(target.pool, why),), dry_run=dry_run)
        least, most, refused = pool.setting.least, pool.setting.most, []
        nodes = min(max(target.nodes, least), most)
        if nodes != target.nodes:
            why = f"{target.nodes} nodes; the pool may have {least} to {most}: {nodes} it is"
            refused.append(Refusal(target.pool, why))
        on_demand = min(max(target.on_demand, pool.setting.base), nodes)
        asked = [ProviderCall("size", target.pool, nodes)] if nodes != pool.planned else []
        if on_demand != pool.on_demand:
            asked.append(ProviderCall("on-demand", target.pool, on_demand))
        if not dry_run:
            if on_demand != pool.on_demand:
                pool.on_demand_since = self._now
            pool.planned, pool.on_demand = nodes, on_demand
            named = (id_ for id_ in target.drain if id_ in pool.stays)
            pool.draining = [*dict.fromkeys((*pool.draining, *named))]
            pool.cancel(self._now)
            pool.fill(self._now)
            self._look()
        return ApplyResult(self._revision, tuple(asked), tuple(refused), dry_run)

    def terminate(self, ids: Sequence[str], *, dry_run: bool = False) -> ApplyResult:
        """End these nodes, in order; their pool replaces those that it still plans."""
        self._advance()
        asked, refused = [], []
        left = {name: pool.lasting(self._now) for name, pool in self._pools.items()}
        for id_ in dict.fromkeys(ids):
            name = next((name for name, pool in self._pools.items() if id_ in pool.stays), None)
            if name is None:
                refused.append(Refusal(id_, "it is gone"))
                continue
            pool = self._pools[name]
            lasts = not pool.stays[id_].leaving(self._now)
            if lasts and left[name] <= pool.setting.least:
                refused.append(Refusal(id_, f"pool {name} would be below its {pool.setting.least} nodes"))
                continue
            asked.append(ProviderCall("end", id_, int(lasts and left[name] <= pool.planned)))
            left[name] -= lasts
            if not dry_run:
                pool.end(id_, self._now)
        if not dry_run:
            for pool in self._pools.values():
                pool.fill(self._now)
            self._look()
        return ApplyResult(self._revision, tuple(asked), tuple(refused), dry_run)

    def repair(self, *, dry_run: bool = False) -> ApplyResult:
        """Return that there is nothing to do: what is planned here is always asked for."""
        self._advance()
        return ApplyResult(self._revision, dry_run=dry_run)

    def close(self) -> None:
        """Do nothing: there are no connections."""

    # --- for whoever simulates ------------------------------------------------------------------------------

    def next_change(self) -> float:
        """Return when, Unix time in s, something happens next if nobody asks for anything; may be infinite."""
        return min((pool.due(self._now) for pool in self._pools.values()), default=inf)

    def dollars(self) -> float:
        """Return what all nodes have cost until now."""
        self._advance()
        return sum(pool.dollars(self._now) for pool in self._pools.values())

    def bills(self) -> list[Bill]:
        """Return the bills of the nodes that are gone, by pool in the order in which they went."""
        self._advance()
        return [bill for pool in self._pools.values() for bill in pool.bills]

    # --- what happens ---------------------------------------------------------------------------------------

    def _advance(self) -> None:
        to = self._clock.now()
        while (at := self.next_change()) <= to:
            self._now = at
            for pool in self._pools.values():
                if pool.stays or pool.planned:
                    pool.happen(at)
            self._look()
        self._now = max(self._now, to)

    def _notices(self) -> tuple[Notice, ...]:
        """Return the firmest, then the earliest notice of each node that works."""
        found: dict[str, Notice] = {}
        for pool in self._pools.values():
            told = {notice.node_id: notice for notice in pool.notices(self._now)}
            for stay in pool.working(self._now):
                id_ = stay.node.id
                both = [notice for notice in (told.get(id_), self._heard.get(id_)) if notice is not None]
                if both:
                    found[id_] = min(both, key=_firmness)
        return tuple(found[id_] for id_ in sorted(found))

    def _sight(self) -> tuple[object, ...]:
        working = tuple(stay.node.id for pool in self._pools.values() for stay in pool.working(self._now))
        return working, self._notices()

    def _look(self) -> None:
        """Let the revision grow if nodes or notices are not what was last seen."""
        seen = self._sight()
        if seen != self._shown:
            self._revision, self._shown = self._revision + 1, seen


def _firmness(notice: Notice) -> tuple[bool, float]:
    return notice.kind != "interruption", notice.deadline
