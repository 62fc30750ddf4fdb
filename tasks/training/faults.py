"""Faults that happen to a training's nodes at set times, for demonstrations and tests: ``20s:kill:node-2``."""

from collections.abc import Callable, Sequence
from typing import Protocol

from ebbflow.infra.clock import Clock
from ebbflow.tasks.faults import Fault, Grammar, Schedule, scripted

FAULTS = Grammar(
    "a scripted fault looks like 20s:kill:node-2, 35s:notice:node-1:10s, 40s:freeze:node-1, 45s:thaw:node-1, "
    "50s:add:1 or 60s:remove:1",
    {
        "kill": "WHOM",
        "notice": "WHOM:SECONDS",
        "freeze": "WHOM",
        "thaw": "WHOM",
        "add": "COUNT",
        "remove": "COUNT",
    },
    most=10_000,
)


class Faulty(Protocol):
    """Nodes that things can happen to."""

    def kill(self, name: str) -> None: ...
    def notice(self, name: str, seconds: float) -> float: ...
    def freeze(self, name: str) -> None: ...
    def thaw(self, name: str) -> None: ...


def schedule_of(
    faults: Sequence[Fault],
    nodes: Faulty,
    add: Callable[[int], object],
    remove: Callable[[int], object],
    say: Callable[[str], None],
    clock: Clock,
) -> Schedule:
    """Return the schedule of ``faults``, which are in order of time.

    ``add`` and ``remove`` change how many nodes there are; ``say`` hears of everything.
    """
    actions: dict[str, Callable[[Fault], object]] = {
        "kill": lambda fault: nodes.kill(fault.of),
        "notice": lambda fault: nodes.notice(fault.of, fault.seconds),
        "freeze": lambda fault: nodes.freeze(fault.of),
        "thaw": lambda fault: nodes.thaw(fault.of),
        "add": lambda fault: add(fault.count),
        "remove": lambda fault: remove(fault.count),
    }

    def do(fault: Fault) -> None:
        say(f"scripted: {fault.told()}")
        actions[fault.kind](fault)

    return Schedule(clock, scripted(clock, faults, do, lambda line: say(f"scripted: {line}")))
