"""Injects the faults of a pipeline's file into the nodes of this machine."""

from collections.abc import Callable, Iterator, Sequence

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import ClusterError, LedgerError
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.local_fleet import LocalFleet
from ebbflow.planners.errors import EbbflowError
from ebbflow.planners.model.ledger import OVER
from ebbflow.planners.model.ledger_state import State
from ebbflow.tasks.faults import Fault, Schedule
from ebbflow.tasks.nodes import OF_POOLS, inject, states_of

_POLL = 0.2  # s


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
            yield clock.now() + _POLL
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
                        _do(fault, _chosen(fault, fleet, state), fleet, say)
                        left.remove(fault)
            except (LedgerError, ClusterError):
                continue  # it is looked at again; the loop says what is wrong with it

    return Schedule(clock, script(), timeout=30.0)


def _do(fault: Fault, target: str | None, fleet: LocalFleet, say: Callable[[str], None]) -> None:
    if target is None:
        say(
            f"scripted: {fault.verb} is skipped: no node of {fault.target} is {' or '.join(states_of(fault.verb))}"
        )
        return
    say(f"scripted: {fault.describe(target)}")
    try:
        inject(fault, target, fleet)
    except EbbflowError as error:
        say(f"scripted: fault not injected: {error}")


def _chosen(fault: Fault, fleet: LocalFleet, state: State) -> str | None:
    """Return the node or pool that ``fault`` means now; ``None`` where there is none."""
    if fault.verb in OF_POOLS:
        return fault.target
    view = [node for node in fleet.view() if node.state in states_of(fault.verb)]
    if any(node.id == fault.target for node in view):
        return fault.target
    leased = {slot.node for slot in state.booked}
    found = [node for node in view if node.pool == fault.target]
    return max(found, key=lambda node: (node.id in leased, node.since)).id if found else None
