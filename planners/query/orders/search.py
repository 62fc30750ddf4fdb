"""Dynamic programming over sets of relations: the inner loop of plan enumeration.

Plain tuples, integers as bit sets and one price per pair and method, because a query of twelve relations has
ten thousand pairs.
"""

import math
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, TypeAlias

from ebbflow.planners.model import Share
from ebbflow.planners.query.costs.cost import CostModel, JoinCostModel, Size, scan
from ebbflow.planners.query.costs.operators import STORED
from ebbflow.planners.query.estimates.cardinality import Cardinalities
from ebbflow.planners.query.orders.subgraphs import Pairs
from ebbflow.planners.query.plan.trees import Join, JoinMethod, Leaf, Tree

# (seconds on the share, core-seconds, critical path, GiB resident, GiB of a task, left entry, right entry,
# method; a leaf has no entries and its relation at the end)
Entry: TypeAlias = tuple[float, float, float, float, float, Any, Any, Any]
# (build side is the right one, method, core-seconds, serial, tail, GiB resident, GiB of a task)
Variant: TypeAlias = tuple[bool, JoinMethod, float, float, float, float, float]

OVERLAP = 0.5  # part of the shorter of work/cores and critical path that does not overlap with the longer
BUILD_RATIO = 4.0  # building on a side so much larger than the other never pays

_BY_SECONDS = itemgetter(0, 3, 4)


class Search:
    """Everything that enumerating one join graph on one share needs, each size and price computed once."""

    def __init__(
        self,
        cardinalities: Cardinalities,
        model: CostModel,
        share: Share,
        build_ratio: float = BUILD_RATIO,
    ) -> None:
        """``build_ratio``: a side with more bytes than this times the other's is never the build side."""
        self._build_ratio = build_ratio
        self.cardinalities = cardinalities
        self.pricer = JoinCostModel(model, share)
        self.inverse_cores = 1.0 / max(share.total.cores, 1e-3)
        self._sizes: dict[int, Size] = {}
        self._priced: dict[tuple[int, int], list[Variant]] = {}

    def size(self, mask: int) -> Size:
        """Return the estimated size of the joined relations ``mask``."""
        found = self._sizes.get(mask)
        if found is None:
            rows = self.cardinalities.rows(mask)
            found = self._sizes[mask] = Size(rows, rows * self.cardinalities.width(mask))
        return found

    def seconds(self, work: float, critical: float) -> float:
        """Return the time on the share: between max(work/cores, critical path), which nothing can beat, and
        their sum, which list scheduling never exceeds (Graham 1969)."""
        spread = work * self.inverse_cores
        return spread + OVERLAP * critical if spread > critical else critical + OVERLAP * spread

    def leaf(self, relation: int) -> Entry:
        """Return the scan of one relation."""
        work = scan(Size(self.cardinalities.base_rows(relation), self.cardinalities.scanned_bytes(relation)))
        model = self.pricer.model
        read = crossed(1 << relation, self.cardinalities, model)
        spent = model.core_seconds(work) + self.pricer.crossing * read
        critical = spent / work.tasks
        return (self.seconds(spent, critical), spent, critical, 0.0, 0.0, None, None, relation)

    def variants(self, left: int, right: int) -> list[Variant]:
        """Return the ways to join two sets that fit the share and that no other way beats in every
        respect."""
        key = (left, right)
        found = self._priced.get(key)
        if found is None:
            found = self._priced[key] = _undominated(self._possible(left, right))
        return found

    def _possible(self, left: int, right: int) -> list[Variant]:
        one, other, out = self.size(left), self.size(right), self.size(left | right)
        equality = self.cardinalities.has_equality(left, right)
        pricer, ratio = self.pricer, self._build_ratio
        keys = pricer.model.keys(self.cardinalities.key_bytes(left, right)) if equality else 1.0
        found: list[Variant] = []
        sides = []
        if other.bytes <= ratio * one.bytes:
            sides.append((True, one, other))
        if one.bytes <= ratio * other.bytes:
            sides.append((False, other, one))
        reads = [0.0, 0.0]
        if pricer.crossing:  # else nothing waits for what links carry
            reads = [crossed(mask, self.cardinalities, pricer.model) for mask in (left, right)]
        for builds_right, probe, build in sides:
            read = reads[builds_right]
            if pricer.allows("broadcast", probe, build):
                cost = pricer.price("broadcast", probe, build, out, equality=equality, keys=keys, read=read)
                found.append((builds_right, "broadcast", *cost[:5]))
            if equality and pricer.allows("shuffle_hash", probe, build):
                cost = pricer.price("shuffle_hash", probe, build, out, keys=keys, read=read)
                found.append((builds_right, "shuffle_hash", *cost[:5]))
        # A merge join buffers its right side's equal keys: the smaller side.
        builds_right = (other.rows, right) <= (one.rows, left)
        probe, build = (one, other) if builds_right else (other, one)
        read = reads[builds_right]
        cost = pricer.price("sort_merge", probe, build, out, equality=equality, read=read)
        found.append((builds_right, "sort_merge", *cost[:5]))
        return found

    def combine(
        self, lefts: Sequence[Entry], rights: Sequence[Entry], variants: Sequence[Variant]
    ) -> list[Entry]:
        """Return every join of an entry of one set with an entry of the other."""
        out: list[Entry] = []
        most = self.pricer.most_resident
        inverse = self.inverse_cores
        for builds_right, method, spent, serial, tail, resident, task in variants:
            probes, builds = (lefts, rights) if builds_right else (rights, lefts)
            for probe in probes:
                for build in builds:
                    held = probe[3] + build[3] + resident
                    if held > most and resident:
                        continue
                    work = probe[1] + build[1] + spent
                    ready = build[2] + serial
                    critical = (probe[2] if probe[2] > ready else ready) + tail
                    spread = work * inverse
                    long, short = (spread, critical) if spread > critical else (critical, spread)
                    time = long + OVERLAP * short
                    biggest = probe[4] if probe[4] > build[4] else build[4]
                    biggest = max(biggest, task)
                    out.append((time, work, critical, held, biggest, probe, build, method))
        return out

    def optimise(
        self,
        units: Sequence[Sequence[Entry]],
        masks: Sequence[int],
        pairs: Pairs,
        keep: int,
        *,
        fastest: bool = False,
    ) -> list[Entry]:
        """Return the best joins of all ``units``.

        A unit is a set of relations (``masks``) with the ways to make it; ``pairs`` are bit sets of *units*,
        grouped by union, subsets first. Of every set, ``keep`` ways survive (:func:`prune`); of the last
        one, all of them are returned, or the ``fastest`` alone.
        """
        plans: dict[int, Sequence[Entry]] = {1 << i: unit for i, unit in enumerate(units)}
        real = _Unions(masks)
        everything = (1 << len(units)) - 1
        made: list[Entry] = list(units[0]) if len(units) == 1 else []
        for union, parts in pairs.items():
            last = union == everything
            made = []
            sides = ((plans.get(left), plans.get(right), left, right) for left, right in parts)
            joinable = [
                (lefts, rights, real[a], real[b]) for lefts, rights, a, b in sides if lefts and rights
            ]
            if (fastest and last) or (keep == 1 and not last):
                made = self._fastest(joinable)
            else:
                for lefts, rights, left, right in joinable:
                    made += self.combine(lefts, rights, self.variants(left, right))
            if not last:
                plans[union] = prune(made, keep)
        return prune(made, 1) if fastest else made

    def _fastest(self, pairs: Sequence[tuple[Sequence[Entry], Sequence[Entry], int, int]]) -> list[Entry]:
        """Return the fastest join of any of ``pairs``: the ways to make two sets, and the sets.

        Pairs whose sides alone take longer than a join found are not priced (accumulated-cost bounding: DeHaan and
        Tompa, SIGMOD 2007).
        """
        best: list[Entry] = []
        least = [self._least(lefts, rights) for lefts, rights, _, _ in pairs]
        for i in sorted(range(len(pairs)), key=least.__getitem__):
            if best and least[i] > best[0][0]:
                break
            lefts, rights, left, right = pairs[i]
            best = prune(best + self.combine(lefts, rights, self.variants(left, right)), 1)
        return best

    def _least(self, lefts: Sequence[Entry], rights: Sequence[Entry]) -> float:
        """Return seconds on the share that no join of ``lefts`` with ``rights`` stays below."""
        (_, left_work, left_path, *_), (_, right_work, right_path, *_) = lefts[0], rights[0]
        if len(lefts) > 1 or len(rights) > 1:
            left_work, right_work = (min(entry[1] for entry in entries) for entries in (lefts, rights))
            left_path, right_path = (min(entry[2] for entry in entries) for entries in (lefts, rights))
        return self.seconds(left_work + right_work, left_path if left_path > right_path else right_path)


def crossed(mask: int, cardinalities: Cardinalities, model: CostModel) -> float:
    """Return the bytes on links of reading what ``mask`` joins once: of a table, or of a stage's output, which joined
    relations are taken to be; where outputs cross no link, of all tables below, as if no stage had joined them."""
    if not mask & (mask - 1):
        relation = mask.bit_length() - 1
        view = cardinalities.graph.relations[relation].is_view
        return cardinalities.scanned_bytes(relation) * (model.store_wire if view else model.table_wire)
    if model.store_wire:
        return cardinalities.bytes(mask) * STORED * model.store_wire
    if not model.table_wire:
        return 0.0
    count = len(cardinalities.graph.relations)
    return sum(crossed(1 << i, cardinalities, model) for i in range(count) if mask >> i & 1)


class _Unions(dict[int, int]):
    """Bit sets of relations by bit sets of units, made when asked for."""

    def __init__(self, masks: Sequence[int]) -> None:
        super().__init__({1 << i: mask for i, mask in enumerate(masks)})

    def __missing__(self, units: int) -> int:
        low = units & -units
        self[units] = found = self[low] | self[units ^ low]
        return found


def prune(entries: list[Entry], keep: int) -> list[Entry]:
    """Return at most ``keep`` entries of the Pareto front on work, critical path and memory.

    First the fastest on the share; then those of least work, shortest critical path and least memory, which
    may be the fastest on another share; then by time.
    """
    if len(entries) <= 1:
        return entries
    entries.sort(key=_BY_SECONDS)
    if keep == 1:
        return entries[:1]
    front = pareto(entries, keep)
    if len(front) < keep:
        return front
    kept = front[:1]
    for extreme in (
        min(entries, key=itemgetter(1, 0, 3, 4)),
        min(entries, key=itemgetter(2, 0, 3, 4)),
        min(entries, key=_memory),
    ):
        if len(kept) < keep and not any(extreme is k for k in kept):
            kept.append(extreme)
    for entry in front:
        if len(kept) < keep and not any(entry is k for k in kept):
            kept.append(entry)
    return kept


def pareto(entries: Sequence[Entry], limit: int) -> list[Entry]:
    """Return the first ``limit`` entries that no other equals or beats in work, critical path and memory at
    once. ``entries`` must be sorted by time, then memory."""
    front: list[Entry] = []
    for entry in entries:
        _, work, critical, resident, task, _, _, _ = entry
        for other in front:
            if other[1] <= work and other[2] <= critical and other[3] <= resident and other[4] <= task:
                break
        else:
            front.append(entry)
            if len(front) == limit:
                break
    return front


def tree_of(entry: Entry) -> Tree:
    """Build the tree that an entry stands for."""
    if entry[5] is None:
        return Leaf(entry[7])
    return Join(tree_of(entry[5]), tree_of(entry[6]), entry[7])


def mask_of(entry: Entry) -> int:
    """Return the relations that an entry joins."""
    if entry[5] is None:
        return 1 << int(entry[7])
    return mask_of(entry[5]) | mask_of(entry[6])


def _memory(entry: Entry) -> tuple[float, float]:
    return float(entry[3] + entry[4]), float(entry[0])


def affordable(pairs: Pairs, keep: int, combinations: int) -> int:
    """Return how many ways per set, up to ``keep``, may survive for the entries that joining all pairs
    combines to number about ``combinations`` at most."""
    flat = steep = 0
    for parts in pairs.values():
        for left, right in parts:
            if left & (left - 1) and right & (right - 1):
                steep += 1
            else:
                flat += 1
    if keep * flat + keep * keep * steep <= combinations:
        return keep
    if not steep:
        return max(combinations // flat, 1)
    return max(int((math.sqrt(flat * flat + 4.0 * steep * combinations) - flat) / (2 * steep)), 1)


def _undominated(variants: list[Variant]) -> list[Variant]:
    kept: list[Variant] = []
    for variant in sorted(variants, key=itemgetter(2, 3, 1)):
        if not any(_dominates(other, variant) for other in kept):
            kept.append(variant)
    return kept


def _dominates(one: Variant, other: Variant) -> bool:
    """Tell whether ``one`` is at least as good whatever the inputs took."""
    if one[2] > other[2] or one[5] > other[5] or one[6] > other[6]:
        return False
    if one[3] + one[4] <= other[4]:
        return True
    return one[0] == other[0] and one[3] <= other[3] and one[4] <= other[4]
