"""Slices of a relation, each with the ranges of keys that it needs of others."""

from collections.abc import Mapping, Sequence

from ebbflow.infra.protocols import Relation
from ebbflow.infra.spark.native.catalyst import NotNativeError
from ebbflow.infra.spark.native.exchange.costs import Size
from ebbflow.infra.spark.native.exchange.program import Program, Slice
from ebbflow.infra.spark.native.exchange.within import Within, learned, needed
from ebbflow.infra.spark.native.narrowing import RANGED
from ebbflow.infra.spark.native.slices import KeyBounds, cuts
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
    keys = [
        (KeyBounds(relation, one.column), scan, column, KeyBounds(scans[scan], column))
        for one in made.narrowings
        if one.type in RANGED
        for scan, column in one.others
    ]
    if tests is None:
        tests = (*made.within, *learned(relation, made.learnable, scans)) if count > 1 else ()
    found = []
    for cut in cuts(relation, count, needed(relation, tests)):
        ranges, shares = [], dict.fromkeys(scans, 1.0)
        for key, scan, column, bounds in keys:
            known = key.of(cut)
            if known is not None and (share := bounds.share(*known)) <= _NARROW:
                ranges.append(KeyRange(f"s{scan}", column, *known))
                shares[scan] = min(shares[scan], share)
        held = sum(one.held * shares[number] for number, one in sizes.items() if number != sliced)
        if held > room:
            if (ranges or count == 1) and count < most:  # of a narrower range others need less
                return narrowed(
                    made, scans, sizes, sliced, min(2 * count, most), most, room, tests if count > 1 else None
                )
            raise NotNativeError("tables that each task reads do not fit into its memory")
        read = sum(one.read * shares[number] for number, one in sizes.items() if number != sliced)
        found.append(Slice(cut, tuple(ranges), read, made))
    return found
