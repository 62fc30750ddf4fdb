"""What a statement adds up to, and what its joins take: each is priced once, for candidates have most in common."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ebbflow.planners.model import Share, Work
from ebbflow.planners.query.costs import cost
from ebbflow.planners.query.costs.cost import CostModel, JoinCost, JoinCostModel, Size
from ebbflow.planners.query.costs.sizes import Sizes
from ebbflow.planners.query.plan.analysis import BlockId
from ebbflow.planners.query.plan.trees import Join, JoinMethod


@dataclass
class CostEstimate:
    """What a statement adds up to while it is walked through."""

    work: Work = field(default_factory=Work)
    serial: float = 0.0  # seconds that no core can shorten, a broadcast's on the links among them
    waiting: float = (
        0.0  # core-seconds in which tasks wait for a shuffle's bytes or an output's tier, or spill
    )
    network: float = 0.0  # seconds on the links, those of both among them
    resident: float = 0.0  # GiB of broadcast tables on every node
    task: float = 0.0  # GiB, the largest hash table of a single task
    widest: int = 1  # tasks of the widest wave
    partitions: int = 0  # of the largest shuffle
    crossed: float = 0.0  # bytes that nodes read from tables and stages' outputs, or write, over their links
    read: list[float] = field(default_factory=list)  # stored bytes of each relation it reads, all columns
    views: set[str] = field(default_factory=set)  # those it computes

    def copy(self) -> "CostEstimate":
        """Return the same, to which other things may be added."""
        return replace(self, read=[*self.read], views={*self.views})

    def first(self, view: str) -> bool:
        """Note that it reads ``view``; tell whether it had not before."""
        known = view in self.views
        self.views.add(view)
        return not known

    def add(self, work: Work) -> None:
        """Add ``work``."""
        self.work = self.work.plus(work)

    def seconds(self, model: CostModel, share: Share) -> float:
        """Return how long the statement takes on ``share``, the engine's latency not included."""
        busy = model.core_seconds(self.work) + self.waiting
        return busy / max(share.total.cores, 1.0) + self.serial

    def shuffle(self, bytes_: float, share: Share) -> int:
        """Note a shuffle of ``bytes_`` and return its partitions."""
        count = cost.partitions(bytes_, share.total.cores)
        self.partitions = max(self.partitions, count)
        self.widest = max(self.widest, count)
        return count


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
        price = pricer.price(join.method, left, right, out, equality=equality, keys=keys, read=read)
        if model.exchanges:
            return PricedJoin(work, price, 0.0)
        exchanged = pricer.sliced(left, right, out, equality=equality, read=read).exchanged
        return PricedJoin(work, price, exchanged)
