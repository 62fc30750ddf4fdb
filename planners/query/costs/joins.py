"""Prices of the joins of one query on one share, each computed once: candidates have most of them in common."""

from dataclasses import dataclass, field
from typing import NamedTuple

from ebbflow.planners.model import Work
from ebbflow.planners.query.costs.cost import JoinCost, JoinCostModel, Size
from ebbflow.planners.query.costs.sizes import Sizes
from ebbflow.planners.query.plan.analysis import BlockId
from ebbflow.planners.query.plan.trees import Join, JoinMethod


class PricedJoin(NamedTuple):
    """What a join takes."""

    work: Work
    cost: JoinCost
    exchanged: float  # bytes that native tasks exchange for it


@dataclass(frozen=True, eq=False)
class PricedJoins:
    """Prices joins by one model."""

    sizes: Sizes
    pricer: JoinCostModel
    _known: dict[tuple[object, ...], PricedJoin] = field(default_factory=dict)

    def price(
        self, block: BlockId, join: Join, left: Size, right: Size, out: Size, read: float
    ) -> PricedJoin:
        """Return what a join of ``left`` with ``right``, the build side, takes; ``read`` is as in
        ``JoinCostModel.price``."""
        key = block, join.left.mask, join.right.mask, join.method, left, right, out, read
        if (found := self._known.get(key)) is None:
            found = self._known[key] = self._priced(block, join, left, right, out, read)
        return found

    def _priced(
        self, block: BlockId, join: Join, left: Size, right: Size, out: Size, read: float
    ) -> PricedJoin:
        cardinalities, sides = self.sizes.blocks[block], (join.left.mask, join.right.mask)
        pricer, model = self.pricer, self.pricer.model
        equality = cardinalities.has_equality(*sides)
        keys = model.keys(cardinalities.key_bytes(*sides)) if equality else 1.0
        way: JoinMethod = join.method if model.exchanges else "broadcast"
        work = pricer.work(way, left, right, out, equality=equality, keys=keys, read=read)
        cost = pricer.price(join.method, left, right, out, equality=equality, keys=keys, read=read)
        if model.exchanges:
            return PricedJoin(work, cost, 0.0)
        exchanged = pricer.sliced(left, right, out, equality=equality, read=read).exchanged
        return PricedJoin(work, cost, exchanged)
