"""The fewest nodes on which a query finishes in time."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import ClassVar

from ebbflow.planners.errors import OptionError
from ebbflow.planners.fleet.scaling.limits import Curve, limits, to
from ebbflow.planners.model import Resources, Share
from ebbflow.planners.model.fleet import PoolState, Target
from ebbflow.planners.query.plan.qep import QueryExecutionPlan
from ebbflow.planners.query.plan.state import ExecutionState
from ebbflow.planners.query.running.progress import propagate
from ebbflow.planners.query.running.replanner import assess

EXACT = 1 - 1e-6  # the list scheduler lets a task in that is too large by rounding


@dataclass(frozen=True, slots=True)
class DeadlineScaling:
    """Keeps a pool at the fewest nodes on which the work ends within ``seconds`` from now.

    A node beyond those that are there works ``boot`` seconds from now; what the present ones get done until then is
    the estimate's reserve.
    """

    name: ClassVar[str] = "deadline"
    seconds: float
    boot: float = 0.0

    def __post_init__(self) -> None:
        if not isfinite(self.seconds):
            raise OptionError(f"seconds until the deadline must be finite; got {self.seconds}")
        if not 0 <= self.boot < inf:
            raise OptionError(f"boot must be >= 0 s and finite; got {self.boot}")

    def decide(self, pool: PoolState, revision: int, curve: Curve, bound: Curve | None = None) -> Target:
        """Return the pool's target. ``curve``: seconds that the work takes on n nodes from when they all work.

        Estimates by list scheduling may rise with a node more (Graham, 1969), so counts are tried one by one from
        the fewest. ``bound``, seconds that the work takes at least, says cheaply which are not worth trying.
        """
        least, most = limits(pool)
        here = min(pool.planned, len(pool.nodes))

        def boot(nodes: int) -> float:
            return self.boot if nodes > here else 0.0

        for nodes in range(least, most + 1):
            if bound is not None and bound(nodes) + boot(nodes) > self.seconds:
                continue
            took = curve(nodes) + boot(nodes)
            if took <= self.seconds:
                said = f"the work completes in {took:.0f} s, within {self.seconds:.0f} s"
                if nodes > least:
                    fewer = curve(nodes - 1) + boot(nodes - 1)
                    said += f"; on {nodes - 1} " + ("it cannot run" if fewer == inf else f"in {fewer:.0f} s")
                return to(pool, revision, nodes, said)
        none = f"no number of nodes from {least} to {most} suffices"
        soonest, nodes = min((curve(nodes) + boot(nodes), nodes) for nodes in range(least, most + 1))
        if soonest == inf:
            kept = min(max(pool.planned, least), most)
            return to(pool, revision, kept, f"{none}: the work runs on none of them")
        said = (
            f"{none} to complete within {self.seconds:.0f} s; {nodes} complete it soonest, in {soonest:.0f} s"
        )
        return to(pool, revision, nodes, said)


class QueryCurve:
    """Seconds until a query would end on n equal nodes, by the simulator that re-planning trusts (QOOP, 5.6).

    The best of all candidate plans counts, each credited with what is finished or running. Plans are tried in order
    of a bound from below, the larger of work by cores and of the longest path, until none can be better: the
    result is that of trying all.

    Raises ``OptionError``.
    """

    def __init__(
        self,
        candidates: Sequence[QueryExecutionPlan],
        state: ExecutionState,
        node: Resources,
        now: float,
        max_parallel_stages: int = 0,
    ) -> None:
        if not candidates:
            raise OptionError("candidates must hold at least one plan; got none")
        if not (node.cores > 0 and node.memory > 0):
            raise OptionError(
                f"a node must have cores and memory; got {node.cores:g} and {node.memory:g} GiB"
            )
        self._state, self._node, self._now, self._most = state, node, now, max_parallel_stages
        self._plans = [(plan, *_least(plan, state, now)) for plan in candidates]

    def __call__(self, nodes: int) -> float:
        """Return the seconds on ``nodes`` nodes; infinite where no plan's tasks fit."""
        share = Share.uniform(self._cores(nodes), self._node.memory * nodes, nodes)
        best = inf
        for bound, at in self._bounds(nodes):
            if bound >= best:
                break
            best = min(
                best, assess(self._plans[at][0], self._state, share, self._now, self._most).estimate.seconds
            )
        return best

    def bound(self, nodes: int) -> float:
        """Return seconds that no plan stays below on ``nodes`` nodes."""
        return self._bounds(nodes)[0][0]

    def _bounds(self, nodes: int) -> list[tuple[float, int]]:
        """Return a bound from below on every plan's seconds, and the plan's position, by bound."""
        cores = self._cores(nodes)
        return sorted(
            (EXACT * max(path, work / cores if cores else inf), at)
            for at, (_, work, path) in enumerate(self._plans)
        )

    def _cores(self, nodes: int) -> float:
        if nodes < 0:
            raise OptionError(f"nodes must be >= 0; got {nodes}")
        return self._node.cores * nodes


def _least(plan: QueryExecutionPlan, state: ExecutionState, now: float) -> tuple[float, float]:
    """Return core-seconds and seconds that the rest of ``plan`` takes at least, whatever is adopted or refused.

    Tasks that run are left out of both: whether they are kept is up to the assessment.
    """
    remaining = propagate(plan, state, now)
    work, ends = 0.0, dict[str, float]()
    for stage in remaining.stages:
        if stage.running:
            ends[stage.stage.output_fp] = 0.0
            continue
        work += stage.tasks * stage.seconds * stage.stage.demand.cores
        start = max((ends.get(fp, 0.0) for fp in stage.waits_for), default=0.0)
        ends[stage.stage.output_fp] = start + stage.latency + (stage.seconds if stage.tasks else 0.0)
    return work, max(ends.values(), default=0.0)
