"""The capacity loop as a process: one a cluster, the only writer of its nodes and leases.

>>> with Ledger.open() as ledger:  # doctest: +SKIP
...     CapacityLoop(ledger, fleet, source, Settings()).run(stop)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbflow.tasks.apps.loop_report import LOOP, RESERVED, LoopRow
    from ebbflow.tasks.capacity.actuator import Evictor, LocalEvictor, RemoteEvictor
    from ebbflow.tasks.capacity.intervals import LoopPace
    from ebbflow.tasks.capacity.listening import LoopEvent, LoopListener
    from ebbflow.tasks.capacity.loop import CapacityLoop, LoopEnd
    from ebbflow.tasks.capacity.observing import Rented

__all__ = [
    "LOOP",
    "RESERVED",
    "CapacityLoop",
    "Evictor",
    "LocalEvictor",
    "LoopEnd",
    "LoopEvent",
    "LoopListener",
    "LoopPace",
    "LoopRow",
    "RemoteEvictor",
    "Rented",
]

_PLACES = {
    "CapacityLoop": "ebbflow.tasks.capacity.loop",
    "Evictor": "ebbflow.tasks.capacity.actuator",
    "LOOP": "ebbflow.tasks.apps.loop_report",
    "LocalEvictor": "ebbflow.tasks.capacity.actuator",
    "LoopEnd": "ebbflow.tasks.capacity.loop",
    "LoopEvent": "ebbflow.tasks.capacity.listening",
    "LoopListener": "ebbflow.tasks.capacity.listening",
    "LoopPace": "ebbflow.tasks.capacity.intervals",
    "LoopRow": "ebbflow.tasks.apps.loop_report",
    "RESERVED": "ebbflow.tasks.apps.loop_report",
    "RemoteEvictor": "ebbflow.tasks.capacity.actuator",
    "Rented": "ebbflow.tasks.capacity.observing",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for only then: a module of the folder needs not all the others."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_PLACES[name]), name)
