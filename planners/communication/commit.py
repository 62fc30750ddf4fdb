"""How all ranks change to a plan at the same iteration: two-phase commit as state machines without input or output.

The coordinator proposes (PREPARE), ranks vote, all votes make it COMMIT with the iteration from which the plan holds,
anything else ABORT. A rank that misses a message does not run alone: at every boundary ranks agree on the smallest
version that any of them may run (``agreed``), and the plan before is kept until all have changed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from ebbflow.planners.errors import OptionError

AHEAD = 8  # iterations from the latest rank's to the one in which a plan begins to hold
PLAIN = 0  # version that needs no plan: collectives as they are submitted

Phase = Literal["preparing", "committed", "aborted"]


@dataclass(frozen=True, slots=True)
class Prepare:
    """Asks a rank whether it could run a plan."""

    version: int
    digest: str  # sha-256 of the plan's text


@dataclass(frozen=True, slots=True)
class Vote:
    """A rank's answer; ``iteration`` is the one it is in, and ``reason`` says why not."""

    version: int
    rank: int
    yes: bool
    iteration: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of a version; ``activate_at`` is the first iteration that runs it."""

    version: int
    commit: bool
    activate_at: int = 0
    reason: str = ""


@dataclass
class Coordinator:
    """Proposes one version and decides once; a decision does not change.

    Args:
        version: above every earlier one.
        digest: of the plan.
        ranks: that must agree.
        deadline: s of the clock at which it gives up.
    """

    version: int
    digest: str
    ranks: frozenset[int]
    deadline: float
    decision: Decision | None = None
    _votes: dict[int, Vote] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.version <= PLAIN:
            raise OptionError(f"the version of a plan must be > {PLAIN}; got {self.version}")
        if not self.ranks:
            raise OptionError("a plan must have ranks that agree; got none")

    @property
    def phase(self) -> Phase:
        """Return where it stands."""
        if self.decision is None:
            return "preparing"
        return "committed" if self.decision.commit else "aborted"

    def prepare(self) -> Prepare:
        """Return the question to every rank; it may be asked again."""
        return Prepare(self.version, self.digest)

    def vote(self, vote: Vote) -> Decision | None:
        """Take a vote, return the decision if there is one. Votes of others, and repeated ones, change nothing."""
        if self.decision is None and vote.version == self.version and vote.rank in self.ranks:
            self._votes.setdefault(vote.rank, vote)
            if not vote.yes:
                self.decision = Decision(
                    self.version, commit=False, reason=f"rank {vote.rank}: {vote.reason or 'no'}"
                )
            elif self._votes.keys() == self.ranks:
                latest = max(one.iteration for one in self._votes.values())
                self.decision = Decision(self.version, commit=True, activate_at=latest + AHEAD)
        return self.decision

    def tick(self, now: float) -> Decision | None:
        """Abort at the deadline, return the decision if there is one."""
        if self.decision is None and now >= self.deadline:
            missing = sorted(self.ranks - self._votes.keys())
            self.decision = Decision(self.version, commit=False, reason=f"no vote of ranks {missing}")
        return self.decision


@dataclass
class Participant:
    """What a rank knows of plans: which it has prepared, which are committed, from when.

    Args:
        rank: its number.
    """

    rank: int
    prepared: dict[int, str] = field(default_factory=dict)  # version -> digest
    committed: dict[int, int] = field(default_factory=dict)  # version -> first iteration

    def prepare(self, asked: Prepare, iteration: int, problem: str = "") -> Vote:
        """Answer whether a plan can be run; ``problem`` is what the rank found wrong with it."""
        if not problem and self.prepared.get(asked.version, asked.digest) != asked.digest:
            problem = "another plan has this version"
        if not problem and asked.version < max(self.committed, default=PLAIN):
            problem = "a later plan is committed"
        if not problem:
            self.prepared[asked.version] = asked.digest
        return Vote(asked.version, self.rank, not problem, iteration, problem)

    def decide(self, decision: Decision) -> None:
        """Take a decision; it may come again, and one about a plan that was never prepared changes nothing."""
        if decision.commit and decision.version in self.prepared:
            self.committed.setdefault(decision.version, decision.activate_at)
        elif not decision.commit and decision.version not in self.committed:
            self.prepared.pop(decision.version, None)

    def newest(self, iteration: int) -> int:
        """Return the newest version that this rank may run in an iteration."""
        return max((v for v, first in self.committed.items() if first <= iteration), default=PLAIN)

    def forget_all(self) -> None:
        """Fall back to plain collectives: its vote at the next boundary is ``PLAIN``."""
        self.committed.clear()
        self.prepared.clear()

    def settle(self, version: int) -> None:
        """Drop plans older than one that all ranks run."""
        self.prepared = {v: digest for v, digest in self.prepared.items() if v >= version}
        self.committed = {v: first for v, first in self.committed.items() if v >= version}


def agreed(newest: Iterable[int]) -> int:
    """Return the version that all ranks run from a boundary on: the smallest of those that each may run."""
    return min(newest, default=PLAIN)
