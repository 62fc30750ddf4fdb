"""Join orders and methods for one join graph on one share.

Up to ``max_pairs`` pairs of connected sets: dynamic programming over them (DPccp), bushy, keeping a Pareto
front per set. Above: greedy operator ordering, improved window by window (``greedy``).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

from ebbflow.planners.model import Share, Work
from ebbflow.planners.query.costs.cost import CostModel, JoinCostModel, Size, scan
from ebbflow.planners.query.estimates.cardinality import Cardinalities
from ebbflow.planners.query.orders.greedy import greedy_linear, greedy_trees
from ebbflow.planners.query.orders.search import Entry, Search, affordable, crossed, pareto, tree_of
from ebbflow.planners.query.orders.subgraphs import (
    Pairs,
    components,
    count_trees,
    csg_cmp_pairs,
    grouped,
    linear_pairs,
)
from ebbflow.planners.query.plan.trees import Leaf, Tree, joins, logical_key
from ebbflow.planners.query.sql.joingraph import JoinGraph

__all__ = ["Candidate", "count_trees", "enumerate_trees", "evaluate", "left_deep_best"]

MAX_PAIRS = 12_000
MAX_COMBINATIONS = 5_000  # of ways to make two sides, summed over pairs
CROSS_ROWS = 1e4  # a cross product of at most so many rows may be worth it in a star
CROSS_EDGES = 3  # such cross products considered


@dataclass(frozen=True, slots=True)
class Candidate:
    """A join tree and what it costs, from the tables to the last join, as one statement."""

    tree: Tree
    work: Work
    core_seconds: float  # those that wait for links or spill among them
    critical_path: float  # seconds with unbounded cores
    peak_memory: float  # GiB that one task needs: broadcast tables of its node, its own hash table, itself
    seconds: float  # on the share


def enumerate_trees(
    graph: JoinGraph,
    cardinalities: Cardinalities,
    cost: CostModel,
    share: Share,
    *,
    keep: int = 4,
    limit: int = 32,
    max_pairs: int = MAX_PAIRS,
    max_combinations: int = MAX_COMBINATIONS,
    cross_rows: float = CROSS_ROWS,
) -> tuple[Candidate, ...]:
    """Return up to ``limit`` join trees: the Pareto front on (work, critical path, memory) by time on the
    share, then the best of the other join orders.

    ``keep`` ways to join each set survive, fewer where ``max_combinations`` demands it (both and
    ``max_pairs`` bound the planning time); with both large enough the front is exact. Relations that no
    predicate connects are joined last; besides, cross products of at most ``cross_rows`` rows between
    relations with a common neighbour are considered. Deterministic.
    """
    search = Search(cardinalities, cost, share)
    bounds = _Bounds(keep, limit, max_pairs, max_combinations, cross_rows)
    found = _search(graph, search, bounds)
    return tuple(evaluate(tree_of(e), cardinalities, cost, share) for e in _select(found, limit))


def left_deep_best(
    graph: JoinGraph,
    cardinalities: Cardinalities,
    cost: CostModel,
    share: Share,
    *,
    keep: int = 4,
    max_pairs: int = MAX_PAIRS,
) -> Candidate:
    """Return the tree of least work of which every join has a single relation on one side (left-deep up to
    swapping sides, which only says what is hashed or broadcast)."""
    search = Search(cardinalities, cost, share)
    parts = []
    for component in components(graph.neighbours):
        units, masks, neighbours = _units(search, graph.neighbours, component)
        pairs = grouped(linear_pairs(neighbours), max_pairs)
        if pairs is None:
            parts.append((component, greedy_linear(search, units, masks, neighbours)))
        else:
            survive = affordable(pairs, keep, MAX_COMBINATIONS)
            parts.append((component, search.optimise(units, masks, pairs, survive)))
    # Joins stay linear only while one side is a single relation: the other components are added one relation
    # at a time.
    parts.sort(key=lambda p: (-p[0].bit_count(), p[0]))
    mask, entries = parts[0]
    for component, others in parts[1:]:
        if component & (component - 1):
            entries = _extend(search, mask, entries, tree_of(min(others, key=_by_work)), component)
        else:
            entries = search.combine(entries, others, search.variants(mask, component))
        mask |= component
    return evaluate(tree_of(min(entries, key=_by_work)), cardinalities, cost, share)


def evaluate(tree: Tree, cardinalities: Cardinalities, cost: CostModel, share: Share) -> Candidate:
    """Cost one tree.

    The critical path is the time with unbounded cores: a scan takes one split's time; a join starts when both
    sides are there, the build side of a broadcast being collected and hashed first, and then takes one task's
    time. Memory counts every broadcast table of the tree as resident until its end.
    """
    pricer = JoinCostModel(cost, share)
    work, critical, resident, task, waiting = _walk(tree, cardinalities, pricer)
    spent = cost.core_seconds(work) + waiting
    seconds = Search(cardinalities, cost, share).seconds(spent, critical)
    return Candidate(tree, work, spent, critical, resident + task + cost.task_memory, seconds)


def _walk(
    tree: Tree, cardinalities: Cardinalities, pricer: JoinCostModel
) -> tuple[Work, float, float, float, float]:
    """Return work, critical path, resident GiB, a task's GiB and core-seconds that wait of ``tree``."""
    if isinstance(tree, Leaf):
        i = tree.relation
        work = scan(Size(cardinalities.base_rows(i), cardinalities.scanned_bytes(i)))
        waiting = pricer.crossing * crossed(tree.mask, cardinalities, pricer.model)
        critical = (pricer.model.core_seconds(work) + waiting) / work.tasks
        return work, critical, 0.0, 0.0, waiting
    left = _walk(tree.left, cardinalities, pricer)
    right = _walk(tree.right, cardinalities, pricer)
    equality = cardinalities.has_equality(tree.left.mask, tree.right.mask)
    one, other, out = (
        Size(cardinalities.rows(m), cardinalities.bytes(m))
        for m in (tree.left.mask, tree.right.mask, tree.mask)
    )
    keys = pricer.model.keys(cardinalities.key_bytes(tree.left.mask, tree.right.mask)) if equality else 1.0
    read = crossed(tree.right.mask, cardinalities, pricer.model)
    own = pricer.work(tree.method, one, other, out, equality=equality, keys=keys, read=read)
    cost = pricer.price(tree.method, one, other, out, equality=equality, keys=keys, read=read)
    return (
        left[0].plus(right[0]).plus(own),
        max(left[1], right[1] + cost.serial) + cost.tail,
        left[2] + right[2] + cost.resident,
        max(left[3], right[3], cost.task),
        left[4] + right[4] + cost.waiting,
    )


class _Bounds(NamedTuple):
    keep: int
    limit: int
    pairs: int
    combinations: int
    cross_rows: float


def _search(graph: JoinGraph, search: Search, bounds: _Bounds) -> list[Entry]:
    parts, masks = [], []
    found = components(graph.neighbours)
    fastest = bounds.limit == 1
    for component in found:
        units, own, neighbours = _units(search, graph.neighbours, component)
        pairs = _bushy_pairs(
            search.cardinalities, tuple(own), tuple(neighbours), bounds.pairs, bounds.cross_rows
        )
        alone = fastest and len(found) == 1  # else a component's other ways may suit the others better
        parts.append(_optimise(search, units, own, neighbours, pairs, bounds, alone))
        masks.append(component)
    if len(parts) == 1:
        return parts[0]
    everyone = (1 << len(parts)) - 1
    neighbours = [everyone & ~(1 << i) for i in range(len(parts))]
    pairs = grouped(csg_cmp_pairs(neighbours), bounds.pairs)
    ways = [_select(part, bounds.keep) for part in parts]
    return _optimise(search, ways, masks, neighbours, pairs, bounds, fastest)


def _optimise(
    search: Search,
    units: Sequence[Sequence[Entry]],
    masks: Sequence[int],
    neighbours: Sequence[int],
    pairs: Pairs | None,
    bounds: _Bounds,
    fastest: bool,
) -> list[Entry]:
    if pairs is None:
        return greedy_trees(search, units, masks, neighbours, bounds.keep)
    keep = affordable(pairs, bounds.keep, bounds.combinations)
    return search.optimise(units, masks, pairs, keep, fastest=fastest)


def _units(
    search: Search, neighbours: Sequence[int], component: int
) -> tuple[list[list[Entry]], list[int], list[int]]:
    """Return the relations of one component as units, with neighbours numbered by unit."""
    relations = [i for i in range(len(neighbours)) if component >> i & 1]
    position = {relation: k for k, relation in enumerate(relations)}
    around = [
        sum(1 << position[other] for other in relations if neighbours[relation] >> other & 1)
        for relation in relations
    ]
    return [[search.leaf(i)] for i in relations], [1 << i for i in relations], around


@lru_cache(maxsize=8)  # one query is searched for several shares and models
def _bushy_pairs(
    cardinalities: Cardinalities,
    masks: tuple[int, ...],
    neighbours: tuple[int, ...],
    max_pairs: int,
    cross_rows: float,
) -> Pairs | None:
    """Return the pairs to consider, with useful small cross products as long as the bounds allow."""
    plain = grouped(csg_cmp_pairs(neighbours), max_pairs)
    edges = _cross_edges(cardinalities, masks, neighbours, cross_rows) if plain is not None else []
    while edges:
        wider = list(neighbours)
        for i, j in edges:
            wider[i] |= 1 << j
            wider[j] |= 1 << i
        pairs = grouped(_joinable(cardinalities, masks, neighbours, wider, cross_rows), max_pairs)
        if pairs is not None:
            return pairs
        edges.pop()
    return plain


def _cross_edges(
    cardinalities: Cardinalities, masks: Sequence[int], neighbours: Sequence[int], cross_rows: float
) -> list[tuple[int, int]]:
    rows = [cardinalities.rows(mask) for mask in masks]
    found = [
        (rows[i] * rows[j], i, j)
        for i, j in combinations(range(len(masks)), 2)
        if not neighbours[i] >> j & 1 and neighbours[i] & neighbours[j] and rows[i] * rows[j] <= cross_rows
    ]
    return [(i, j) for _, i, j in sorted(found)[:CROSS_EDGES]]


def _joinable(
    cardinalities: Cardinalities,
    masks: Sequence[int],
    neighbours: Sequence[int],
    wider: Sequence[int],
    cross_rows: float,
) -> Iterator[tuple[int, int]]:
    """Yield the pairs of the widened graph that a predicate joins or whose cross product is small."""
    around: dict[int, int] = {0: 0}
    real: dict[int, int] = {0: 0}
    for one, other in csg_cmp_pairs(wider):
        for part in (one, other):
            if part not in around:
                near = mask = 0
                for i in range(len(masks)):
                    if part >> i & 1:
                        near |= neighbours[i]
                        mask |= masks[i]
                around[part], real[part] = near, mask
        if (
            around[one] & other
            or cardinalities.rows(real[one]) * cardinalities.rows(real[other]) <= cross_rows
        ):
            yield one, other


def _select(entries: list[Entry], limit: int) -> list[Entry]:
    """Return up to ``limit`` entries: the Pareto front by time, then the fastest of every other join
    order."""
    entries = sorted(entries, key=lambda e: (e[0], e[3], e[4]))
    chosen = pareto(entries, limit)
    seen = {logical_key(tree_of(e)) for e in chosen}
    for entry in entries:
        if len(chosen) >= limit:
            break
        key = logical_key(tree_of(entry))
        if key not in seen:
            seen.add(key)
            chosen.append(entry)
    return chosen


def _extend(search: Search, mask: int, entries: list[Entry], order: Tree, component: int) -> list[Entry]:
    """Join the relations of another component to ``entries`` one by one, in the order of its linear tree."""
    steps = [join.mask for join in joins(order)]
    smallest = steps[0] & -steps[0]
    sequence = [smallest, *(b ^ a for a, b in zip([smallest, *steps], steps, strict=False))]
    for relation in sequence:
        leaf = search.leaf(relation.bit_length() - 1)
        entries = [min(search.combine(entries, [leaf], search.variants(mask, relation)), key=_by_work)]
        mask |= relation
    assert mask & component == component
    return entries


def _by_work(entry: Entry) -> tuple[float, float]:
    return entry[1], entry[0]
