"""Connected subgraphs of a join graph and their connected complements (Moerkotte and Neumann 2006, DPccp)."""

from collections.abc import Iterator, Sequence

from ebbflow.planners.query.sql.joingraph import JoinGraph

Pairs = dict[int, list[tuple[int, int]]]  # per union, the disjoint connected parts that make it


def csg_cmp_pairs(neighbours: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield every unordered pair of disjoint connected vertex sets with an edge between them, once each.

    ``neighbours[i]`` is the bit set adjacent to vertex ``i``.
    """
    reach = _Reach(neighbours)
    for i in reversed(range(len(neighbours))):
        start = 1 << i
        for part in reach.connected(start, (start << 1) - 1):
            yield from ((part, other) for other in _complements(reach, part))


def linear_pairs(neighbours: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of a connected set and one adjacent vertex, smaller sets first. A pair of two vertices
    comes once."""
    level = {1 << i for i in range(len(neighbours))}
    reach = _Reach(neighbours)
    while level:
        grown: set[int] = set()
        for part in sorted(level):
            around = reach.around(part)
            for vertex in bits(around):
                if part & (part - 1) or part < vertex:
                    yield part, vertex
                grown.add(part | vertex)
        level = grown


def grouped(pairs: Iterator[tuple[int, int]], limit: int) -> Pairs | None:
    """Group pairs by their union, smaller unions first; ``None`` if there are more than ``limit`` pairs."""
    found: Pairs = {}
    for count, (one, other) in enumerate(pairs, start=1):
        if count > limit:
            return None
        union = one | other
        known = found.get(union)
        if known is None:
            found[union] = [(one, other)]
        else:
            known.append((one, other))
    # A subset is a smaller number than its superset.
    return dict(sorted(found.items()))


def components(neighbours: Sequence[int]) -> list[int]:
    """Return the connected components as bit sets, by their smallest vertex."""
    out = []
    left = (1 << len(neighbours)) - 1
    while left:
        component = left & -left
        while True:
            wider = component
            for i in range(len(neighbours)):
                if component >> i & 1:
                    wider |= neighbours[i]
            if wider == component:
                break
            component = wider
        out.append(component)
        left &= ~component
    return out


def count_trees(graph: JoinGraph) -> int:
    """Return the number of unordered join trees without cross products: a chain of 4 has 5, a star with three
    dimensions 6, a clique of 4 has 15. A disconnected graph has none.

    Takes time in proportion to the pairs of :func:`csg_cmp_pairs`: for tests and small graphs.
    """
    neighbours = graph.neighbours
    trees = {1 << i: 1 for i in range(len(neighbours))}
    pairs = grouped(csg_cmp_pairs(neighbours), limit=10**7)
    for union, parts in (pairs or {}).items():
        trees[union] = sum(trees[one] * trees[other] for one, other in parts)
    return trees.get(graph.everything, 0)


def bits(mask: int) -> Iterator[int]:
    """Yield the single bits of ``mask``, lowest first."""
    while mask:
        low = mask & -mask
        yield low
        mask ^= low


class _Reach:
    """Neighbourhoods of vertex sets, each computed once."""

    def __init__(self, neighbours: Sequence[int]) -> None:
        self._all = {1 << i: mask for i, mask in enumerate(neighbours)}

    def around(self, part: int) -> int:
        """Return the vertices next to ``part`` and outside it."""
        return self._union(part) & ~part

    def _union(self, part: int) -> int:
        found = self._all.get(part)
        if found is None:
            low = part & -part
            found = self._all[part] = self._all[low] | self._union(part ^ low)
        return found

    def connected(self, part: int, excluded: int) -> Iterator[int]:
        """Yield ``part`` and every connected set that extends it without vertices of ``excluded``."""
        yield part
        stack = [(part, excluded)]
        while stack:
            part, excluded = stack.pop()
            fringe = self.around(part) & ~excluded
            if not fringe:
                continue
            closed = excluded | fringe
            subset = fringe
            while subset:
                wider = part | subset
                yield wider
                stack.append((wider, closed))
                subset = (subset - 1) & fringe


def _complements(reach: _Reach, part: int) -> Iterator[int]:
    """Yield the connected sets next to ``part`` whose vertices all come after its first one."""
    lowest = part & -part
    excluded = ((lowest << 1) - 1) | part
    fringe = reach.around(part) & ~excluded
    for vertex in bits(fringe):
        earlier = fringe & (vertex - 1)
        yield from reach.connected(vertex, excluded | earlier | vertex)
