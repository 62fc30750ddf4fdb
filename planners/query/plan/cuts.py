"""Where to cut a join tree into stages.

A cut makes an intermediate result durable. It costs writing and reading that result, and one statement more;
it saves what would be computed again when a node is lost, or when the query switches to another plan that
contains the same sub-plan. Cuts are placed where the expected completion time is least.

Model. A share of m nodes loses nodes at rate λ (per second, all nodes together). A segment (the work
between two cuts) of length T is hit λT times, half-way on average. A lost node held 1/m of the segment's
shuffle files, which the other m-1 nodes compute again: T/2 · 1/(m-1) of delay (T/2 when m = 1). With
probability σ the change makes another plan better, and everything since the last cut is dropped. Hence

    E = Σ_segments T · (1 + λ · (ρ + σ) · T / 2) + Σ_cuts materialise,    ρ = 1 / max(m - 1, 1)
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ebbflow.planners.model import Share
from ebbflow.planners.query.plan.trees import Join, Tree, joins

SWITCH_PROBABILITY = 0.25  # σ: at most 3 switches a job were seen over many more changes (QOOP, Fig 2.9)
MAX_CUTS = 3  # per block: more were never worth their statements
_UNSHARED = 0.5  # a checkpoint that no other candidate could use is charged this much more


@dataclass(frozen=True, slots=True)
class NodeCost:
    """What one join node costs on a share, and what cutting above it would."""

    seconds: float  # the join itself and the scans directly below it
    materialise: float  # writing and reading its output, and the extra statement
    shared: float = 1.0  # fraction of the candidate trees that contain the same subset


@dataclass(frozen=True, slots=True)
class CutPlan:
    """A set of cuts and the completion time expected with it."""

    masks: frozenset[int]
    seconds: float


def every_join(tree: Tree) -> frozenset[int]:
    """Return a cut above every join: one join a stage, as QOOP's own engine does."""
    return frozenset(j.mask for j in joins(tree))


def loss_rate(share: Share) -> float:
    """Return node losses per second over the whole share."""
    return share.hazard * share.nodes / 3600.0


def rework_seconds(length: float, share: Share) -> float:
    """Return the delay expected from node losses during a segment of ``length`` seconds."""
    return loss_rate(share) * (1.0 / max(share.nodes - 1, 1) + SWITCH_PROBABILITY) / 2.0 * length * length


def expected_seconds(
    tree: Tree, cuts: frozenset[int], costs: Mapping[int, NodeCost], share: Share, top_seconds: float
) -> float:
    """Return the expected completion time of ``tree`` with ``cuts``; ``top_seconds`` is work above it."""
    total = 0.0

    def segment(node: Tree) -> float:
        nonlocal total
        if not isinstance(node, Join):
            return 0.0
        cost = costs[node.mask]
        length = cost.seconds + segment(node.left) + segment(node.right)
        if node.mask not in cuts:
            return length
        penalty = 1.0 + _UNSHARED * (1.0 - cost.shared)
        total += length + rework_seconds(length, share) + cost.materialise * penalty
        return 0.0

    rest = segment(tree) + top_seconds
    return total + rest + rework_seconds(rest, share)


def place(
    tree: Tree, costs: Mapping[int, NodeCost], share: Share, top_seconds: float, keep: int = 3
) -> Sequence[CutPlan]:
    """Return the ``keep`` best sets of at most ``MAX_CUTS`` cuts, best first; the empty set is among them."""
    none: frozenset[int] = frozenset()
    plans = [CutPlan(none, expected_seconds(tree, none, costs, share, top_seconds))]
    worth = [m for m in (j.mask for j in joins(tree)) if _could_pay(costs[m], plans[0].seconds)]
    for size in range(1, min(MAX_CUTS, len(worth)) + 1):
        for masks in itertools.combinations(worth, size):
            chosen = frozenset(masks)
            plans.append(CutPlan(chosen, expected_seconds(tree, chosen, costs, share, top_seconds)))
    plans.sort(key=lambda p: (p.seconds, len(p.masks), sorted(p.masks)))
    best = plans[:keep]
    return (
        best if any(not p.masks for p in best) else [*best[: keep - 1], next(p for p in plans if not p.masks)]
    )


def _could_pay(cost: NodeCost, uncut: float) -> bool:
    return cost.materialise < 0.5 * uncut
