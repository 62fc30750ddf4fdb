"""A policy as a simulation asks it: what it keeps, what it costs, and when it gets nowhere."""

from collections.abc import Sequence
from math import inf
from time import process_time
from typing import Any

import numpy as np

from ebbflow.infra.errors import SimulationError
from ebbflow.infra.simulation.entry import ROUNDING, Entry
from ebbflow.planners.model.capacity import Capacity
from ebbflow.planners.model.scheduling import App, Decision, Policy, View


class Asking:
    """Asks ``policy`` for decisions and keeps the account of it.

    Args:
        policy: that decides.
        rng: its generator.
        limit: decisions in a row without any training, or without any time between them, after which it is stuck.
    """

    def __init__(self, policy: Policy, rng: np.random.Generator, limit: int) -> None:
        self._policy, self._rng, self._limit = policy, rng, limit
        self.name = policy.name
        self.elastic = bool(getattr(policy, "elastic", False))
        self.wake = inf  # s, when it wants to be asked again
        self.seconds = 0.0  # of CPU
        self.decisions = 0
        self.reason = ""  # the last that it gave for letting a job wait
        self._memory: Any = None
        self._notes: dict[str, tuple[float, int]] = {}
        self._idle = self._hasty = 0
        self._decided = -inf

    def news(self) -> None:
        """Take note that jobs or capacity came or went: nobody was stuck before that."""
        self._idle = 0

    def ask(
        self, now: float, active: Sequence[Entry], apps: list[App], capacity: Capacity, trained: bool
    ) -> Decision:
        """Return what the policy decides; ``trained`` tells whether any job did since the last decision.

        Raises ``SimulationError`` when it is stuck, or wants to be woken in the past.
        """
        self._idle = 0 if trained else self._idle + 1
        if self._idle > self._limit:
            raise self.stuck(now, active, f"{self._idle} decisions in a row allocated no GPU")
        self._hasty = self._hasty + 1 if now - self._decided < ROUNDING else 0
        self._decided = now
        if self._hasty > self._limit:
            what = f"{self._hasty} decisions in a row came within {ROUNDING:g} s of the one before"
            raise self.stuck(now, active, what)
        for entry in active:
            entry.model.report(entry.app)
        view = View(now, apps, capacity)
        began = process_time()
        decision = self._policy.decide(view, self._memory, self._rng)
        self.seconds += process_time() - began
        self.decisions += 1
        self._memory = decision.memory
        if decision.wake <= now:
            raise self.wrong(now, f"wants to be woken at {decision.wake:g} s, not later")
        self.wake = decision.wake
        for name, value in decision.notes.items():
            total, times = self._notes.get(name, (0.0, 0))
            self._notes[name] = (total + value, times + 1)
        return decision

    @property
    def notes(self) -> dict[str, float]:
        """Return the policy's figures, each the mean over the decisions that gave it."""
        return {name: total / times for name, (total, times) in self._notes.items()}

    def wrong(self, now: float, what: str) -> SimulationError:
        """Return the error that says what the policy did."""
        return SimulationError(f"policy {self.name} at {now:g} s {what}")

    def stuck(self, now: float, active: Sequence[Entry], what: str) -> SimulationError:
        """Return the error that names jobs which the policy leaves waiting for ever."""
        names = ", ".join(entry.job.id for entry in active[:3])
        last = f"; its last reason: {self.reason}" if self.reason else ""
        return self.wrong(now, f"leaves {len(active)} jobs unfinished ({names}): {what}{last}")
