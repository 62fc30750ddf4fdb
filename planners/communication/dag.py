"""One iteration of a training as a graph: blocks of compute, collectives, and what waits for what."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from math import isfinite
from typing import Literal

from ebbflow.planners.errors import OptionError

Kind = Literal["all-reduce", "all-to-all", "broadcast", "all-gather", "reduce-scatter"]


@dataclass(frozen=True, slots=True)
class ComputeOp:
    """A block of kernels on the compute stream.

    Args:
        name: unique in its DAG.
        seconds: duration.
    """

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class CommOp:
    """A collective as the application submits it.

    Args:
        name: unique in its DAG.
        kind: the collective.
        bytes: payload of one rank: of an all-reduce its tensor, of an all-to-all what it sends to all ranks together.
        ranks: number of processes that take part.
        prefetchable: whether it may be submitted an iteration earlier (its input does not depend on the update).
    """

    name: str
    kind: Kind
    bytes: float
    ranks: int
    prefetchable: bool = False


@dataclass(frozen=True, slots=True)
class Dependency:
    """``after`` of an iteration begins when ``before`` of the iteration ``lag`` earlier has ended."""

    before: str
    after: str
    lag: int = 0


@dataclass(frozen=True)
class TrainingDag:
    """One iteration; iterations follow each other by dependencies with a lag. Raises ``OptionError`` if it is none.

    Args:
        compute: blocks in program order; each waits for the one before it, the first for the last of the iteration
            before.
        comm: collectives in the order of their submission.
        dependencies: all others.
    """

    compute: tuple[ComputeOp, ...]
    comm: tuple[CommOp, ...]
    dependencies: tuple[Dependency, ...]

    def __post_init__(self) -> None:
        names = [*(block.name for block in self.compute), *(op.name for op in self.comm)]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise OptionError(f"names of a training DAG must be unique; got {twice!r} twice")
        if not self.compute:
            raise OptionError("a training DAG must have a block of compute; got none")
        for block in self.compute:
            if not (isfinite(block.seconds) and block.seconds >= 0):
                raise OptionError(f"seconds of {block.name} must be >= 0 and finite; got {block.seconds}")
        for op in self.comm:
            if not (isfinite(op.bytes) and op.bytes >= 0):
                raise OptionError(f"bytes of {op.name} must be >= 0 and finite; got {op.bytes}")
            if op.ranks < 1:
                raise OptionError(f"ranks of {op.name} must be >= 1; got {op.ranks}")
        known = set(names)
        for one in self.dependencies:
            if missing := {one.before, one.after} - known:
                raise OptionError(f"a dependency names {missing.pop()!r}, which the DAG does not have")
            if one.lag < 0:
                raise OptionError(f"lag of {one.before} -> {one.after} must be >= 0; got {one.lag}")
        sorter = TopologicalSorter({name: set() for name in names})
        for before, after in self._within():
            sorter.add(after, before)
        try:
            sorter.prepare()
        except CycleError as error:
            raise OptionError(
                f"a training DAG must have no circle; got {' -> '.join(error.args[1])}"
            ) from error

    def _within(self) -> Iterable[tuple[str, str]]:
        """Yield the pairs of names that depend on each other within an iteration."""
        for before, after in pairwise(self.compute):
            yield before.name, after.name
        for one in self.dependencies:
            if one.lag == 0:
                yield one.before, one.after

    @cached_property
    def edges(self) -> tuple[Dependency, ...]:
        """Return all dependencies, those between blocks of compute included."""
        chain = [Dependency(before.name, after.name) for before, after in pairwise(self.compute)]
        return (*chain, Dependency(self.compute[-1].name, self.compute[0].name, lag=1), *self.dependencies)

    @property
    def compute_seconds(self) -> float:
        """Return the seconds of all blocks of compute of an iteration."""
        return sum(block.seconds for block in self.compute)

    def prefetched(self) -> "TrainingDag":
        """Return the DAG in which prefetchable collectives are submitted one iteration earlier (section 4.6.5.1)."""
        early = {op.name for op in self.comm if op.prefetchable}
        moved = tuple(
            replace(one, lag=one.lag + 1) if one.after in early else one for one in self.dependencies
        )
        return replace(self, dependencies=moved)
