"""What a running training was seen to do: its iterations as ranks measured them, and the DAG that they make."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import zip_longest
from statistics import median
from typing import Any, cast, get_args

from ebbflow.planners.communication.dag import CommOp, ComputeOp, Dependency, Kind, TrainingDag
from ebbflow.planners.errors import OptionError

FORMAT = 1
MIN_ITERATIONS = 3  # of one shape, for a median


@dataclass(frozen=True, slots=True)
class Block:
    """Compute between two events of an iteration.

    Args:
        name: unique in the iteration.
        seconds: duration.
        shared: whether it ends on all ranks at once, such as an agreement: the rank that came last waited for no one,
            so that the shortest duration over ranks counts, not the longest.
    """

    name: str
    seconds: float
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Submission:
    """A collective that was submitted when the block ``after`` had ended; if that is empty, as the iteration began.

    ``bytes`` are one rank's payload.
    """

    op: str
    kind: Kind
    bytes: float
    after: str
    prefetchable: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """The block ``before`` began when ``op``, submitted ``lag`` iterations earlier, was done."""

    op: str
    before: str
    lag: int = 0


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration as a rank saw it, or the median of several.

    Args:
        blocks: compute in program order.
        submissions: collectives in the order of their submission.
        waits: what blocks waited for.
        seconds: from its beginning to the next one's.
    """

    blocks: tuple[Block, ...]
    submissions: tuple[Submission, ...]
    waits: tuple[Wait, ...]
    seconds: float

    @property
    def shape(self) -> tuple[object, ...]:
        """Return all but durations: iterations of one shape may be averaged."""
        return tuple((one.name, one.shared) for one in self.blocks), self.submissions, self.waits


@dataclass(frozen=True, slots=True)
class RankProfile:
    """The median iteration of a rank.

    Args:
        rank: its number, from 0.
        ranks: processes of the training.
        iterations: that the median is of.
        iteration: the median.
    """

    rank: int
    ranks: int
    iterations: int
    iteration: Iteration

    def to_json(self) -> str:
        """Return the profile as text."""
        one = self.iteration
        return json.dumps(
            {
                "format": FORMAT, "rank": self.rank, "ranks": self.ranks, "iterations": self.iterations,
                "seconds": one.seconds,
                "blocks": [[b.name, b.seconds, b.shared] for b in one.blocks],
                "submissions": [[s.op, s.kind, s.bytes, s.after, s.prefetchable] for s in one.submissions],
                "waits": [[w.op, w.before, w.lag] for w in one.waits],
            },
            separators=(",", ":"),
        )  # fmt: skip

    @classmethod
    def from_json(cls, text: str) -> "RankProfile":
        """Return the profile that ``to_json`` wrote. Raises ``OptionError`` for any other text."""
        try:
            data: dict[str, Any] = json.loads(text)
            _check_format(data, "profile of a rank")
            iteration = Iteration(
                tuple(Block(str(n), float(s), bool(w)) for n, s, w in data["blocks"]),
                tuple(
                    Submission(str(o), _kind(k), float(b), str(a), bool(p))
                    for o, k, b, a, p in data["submissions"]
                ),
                tuple(Wait(str(o), str(b), int(lag)) for o, b, lag in data["waits"]),
                float(data["seconds"]),
            )
            return cls(int(data["rank"]), int(data["ranks"]), int(data["iterations"]), iteration)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise OptionError(f"not a profile of a rank: {error!r:.200}") from error


def median_profile(rank: int, ranks: int, iterations: Sequence[Iteration]) -> RankProfile:
    """Return the profile of the iterations that have the shape of most.

    Raises ``OptionError`` where fewer than three have it: the training does not submit the same collectives in each
    iteration, and cannot be planned.
    """
    counts = Counter(one.shape for one in iterations)
    if not counts:
        raise OptionError(f"a profile must have {MIN_ITERATIONS} iterations; got none")
    shape, count = counts.most_common(1)[0]
    if count < MIN_ITERATIONS or 2 * count <= len(iterations):
        raise OptionError(
            f"most iterations of a profile, and at least {MIN_ITERATIONS}, must submit the same collectives; got "
            f"{count} alike of {len(iterations)}"
        )
    alike = [one for one in iterations if one.shape == shape]
    first = alike[0]
    blocks = tuple(
        Block(block.name, median(one.blocks[k].seconds for one in alike), block.shared)
        for k, block in enumerate(first.blocks)
    )
    seconds = median(one.seconds for one in alike)
    return RankProfile(rank, ranks, count, Iteration(blocks, first.submissions, first.waits, seconds))


@dataclass(frozen=True)
class RecordedTraining:
    """A training as it ran without a plan. Raises ``OptionError`` if it is none.

    Args:
        dag: one iteration.
        ranks: processes.
        seconds: of an iteration as measured.
        iterations: that the medians are of.
    """

    dag: TrainingDag
    ranks: int
    seconds: float
    iterations: int

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.iterations < 1 or not 0 <= self.seconds < float("inf"):
            raise OptionError(
                "a recorded training must have ranks and iterations >= 1 and finite seconds; got "
                f"{self.ranks}, {self.iterations}, {self.seconds}"
            )
        for op in self.dag.comm:
            if op.ranks != self.ranks:
                raise OptionError(
                    f"{op.name} must be a collective of all {self.ranks} ranks; got {op.ranks} ranks"
                )

    @cached_property
    def fingerprint(self) -> str:
        """Return what tells trainings apart: a digest of ranks, names, kinds and sizes of the collectives."""
        data = [[op.name, op.kind, float(op.bytes)] for op in self.dag.comm]
        return sha256(json.dumps([self.ranks, data]).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Return the training as text."""
        dag = self.dag
        return json.dumps(
            {
                "format": FORMAT, "fingerprint": self.fingerprint, "ranks": self.ranks,
                "iterations": self.iterations, "seconds": self.seconds,
                "compute": [[one.name, one.seconds] for one in dag.compute],
                "comm": [[one.name, one.kind, one.bytes, one.prefetchable] for one in dag.comm],
                "dependencies": [[one.before, one.after, one.lag] for one in dag.dependencies],
            },
            indent=1,
        )  # fmt: skip

    @classmethod
    def from_json(cls, text: str) -> "RecordedTraining":
        """Return the training that ``to_json`` wrote. Raises ``OptionError`` for any other text."""
        try:
            data: dict[str, Any] = json.loads(text)
            _check_format(data, "recorded training")
            ranks = int(data["ranks"])
            dag = TrainingDag(
                tuple(ComputeOp(str(name), float(seconds)) for name, seconds in data["compute"]),
                tuple(CommOp(str(n), _kind(k), float(b), ranks, bool(p)) for n, k, b, p in data["comm"]),
                tuple(Dependency(str(b), str(a), int(lag)) for b, a, lag in data["dependencies"]),
            )
            found = cls(dag, ranks, float(data["seconds"]), int(data["iterations"]))
            digest = str(data["fingerprint"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise OptionError(f"not a recorded training: {error!r:.200}") from error
        if digest != found.fingerprint:
            raise OptionError(
                f"the recorded training's fingerprint must be that of its collectives, {found.fingerprint}; got "
                f"{digest!r:.40}"
            )
        return found


def merge_profiles(profiles: Iterable[RankProfile]) -> RecordedTraining:
    """Return the training that all ranks have seen: each block as long as on the slowest rank.

    Raises ``OptionError`` where a rank is missing, or ranks submit different collectives.
    """
    ordered = sorted(profiles, key=lambda one: one.rank)
    ranks = ordered[0].ranks if ordered else 0
    if [(one.rank, one.ranks) for one in ordered] != [(rank, ranks) for rank in range(ranks)] or not ranks:
        raise OptionError(
            f"profiles must be of all ranks of one training, each once; got ranks {[p.rank for p in ordered]}"
        )
    first = ordered[0].iteration
    for one in ordered[1:]:
        if one.iteration.shape != first.shape:
            raise OptionError(
                f"rank {one.rank} submits other collectives than rank 0, or at other places: they cannot be planned; "
                f"{_difference(one.iteration, first)}"
            )
    compute = tuple(
        ComputeOp(
            block.name,
            (min if block.shared else max)(one.iteration.blocks[k].seconds for one in ordered),
        )
        for k, block in enumerate(first.blocks)
    )
    comm = tuple(CommOp(s.op, s.kind, s.bytes, ranks, s.prefetchable) for s in first.submissions)
    last = first.blocks[-1].name if first.blocks else ""
    after = tuple(Dependency(s.after or last, s.op, 0 if s.after else 1) for s in first.submissions)
    before = tuple(Dependency(w.op, w.before, w.lag) for w in first.waits)
    seconds = max(one.iteration.seconds for one in ordered)
    count = min(one.iterations for one in ordered)
    return RecordedTraining(TrainingDag(compute, comm, after + before), ranks, seconds, count)


def _difference(one: Iteration, first: Iteration) -> str:
    """Return the first thing in which two iterations of different shape differ."""
    names = [b.name for b in one.blocks], [b.name for b in first.blocks]
    for ours, theirs in ((one.submissions, first.submissions), (one.waits, first.waits), names):
        for mine, other in zip_longest(ours, theirs, fillvalue="nothing"):
            if mine != other:
                return f"it has {_said(mine)} where rank 0 has {_said(other)}"
    return "their blocks end at different agreements"


def _said(one: object) -> str:
    match one:
        case Submission():
            return f"{one.op} ({one.kind} of {one.bytes:,.15g} bytes)"
        case Wait():
            return f"a wait for {one.op} before {one.before}"
    return str(one)


def _check_format(data: Any, what: str) -> None:
    if data["format"] != FORMAT:
        raise OptionError(f"the {what} has format {data['format']!r}; this version reads {FORMAT}")


def _kind(text: str) -> Kind:
    if text not in get_args(Kind):
        raise OptionError(f"a collective must be one of {', '.join(get_args(Kind))}; got {text!r:.40}")
    return cast(Kind, text)
