"""The capacity loop as a process: one a cluster, the only writer of its nodes and leases.

>>> with Ledger.open() as ledger:  # doctest: +SKIP
...     CapacityLoop(ledger, fleet, source, Settings()).run(stop)
"""

from ebbflow.tasks.loop.evicting import Evictor, LocalEvictor, RemoteEvictor
from ebbflow.tasks.loop.listening import LoopEvent, LoopListener
from ebbflow.tasks.loop.loop import CapacityLoop, LoopEnd
from ebbflow.tasks.loop.observing import Rented
from ebbflow.tasks.loop.pace import LoopPace
from ebbflow.tasks.loop.row import LOOP, RESERVED, LoopRow

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
