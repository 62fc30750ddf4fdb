"""Join orders for graphs too large for dynamic programming over all of their sets.

Greedy operator ordering (Fegaras 1998) gives a bushy tree; every window of it, up to ``WINDOW`` sub-trees
below one join, is then optimised by dynamic programming (iterative dynamic programming, Kossmann and Stocker
2000).
"""

from collections.abc import Callable, Iterator, Sequence

from ebbflow.planners.query.orders.search import Entry, Search, mask_of
from ebbflow.planners.query.orders.subgraphs import bits, csg_cmp_pairs, grouped

WINDOW = 6  # sub-trees optimised together: 301 pairs at most
PASSES = 2

Measure = Callable[[int, Entry], tuple[float, ...]]


def greedy_trees(
    search: Search,
    units: Sequence[Sequence[Entry]],
    masks: Sequence[int],
    neighbours: Sequence[int],
    keep: int,
) -> list[Entry]:
    """Return good joins of all units, as :meth:`Search.optimise` does: ``neighbours`` are bit sets of
    units."""
    measures: tuple[Measure, ...] = (
        lambda mask, entry: (search.size(mask).rows, entry[1]),
        lambda mask, entry: (search.size(mask).bytes, entry[1]),
        lambda mask, entry: (entry[1], search.size(mask).rows),
    )
    edges = _Edges(masks, neighbours)
    found: list[Entry] = []
    for measure in measures:
        entry = _greedy(search, units, masks, edges, measure)
        for _ in range(PASSES):
            better = _improve(search, entry, edges)
            done = better[0] >= entry[0] * (1.0 - 1e-9)
            entry = min(entry, better, key=_time)
            if done:
                break
        found.append(entry)
        found += _window(search, entry, edges, keep)
    return found


def greedy_linear(
    search: Search, units: Sequence[Sequence[Entry]], masks: Sequence[int], neighbours: Sequence[int]
) -> list[Entry]:
    """Return, from every first unit, the linear join that always adds the unit giving the fewest rows."""
    found = []
    everything = (1 << len(units)) - 1
    for start in range(len(units)):
        entry, joined, mask, fringe = units[start][0], 1 << start, masks[start], neighbours[start]
        while joined != everything:
            choices = [b.bit_length() - 1 for b in bits(fringe & ~joined)]
            chosen = min(choices, key=lambda i: (search.size(mask | masks[i]).rows, i))
            variants = search.variants(mask, masks[chosen])
            entry = min(search.combine([entry], units[chosen], variants), key=lambda e: (e[1], e[0]))
            joined |= 1 << chosen
            mask |= masks[chosen]
            fringe |= neighbours[chosen]
        found.append(entry)
    return found


class _Edges:
    """Which sets of relations are adjacent, at the grain of the units."""

    def __init__(self, masks: Sequence[int], neighbours: Sequence[int]) -> None:
        self.masks = tuple(masks)
        self._near = [sum(masks[j] for j in range(len(masks)) if n >> j & 1) for n in neighbours]

    def around(self, mask: int) -> int:
        near = 0
        for own, other in zip(self.masks, self._near, strict=True):
            if own & mask:
                near |= other
        return near & ~mask

    def is_unit(self, mask: int) -> bool:
        return mask in self.masks


def _greedy(
    search: Search,
    units: Sequence[Sequence[Entry]],
    masks: Sequence[int],
    edges: _Edges,
    measure: Measure,
) -> Entry:
    """Join, again and again, the adjacent pair whose result measures least."""
    forest = {mask: min(unit, key=_time) for mask, unit in zip(masks, units, strict=True)}
    near = {mask: edges.around(mask) for mask in masks}
    options: dict[tuple[int, int], tuple[tuple[float, ...], Entry]] = {}
    fresh = [(a, b) for a in masks for b in masks if a < b and near[a] & b]
    while len(forest) > 1:
        for a, b in fresh:
            made = search.combine([forest[a]], [forest[b]], search.variants(a, b))
            entry = min(made, key=_time)
            options[a, b] = (measure(a | b, entry), entry)
        a, b = min(options, key=lambda pair: (options[pair][0], pair))
        joined = a | b
        forest[joined] = options[a, b][1]
        near[joined] = (near[a] | near[b]) & ~joined
        for gone in (a, b):
            del forest[gone], near[gone]
        options = {pair: o for pair, o in options.items() if not (pair[0] | pair[1]) & joined}
        fresh = [(min(m, joined), max(m, joined)) for m in forest if m != joined and near[joined] & m]
    return next(iter(forest.values()))


def _improve(search: Search, entry: Entry, edges: _Edges) -> Entry:
    """Optimise the window below every join, lower joins first."""
    if edges.is_unit(mask_of(entry)):
        return entry
    left, right = _improve(search, entry[5], edges), _improve(search, entry[6], edges)
    mine = (mask_of(left), mask_of(right))
    rebuilt = search.combine([left], [right], search.variants(*mine))
    best = min(rebuilt, key=_time)
    return min([best, *_window(search, best, edges, keep=1)], key=_time)


def _window(search: Search, entry: Entry, edges: _Edges, keep: int) -> list[Entry]:
    """Return the joins of the window below ``entry``: the sub-trees left when the costliest joins are
    opened."""
    parts = [entry]
    while len(parts) < WINDOW:
        open_ones = [p for p in parts if not edges.is_unit(mask_of(p))]
        if not open_ones:
            break
        chosen = max(open_ones, key=lambda e: (e[1], mask_of(e)))
        parts = [p for p in parts if p is not chosen] + [chosen[5], chosen[6]]
    if len(parts) < 3:
        return [entry]
    parts.sort(key=mask_of)
    masks = [mask_of(p) for p in parts]
    neighbours = list(_adjacency(masks, edges))
    pairs = grouped(csg_cmp_pairs(neighbours), limit=10**6)
    assert pairs is not None
    return search.optimise([[p] for p in parts], masks, pairs, keep, fastest=keep == 1)


def _adjacency(masks: Sequence[int], edges: _Edges) -> Iterator[int]:
    for mask in masks:
        near = edges.around(mask)
        yield sum(1 << j for j, other in enumerate(masks) if near & other)


def _time(entry: Entry) -> tuple[float, ...]:
    return entry[:5]
