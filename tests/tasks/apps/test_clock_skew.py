"""Clocks of an app and its loop that differ by some seconds: leases last as long as the loop means them to."""

import random

import pytest
from lease_cases import RULES, Hands, lease

from ebbflow.infra.ledger import LeaderLease
from ebbflow.tasks.apps.lease_table import LeaseTable
from ebbflow.tasks.apps.skew import LEAST, Skew, shifted

LEASE, BEFORE = 20.0, 15.0  # s that leases last, and before whose end the loop extends them
LEAVE = 10.0  # s before their end at which apps begin to leave


@pytest.mark.parametrize("ahead", [-60.0, -8.0, -4.0, -1.0, 0.0, 1.0, 4.0, 8.0, 60.0])
def test_short_leases_are_kept_whatever_the_loops_clock_is_ahead_by(ahead: float) -> None:
    rng, clock, skew = random.Random(1), Hands(), Skew()
    rules = RULES.__class__(grace=6.0, leave=LEAVE, fence=5.0)
    book = LeaseTable("app", clock, rules)
    book.settle()
    until, renewed = clock.time + ahead + LEASE, -1e9
    row = LeaderLease(1, "a loop", 0.0, 15.0)
    for step in range(400):
        clock.time += rng.uniform(0.1, 0.4)  # between two looks of the app
        loops = clock.time + ahead
        if until - loops < BEFORE:
            until = loops + LEASE
        if loops - renewed > row.seconds / 3:
            renewed = loops - rng.uniform(0.0, 0.3)  # a moment ago
            row = LeaderLease(1, "a loop", renewed + row.seconds, row.seconds)
        found = skew.look(row, clock.time)
        held = lease(1, since=clock.time + ahead - 500.0, until=until)
        led = row.until - found if row.alive(clock.time + found) else 0.0
        book.learn([shifted(held, -found) if found else held], led, clock.time)
        if step > 120:  # it has seen a few renewals
            assert book.placement() == {"a": 1}, f"{ahead:+g} s: left after {clock.time - 1000:.1f} s"
            assert found == 0.0 or found == pytest.approx(ahead, abs=1.0)


def test_clocks_that_agree_are_left_alone() -> None:
    skew = Skew()
    for n in range(20):
        assert skew.look(LeaderLease(1, "a loop", 100.0 + n, 6.0), 94.0 + n + LEAST / 2) == 0.0
