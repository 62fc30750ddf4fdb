"""The decisions of the capacity loop: who holds which GPU until when, how many nodes there are to be, and why.

>>> from ebbflow.planners.capacity import Memory, Settings, Situation, decide
>>> cycle = decide(Situation(now, state), Settings(), Memory(), rng)  # doctest: +SKIP
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbflow.planners.capacity.deciding import decide
    from ebbflow.planners.capacity.values import (
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

_PLACES = {
    "Cycle": "values",
    "Evict": "values",
    "Memory": "values",
    "Plan": "values",
    "Scaling": "values",
    "Settings": "values",
    "Situation": "values",
    "Team": "values",
    "Wanted": "values",
    "decide": "deciding",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for only then: a module of the folder needs not all the others."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
