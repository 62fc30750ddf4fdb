"""Carries out the faults that a pipeline's file asks for, on nodes of this machine."""

from collections.abc import Callable, Iterator, Sequence

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import ClusterError, LedgerError
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.local_fleet import LocalFleet
from ebbflow.planners.errors import EbbflowError
from ebbflow.planners.model.ledger import OVER
from ebbflow.planners.model.ledger_state import State
from ebbflow.tasks.faults import Fault, Schedule

_LOOK = 0.2  # s


def schedule_of(
    faults: Sequence[Fault],
    fleet: LocalFleet,
    ledger: Ledger,
    apps: Callable[[str], str],
    say: Callable[[str], None],
    clock: Clock,
) -> Schedule:
    """Return the schedule of ``faults`` on the nodes of ``fleet``.

    A fault's time counts from the moment at which its step, or the first of all, is seen running in the ledger. A
    pool in place of a node means the newest of its nodes that is leased, or else the newest.

    Args:
        apps: the app of each step in the ledger.
        say: hears what is done.
    """

    def script() -> Iterator[float]:
        left = sorted(faults, key=lambda fault: fault.after)
        began: dict[str, float] = {}  # app -> when it was first seen running; "" for the first of all
        while left:
            yield clock.now() + _LOOK
            try:
                state = ledger.state()
                now = clock.now()
                for id_, record in state.apps.items():
                    if record.phase == "running" or record.first_lease is not None or record.phase in OVER:
                        began.setdefault("", now)
                        began.setdefault(id_, now)
                for fault in list(left):
                    since = began.get(apps(fault.step) if fault.step else "")
                    if since is not None and now >= since + fault.after:
                        _do(fault, _chosen(fault.of, fleet, state), fleet, say)
                        left.remove(fault)
            except (LedgerError, ClusterError):
                continue  # it is looked at again; the loop says what is wrong with it

    return Schedule(clock, script(), patience=30.0)


def _do(fault: Fault, node: str | None, fleet: LocalFleet, say: Callable[[str], None]) -> None:
    if node is None:
        say(f"scripted: there is no node of {fault.of} to take away")
        return
    say(f"scripted: {fault.told(node)}")
    try:
        if fault.kind == "kill":
            fleet.kill(node)
        else:
            fleet.notice(node, fault.seconds)
    except EbbflowError as error:
        say(f"scripted: that did not work: {error}")


def _chosen(name: str, fleet: LocalFleet, state: State) -> str | None:
    """Return the node that ``name`` means now; ``None`` where there is none."""
    view = [node for node in fleet.view() if node.state == "alive"]
    if any(node.id == name for node in view):
        return name
    leased = {slot.node for slot in state.booked}
    found = [node for node in view if node.pool == name]
    return max(found, key=lambda node: (node.id in leased, node.since)).id if found else None
