"""Faults of a local fleet at set times: ``20s:notice:gpu-2:5s``, ``30s:kill:spark-1``."""

from collections.abc import Callable, Iterable

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import ClusterError
from ebbflow.infra.local_fleet import LocalFleet
from ebbflow.tasks.faults import Fault, Grammar, Schedule, Verb, scripted

VERBS: tuple[Verb, ...] = ("kill", "notice", "recommend", "pause", "resume", "outage", "add", "remove")
FAULTS = Grammar("a local fleet", VERBS, example="20s:notice:gpu-2:5s", max_count=1000, pools=True)
OF_POOLS: frozenset[Verb] = frozenset(("add", "remove", "outage"))
"""Verbs whose target is a pool, never a node."""


def schedule_of(
    faults: Iterable[Fault], fleet: LocalFleet, say: Callable[[str], None], clock: Clock
) -> Schedule:
    """Return the schedule of ``faults`` on a fleet, in order of time. ``say`` gets a line for each fault."""

    def do(fault: Fault) -> None:
        target = fault.target if fault.verb in OF_POOLS else _node(fault, fleet)
        say(f"scripted: {fault.describe(target)}")
        inject(fault, target, fleet)

    script = sorted(faults, key=lambda fault: fault.after)
    return Schedule(clock, scripted(clock, script, do, lambda line: say(f"scripted: {line}")))


def inject(fault: Fault, target: str, fleet: LocalFleet) -> None:
    """Inject ``fault`` into ``target``, a node or a pool of ``fleet``, now.

    Raises ``ClusterError`` for a node that is not there, ``OptionError`` for a pool that is not.
    """
    match fault.verb:
        case "kill":
            fleet.kill(target)
        case "notice":
            fleet.notice(target, fault.seconds)
        case "recommend":
            fleet.notice(target, fault.seconds, "rebalance")
        case "pause":
            fleet.pause(target)
        case "resume":
            fleet.resume(target)
        case "outage":
            fleet.outage(target, fault.seconds)
        case "add":
            fleet.add(target, fault.count)
        case "remove":
            fleet.remove(target, fault.count)
        case _:
            raise ClusterError(f"a local fleet has no fault {fault.verb!r}")


def states_of(verb: Verb) -> tuple[str, ...]:
    """Return the states of the nodes of a pool that ``verb`` may mean."""
    return ("paused",) if verb == "resume" else ("alive",)


def _node(fault: Fault, fleet: LocalFleet) -> str:
    """Return the node that is meant: the oldest of a pool. Raises ``ClusterError`` where it has none."""
    if fleet.state.pool(fault.target) is None:
        return fault.target
    states = states_of(fault.verb)
    found = [node.id for node in fleet.view() if node.pool == fault.target and node.state in states]
    if not found:
        raise ClusterError(f"no node of the pool {fault.target} is {' or '.join(states)} now")
    return found[0]
