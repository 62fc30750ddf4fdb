"""Everything that a loop works on, opened from what was asked for."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.protocols import CapacitySource, FleetControl
from ebbflow.planners.errors import OptionError
from ebbflow.planners.loop import Settings
from ebbflow.planners.recovery import hazard
from ebbflow.tasks.loop.evicting import Evictor, LocalEvictor, RemoteEvictor
from ebbflow.tasks.loop.listening import LoopListener
from ebbflow.tasks.loop.loop import CapacityLoop
from ebbflow.tasks.loop.observing import Rented
from ebbflow.tasks.loop.request import CapacityRequest, LoopRules

SOURCES = "local[:NAME], aws[:CONFIG], spark://HOST:PORT, cluster[:NAME]"
_REGISTER = 0.0  # s to wait for a node that Systems Manager does not know: an eviction is tried again anyway


@dataclass(frozen=True)
class Nodes:
    """Where the nodes of a cluster come from."""

    source: CapacitySource
    fleet: FleetControl | None = None
    evictor: Evictor | None = None
    rented: Callable[[], Rented] | None = None
    answered: Callable[[], float | None] | None = None


@dataclass(frozen=True)
class OpenedLoop:
    """A loop that is ready to run, and what it was made of."""

    loop: CapacityLoop
    ledger: Ledger
    settings: Settings
    rules: LoopRules


@contextmanager
def opened_loop(
    request: CapacityRequest,
    listener: LoopListener | None = None,
    clock: Clock | None = None,
    *,
    holder: str = "",
) -> Iterator[OpenedLoop]:
    """Open ledger and nodes; the loop is not started. ``holder`` is what others are told of who leads.

    Raises ``OptionError``, ``SettingsError``, ``LedgerError``, ``EngineUnavailableError``, ``ClusterError``.
    """
    clock = clock or SystemClock()
    rules = request.rules()
    settings = request.settings(rules)
    with ExitStack() as stack:
        ledger = stack.enter_context(Ledger.open(request.ledger, cluster=request.cluster, clock=clock))
        nodes = stack.enter_context(opened_nodes(request, ledger, clock))
        loop = CapacityLoop(
            ledger,
            nodes.fleet,
            nodes.source,
            settings,
            evictor=nodes.evictor,
            clock=clock,
            listener=listener,
            pace=rules.pace,
            rented=nodes.rented,
            answered=nodes.answered,
            seed=request.seed,
            holder=holder,
        )
        yield OpenedLoop(loop, ledger, settings, rules)


@contextmanager
def opened_nodes(request: CapacityRequest, ledger: Ledger, clock: Clock) -> Iterator[Nodes]:
    """Open what ``request.source`` names. Raises ``OptionError`` for a source that there is not."""
    kind, _, rest = request.source.partition(":")
    if kind == "local":
        with _local(rest or "local", clock) as nodes:
            yield nodes
    elif kind == "aws":
        with _aws(request, rest or None, ledger, clock) as nodes:
            yield nodes
    elif kind in ("spark", "cluster"):
        with _spark(request.source, clock) as nodes:
            yield nodes
    else:
        raise OptionError(f"source must be one of {SOURCES}; got {request.source!r}")


@contextmanager
def _local(name: str, clock: Clock) -> Iterator[Nodes]:
    from ebbflow.infra.local_fleet import LocalFleet

    fleet = LocalFleet.attach(name, hazard=hazard, clock=clock)

    try:
        yield Nodes(fleet, fleet, LocalEvictor(fleet))
    finally:
        fleet.close()


@contextmanager
def _spark(source: str, clock: Clock) -> Iterator[Nodes]:
    from ebbflow.infra.spark.cluster import LocalSparkCluster
    from ebbflow.infra.spark.master_capacity import MasterCapacity

    url = source
    if source.startswith("cluster"):
        url = LocalSparkCluster.attach(source.partition(":")[2] or "default").master_url
    found = MasterCapacity(url, hazard=hazard, clock=clock)
    try:
        yield Nodes(found)
    finally:
        found.close()


@contextmanager
def _aws(request: CapacityRequest, config: str | None, ledger: Ledger, clock: Clock) -> Iterator[Nodes]:
    from ebbflow.infra.aws.capacity import AwsCapacity
    from ebbflow.tasks.fleet import observe, opened
    from ebbflow.tasks.fleet_request import FleetRequest

    with opened(FleetRequest(config=config, limits=request.limits), clock) as cluster, ExitStack() as stack:
        feed = cluster.feed()
        feed.start()
        stack.callback(feed.close)
        source = AwsCapacity(cluster.control, feed, hazard=hazard, clock=clock)
        stack.enter_context(source)

        def rented() -> Rented:
            seen = observe(cluster.control, cluster.prices)
            cluster.stays.look()
            return Rented(seen.fleet, seen.offers)

        runner = cluster.runner(_REGISTER)
        yield Nodes(
            source,
            cluster.control,
            RemoteEvictor(runner, lambda app: services_of(ledger, app)),
            rented,
            lambda: source.status().seen,
        )


def services_of(ledger: Ledger, app: str) -> Sequence[str]:
    """Return the services that ``app`` says it has on AWS nodes: ``services`` in what it last reported of its job."""
    report = ledger.reports().get(app)
    named = report.job.get("services", ()) if report is not None else ()
    return tuple(str(name) for name in named) if isinstance(named, list | tuple) else ()
