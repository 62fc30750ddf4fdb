"""In which order motifs are launched, the same on every rank: the enforcer's queue without threads (Pseudocode 5).

The thesis' text deadlocks where iterations overlap and where several motifs share a number; the keys here rise over
iterations, and a number is released when all its motifs are there.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ebbflow.planners.errors import OptionError


class Launch(NamedTuple):
    """A motif to enqueue on its channel."""

    channel: int
    op: str
    motif: int
    iteration: int


@dataclass(frozen=True)
class LaunchOrder:
    """Numbers of an iteration's motifs, and their channels.

    Args:
        numbers: (collective, motif) -> number; equal ones may overlap.
        channels: (collective, motif) -> channel.
        ahead: collectives that are submitted for the next iteration; their first submission is launched at once.

    Raises ``OptionError`` for an order with a gap, or one that does not name the same motifs twice.
    """

    numbers: Mapping[tuple[str, int], int]
    channels: Mapping[tuple[str, int], int]
    ahead: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.numbers.keys() != self.channels.keys():
            raise OptionError("an order must give each motif a number and a channel")
        if set(self.numbers.values()) != set(range(self.length)):
            raise OptionError("numbers of an order must be 0, 1, 2, ... without a gap")
        if unknown := self.ahead - {op for op, _ in self.numbers}:
            raise OptionError(f"an order must not have {min(unknown)!r} ahead, which it does not launch")

    @property
    def length(self) -> int:
        """Return how many numbers there are."""
        return 1 + max(self.numbers.values(), default=-1)

    @property
    def ops(self) -> dict[str, int]:
        """Return the collectives with how many motifs each has."""
        counts: dict[str, int] = defaultdict(int)
        for op, _ in self.numbers:
            counts[op] += 1
        return dict(counts)

    @classmethod
    def in_order(cls, motifs: Iterable[tuple[str, int, int]]) -> "LaunchOrder":
        """Return the order of these (collective, motif, channel), each with a number of its own."""
        listed = list(motifs)
        return cls(
            {(op, motif): number for number, (op, motif, _) in enumerate(listed)},
            {(op, motif): channel for op, motif, channel in listed},
        )


class UnknownCollectiveError(OptionError):
    """A collective that the order does not have, or that was submitted twice in an iteration."""


class MotifQueue:
    """Takes collectives as ranks submit them, in any order, and gives motifs in the planned one.

    Args:
        order: of an iteration.
    """

    def __init__(self, order: LaunchOrder) -> None:
        self._order = order
        self._members: dict[int, int] = defaultdict(int)  # number -> motifs that it has
        for number in order.numbers.values():
            self._members[number] += 1
        self._waiting: dict[int, list[Launch]] = defaultdict(list)  # key -> its motifs that have come
        self._next = 0
        # of the next submission of each collective
        self._iteration = {op: -1 if op in order.ahead else 0 for op in order.ops}

    @property
    def pending(self) -> int:
        """Return how many motifs wait for others before them."""
        return sum(len(some) for some in self._waiting.values())

    @property
    def next(self) -> tuple[int, int]:
        """Return the iteration and the number that is launched next."""
        return divmod(self._next, max(self._order.length, 1))

    def submit(self, op: str) -> list[Launch]:
        """Take a collective and return what may be enqueued now, in the order of the launch.

        Raises ``UnknownCollectiveError`` for one that the order does not have; nothing is changed then.
        """
        motifs = self._order.ops.get(op)
        if motifs is None:
            raise UnknownCollectiveError(f"the plan has no collective {op!r}")
        iteration = self._iteration[op]
        self._iteration[op] += 1
        if iteration < 0:
            own = [(self._order.numbers[op, motif], motif) for motif in range(motifs)]
            return [Launch(self._order.channels[op, motif], op, motif, iteration) for _, motif in sorted(own)]
        for motif in range(motifs):
            key = iteration * self._order.length + self._order.numbers[op, motif]
            self._waiting[key].append(Launch(self._order.channels[op, motif], op, motif, iteration))
        return self._release()

    def flush(self) -> list[Launch]:
        """Return all that waits, in the order of the launch, and forget it: before another plan takes over."""
        left = [one for key in sorted(self._waiting) for one in sorted(self._waiting[key])]
        self._waiting.clear()
        return left

    def _release(self) -> list[Launch]:
        out: list[Launch] = []
        while self._order.length:
            came = self._waiting.get(self._next, [])
            if len(came) < self._members[self._next % self._order.length]:
                return out
            out += sorted(self._waiting.pop(self._next))
            self._next += 1
        return out
