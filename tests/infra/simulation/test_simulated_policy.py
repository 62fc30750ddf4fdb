"""A policy as a simulation asks it: its memory, its figures, and what is said of one that gets nowhere."""

from typing import Any

import numpy as np
import pytest

from ebbflow.infra.errors import SimulationError
from ebbflow.infra.simulation.asking import Asking
from ebbflow.planners.model.capacity import Capacity
from ebbflow.planners.model.scheduling import Decision, View

NONE = Capacity(0, ())


class Counting:
    """Remembers how often it was asked, and wants to be woken some time later."""

    name = "counting"
    elastic = True

    def __init__(self, sleep: float = 10.0) -> None:
        self.sleep = sleep

    def decide(self, view: View, memory: Any, rng: np.random.Generator) -> Decision:
        times = (memory or 0) + 1
        return Decision({}, wake=view.now + self.sleep, memory=times, notes={"times": float(times)})


def asking(policy: Counting, limit: int = 2) -> Asking:
    return Asking(policy, np.random.default_rng(0), limit)


def test_a_policy_gets_its_memory_back_and_its_figures_are_means() -> None:
    asked = asking(Counting())
    for now in (0.0, 1.0, 2.0):
        asked.ask(now, [], [], NONE, trained=True)
    assert (asked.decisions, asked.wake, asked.notes, asked.elastic) == (3, 12.0, {"times": 2.0}, True)
    assert asked.seconds >= 0.0


def test_one_that_lets_nobody_train_is_stuck_unless_there_was_news() -> None:
    asked = asking(Counting())
    asked.reason = "j: too large"
    for now in (0.0, 1.0):
        asked.ask(now, [], [], NONE, trained=False)
    asked.news()
    for now in (2.0, 3.0):
        asked.ask(now, [], [], NONE, trained=False)
    with pytest.raises(
        SimulationError, match=r"counting at 4 s leaves .*allocated no GPU; .*reason: j: too large"
    ):
        asked.ask(4.0, [], [], NONE, trained=False)


def test_one_that_is_asked_again_and_again_at_once_is_stuck() -> None:
    asked = asking(Counting(1e-9))
    for _ in range(3):
        asked.ask(1.0, [], [], NONE, trained=True)
    with pytest.raises(SimulationError, match="3 decisions in a row came within"):
        asked.ask(1.0, [], [], NONE, trained=True)


def test_none_is_woken_in_the_past() -> None:
    with pytest.raises(SimulationError, match="policy counting at 5 s wants to be woken at 5 s, not later"):
        asking(Counting(0.0)).ask(5.0, [], [], NONE, trained=True)
