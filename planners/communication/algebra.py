"""How a collective is rewritten into motifs that do the same: by payload (segments) and by pattern (splines).

The rules are E1 to E6 of the thesis' appendix C with its index ranges corrected; ``check_cover`` proves for a given
rewriting that every byte arrives exactly once and every rank is counted exactly once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Literal

from ebbflow.planners.errors import OptionError

MotifKind = Literal["all-reduce", "all-to-all", "reduce", "broadcast", "reduce-scatter", "all-gather"]


@dataclass(frozen=True, slots=True)
class Motif:
    """A group of transfers that runs as one; ``after`` are positions of motifs that must have ended.

    Args:
        kind: what it does to its range.
        ranks: that take part, in ring order.
        low: first element of its range: of the tensor, of an all-to-all of each row.
        high: end of the range.
        root: of a reduce or a broadcast.
        offsets: of an all-to-all: rank ``i`` of ``n`` sends to ``(i + o) mod n`` for ``o`` from the first to before
            the second.
        after: positions in the list that it is part of.
    """

    kind: MotifKind
    ranks: tuple[int, ...]
    low: int
    high: int
    root: int = -1
    offsets: tuple[int, int] = (0, 0)
    after: tuple[int, ...] = ()

    def piece(self, index: int) -> tuple[int, int]:
        """Return the range of one of the as many pieces as there are ranks, as rings cut it."""
        size, n = self.high - self.low, len(self.ranks)
        return self.low + size * index // n, self.low + size * (index + 1) // n

    def transfers(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield sender, receiver and the range that is sent, in an order in which one rank could do them."""
        ranks, n = self.ranks, len(self.ranks)
        match self.kind:
            case "all-to-all":
                for i, o in ((i, o) for i in range(n) for o in range(*self.offsets)):
                    yield ranks[i], ranks[(i + o) % n], self.low, self.high
            case "reduce":
                yield from ((rank, self.root, self.low, self.high) for rank in ranks if rank != self.root)
            case "broadcast":
                yield from ((self.root, rank, self.low, self.high) for rank in ranks if rank != self.root)
            case "reduce-scatter":
                for r, i in ((r, i) for r in range(n - 1) for i in range(n)):
                    yield ranks[i], ranks[i - 1], *self.piece((i + 1 + r) % n)
            case "all-gather":
                for r, i in ((r, i) for r in range(n - 1) for i in range(n)):
                    yield ranks[i], ranks[i - 1], *self.piece((i + r) % n)
            case "all-reduce":
                yield from replace(self, kind="reduce-scatter").transfers()
                yield from replace(self, kind="all-gather").transfers()


Motifs = tuple[Motif, ...]
Rewriting = Callable[[Motif], Motifs]


def all_reduce(ranks: int, size: int) -> Motif:
    """Return the all-reduce of ``size`` elements among this many ranks. Raises ``OptionError``."""
    return Motif("all-reduce", _ranks(ranks), 0, _size(size))


def all_to_all(ranks: int, size: int) -> Motif:
    """Return the all-to-all in which each rank sends ``size`` elements to each. Raises ``OptionError``."""
    return Motif("all-to-all", _ranks(ranks), 0, _size(size), offsets=(0, ranks))


def broadcast(ranks: int, size: int, root: int = 0) -> Motif:
    """Return the broadcast of ``size`` elements from ``root``. Raises ``OptionError``."""
    return Motif("broadcast", _ranks(ranks), 0, _size(size), root=root)


def segment(motif: Motif, size: int) -> Motifs:
    """Cut the payload into segments of ``size`` elements, the last one shorter (E1, E3). Raises ``OptionError``."""
    if size < 1:
        raise OptionError(f"a segment must have at least 1 element; got {size}")
    starts = range(motif.low, motif.high, size)
    return tuple(replace(motif, low=a, high=min(a + size, motif.high)) for a in starts) or (motif,)


def spline_all_to_all(motif: Motif, width: int) -> Motifs:
    """Cut an all-to-all into motifs of ``width`` destinations for every rank (E2). Raises ``OptionError``."""
    _must_be(motif, "all-to-all")
    if width < 1:
        raise OptionError(f"a spline must have at least 1 destination; got {width}")
    first, end = motif.offsets
    return tuple(replace(motif, offsets=(o, min(o + width, end))) for o in range(first, end, width))


def spline_broadcast(motif: Motif, width: int) -> Motifs:
    """Cut a broadcast into motifs of ``width`` receivers (E6). Raises ``OptionError``."""
    _must_be(motif, "broadcast")
    if width < 1:
        raise OptionError(f"a spline must have at least 1 receiver; got {width}")
    others = [rank for rank in motif.ranks if rank != motif.root]
    cut = [others[i : i + width] for i in range(0, len(others), width)]
    return tuple(replace(motif, ranks=(motif.root, *some)) for some in cut) or (motif,)


def ring_all_reduce(motif: Motif) -> Motifs:
    """Return a reduce-scatter and the all-gather after it (E4). Raises ``OptionError``."""
    _must_be(motif, "all-reduce")
    return replace(motif, kind="reduce-scatter"), replace(motif, kind="all-gather", after=(0,))


def tree_all_reduce(motif: Motif, fan_in: int) -> Motifs:
    """Return reductions up a tree of groups of ``fan_in`` ranks and broadcasts down again (E5).

    Raises ``OptionError`` for a fan-in below 2.
    """
    _must_be(motif, "all-reduce")
    if fan_in < 2:
        raise OptionError(f"fan_in of a tree must be >= 2; got {fan_in}")
    levels, level = [], motif.ranks
    while len(level) > 1:
        groups = [level[i : i + fan_in] for i in range(0, len(level), fan_in)]
        levels.append(groups)
        level = tuple(group[0] for group in groups)
    found: list[Motif] = []
    made_by: dict[int, int] = {}  # rank -> the motif that its value waits for
    up: list[tuple[MotifKind, tuple[int, ...]]] = [("reduce", g) for groups in levels for g in groups]
    down: list[tuple[MotifKind, tuple[int, ...]]] = [
        ("broadcast", g) for groups in reversed(levels) for g in groups
    ]
    for kind, group in up + down:
        if len(group) > 1:
            after = tuple(sorted({made_by[rank] for rank in group if rank in made_by}))
            found.append(replace(motif, kind=kind, ranks=group, root=group[0], after=after))
            made_by.update(dict.fromkeys(group, len(found) - 1))
    return tuple(found) or (motif,)


def hierarchical_all_reduce(motif: Motif, per_node: int) -> Motifs:
    """Return a reduce-scatter in each node, an all-reduce of each piece across nodes, and an all-gather in each node.

    Args:
        motif: an all-reduce.
        per_node: ranks of a node, consecutive; they divide the ranks.

    Raises ``OptionError``.
    """
    _must_be(motif, "all-reduce")
    if per_node < 1 or len(motif.ranks) % per_node:
        raise OptionError(f"per_node must divide the {len(motif.ranks)} ranks; got {per_node}")
    nodes = [motif.ranks[i : i + per_node] for i in range(0, len(motif.ranks), per_node)]
    if len(nodes) == 1 or per_node == 1:
        return ring_all_reduce(motif) if len(motif.ranks) > 1 else (motif,)
    within = tuple(range(len(nodes)))
    found = [replace(motif, kind="reduce-scatter", ranks=node) for node in nodes]
    for local in range(per_node):
        low, high = replace(motif, ranks=nodes[0]).piece(local)
        across = tuple(node[local] for node in nodes)
        found.append(replace(motif, ranks=across, low=low, high=high, after=within))
    after = tuple(range(len(nodes), len(nodes) + per_node))
    return (*found, *(replace(motif, kind="all-gather", ranks=node, after=after) for node in nodes))


def compose(motifs: Sequence[Motif], rewriting: Rewriting, *, kind: MotifKind | None = None) -> Motifs:
    """Rewrite each motif, or each of a ``kind``, and keep what waits for what."""
    found: list[Motif] = []
    ends: list[tuple[int, ...]] = []  # of each motif given: the new ones that end it
    for motif in motifs:
        alone = replace(motif, after=())
        new = rewriting(alone) if kind in (None, motif.kind) else (alone,)
        base = len(found)
        before = tuple(sorted({end for one in motif.after for end in ends[one]}))
        found += [replace(one, after=tuple(base + i for i in one.after) or before) for one in new]
        followed = {i for one in new for i in one.after}
        ends.append(tuple(base + i for i in range(len(new)) if i not in followed))
    return tuple(found)


def check_cover(whole: Motif, motifs: Sequence[Motif]) -> list[str]:
    """Return what a rewriting of ``whole`` does wrong; empty where it delivers exactly the same.

    An all-to-all must deliver each element of each pair exactly once; a reduction must leave on every rank a sum that
    counts every rank exactly once (checked for the elements between any two cuts); motifs that do not wait for each
    other must not touch the same elements of the same rank.
    """
    problems = _races(motifs)
    cuts = sorted({*(edge for one in motifs for edge in _edges(one)), whole.low, whole.high})
    for low, high in pairwise(cuts):
        here = [one for one in motifs if one.low <= low and high <= one.high]
        if whole.kind == "all-to-all":
            problems += _wrong_deliveries(whole, here, low)
        else:
            problems += _wrong_sums(whole, motifs, low, high)
    return problems


def _edges(motif: Motif) -> Iterator[int]:
    yield from (motif.low, motif.high)
    if motif.kind in ("reduce-scatter", "all-gather", "all-reduce"):
        yield from (motif.piece(i)[0] for i in range(len(motif.ranks)))


def _races(motifs: Sequence[Motif]) -> list[str]:
    before: list[set[int]] = []
    for k, motif in enumerate(motifs):
        if any(i >= k for i in motif.after):
            return [f"motif {k} waits for a later one"]
        before.append(set(motif.after).union(*(before[i] for i in motif.after)))
    found = []
    for (i, one), (j, other) in combinations(enumerate(motifs), 2):
        if i in before[j] or "all-to-all" in (
            one.kind,
            other.kind,
        ):  # rows of an all-to-all are buffers of their own
            continue
        shared = {r for r in one.ranks if r in other.ranks}
        if one.kind == other.kind == "broadcast" and one.root == other.root:
            shared.discard(one.root)  # which is only read
        if shared and max(one.low, other.low) < min(one.high, other.high):
            found.append(f"motifs {i} and {j} touch the same elements of rank {min(shared)} and do not wait")
    return found


def _wrong_deliveries(whole: Motif, motifs: Iterable[Motif], low: int) -> list[str]:
    times: dict[tuple[int, int], int] = {}
    for one in motifs:
        for src, dst, _, _ in one.transfers():
            times[src, dst] = times.get((src, dst), 0) + 1
    pairs = [(src, dst) for src in whole.ranks for dst in whole.ranks]
    return [
        f"element {low} from {src} to {dst} arrives {times.get((src, dst), 0)} times"
        for src, dst in pairs
        if times.get((src, dst), 0) != 1
    ]


def _wrong_sums(whole: Motif, motifs: Sequence[Motif], low: int, high: int) -> list[str]:
    """Return wrong sums; a sum is kept as a number whose digits count each rank."""
    base = 2 * len(whole.ranks) + 1
    digit = {rank: base**i for i, rank in enumerate(whole.ranks)}
    held = dict(digit)
    for one in motifs:
        if not (one.low <= low and high <= one.high):
            continue
        _run(one, held, low, high)
    right = digit[whole.root] if whole.kind == "broadcast" else sum(digit.values())
    return [
        f"elements {low} to {high} of rank {rank} count {held[rank]:x}, not {right:x}"
        for rank in whole.ranks
        if held[rank] != right
    ]


def _run(motif: Motif, held: dict[int, int], low: int, high: int) -> None:
    """Do to the sums that ranks hold of a range what the motif does."""
    if motif.kind == "all-reduce":
        _run(replace(motif, kind="reduce-scatter"), held, low, high)
        _run(replace(motif, kind="all-gather"), held, low, high)
        return
    adds = motif.kind in ("reduce", "reduce-scatter")
    moves = [(src, dst) for src, dst, a, b in motif.transfers() if a <= low and high <= b]
    for src, dst in moves:
        held[dst] = held[dst] + held[src] if adds else held[src]


def _ranks(count: int) -> tuple[int, ...]:
    if count < 1:
        raise OptionError(f"a collective must have at least 1 rank; got {count}")
    return tuple(range(count))


def _size(size: int) -> int:
    if size < 0:
        raise OptionError(f"elements of a collective must be >= 0; got {size}")
    return size


def _must_be(motif: Motif, kind: MotifKind) -> None:
    if motif.kind != kind:
        raise OptionError(f"this rewrites an {kind}; got {motif.kind}")
