"""Two-phase commit under faults, 200 seeded schedules: messages are lost, late, repeated; the coordinator dies."""

from dataclasses import dataclass, field
from random import Random

import pytest

from ebbflow.planners.communication.commit import (
    AHEAD,
    PLAIN,
    Coordinator,
    Decision,
    Participant,
    Prepare,
    Vote,
    agreed,
)

ROUNDS = 120
DEADLINE = 30.0


@dataclass
class Schedule:
    """One run: ranks pass boundaries together, messages take as long as they take."""

    draw: Random
    ranks: list[Participant]
    coordinator: Coordinator | None
    at: int = 0
    messages: list[tuple[int, int, object]] = field(
        default_factory=list
    )  # when, to whom (-1: coordinator), what
    ran: list[tuple[int, ...]] = field(default_factory=list)  # of each boundary, what each rank ran

    def send(self, now: int, to: int, what: object) -> None:
        if self.draw.random() < 0.15:
            return
        for _ in range(2 if self.draw.random() < 0.1 else 1):
            self.messages.append((now + self.draw.choice((0, 1, 1, 2, 5, 20)), to, what))

    def deliver(self, now: int) -> None:
        due = [one for one in self.messages if one[0] <= now]
        self.messages = [one for one in self.messages if one[0] > now]
        self.draw.shuffle(due)
        for _, to, what in due:
            if isinstance(what, Prepare):
                self.send(now, -1, self.ranks[to].prepare(what, self.at))
            elif isinstance(what, Decision):
                self.ranks[to].decide(what)
            elif isinstance(what, Vote) and self.coordinator is not None and to == -1:
                before = self.coordinator.decision
                decision = self.coordinator.vote(what)
                if decision is not None and before is None:
                    self.announce(now, decision)

    def announce(self, now: int, decision: Decision) -> None:
        for k in range(len(self.ranks)):
            self.send(now, k, decision)

    def boundary(self) -> None:
        self.at += 1
        chosen = agreed(rank.newest(self.at) for rank in self.ranks)
        self.ran.append(tuple(chosen for _ in self.ranks))
        for rank in self.ranks:
            assert chosen == PLAIN or chosen in rank.prepared, "a rank runs a plan that it does not have"


@pytest.mark.parametrize("seed", range(200))
def test_all_ranks_end_on_one_plan_or_on_plain_collectives(seed: int) -> None:
    draw = Random(seed)
    count = draw.randint(2, 8)
    dies_at = draw.choice((None, 0, 1, 2, 3, 5, 8, 30))  # in every phase, and not at all
    failing = draw.choice((None, None, draw.randrange(count)))  # a rank whose channel breaks
    one = Schedule(
        draw, [Participant(k) for k in range(count)], Coordinator(1, "d", frozenset(range(count)), DEADLINE)
    )
    for now in range(ROUNDS):
        if now == dies_at:
            one.coordinator = None
        if one.coordinator is not None:
            if one.coordinator.decision is None and now % 5 == 0:
                for k in range(count):
                    one.send(now, k, one.coordinator.prepare())
            decision = one.coordinator.tick(float(now))
            if decision is not None and now % 5 == 0:  # said again to those that may have missed it
                one.announce(now, decision)
        one.deliver(now)
        if failing is not None and now == 80:
            one.ranks[failing].forget_all()
        one.boundary()
    versions = [some[0] for some in one.ran]
    first = next((k for k, version in enumerate(versions) if version != PLAIN), None)
    if first is not None:
        assert first >= AHEAD, "no plan holds before its announced iteration"
        end = 80 if failing is not None and first <= 80 else len(versions)
        assert set(versions[first:end]) <= {1}, "no way back but by a failure"
        if failing is not None:
            assert versions[-1] == PLAIN
    if dies_at is not None and dies_at <= 0:
        assert set(versions) == {PLAIN}
