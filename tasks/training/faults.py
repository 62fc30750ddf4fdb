"""Faults of a training's nodes at set times, for demonstrations and tests: ``20s:kill:node-2``."""

from collections.abc import Callable, Sequence
from typing import Protocol

from ebbflow.infra.clock import Clock
from ebbflow.tasks.faults import Fault, Grammar, Schedule, scripted

FAULTS = Grammar(
    "a training", ("kill", "notice", "pause", "resume", "add", "remove"), example="20s:kill:node-2"
)


class FaultTarget(Protocol):
    """Nodes that faults can be injected into."""

    def kill(self, name: str) -> None: ...
    def notice(self, name: str, seconds: float) -> float: ...
    def pause(self, name: str) -> None: ...
    def resume(self, name: str) -> None: ...


def schedule_of(
    faults: Sequence[Fault],
    nodes: FaultTarget,
    add: Callable[[int], object],
    remove: Callable[[int], object],
    notify: Callable[[str], None],
    clock: Clock,
) -> Schedule:
    """Return the schedule of ``faults``, which are in order of time.

    ``add`` and ``remove`` change the number of nodes; ``notify`` gets a line for each fault.
    """
    actions: dict[str, Callable[[Fault], object]] = {
        "kill": lambda fault: nodes.kill(fault.target),
        "notice": lambda fault: nodes.notice(fault.target, fault.seconds),
        "pause": lambda fault: nodes.pause(fault.target),
        "resume": lambda fault: nodes.resume(fault.target),
        "add": lambda fault: add(fault.count),
        "remove": lambda fault: remove(fault.count),
    }

    def inject(fault: Fault) -> None:
        notify(f"scripted: {fault.describe()}")
        actions[fault.verb](fault)

    return Schedule(clock, scripted(clock, faults, inject, lambda line: notify(f"scripted: {line}")))
