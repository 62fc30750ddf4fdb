"""Faults that happen to a local fleet at set times: ``20s:notice:gpu-2:5s``, ``30s:kill:spark-1``."""

from collections.abc import Callable, Iterable

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import ClusterError
from ebbflow.infra.local_fleet import LocalFleet
from ebbflow.tasks.faults import Fault, Grammar, Schedule, scripted

FAULTS = Grammar(
    "a scripted fault of a fleet looks like 30s:kill:spark-1, 20s:notice:gpu-2:5s, 20s:advise:gpu-2:120s, "
    "40s:freeze:gpu-1, 45s:thaw:gpu-1, 50s:add:gpu, 50s:add:gpu:2 or 60s:shut:gpu:30s; a pool in place of a node "
    "means its oldest node that is not about to leave",
    {
        "kill": "WHOM",
        "notice": "WHOM:SECONDS",
        "advise": "WHOM:SECONDS",
        "freeze": "WHOM",
        "thaw": "WHOM",
        "add": "WHOM[:COUNT]",
        "shut": "WHOM:SECONDS",
    },
    most=1000,
)


def schedule_of(
    faults: Iterable[Fault], fleet: LocalFleet, say: Callable[[str], None], clock: Clock
) -> Schedule:
    """Return the schedule of ``faults`` on a fleet, in order of time. ``say`` hears of everything."""
    actions: dict[str, Callable[[Fault, str], object]] = {
        "kill": lambda fault, of: fleet.kill(of),
        "notice": lambda fault, of: fleet.notice(of, fault.seconds),
        "advise": lambda fault, of: fleet.notice(of, fault.seconds, "rebalance"),
        "freeze": lambda fault, of: fleet.freeze(of),
        "thaw": lambda fault, of: fleet.thaw(of),
        "add": lambda fault, of: fleet.add(of, fault.count),
        "shut": lambda fault, of: fleet.shut(of, fault.seconds),
    }

    def do(fault: Fault) -> None:
        of = fault.of if fault.kind in ("add", "shut") else _node(fault, fleet)
        say(f"scripted: {fault.told(of)}")
        actions[fault.kind](fault, of)

    script = sorted(faults, key=lambda fault: fault.after)
    return Schedule(clock, scripted(clock, script, do, lambda line: say(f"scripted: {line}")))


def _node(fault: Fault, fleet: LocalFleet) -> str:
    """Return the node that is meant."""
    if fleet.book.pool(fault.of) is None:
        return fault.of
    states = ("frozen",) if fault.kind == "thaw" else ("alive",)
    found = [node.id for node in fleet.view() if node.pool == fault.of and node.state in states]
    if not found:
        raise ClusterError(f"no node of the pool {fault.of} is {' or '.join(states)} now")
    return found[0]
