"""How many aggregators the trainings of a cluster need, and who pays what of those that serve."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ebbflow.planners.aggregation.accounts import SharedAccounts
from ebbflow.planners.errors import OptionError

THRESHOLD = 1  # lacking aggregators that are tolerated for a period, as in the hybrid scaling (AutoPS 5.9)


@dataclass(frozen=True, slots=True)
class RunDemand:
    """What a training asks of the service.

    Args:
        run: its ID, which is that of its app where it is one of the cluster's.
        servers: aggregators that it begins on, mirrors included.
        placed: whether it was measured, and its tensors are where the assignment wants them.
        lacking: further aggregators that it needs to stay under the limit of its loss.

    Raises ``OptionError`` for a number below 0, or no aggregator at all.
    """

    run: str
    servers: int
    placed: bool = False
    lacking: int = 0

    def __post_init__(self) -> None:
        if self.servers < 1 or self.lacking < 0:
            raise OptionError(
                f"a training must need at least 1 aggregator and lack at least 0; got {self.servers}, {self.lacking}"
            )


@dataclass(frozen=True, slots=True)
class ServingNode:
    """An aggregator and the node that it is on.

    Args:
        aggregator: name under which it serves.
        node: ID of its node; empty where that is not known.
        tensors: that it has, mirrors included.
        draining: by when it was asked to be empty, seconds since the Unix epoch; ``None``: it was not.
        use: what trainings use of it, by run, in any unit that is the same for all aggregators.
    """

    aggregator: str
    node: str = ""
    tensors: int = 0
    draining: float | None = None
    use: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AggregationDemand:
    """What is known of a service.

    Args:
        runs: its trainings.
        nodes: its aggregators.
        accounts: what trainings have used of aggregators so far.
    """

    runs: tuple[RunDemand, ...] = ()
    nodes: tuple[ServingNode, ...] = ()
    accounts: SharedAccounts = field(default_factory=SharedAccounts)

    def shape(self) -> object:
        """Return all of it that a decision depends on: neither dollars nor measured times."""
        return self.runs, tuple(
            (one.aggregator, one.node, one.tensors > 0, one.draining) for one in self.nodes
        )


@dataclass(frozen=True, slots=True)
class AggregatorNeed:
    """How many aggregators are needed.

    Args:
        count: of them.
        reason: for people.
        run: the training that it is for most of all.
        lacking: aggregators that trainings lack, those that are tolerated for now included.
    """

    count: int
    reason: str
    run: str = ""
    lacking: int = 0


def aggregators_needed(
    demand: AggregationDemand,
    waiting: Collection[RunDemand] = (),
    without: Collection[str] = (),
    leaving: Collection[str] = (),
    *,
    lacked_s: float = 0.0,
    patience_s: float = 0.0,
    threshold: int = THRESHOLD,
) -> AggregatorNeed:
    """Return how many aggregators trainings need.

    On arrival a training needs as many as it begins on, which others use, too; once it was measured and placed, those
    that have tensors, and what it lacks under the limit of its loss. Between periods no more is added than exceeds
    ``threshold`` (hybrid scaling of AutoPS, 5.9 of its reference).

    Args:
        demand: of the service.
        waiting: trainings that have not come to the service and are about to get their GPUs.
        without: runs that count for nothing now, since they have no GPUs.
        leaving: nodes that leave; their tensors go to others.
        lacked_s: seconds for which aggregators have been lacking.
        patience_s: seconds for which ``threshold`` of them may.
        threshold: lacking aggregators that are tolerated so long.
    """
    runs = [one for one in (*demand.runs, *waiting) if one.run not in without]
    if not runs:
        return AggregatorNeed(0, "no training uses aggregators")
    used = sum(1 for one in demand.nodes if one.tensors and one.node not in leaving and one.draining is None)
    lacking = sum(one.lacking for one in runs)
    extra = lacking if lacking > threshold or lacked_s >= patience_s else 0
    begins = max(
        (one for one in runs if not one.placed), key=lambda one: (one.servers, one.run), default=None
    )
    count = max(used + extra, 1)
    if begins is not None and begins.servers > count:
        what = f"{begins.run} begins on {_aggregators(begins.servers)}"
        return AggregatorNeed(begins.servers, what, begins.run, lacking)
    worst = max(runs, key=lambda one: (one.lacking, one.run))
    if extra:
        what = f"{worst.run} lacks {_aggregators(worst.lacking)} to stay under the loss limit"
        return AggregatorNeed(count, what, worst.run, lacking)
    what = f"{_aggregators(max(used, 1))} for {len(runs)} {'training' if len(runs) == 1 else 'trainings'}"
    return AggregatorNeed(count, what, runs[0].run, lacking)


def shares(demand: AggregationDemand, costs: Mapping[str, float]) -> dict[str, float]:
    """Return what each run pays of its aggregators' nodes; their sum is that of ``costs``.

    A node is paid by those that use it, as they use it; one that nobody uses by all, as they use the others; and by
    nobody, under the empty name, where no training uses any.

    Args:
        demand: of the service.
        costs: of nodes, dollars.

    Raises ``OptionError`` for a cost below 0.
    """
    if (low := min(costs.values(), default=0.0)) < 0:
        raise OptionError(f"a node must cost at least 0 dollars; got {low:g}")
    uses: dict[str, dict[str, float]] = {}
    for one in demand.nodes:
        own = uses.setdefault(one.node, {})
        for run, amount in one.use.items():
            own[run] = own.get(run, 0.0) + max(amount, 0.0)
    every: dict[str, float] = {}
    for own in uses.values():
        for run, amount in own.items():
            every[run] = every.get(run, 0.0) + amount
    found: dict[str, float] = {}
    for node, cost in sorted(costs.items()):
        parts = uses.get(node, {})
        parts = parts if sum(parts.values()) > 0 else every
        total = sum(parts.values())
        for run, amount in parts.items() if total > 0 else (("", 1.0),):
            found[run] = found.get(run, 0.0) + cost * amount / (total or 1.0)
    return {run: dollars for run, dollars in found.items() if dollars > 0}


def _aggregators(count: int) -> str:
    return f"{count} aggregator" if count == 1 else f"{count} aggregators"
