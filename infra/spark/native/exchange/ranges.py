"""Slices of a relation, each with the ranges of keys that it needs of others."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ebbflow.infra.protocols import Relation
from ebbflow.infra.spark.native.catalyst import NotNativeError
from ebbflow.infra.spark.native.exchange.costs import Size
from ebbflow.infra.spark.native.exchange.program import Program, Slice
from ebbflow.infra.spark.native.exchange.within import Within, learned, needed
from ebbflow.infra.spark.native.narrowing import RANGED
from ebbflow.infra.spark.native.slices import Cut, KeyBounds, cuts, finer
from ebbflow.infra.spark.native.worker import KeyRange

_NARROW = 0.7  # of a relation's rows; DuckDB takes any range for a fifth, and might order joins by that


def narrowed(
    made: Program,
    scans: Mapping[int, Relation],
    sizes: Mapping[int, Size],
    sliced: int,
    count: int,
    most: int,
    room: float,
    tests: Sequence[Within] | None = None,
) -> list[Slice]:
    """Return about ``count`` slices of a scan, but up to ``most`` where others must be narrowed to fit.

    Args:
        made: what tasks run.
        scans: all of them.
        sizes: of those that tasks read.
        sliced: number of the scan.
        count: of slices.
        most: of slices.
        room: bytes of other scans that a task can hold.
        tests: what rows of the scan have that are needed; if not given, they are found.

    Raises ``NotNativeError`` where they do not fit, and ``TableError``.
    """
    relation = scans[sliced]
    if tests is None:
        tests = (*made.within, *learned(relation, made.learnable, scans)) if count > 1 else ()
    found, keys = [], _keys(made, scans, sliced)
    for cut in cuts(relation, count, needed(relation, tests)):
        ranges, shares = _ranges(cut, keys)
        held = sum(one.held * shares.get(number, 1.0) for number, one in sizes.items() if number != sliced)
        if held > room:
            if (ranges or count == 1) and count < most:  # of a narrower range others need less
                return narrowed(
                    made, scans, sizes, sliced, min(2 * count, most), most, room, tests if count > 1 else None
                )
            raise NotNativeError("tables that each task reads do not fit into its memory")
        read = sum(one.read * shares.get(number, 1.0) for number, one in sizes.items() if number != sliced)
        found.append(Slice(cut, ranges, read, made))
    return found


def divided(one: Slice, scans: Mapping[int, Relation], count: int) -> list[Slice]:
    """Return a slice as at most ``count``, none of which needs more of other scans than it does.

    Raises ``TableError``.
    """
    if one.made.sliced is None or count <= 1:
        return [one]
    keys = _keys(one.made, scans, one.made.sliced)
    found = finer(scans[one.made.sliced], one.cut, count)
    return [Slice(cut, _ranges(cut, keys)[0], one.read, one.made) for cut in found]


class _Key(NamedTuple):
    """A key of the sliced relation's, and the column of another scan outside of whose values nothing is needed."""

    bounds: KeyBounds
    scan: int
    column: str
    others: KeyBounds


def _keys(made: Program, scans: Mapping[int, Relation], sliced: int) -> list[_Key]:
    return [
        _Key(KeyBounds(scans[sliced], one.column), scan, column, KeyBounds(scans[scan], column))
        for one in made.narrowings
        if one.type in RANGED
        for scan, column in one.others
    ]


def _ranges(cut: Cut, keys: Sequence[_Key]) -> tuple[tuple[KeyRange, ...], dict[int, float]]:
    """Return what a slice needs of other scans, and of each so narrowed which part that is."""
    ranges, shares = [], dict[int, float]()
    for key in keys:
        known = key.bounds.of(cut)
        if known is not None and (share := key.others.share(*known)) <= _NARROW:
            ranges.append(KeyRange(f"s{key.scan}", key.column, *known))
            shares[key.scan] = min(shares.get(key.scan, 1.0), share)
    return tuple(ranges), shares
