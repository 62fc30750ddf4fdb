"""Layered drawing of a small DAG (Sugiyama's method): layers, crossings, coordinates.

Nodes are layered by longest path, edges over several layers get a bend in each, orders are improved by
barycentre sweeps, and positions are pulled towards what a node is linked to while those in a layer keep
their distance.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import TypeVar

N = TypeVar("N", bound=Hashable)
_SWEEPS = 12


@dataclass(frozen=True, slots=True)
class Layout:
    """Where nodes lie: their layer, and their centre across it; edges as the centres they pass."""

    layer: Mapping[Hashable, int]
    centre: Mapping[Hashable, float]
    routes: Mapping[
        tuple[Hashable, Hashable], tuple[tuple[int, float], ...]
    ]  # (layer, centre) from end to end
    layers: int
    extent: float  # across all layers


def longest_path(nodes: Sequence[N], edges: Sequence[tuple[N, N]]) -> dict[N, int]:
    """Return each node's layer: one more than its deepest input. ``nodes`` are in topological order."""
    layer = dict.fromkeys(nodes, 0)
    for node in nodes:
        layer[node] = max((layer[a] + 1 for a, b in edges if b == node), default=0)
    return layer


def arrange(
    layer: Mapping[Hashable, int],
    size: Mapping[Hashable, float],
    edges: Sequence[tuple[Hashable, Hashable]],
    gap: float,
) -> Layout:
    """Lay out nodes of a given ``layer`` and ``size`` across it, at least ``gap`` apart."""
    count = max(layer.values(), default=-1) + 1
    rows: list[list[Hashable]] = [[] for _ in range(count)]
    sizes = dict(size)
    for node, number in layer.items():
        rows[number].append(node)
    chains: dict[tuple[Hashable, Hashable], list[Hashable]] = {}
    above: dict[Hashable, list[Hashable]] = {}
    below: dict[Hashable, list[Hashable]] = {}
    for a, b in edges:
        bends: list[Hashable] = [(a, b, n) for n in range(layer[a] + 1, layer[b])]
        for bend in bends:
            rows[layer[a] + 1 + bends.index(bend)].append(bend)
            sizes[bend] = 8.0
        chain = [a, *bends, b]
        chains[a, b] = chain
        for one, two in pairwise(chain):
            below.setdefault(one, []).append(two)
            above.setdefault(two, []).append(one)
    _order(rows, above, below)
    centre = _coordinates(rows, sizes, above, below, gap)
    low = min((centre[n] - sizes[n] / 2 for n in centre), default=0.0)
    centre = {n: c - low for n, c in centre.items()}
    start = {edge: layer[edge[0]] for edge in chains}
    return Layout(
        layer=dict(layer),
        centre=centre,
        routes={
            edge: tuple((start[edge] + i, centre[n]) for i, n in enumerate(chain))
            for edge, chain in chains.items()
        },
        layers=count,
        extent=max((centre[n] + sizes[n] / 2 for n in centre), default=0.0),
    )


def _order(
    rows: list[list[Hashable]],
    above: Mapping[Hashable, Sequence[Hashable]],
    below: Mapping[Hashable, Sequence[Hashable]],
) -> None:
    """Reorder each row by the mean position of its neighbours; keep the order with the fewest crossings."""
    best, fewest = [list(r) for r in rows], _crossings(rows, below)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        sequence = range(1, len(rows)) if down else range(len(rows) - 2, -1, -1)
        for number in sequence:
            beside = rows[number - 1] if down else rows[number + 1]
            place = {n: i for i, n in enumerate(beside)}
            links = above if down else below
            own = {n: float(i) for i, n in enumerate(rows[number])}
            key = {n: fmean(place[m] for m in links[n]) if links.get(n) else own[n] for n in rows[number]}
            rows[number].sort(key=key.__getitem__)
        crossings = _crossings(rows, below)
        if crossings < fewest:
            best, fewest = [list(r) for r in rows], crossings
    rows[:] = best


def _crossings(rows: Sequence[Sequence[Hashable]], below: Mapping[Hashable, Sequence[Hashable]]) -> int:
    total = 0
    for row, after in pairwise(rows):
        place = {n: i for i, n in enumerate(after)}
        ends = [(i, place[m]) for i, n in enumerate(row) for m in below.get(n, ())]
        total += sum((a - c) * (b - d) < 0 for k, (a, b) in enumerate(ends) for c, d in ends[k + 1 :])
    return total


def _coordinates(
    rows: Sequence[Sequence[Hashable]],
    sizes: Mapping[Hashable, float],
    above: Mapping[Hashable, Sequence[Hashable]],
    below: Mapping[Hashable, Sequence[Hashable]],
    gap: float,
) -> dict[Hashable, float]:
    centre: dict[Hashable, float] = {}
    for row in rows:
        centre.update(_spread(row, [0.0] * len(row), sizes, gap))
    for sweep in range(_SWEEPS):
        links = (above, below)[sweep % 2]
        for row in rows if sweep % 2 == 0 else reversed(rows):
            wanted = [fmean(centre[m] for m in links[n]) if links.get(n) else centre[n] for n in row]
            centre.update(_spread(row, wanted, sizes, gap))
    return centre


def _spread(
    row: Sequence[Hashable], wanted: Sequence[float], sizes: Mapping[Hashable, float], gap: float
) -> dict[Hashable, float]:
    """Place ``row`` in its order, closest in the least-squares sense to ``wanted``, without overlap.

    Isotonic regression by pooling adjacent violators, after subtracting the distance that order demands.
    """
    offsets = [0.0]
    for before, node in pairwise(row):
        offsets.append(offsets[-1] + (sizes[before] + sizes[node]) / 2 + gap)
    blocks: list[tuple[float, int]] = []  # (mean, members)
    for want, offset in zip(wanted, offsets, strict=False):
        mean, members = want - offset, 1
        while blocks and blocks[-1][0] > mean:
            other, count = blocks.pop()
            mean, members = (mean * members + other * count) / (members + count), members + count
        blocks.append((mean, members))
    means = [mean for mean, members in blocks for _ in range(members)]
    return {node: mean + offset for node, mean, offset in zip(row, means, offsets, strict=False)}
