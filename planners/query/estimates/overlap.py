"""How often the join keys of finished stages meet, from samples of both.

Whether the rows that two filters leave refer to the same things no statistics of single tables tell. Of stages that
have finished it is seen: the pairs of equal keys in two samples over all pairs are, in the mean, the selectivity of
their join (P. Haas, J. Naughton, A. Swami, "On the relative cost of sampling for join selectivity estimation", PODS
1994).
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from math import prod

Keys = Mapping[int, Sequence[Hashable]]
"""Sampled values of what a set of relations hands upward, by the index of their equality class; none is null."""


class Overlaps:
    """Corrections of joins of sets of relations of whose keys there are samples, by the sets' bit masks."""

    def __init__(self, samples: Mapping[int, Keys]) -> None:
        self._samples = samples
        self._counts: dict[tuple[int, int], Counter[Hashable]] = {}
        self._matches: dict[tuple[int, tuple[int, ...]], float] = {}

    def correction(
        self, sets: Sequence[int], class_masks: Sequence[int], divisor: Callable[[int, int], float]
    ) -> float:
        """Return how many times as many rows the join of disjoint sets has as by estimate.

        Args:
            sets: some of the relations that are joined.
            class_masks: relations of each equality class.
            divisor: of the product of rows, by estimate, for relations of a class; by the class's index.

        One pair is added to those found and to those expected: where few were expected, few that are found say
        little. Of sets that several classes join nothing is said: keys of one go with keys of another.
        """
        found = []
        for index, members in enumerate(class_masks) if self._samples else ():
            masks = tuple(sorted(m for m in sets if m & members and self._samples.get(m, {}).get(index)))
            if len(masks) > 1:
                pairs = prod(float(len(self._samples[mask][index])) for mask in masks)
                pairs *= prod(divisor(index, mask & members) for mask in masks)
                pairs /= max(divisor(index, sum(masks) & members), 1e-9)
                found.append((self._pairs(index, masks) + 1.0) / (pairs + 1.0))
        return found[0] if len(found) == 1 else 1.0

    def _pairs(self, index: int, masks: tuple[int, ...]) -> float:
        found = self._matches.get((index, masks))
        if found is None:
            first, *others = sorted((self._of(index, mask) for mask in masks), key=len)
            found = float(sum(n * prod(o[value] for o in others) for value, n in first.items()))
            self._matches[index, masks] = found
        return found

    def _of(self, index: int, mask: int) -> Counter[Hashable]:
        key = (index, mask)
        if key not in self._counts:
            self._counts[key] = Counter(self._samples[mask][index])
        return self._counts[key]
