"""A pipeline on the fleet that Terraform has made: its nodes for trainings, and how they are given back."""

import threading
from collections.abc import Callable
from dataclasses import replace

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import InfraError
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.protocols import FleetControl
from ebbflow.planners.capacity.leases import SERVICE
from ebbflow.planners.capacity.values import Settings
from ebbflow.tasks.capacity.leadership import leads
from ebbflow.tasks.capacity.loop import CapacityLoop

_RETURN = 180.0  # s for nodes to be given back: draining takes two minutes at most
_POLL = 1.0  # s between looks whether they are
_END = 30.0  # s for the loop to end


def give_back(
    ledger: Ledger,
    fleet: FleetControl,
    settings: Settings,
    make: Callable[[Settings], CapacityLoop],
    say: Callable[[str], None],
    clock: Clock,
) -> None:
    """Give nodes back that nobody uses, once the loop of this process has ended: nobody else would.

    ``make`` makes another loop, which decides by the same rules but waits for nothing. Nodes stay where other apps
    are active or another loop leads. Bounded: what is still there after three minutes is told.
    """
    if settings.scaling is None:
        return
    try:
        if leads(ledger, clock):
            say("nodes stay: a capacity loop is the leader of the cluster and manages them")
            return
        apps = [one.spec.id for one in ledger.state().active() if one.phase != "lost"]
        if active := [one for one in apps if one != SERVICE]:  # aggregators serve no training any more
            say(
                f"nodes stay, since {', '.join(active[:3])} may need them; start a capacity loop to"
                f" manage the cluster"
            )
            return
        if not (more := _surplus(fleet)):
            return
        say(f"terminating nodes: {more}")
        scaling = replace(settings.scaling, scale_in_idle_s=0.0, cooldown_s=0.0)
        left = _run_until_returned(make(replace(settings, scaling=scaling)), ledger, fleet, clock)
    except InfraError as error:
        left = str(error)
    if left:
        say(f"nodes remain: {left}; see: ebbflow fleet status")
    else:
        say("all launched nodes are terminated")


def _run_until_returned(loop: CapacityLoop, ledger: Ledger, fleet: FleetControl, clock: Clock) -> str:
    """Run a loop until no pool has more nodes than its least, and the ledger knows; return what is left."""
    stop, problem = threading.Event(), ""

    def work() -> None:
        nonlocal problem
        try:
            loop.run(stop)
        except Exception as error:  # whatever it is: the caller says that nodes are left
            problem = str(error)

    thread = threading.Thread(target=work, name="ebbflow-giving-back", daemon=True)
    thread.start()
    end, left = clock.now() + _RETURN, "their number is not known"
    try:
        while thread.is_alive() and clock.now() < end:
            if not (left := _surplus(fleet)) and not _ended(ledger, fleet):
                break
            clock.sleep(_POLL)
    finally:
        stop.set()
        thread.join(_END)
    return f"{left} ({problem})" if left and problem else left


def _ended(ledger: Ledger, fleet: FleetControl) -> set[str]:
    """Return the nodes that the ledger has and that are gone. Raises ``InfraError``."""
    return ledger.state().nodes.keys() - {node.id for pool in fleet.observe().pools for node in pool.nodes}


def _surplus(fleet: FleetControl) -> str:
    """Return which pools have more nodes than they must have; empty: none. Raises ``InfraError``."""
    seen = fleet.observe()
    more = {
        pool.name: max(pool.planned, pool.requested, len(pool.nodes)) - pool.min_nodes for pool in seen.pools
    }
    return ", ".join(f"{count} of {name}" for name, count in more.items() if count > 0 and "/" not in name)
