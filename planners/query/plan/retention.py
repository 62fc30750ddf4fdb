"""Which of many choices are costed, and which plans are kept as candidates."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from ebbflow.planners.model import Share
from ebbflow.planners.query.plan.qep import QueryExecutionPlan
from ebbflow.planners.query.plan.trees import Tree, joins

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
Cut: TypeAlias = tuple[Tree, frozenset[int]]  # a join tree, and the joins that stages end with
_SHARED = 8  # joins, at most, that several blocks have and one stage is to make for them
_VARIED = 32  # choices that vary one block, at most: they are divided among the blocks


def retain(plans: Sequence[QueryExecutionPlan], share: Share, keep: int) -> tuple[QueryExecutionPlan, ...]:
    """Keep at most ``keep`` plans with significant differences in cost (QOOP, footnote 2 and section 5.3).

    First the plans of least work, critical path, memory and time on the links, which may be the best on another
    share, unless they take several times as long on this one; then the Pareto front of total work, critical path and
    peak memory, then the cheapest others. A plan within 5 % of a kept one on both work and critical path is dropped,
    unless it is cut differently. The cheapest on the share always stays.
    """

    def scalar(plan: QueryExecutionPlan) -> float:
        return max(plan.total_work / max(share.total.cores, 1.0), plan.critical_path) + sum(
            s.latency for s in plan.stages
        )

    ordered = sorted(plans, key=lambda p: (scalar(p), p.id))
    front = [p for p in ordered if not any(_dominates(q, p) for q in ordered)]
    near = [p for p in ordered if scalar(p) <= _AFFORDABLE * scalar(ordered[0])]
    extremes = [min(near, key=measure) for measure in _MEASURES] if near else []
    kept: list[QueryExecutionPlan] = []
    for plan in [*ordered[:1], *extremes, *front, *ordered]:
        if len(kept) == keep:
            break
        if not any(plan is k or _alike(plan, k) for k in kept):
            kept.append(plan)
    return tuple(kept)


def _on_links(plan: QueryExecutionPlan) -> float:
    return sum(stage.network for stage in plan.stages)


_AFFORDABLE = 3.0  # times the time of the best plan that one for another share may take on this one
_MEASURES: tuple[Callable[[QueryExecutionPlan], float], ...] = (
    lambda plan: plan.total_work,
    lambda plan: plan.critical_path,
    lambda plan: plan.peak_memory,
    _on_links,
)


def _dominates(one: QueryExecutionPlan, other: QueryExecutionPlan) -> bool:
    a = (one.total_work, one.critical_path, one.peak_memory)
    b = (other.total_work, other.critical_path, other.peak_memory)
    return a != b and all(x <= y for x, y in zip(a, b, strict=True))


def _alike(one: QueryExecutionPlan, other: QueryExecutionPlan) -> bool:
    def near(a: float, b: float) -> bool:
        return abs(a - b) <= 0.05 * max(a, b)

    same_cuts = {s.output_fp for s in one.stages} == {s.output_fp for s in other.stages}
    return (
        same_cuts and near(one.total_work, other.total_work) and near(one.critical_path, other.critical_path)
    )


def varied(options: Mapping[K, Sequence[T]]) -> list[dict[K, T]]:
    """Return what is worth costing of options that are listed best first: every block's best, then one block at a
    time varied, for blocks add up almost independently, and all varied together, for plans that differ everywhere.

    >>> varied({"a": [1, 2], "b": [3]})
    [{'a': 1, 'b': 3}, {'a': 2, 'b': 3}, {'a': 2, 'b': 3}]
    """
    base = {key: found[0] for key, found in options.items()}
    each = max(_VARIED // max(len(options), 1), 1)
    found = [base]
    for key, some in options.items():
        found += [{**base, key: option} for option in some[1 : each + 1]]
    if len(options) > 1:
        depth = max(len(some) for some in options.values())
        found += [{k: some[min(d, len(some) - 1)] for k, some in options.items()} for d in range(1, depth)]
    return found


def sharing(options: Mapping[K, Sequence[Cut]], part: Callable[[K, int], str]) -> list[dict[K, Cut]]:
    """Return, for each join that some block would cut and several have, all of these cut there and nowhere else, and
    every other as it is best, or not cut at all: no block alone saves by what all of them can read. A block without
    any cut among its options is never cut.

    Args:
        options: of each block its trees with the masks of the joins to cut, best first.
        part: names the output of a block's join.
    """
    if len(options) < 2:
        return []
    blocks_of: dict[str, dict[K, Cut]] = {
        part(key, mask): {} for key, some in options.items() for _, masks in some for mask in sorted(masks)
    }
    for key, some in options.items():
        for tree, _ in some if any(masks for _, masks in some) else ():
            for join in joins(tree):
                if (found := blocks_of.get(part(key, join.mask))) is not None:
                    found.setdefault(key, (tree, frozenset({join.mask})))
    in_common = [cut_there for cut_there in blocks_of.values() if len(cut_there) > 1][:_SHARED]
    best = {key: some[0] for key, some in options.items()}
    bare: dict[K, Cut] = {key: (tree, frozenset()) for key, (tree, _) in best.items()}
    choices = list[dict[K, Cut]]()
    for cut_there in in_common:
        for others in (best, bare):
            if (choice := {**others, **cut_there}) not in choices:
                choices.append(choice)
    return choices
