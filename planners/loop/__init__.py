"""The decisions of the capacity loop: who holds which GPU until when, how many nodes there are to be, and why.

>>> from ebbflow.planners.loop import Memory, Settings, Situation, decide
>>> cycle = decide(Situation(now, state), Settings(), Memory(), rng)  # doctest: +SKIP
"""

from ebbflow.planners.loop.deciding import decide
from ebbflow.planners.loop.values import (
    Cycle,
    Evict,
    Memory,
    Plan,
    Scaling,
    Settings,
    Situation,
    Team,
    Wanted,
)

__all__ = [
    "Cycle",
    "Evict",
    "Memory",
    "Plan",
    "Scaling",
    "Settings",
    "Situation",
    "Team",
    "Wanted",
    "decide",
]
