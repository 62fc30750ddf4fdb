"""Where a pipeline runs: the ledger it speaks through, its nodes, and the loop that leads where none does yet."""

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import PipelineRunError
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.local_fleet import LocalFleet
from ebbflow.infra.protocols import Trainer
from ebbflow.planners.capacity.values import Settings
from ebbflow.planners.errors import EbbflowError
from ebbflow.planners.hazard import hazard
from ebbflow.tasks.capacity.actuator import LocalEvictor
from ebbflow.tasks.capacity.intervals import LoopIntervals
from ebbflow.tasks.capacity.leadership import leads, led_soon
from ebbflow.tasks.capacity.listeners import LoopListener
from ebbflow.tasks.capacity.loop import CapacityLoop
from ebbflow.tasks.capacity.observation import FleetObservation
from ebbflow.tasks.capacity.release import give_back
from ebbflow.tasks.pipeline.checking import from_environment
from ebbflow.tasks.pipeline.faulting import schedule_of
from ebbflow.tasks.pipeline.file.deciding import settings_of
from ebbflow.tasks.pipeline.file.references import fill_in
from ebbflow.tasks.pipeline.file.spec import AwsSpec, ExistingSpec, LocalSpec, Pipeline
from ebbflow.tasks.training.leased.aws import MakePools, opened_pools

LEDGER = "ledger.db"  # in the run's directory, of a cluster that comes and goes with the run
_UP = 120.0  # s for the first nodes of this machine, beside their boot time
_END = 30.0  # s for the loop to end
_PRIOR_HOURS = 1.0  # how much evidence a stated hazard counts for
PACE = LoopIntervals(
    capacity_poll_interval=0.3, fleet_poll_interval=1.0, leader_lease=6.0
)  # one process, one file: quicker than across machines

log = logging.getLogger(__name__)

Say = Callable[[str], None]


@dataclass
class Site:
    """A cluster that is up, with a loop that leads it."""

    ledger: Ledger
    cluster: str
    fleet: LocalFleet | None = None  # nodes of this machine
    pools: MakePools | None = None  # of nodes for trainings; None: there are none
    make: Callable[..., Trainer] | None = None  # the launcher on them; None: the usual one
    listed: Mapping[str, float] = field(default_factory=dict)  # on-demand prices by instance type, $/h
    spark_master: str = ""  # of Spark pools on AWS
    variables: Mapping[str, str] = field(default_factory=dict)  # that programs on its nodes need
    address: str | None = field(default=None, repr=False)  # of a ledger that others share; has a password
    grace: float | None = None  # s that the loop waits beyond a lease's end; None: as the loop says itself
    joined: bool = False  # its loop runs elsewhere
    ended: threading.Event = field(default_factory=threading.Event)  # the loop of this process is over
    problem: str = ""  # why
    wind_up: Callable[[], None] = lambda: (
        None
    )  # once all steps are over: ends the loop, gives rented nodes back

    @property
    def master(self) -> str:
        """Return the address of the Spark master; empty: there is none."""
        return self.fleet.spark_master if self.fleet is not None else self.spark_master


@contextmanager
def opened_site(
    pipeline: Pipeline,
    run: str,
    folder: Path,
    apps: Callable[[str], str],
    say: Say,
    clock: Clock,
    listener: LoopListener | None = None,
    *,
    allowed: Collection[str] = (),
) -> Iterator[Site]:
    """Bring up, or join, the cluster of a pipeline; take down at the end what was brought up.

    Args:
        run: the run's id.
        folder: the run's.
        apps: returns the id that a step has in the ledger.
        say: hears what happens, from other threads too.
        listener: of the loop, where this process runs it.
        allowed: policies that may be imported, as ``MODULE:NAME``.

    Raises ``EbbflowError``.
    """
    cluster = pipeline.cluster
    if isinstance(cluster, LocalSpec):
        settings = settings_of(pipeline, allowed)
        with _local(cluster, pipeline, settings, run, folder, apps, say, clock, listener) as site:
            yield site
    elif isinstance(cluster, ExistingSpec):
        address = fill_in(cluster.ledger, from_environment)
        with Ledger.open(address, cluster=cluster.name, clock=clock) as ledger:
            _check_led(ledger, clock, say)
            fleet = LocalFleet.attach(cluster.fleet, clock=clock) if cluster.fleet else None
            yield Site(ledger, cluster.name, fleet, _local_pools(fleet), joined=True, address=address)
    else:
        with _aws(cluster, pipeline, allowed, say, clock, listener) as site:
            yield site


@contextmanager
def _local(
    cluster: LocalSpec,
    pipeline: Pipeline,
    settings: Settings,
    run: str,
    folder: Path,
    apps: Callable[[str], str],
    say: Say,
    clock: Clock,
    listener: LoopListener | None,
) -> Iterator[Site]:
    learn = hazard if cluster.hazard is None else _stated(cluster.hazard)
    with ExitStack() as stack:
        ledger = stack.enter_context(Ledger.open(str(folder / LEDGER), cluster=run, clock=clock))
        words = ", ".join(f"{pool.start} {pool.name}" for pool in cluster.pools)
        say(f"starting nodes of this machine: {words}")
        boot = max((pool.provision_time for pool in cluster.pools), default=0.0)
        fleet = stack.enter_context(
            LocalFleet.start(cluster.pools, run, hazard=learn, wait=_UP + boot, clock=clock)
        )
        listed = {pool.instance_type: pool.price_in("on-demand") for pool in cluster.pools}
        site = Site(
            ledger, run, fleet, _local_pools(fleet), listed=listed, grace=settings.termination_grace_s
        )

        def rented() -> FleetObservation:
            seen = fleet.observe()
            return FleetObservation(seen, {pool.name: fleet.offers(pool.name) for pool in seen.pools})

        loop = CapacityLoop(
            ledger,
            fleet,
            fleet,
            settings,
            evictor=LocalEvictor(fleet),
            rented=rented,
            clock=clock,
            listener=listener,
            pace=PACE,
            # a run is held by one process: whoever led before under its name is gone
            holder=f"pipeline {run}",
        )
        stack.enter_context(_running(loop, site, say))
        faults = schedule_of(cluster.faults, fleet, ledger, apps, say, clock)
        faults.begin()
        stack.callback(faults.end)
        yield site


@contextmanager
def _aws(
    cluster: AwsSpec,
    pipeline: Pipeline,
    allowed: Collection[str],
    say: Say,
    clock: Clock,
    listener: LoopListener | None,
) -> Iterator[Site]:
    with ExitStack() as stack:
        address = fill_in(cluster.ledger, from_environment)
        ledger = stack.enter_context(Ledger.open(address, cluster=cluster.name, clock=clock))
        site = Site(ledger, cluster.name, spark_master=_spark_master(cluster), joined=True, address=address)
        pools = (*cluster.pools, *cluster.spark_pools)
        room = stack.enter_context(opened_pools(pools, cluster.terraform_output, cluster.prices, clock))
        site.pools, site.make, site.listed = room.pools, room.make, room.listed()
        site.variables = room.variables
        if cluster.loop and not leads(ledger, clock):
            settings = settings_of(pipeline, allowed)
            stack.enter_context(_leading(cluster, settings, site, say, clock, listener))
        else:
            _check_led(ledger, clock, say)
        yield site


def _spark_master(cluster: AwsSpec) -> str:
    """Return the address of the master of a cluster's Spark pools; empty where none are named."""
    from ebbflow.tasks.fleet.request import FleetRequest

    if not cluster.spark_pools:
        return ""
    return FleetRequest(terraform_output=cluster.terraform_output or None).settings().spark_master or ""


@contextmanager
def _leading(
    cluster: AwsSpec, settings: Settings, site: Site, say: Say, clock: Clock, listener: LoopListener | None
) -> Iterator[None]:
    """Lead a cluster on AWS while the block runs, and give back at its end what nobody uses.

    An interrupt out of turn ends this at once: nodes then stay until another loop leads.
    """
    from ebbflow.tasks.capacity.node_sources import opened_nodes
    from ebbflow.tasks.capacity.request import CapacityRequest

    request = CapacityRequest(
        cluster=cluster.name, source=f"aws:{cluster.terraform_output}", prices=cluster.prices or None
    )
    rules = request.rules()
    assert settings.scaling is not None
    # the quotas of the configuration file ($EBBFLOW_CONFIG) hold for every loop
    settings = replace(
        settings,
        limits=settings.limits.also(rules.fleet.limits),
        scaling=replace(settings.scaling, fallback=rules.fleet.fallback),
    )
    site.joined, site.grace = False, settings.termination_grace_s
    with opened_nodes(request, site.ledger, clock) as nodes:

        def loop(settings: Settings, listener: LoopListener | None = None) -> CapacityLoop:
            return nodes.loop(site.ledger, settings, clock=clock, listener=listener, pace=rules.intervals)

        interrupted = False
        try:
            with _running(loop(settings, listener), site, say):
                yield
        except KeyboardInterrupt:
            interrupted = True
            say("nodes that were launched may still be running: ebbflow fleet status lists them")
            raise
        finally:
            if nodes.fleet is not None and not interrupted:
                give_back(site.ledger, nodes.fleet, settings, loop, say, clock)


def _local_pools(fleet: LocalFleet | None) -> MakePools | None:
    if fleet is None:
        return None
    return lambda app, grace, environment: lambda: fleet.nodes_for(app, grace=grace, environment=environment)


@contextmanager
def _running(loop: CapacityLoop, site: Site, say: Say) -> Iterator[None]:
    """Run the loop in a thread of its own."""
    stop = threading.Event()

    def work() -> None:
        try:
            end = loop.run(stop)
            site.problem = "" if stop.is_set() else f"the capacity loop has ended: {end.reason}"
        except EbbflowError as error:
            site.problem = f"the capacity loop has ended: {error}"
        except Exception as error:
            log.exception("the capacity loop failed")
            site.problem = f"the capacity loop has failed: {type(error).__name__}: {error}"
        finally:
            site.ended.set()
        if site.problem:
            say(site.problem)

    thread = threading.Thread(target=work, name="ebbflow-capacity-loop", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_END)


def _check_led(ledger: Ledger, clock: Clock, say: Say) -> None:
    """Raise ``PipelineRunError`` unless a loop leads the cluster: apps would wait for ever.

    A loop that is late, or that another is about to follow, gets the time of a lead.
    """
    lead = ledger.leader()
    if lead is not None and not lead.alive(clock.now()):
        say(
            f"the capacity loop {lead.holder} {'has left' if lead.until == 0 else 'is late'}; waiting for it or "
            "another, for the time of a lead"
        )
    if not led_soon(ledger, clock):
        last = f"; the last was {lead.holder}" if lead is not None else ""
        raise PipelineRunError(
            f"no capacity loop is the leader of the cluster {ledger.cluster!r} of "
            f"{ledger.address}{last}; start one: ebbflow capacity start"
        )


def _stated(rate: float) -> Callable[[int, float], float]:
    """Return an estimate that begins with a stated rate and learns from what happens."""
    return lambda losses, seconds: hazard(losses, seconds, rate * _PRIOR_HOURS, _PRIOR_HOURS)
