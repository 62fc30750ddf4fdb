"""Which executors and shards move where when workers come and go."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from ebbflow.planners.errors import OptionError


class Load(NamedTuple):
    """One movable thing: an executor or a shard."""

    item: int
    owner: str  # a worker
    size: int  # bytes that a move transfers


class Move(NamedTuple):
    """One thing on its way."""

    item: int
    source: str
    target: str


def plan_moves(loads: Sequence[Load], workers: Collection[str], leaving: Collection[str] = ()) -> list[Move]:
    """Return the fewest moves after which the counts on all staying workers differ by at most one.

    ``workers`` are those that stay or leave; an owner outside of them counts as leaving. Larger quotas go to
    those who have most, which is what makes the moves fewest. Donors give
    smallest things first, in the order of their load, receivers take in the order of theirs; ties go by name, so
    equal inputs give equal plans.
    Raises ``OptionError`` when no worker stays.
    """
    staying = sorted(set(workers) - set(leaving))
    if not staying:
        raise OptionError(f"at least one worker must stay; all leave: {sorted(leaving)}")
    held: dict[str, list[Load]] = {worker: [] for worker in staying}
    for load in loads:
        held.setdefault(load.owner, []).append(load)
    base, extra = divmod(len(loads), len(staying))
    by_load = sorted(staying, key=lambda worker: (-len(held[worker]), worker))
    quota = {worker: base + (place < extra) for place, worker in enumerate(by_load)}
    counts = {worker: len(held[worker]) for worker in staying}
    moves = []
    for donor in sorted(held, key=lambda worker: (-len(held[worker]), worker)):
        surplus = len(held[donor]) - quota.get(donor, 0)
        for load in sorted(held[donor], key=lambda load: (load.size, load.item))[: max(surplus, 0)]:
            target = min((w for w in staying if counts[w] < quota[w]), key=lambda w: (counts[w], w))
            counts[target] += 1
            moves.append(Move(load.item, donor, target))
    return moves


def imbalance(counts: Sequence[int]) -> float:
    """Return the largest load over the mean load; 1 is even. Less than 1 + workers / things after a rebalance.

    Raises ``OptionError``.
    """
    if not counts or not sum(counts):
        raise OptionError(f"counts must have a positive sum; got {list(counts)}")
    return max(counts) * len(counts) / sum(counts)
