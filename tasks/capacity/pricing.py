"""What nodes cost, where the source that sees them does not know: leases and budgets count by it."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from ebbflow.infra.errors import InfraError
from ebbflow.infra.protocols import CapacitySource
from ebbflow.planners.model.capacity import Capacity
from ebbflow.planners.model.fleet import Offer

log = logging.getLogger(__name__)

Offers = Mapping[str, tuple[Offer, ...]]


class Priced:
    """A source whose nodes have the prices that were offered last. For several threads.

    ``first`` returns the offers, by pool, for the first look at nodes; it is asked once, since a market that does not
    answer must not delay the word of a notice, and what it cannot say ``learn`` is told later. Until then nodes keep
    the price that the source gives them.
    """

    def __init__(self, source: CapacitySource, first: Callable[[], Offers]) -> None:
        self._source = source
        self._first: Callable[[], Offers] | None = first
        self._prices: dict[tuple[str, str, str], float] = {}  # $/h, by type, zone and market

    def learn(self, offers: Offers) -> None:
        """Take in what pools are offered; what is offered no more keeps its last price."""
        found = {(o.instance_type, o.zone, o.market): o.price for some in offers.values() for o in some}
        self._prices = {**self._prices, **found}

    def capacity(self) -> Capacity:
        """See ``CapacitySource``."""
        seen = self._source.capacity()
        if seen.nodes and (first := self._first) is not None:
            self._first = None
            try:
                self.learn(first())
            except InfraError as error:
                log.warning("what nodes cost is not known yet, they count as free: %s", error)
        prices = self._prices
        nodes = tuple(
            replace(node, price=prices.get((node.instance_type, node.zone, node.market), node.price))
            for node in seen.nodes
        )
        return replace(seen, nodes=nodes)
