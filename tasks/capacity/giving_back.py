"""A pipeline on the fleet that Terraform has made: its nodes for trainings, and how they are given back."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import InfraError
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.protocols import FleetControl, Trainer
from ebbflow.infra.training.launcher.pool import NodePool
from ebbflow.planners.capacity import Settings
from ebbflow.planners.errors import OptionError
from ebbflow.planners.hazard import hazard
from ebbflow.tasks.capacity import CapacityLoop
from ebbflow.tasks.capacity.leader import leads
from ebbflow.tasks.pipeline.file.spec import AwsSpec

_REFRESH = 3.0  # s between looks at the pools
_RETURN = 180.0  # s for nodes to be given back: draining takes two minutes at most
_LOOK = 1.0  # s between looks whether they are
_END = 30.0  # s for the loop to end

MakePools = Callable[[str, float, Mapping[str, str]], Callable[[], NodePool]]
"""From an app's id, its grace (s) and its environment to what makes pools of nodes for it."""


@dataclass(frozen=True)
class AwsRoom:
    """What trainings need of a fleet."""

    pools: MakePools  # of instances, under their own ids
    make: Callable[..., Trainer]  # the launcher on them
    listed: Callable[[], Mapping[str, float]]  # asks for on-demand prices, $/h, by instance type


@contextmanager
def opened_pools(cluster: AwsSpec, clock: Clock) -> Iterator[AwsRoom]:
    """Open what trainings need.

    Raises ``SettingsError``, ``OptionError`` for a pool that the cluster does not have, ``AwsError``.
    """
    from ebbflow.infra.aws.capacity import AwsCapacity, Untold
    from ebbflow.infra.aws.train_nodes import FORM, LOGS, AwsNodes
    from ebbflow.tasks.fleet.request import FleetRequest
    from ebbflow.tasks.fleet.steps import opened
    from ebbflow.tasks.training.aws import ShippingTrainer

    asked = FleetRequest(config=cluster.config or None, prices=cluster.prices or None)
    with ExitStack() as stack:
        fleet = stack.enter_context(opened(asked, clock))
        for pool in cluster.pools:
            if pool not in fleet.settings.pools:
                known = ", ".join(fleet.settings.pools) or "none"
                raise OptionError(f"there is no pool {pool!r} in this cluster; there are {known}")
        # the queue of notices has one reader, the loop: a training is told by the node's own agent
        capacity = AwsCapacity(
            fleet.control, Untold(), hazard=hazard, pools=list(cluster.pools), refresh=_REFRESH, clock=clock
        )
        stack.enter_context(capacity)

        def pools(app: str, grace: float, environment: Mapping[str, str]) -> Callable[[], NodePool]:
            if environment:
                raise OptionError(
                    f"environment is for nodes of this machine; got {', '.join(environment)}: on AWS a node reads "
                    "its secrets by its own role"
                )
            return lambda: AwsNodes(fleet.runner(FORM), capacity, named=True, look=capacity.look, clock=clock)

        def make(pool: NodePool, **options: Any) -> Trainer:
            given = {"form": FORM, **options, "logs": Path(LOGS) / str(pool.uid)}
            return ShippingTrainer(pool, fleet.settings.region, **given)  # type: ignore[arg-type]

        def listed() -> Mapping[str, float]:
            types = {kind for pool in cluster.pools for kind in fleet.settings.pools[pool].instance_types}
            found = {kind: fleet.prices.on_demand(kind) for kind in sorted(types)}
            return {kind: price for kind, price in found.items() if price is not None}

        yield AwsRoom(pools, make, listed)


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
            say("nodes stay as they are: a capacity loop leads the cluster, and sees to them")
            return
        if active := [one.spec.id for one in ledger.state().active() if one.phase != "lost"]:
            say(
                f"nodes stay, since {', '.join(active[:3])} may need them; a loop must lead the cluster from now on"
            )
            return
        if not (more := _surplus(fleet)):
            return
        say(f"giving nodes back: {more}")
        scaling = replace(settings.scaling, idle_s=0.0, hold_s=0.0)
        left = _run_until_returned(make(replace(settings, scaling=scaling)), ledger, fleet, clock)
    except InfraError as error:
        left = str(error)
    if left:
        say(f"nodes are left: {left}; look: ebbflow fleet status")
    else:
        say("all nodes that were rented are given back")


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
            clock.sleep(_LOOK)
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
    more = {pool.name: max(pool.planned, pool.requested, len(pool.nodes)) - pool.least for pool in seen.pools}
    return ", ".join(f"{count} of {name}" for name, count in more.items() if count > 0 and "/" not in name)
