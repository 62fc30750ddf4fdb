"""How long collectives take: from a measured table, or from latency and bandwidth where there is none."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, inf, isfinite, log2
from typing import Protocol

from ebbflow.planners.communication.dag import CommOp, Kind
from ebbflow.planners.communication.schedule import ExecutionOption, PlannedMotif
from ebbflow.planners.errors import OptionError

ALGORITHMS = ("whole", "ring", "tree", "hierarchical", "spline")


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to carry out a collective.

    Args:
        algorithm: ``whole`` (as the library does it), ``ring``, ``tree``, ``hierarchical``, ``spline``.
        pieces: of a spline its motifs, of others segments; they run one after the other on a channel.
        channel: what carries it.
    """

    algorithm: str = "whole"
    pieces: int = 1
    channel: int = 0

    @property
    def name(self) -> str:
        """Return a name for plans and tables, such as ``ring/4@0``."""
        return f"{self.algorithm}/{self.pieces}@{self.channel}"


class CostModel(Protocol):
    """Answers how long a collective takes on an idle network."""

    def seconds(self, op: CommOp, choice: Choice) -> float:
        """Return the seconds of ``op`` carried out so, all pieces together. Raises ``OptionError``."""


@dataclass(frozen=True, slots=True)
class LinkModel:
    """Latency and bandwidth (alpha-beta), with incast at the receivers of wide all-to-alls.

    Formulas and defaults are the recommended completion of the thesis' measured table: a ring takes
    ``2 (N - 1) alpha + 2 S b (N - 1) / N``, a binary tree ``2 L (alpha + S b)`` with ``L = ceil(log2 N)``, an
    all-to-all in ``w`` motifs ``w launch + N message + N D b phi`` with
    ``phi = 1 + incast max(0, (k min(D, window) - buffer) / buffer)``, ``k = N / w`` senders at once to each receiver
    and ``D`` bytes for each pair.

    Args:
        alpha: s of latency of a transfer.
        per_byte: s for each byte on the slowest link of the path.
        launch: s that each motif costs to launch.
        message: s that each message of an all-to-all costs.
        incast: how much overflowing buffers slow a receiver down.
        buffer: bytes of the buffer at a receiver's port.
        window: bytes of a flow that are under way at once.
    """

    alpha: float = 5e-6
    per_byte: float = 1 / 12.5e9
    launch: float = 30e-6
    message: float = 0.5e-6
    incast: float = 1.0
    buffer: float = 2 * 2**20
    window: float = 64 * 2**10

    def __post_init__(self) -> None:
        for name in ("alpha", "per_byte", "launch", "message", "incast", "window"):
            value = getattr(self, name)
            if not (isfinite(value) and value >= 0):
                raise OptionError(f"{name} of links must be >= 0 and finite; got {value}")
        if not self.buffer > 0:
            raise OptionError(f"buffer of links must be > 0 bytes; got {self.buffer}")

    def ring(self, ranks: int, size: float) -> float:
        """Return the seconds of a ring all-reduce of ``size`` bytes."""
        return 2 * (ranks - 1) * self.alpha + 2 * size * self.per_byte * (ranks - 1) / ranks

    def tree(self, ranks: int, size: float) -> float:
        """Return the seconds of a binary tree's all-reduce of ``size`` bytes."""
        return 2 * _levels(ranks) * (self.alpha + size * self.per_byte)

    def crossover(self, ranks: int) -> float:
        """Return the bytes from which a ring is faster than a tree; infinite where it never is."""
        levels, share = _levels(ranks), (ranks - 1) / ranks
        if ranks < 2 or self.per_byte == 0 or levels <= share:
            return inf
        return self.alpha * ((ranks - 1) - levels) / (self.per_byte * (levels - share))

    def all_to_all(self, ranks: int, each: float, motifs: int) -> float:
        """Return the seconds of an all-to-all of ``each`` bytes for a pair, in this many motifs."""
        senders = ranks / motifs
        waiting = senders * min(each, self.window) - self.buffer
        slower = 1 + self.incast * max(0.0, waiting / self.buffer)
        return motifs * self.launch + ranks * self.message + ranks * each * self.per_byte * slower

    def seconds(self, op: CommOp, choice: Choice) -> float:
        """Return the seconds of ``op`` carried out so. Raises ``OptionError`` for what cannot be done so."""
        if op.ranks == 1 or op.bytes == 0:
            return choice.pieces * self.launch
        if op.kind == "all-to-all":
            if choice.algorithm not in ("whole", "spline"):
                raise OptionError(f"an all-to-all cannot be a {choice.algorithm}")
            return self.all_to_all(op.ranks, op.bytes / op.ranks, choice.pieces)
        part = op.bytes / choice.pieces
        match op.kind, choice.algorithm:
            case "all-reduce", "ring" | "whole":
                one = self.ring(op.ranks, part)
            case "all-reduce", "tree":
                one = self.tree(op.ranks, part)
            case (("reduce-scatter" | "all-gather"), "whole"):
                one = self.ring(op.ranks, part) / 2
            case "broadcast", "whole":
                one = self.tree(op.ranks, part) / 2
            case _:
                raise OptionError(f"no formula for {op.kind} as {choice.algorithm}; measure it")
        return choice.pieces * (self.launch + one)


@dataclass(frozen=True)
class TableModel:
    """Measured seconds, linear between two sizes; beyond the largest along the line of the last two.

    Args:
        rows: (kind, ranks, name of the choice) -> pairs of bytes and seconds, bytes rising.
    """

    rows: Mapping[tuple[Kind, int, str], Sequence[tuple[float, float]]]

    def __post_init__(self) -> None:
        for (kind, ranks, name), points in self.rows.items():
            what = f"the measurements of {kind} among {ranks} as {name}"
            if not points:
                raise OptionError(f"{what} must not be empty")
            if any(not (isfinite(x) and isfinite(y) and x >= 0 and y >= 0) for x, y in points):
                raise OptionError(f"{what} must be bytes and seconds >= 0; got {points!r:.120}")
            if any(a[0] >= b[0] for a, b in pairwise(points)):
                raise OptionError(f"{what} must have rising sizes; got {points!r:.120}")

    def choices(self, op: CommOp) -> list[str]:
        """Return the names of all choices measured for collectives of this kind and size of group."""
        return [name for kind, ranks, name in self.rows if (kind, ranks) == (op.kind, op.ranks)]

    def seconds(self, op: CommOp, choice: Choice) -> float:
        """Return the interpolated seconds. Raises ``OptionError`` for a choice that was not measured."""
        points = self.rows.get((op.kind, op.ranks, choice.name))
        if points is None:
            raise OptionError(f"{op.kind} among {op.ranks} ranks was not measured as {choice.name}")
        sizes = [x for x, _ in points]
        if len(points) == 1 or op.bytes <= sizes[0]:
            return points[0][1]
        k = min(max(bisect_left(sizes, op.bytes), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[k - 1], points[k]
        return max(y0 + (y1 - y0) * (op.bytes - x0) / (x1 - x0), 0.0)


def option_of(op: CommOp, choice: Choice, model: CostModel) -> ExecutionOption:
    """Return the option that ``choice`` is for ``op``: equal pieces on its channel. Raises ``OptionError``."""
    if choice.pieces < 1:
        raise OptionError(f"pieces of {op.name} must be >= 1; got {choice.pieces}")
    each = model.seconds(op, choice) / choice.pieces
    motifs = tuple(PlannedMotif(each, (choice.channel,)) for _ in range(choice.pieces))
    return ExecutionOption(choice.name, motifs, choice.algorithm)


def options_of(
    op: CommOp, choices: Sequence[Choice], models: Mapping[int, CostModel]
) -> tuple[ExecutionOption, ...]:
    """Return the options of ``op``: those choices that the model of their channel knows. Raises ``OptionError``.

    Args:
        op: a collective.
        choices: ways to carry it out.
        models: channel -> its costs.
    """
    found = []
    for choice in choices:
        try:
            found.append(option_of(op, choice, models[choice.channel]))
        except (OptionError, KeyError):
            continue
    if not found:
        raise OptionError(f"no choice can carry out {op.name} ({op.kind} among {op.ranks} ranks)")
    return tuple(found)


def _levels(ranks: int) -> int:
    return ceil(log2(ranks)) if ranks > 1 else 0
