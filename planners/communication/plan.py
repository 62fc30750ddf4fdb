"""A plan that ranks carry out: for each collective its choice, and the order of all pieces; as text with a digest."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import groupby
from math import isfinite
from typing import Any, cast, get_args

from ebbflow.planners.communication.algebra import (
    Motif,
    Motifs,
    all_reduce,
    all_to_all,
    hierarchical_all_reduce,
    ring_all_reduce,
    segment,
    spline_all_to_all,
    tree_all_reduce,
)
from ebbflow.planners.communication.costs import Choice
from ebbflow.planners.communication.dag import Kind, TrainingDag
from ebbflow.planners.communication.order import LaunchOrder
from ebbflow.planners.communication.schedule import Plan, Timeline
from ebbflow.planners.errors import OptionError

FORMAT = 1
MAX_PARTS = 1 << 20  # ranks times pieces of a collective: what a plan's file may make this process hold
_STEADY = 3  # iteration whose order is the plan's, counted from 0


@dataclass(frozen=True, slots=True)
class Piece:
    """What is launched at once: motifs that run one after the other on a channel.

    Args:
        motifs: in order; ranges are in ``units``.
        units: into how many equal parts ranges divide the payload.
    """

    motifs: Motifs
    units: int


def pieces_of(kind: Kind, ranks: int, choice: Choice, *, per_node: int = 1) -> tuple[Piece, ...]:
    """Return the pieces of a collective that is carried out so. Raises ``OptionError`` for what cannot be done so.

    Args:
        kind: ``all-reduce`` or ``all-to-all``.
        ranks: processes.
        choice: algorithm, number of pieces and channel.
        per_node: consecutive ranks on one node, for ``hierarchical``.
    """
    count = choice.pieces
    if count < 1:
        raise OptionError(f"pieces of a choice must be >= 1; got {count}")
    if ranks * count > MAX_PARTS:
        raise OptionError(f"ranks times pieces must be {MAX_PARTS} at most; got {ranks} and {count}")
    match kind, choice.algorithm:
        case "all-to-all", "whole":
            return tuple(Piece((one,), count) for one in segment(all_to_all(ranks, count), 1))
        case "all-to-all", "spline":
            width = -(-ranks // count)
            cut = spline_all_to_all(all_to_all(ranks, 1), width)
            return (
                tuple(Piece((one,), 1) for one in cut) if len(cut) == count else _refuse(kind, ranks, choice)
            )
        case "all-reduce", "whole":
            return tuple(Piece((one,), count) for one in segment(all_reduce(ranks, count), 1))
        case "all-reduce", "ring":
            units = count * ranks  # rings cut a segment into as many parts as they have ranks
            parts = segment(all_reduce(ranks, units), ranks)
            return tuple(Piece(ring_all_reduce(one), units) for one in parts)
        case "all-reduce", "tree":
            return tuple(
                Piece(tree_all_reduce(one, 2), count) for one in segment(all_reduce(ranks, count), 1)
            )
        case "all-reduce", "hierarchical":
            units = count * ranks
            parts = segment(all_reduce(ranks, units), ranks)
            return tuple(Piece(hierarchical_all_reduce(one, per_node), units) for one in parts)
    return _refuse(kind, ranks, choice)


def _refuse(kind: Kind, ranks: int, choice: Choice) -> tuple[Piece, ...]:
    raise OptionError(f"an {kind} among {ranks} ranks cannot be carried out as {choice.name}")


@dataclass(frozen=True, slots=True)
class PlannedCollective:
    """A collective of the plan.

    Args:
        kind: what it is.
        bytes: payload of a rank, by which a plan of another model is told from this one's.
        choice: how it is carried out.
    """

    kind: Kind
    bytes: float
    choice: Choice


@dataclass(frozen=True)
class CommunicationPlan:
    """What all ranks do in the same way. Raises ``OptionError`` if it does not fit together.

    Args:
        version: above those of all earlier plans of the run.
        ranks: processes that it is for.
        collectives: name -> what it is and how it is carried out, in order of submission.
        order: in which pieces are launched.
        seconds: predicted, of an iteration.
        plain_seconds: the same without a plan.
        per_node: consecutive ranks on one node.
    """

    version: int
    ranks: int
    collectives: Mapping[str, PlannedCollective]
    order: LaunchOrder
    seconds: float
    plain_seconds: float
    per_node: int = 1

    def __post_init__(self) -> None:
        if self.version < 1:
            raise OptionError(f"the version of a plan must be >= 1; got {self.version}")
        if not (isfinite(self.seconds) and isfinite(self.plain_seconds)):
            raise OptionError("predictions of a plan must be finite seconds")
        wanted = {
            (name, k): one.choice.channel
            for name, one in self.collectives.items()
            for k in range(len(self.pieces[name]))
        }
        if dict(self.order.channels) != wanted:
            raise OptionError("the order of a plan must launch exactly the pieces of its collectives")

    @cached_property
    def pieces(self) -> dict[str, tuple[Piece, ...]]:
        """Return the pieces of each collective."""
        return {
            name: pieces_of(one.kind, self.ranks, one.choice, per_node=self.per_node)
            for name, one in self.collectives.items()
        }

    @property
    def channels(self) -> int:
        """Return how many channels it needs."""
        return 1 + max((one.choice.channel for one in self.collectives.values()), default=0)

    def problem(self, ranks: int, collectives: Mapping[str, tuple[Kind, float]]) -> str:
        """Return why a training cannot run it; empty if it can.

        Args:
            ranks: processes of the training.
            collectives: what it submits: name -> kind and bytes of a rank.
        """
        if ranks != self.ranks:
            return f"the plan is for {self.ranks} ranks, not {ranks}"
        own = {name: (one.kind, one.bytes) for name, one in self.collectives.items()}
        for name in sorted(own.keys() | collectives.keys()):
            if own.get(name) != collectives.get(name):
                return f"the plan has {_said(own.get(name))} as {name}, the training {_said(collectives.get(name))}"
        return ""

    def to_json(self) -> str:
        """Return the plan as text; equal plans have equal texts."""
        numbers = sorted(self.order.numbers.items(), key=lambda one: (one[1], one[0]))
        return json.dumps(
            {
                "format": FORMAT,
                "version": self.version,
                "ranks": self.ranks,
                "per_node": self.per_node,
                "seconds": self.seconds,
                "plain_seconds": self.plain_seconds,
                "collectives": [
                    [name, one.kind, one.bytes, one.choice.algorithm, one.choice.pieces, one.choice.channel]
                    for name, one in self.collectives.items()
                ],
                "order": [
                    [list(motif) for motif, _ in some] for _, some in groupby(numbers, key=lambda one: one[1])
                ],
                "ahead": sorted(self.order.ahead),
            },
            separators=(",", ":"),
        )

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the text."""
        return sha256(self.to_json().encode()).hexdigest()

    @classmethod
    def from_json(cls, text: str) -> "CommunicationPlan":
        """Return the plan that ``to_json`` has written. Raises ``OptionError`` for any other text."""
        try:
            said: dict[str, Any] = json.loads(text)
            if said["format"] != FORMAT:
                raise OptionError(f"the plan has format {said['format']!r}; this version reads {FORMAT}")
            collectives = {
                str(name): PlannedCollective(
                    _kind(kind), float(size), Choice(str(algorithm), int(pieces), int(channel))
                )
                for name, kind, size, algorithm, pieces, channel in said["collectives"]
            }
            numbers = {
                (str(op), int(motif)): number
                for number, some in enumerate(said["order"])
                for op, motif in some
            }
            channels = {(op, motif): collectives[op].choice.channel for op, motif in numbers}
            order = LaunchOrder(numbers, channels, frozenset(map(str, said["ahead"])))
            return cls(
                int(said["version"]), int(said["ranks"]), collectives, order, float(said["seconds"]),
                float(said["plain_seconds"]), int(said["per_node"]),
            )  # fmt: skip
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise OptionError(f"not a communication plan: {error!r:.200}") from error


def plan_of(
    dag: TrainingDag,
    found: Plan,
    choices: Mapping[str, Choice],
    timeline: Timeline,
    *,
    version: int,
    plain_seconds: float,
    per_node: int = 1,
) -> CommunicationPlan:
    """Return what ranks carry out of a plan that was searched.

    Args:
        dag: one iteration, as it was searched (with what is prefetched).
        found: the option of each collective.
        choices: the choice that each of these options is.
        timeline: of the plan; the order in which the motifs of a steady period begin is the order of launch.
        version: of the plan.
        plain_seconds: predicted for an iteration without a plan.
        per_node: consecutive ranks on one node.
    """
    ranks = max((op.ranks for op in dag.comm), default=1)
    collectives = {op.name: PlannedCollective(op.kind, op.bytes, choices[op.name]) for op in dag.comm}
    last = dag.compute[-1].name
    ends = [
        end
        for node, end in timeline.ends.items()
        if node.op == last and node.iteration in (_STEADY - 1, _STEADY)
    ]
    begin, end = min(ends), max(ends)
    ahead = {edge.after for edge in dag.edges if edge.lag >= 2 and edge.after in collectives}
    numbers: dict[tuple[str, int], int] = {}
    number, at = -1, None
    used: set[int] = set()
    counted = {name: len(found[name].motifs) for name in collectives}
    for node, start in sorted(timeline.starts.items(), key=lambda one: one[1]):
        key = (node.op, node.motif)
        if node.motif < 0 or not begin <= start < end or key in numbers:
            continue
        own = set(found[node.op].motifs[node.motif].channels)
        if start != at or used & own:
            number, at, used = number + 1, start, set()
        used |= own
        numbers[key] = number
    for name, motifs in counted.items():  # a period that drifts may miss some
        for k in range(motifs):
            if (name, k) not in numbers:
                number += 1
                numbers[name, k] = number
    channels = {(name, k): choices[name].channel for name, k in numbers}
    return CommunicationPlan(
        version,
        ranks,
        collectives,
        LaunchOrder(numbers, channels, frozenset(ahead)),
        timeline.period,
        plain_seconds,
        per_node,
    )


def motifs_of(pieces: tuple[Piece, ...]) -> Motifs:
    """Return the motifs of all pieces as one list; their ranges are in units of the pieces."""
    found: list[Motif] = []
    for piece in pieces:
        base = len(found)
        found += [replace(one, after=tuple(base + i for i in one.after)) for one in piece.motifs]
    return tuple(found)


def _kind(text: str) -> Kind:
    if text not in get_args(Kind):
        raise OptionError(f"a collective must be one of {', '.join(get_args(Kind))}; got {text!r:.40}")
    return cast(Kind, text)


def _said(one: tuple[Kind, float] | None) -> str:
    return f"{one[0]} of {one[1]:.0f} bytes" if one else "nothing"
