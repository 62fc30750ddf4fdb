"""How all ranks change to a plan at the same iteration: two-phase commit as state machines without input or output.

The coordinator proposes (PREPARE), ranks vote, all votes make it COMMIT with the iteration from which the plan holds,
anything else ABORT. A rank that misses a message does not run alone: at every boundary ranks agree on the smallest
version that any of them may run (``agreed``), and the plan before is kept until all have changed.

And when a plan is searched again: where ranks wait too long for its order (section 4.4.4 of the thesis).
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


@dataclass(frozen=True, slots=True)
class ReplanRule:
    """When waiting for the planned order costs too much.

    Args:
        share: fraction of the iteration that a rank may wait (the thesis: 5 %).
        times: iterations one after another in which it must be more; the thesis says "consistently".
        warm_up: iterations after a change of plans that do not count.
        spacing: s between two searches.
    """

    share: float = 0.05
    times: int = 3
    warm_up: int = 2
    spacing: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise OptionError(f"share of a re-planning rule must be > 0 and < 1; got {self.share}")
        if self.times < 1 or self.warm_up < 0 or not self.spacing >= 0:
            raise OptionError(
                "times must be >= 1, warm_up and spacing >= 0; got "
                f"{self.times}, {self.warm_up}, {self.spacing:g} s"
            )


@dataclass
class ReplanWatch:
    """Counts waits of iterations, mean over ranks, against a rule."""

    rule: ReplanRule
    _since: int = 0  # iterations since the plan changed
    _above: int = 0  # one after another
    _searched: float | None = None  # s of the clock

    def changed(self) -> None:
        """Take note that another plan runs from now on."""
        self._since, self._above = 0, 0

    def observe(self, waited: float, iteration: float, now: float) -> str:
        """Return why a plan should be searched now; empty where none should.

        Args:
            waited: s that ranks waited in the iteration for motifs before theirs, mean over ranks.
            iteration: s that it took.
            now: s of the clock.
        """
        self._since += 1
        if self._since <= self.rule.warm_up or iteration <= 0:
            return ""
        share = waited / iteration
        self._above = self._above + 1 if share > self.rule.share else 0
        if self._above < self.rule.times:
            return ""
        if self._searched is not None and now - self._searched < self.rule.spacing:
            return ""
        self._searched, self._above = now, 0
        return (
            f"ranks waited {share:.0%} of an iteration for the planned order, {self.rule.times} times in a row "
            f"(limit {self.rule.share:.0%})"
        )
