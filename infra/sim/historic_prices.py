"""A ``PriceSource`` that replays price history: the same planners decide on it as on AWS."""

from collections.abc import Iterable, Mapping

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import PriceError
from ebbflow.infra.sim.prices import PriceHistory
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.fleet import Offer
from ebbflow.planners.model.prices import Machine, Series, offers_of


class HistoricPrices:
    """Prices as they were at the clock's time plus ``begin`` s, known up to that moment only.

    ``pools`` says which machines each pool may have; a machine is offered in all zones of ``zones``, where None
    stands for all of the history, that have prices of it. Raises ``PriceError`` for a machine without any.
    """

    def __init__(
        self,
        history: PriceHistory,
        pools: Mapping[str, Iterable[Machine]],
        clock: Clock,
        *,
        begin: float = 0.0,
        zones: Iterable[str] | None = None,
    ) -> None:
        self._history = history
        self._pools = {name: tuple(machines) for name, machines in pools.items()}
        self._clock = clock
        self._begin = begin
        wanted = None if zones is None else frozenset(zones)
        self._zones: dict[str, list[str]] = {}
        for zone, kind in sorted(history.series):
            if wanted is None or zone in wanted:
                self._zones.setdefault(kind, []).append(zone)
        self._listed = {one.instance_type: one.on_demand for own in self._pools.values() for one in own}
        for kind in sorted(self._listed):
            if kind not in self._zones:
                raise PriceError(f"{history.source}: no prices of {kind} in the zones asked for")

    def now(self) -> float:
        """Return the moment of the history that the clock stands at, s since the Unix epoch."""
        return self._begin + self._clock.now()

    def offers(self, pool: str) -> tuple[Offer, ...]:
        """See ``PriceSource``."""
        if pool not in self._pools:
            raise OptionError(f"pool must be one of {', '.join(sorted(self._pools)) or 'none'}; got {pool!r}")
        now = self.now()
        machines = self._pools[pool]
        places = [(zone, one.instance_type) for one in machines for zone in self._zones[one.instance_type]]
        spot = {
            place: self._history.series[place].at(now)
            for place in places
            if self._history.series[place].covers(now)
        }
        return offers_of(machines, self._zones, spot)

    def series(self, zone: str, instance_type: str, start: float) -> Series:
        """See ``PriceSource``."""
        found = self._history.series.get((zone, instance_type))
        now = self.now()
        if found is None or not found.covers(now):
            raise PriceError(
                f"{self._history.source}: no prices of {instance_type} in {zone or 'no zone'} yet"
            )
        return found.between(start, now)

    def on_demand(self, instance_type: str) -> float | None:
        """See ``PriceSource``."""
        return self._listed.get(instance_type)

    def problems(self) -> list[str]:
        """See ``PriceSource``: history has none."""
        return []
