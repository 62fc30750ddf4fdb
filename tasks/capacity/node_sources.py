"""Everything that a loop works on, opened from what was asked for.

What nodes cost, where the source that sees them does not know: leases and budgets count by it.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import InfraError
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.protocols import CapacitySource, FleetControl
from ebbflow.planners.capacity.values import Settings
from ebbflow.planners.errors import OptionError
from ebbflow.planners.hazard import hazard
from ebbflow.planners.model.capacity import Capacity
from ebbflow.planners.model.fleet import Fleet, Offer
from ebbflow.tasks.capacity.actuator import Evictor, LocalEvictor, RemoteEvictor
from ebbflow.tasks.capacity.listeners import LoopListener
from ebbflow.tasks.capacity.loop import CapacityLoop
from ebbflow.tasks.capacity.metrics import serving_metrics
from ebbflow.tasks.capacity.observation import FleetObservation
from ebbflow.tasks.capacity.request import CapacityRequest, LoopRules
from ebbflow.tasks.query.request import check_master

if TYPE_CHECKING:
    from ebbflow.infra.local_fleet import LocalFleet
    from ebbflow.tasks.fleet.request import FleetRequest

Offers = Mapping[str, tuple[Offer, ...]]


class PricedSource:
    """A source whose nodes have the prices that were offered last. For several threads.

    ``first`` returns the offers, by pool, for the first look at nodes; it is asked once, since a market that does not
    answer must not delay the word of a notice, and what it cannot say ``learn`` is told later. Until then nodes keep
    the price that the source gives them.
    """

    def __init__(self, source: CapacitySource, first: Callable[[], Offers]) -> None:
        self._source = source
        self._first: Callable[[], Offers] | None = first
        self._prices: dict[tuple[str, str, str], float] = {}  # $/h, by type, zone and market

    def learn(self, offers: Offers) -> None:
        """Take in what pools are offered; what is offered no more keeps its last price."""
        found = {(o.instance_type, o.zone, o.market): o.price for some in offers.values() for o in some}
        self._prices = {**self._prices, **found}

    def capacity(self) -> Capacity:
        """See ``CapacitySource``."""
        seen = self._source.capacity()
        if seen.nodes and (first := self._first) is not None:
            self._first = None
            try:
                self.learn(first())
            except InfraError as error:
                log.warning("prices of nodes are not known yet; they count as 0 $/h: %s", error)
        prices = self._prices
        nodes = tuple(
            replace(node, price=prices.get((node.instance_type, node.zone, node.market), node.price))
            for node in seen.nodes
        )
        return replace(seen, nodes=nodes)


log = logging.getLogger(__name__)

SOURCES = "local[:NAME], aws[:FILE], spark://HOST:PORT"
_STAYS = 60.0  # s between notes of what nodes cost
_REGISTER = 0.0  # s to wait for a node that Systems Manager does not know: an eviction is tried again anyway


@dataclass(frozen=True)
class Nodes:
    """Where the nodes of a cluster come from."""

    source: CapacitySource
    fleet: FleetControl | None = None
    evictor: Evictor | None = None
    rented: Callable[[], FleetObservation] | None = None
    answered: Callable[[], float | None] | None = None

    def loop(self, ledger: Ledger, settings: Settings, **options: Any) -> CapacityLoop:
        """Return a loop on these nodes, which is not started; ``options`` are further ones of ``CapacityLoop``."""
        return CapacityLoop(
            ledger,
            self.fleet,
            self.source,
            settings,
            evictor=self.evictor,
            rented=self.rented,
            answered=self.answered,
            **options,
        )


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

    Raises ``OptionError``, ``SettingsError``, ``LedgerError``, ``EngineUnavailableError``, ``ClusterError``, and
    ``InfraError`` for a port of metrics that is taken.
    """
    clock = clock or SystemClock()
    rules = request.rules()
    settings = request.settings(rules)
    check_source(request, clock)  # before a ledger is made, or a cluster in it
    with ExitStack() as stack:
        ledger = stack.enter_context(Ledger.open(request.ledger, cluster=request.cluster, clock=clock))
        nodes = stack.enter_context(opened_nodes(request, ledger, clock))
        loop = nodes.loop(
            ledger,
            settings,
            clock=clock,
            listener=listener,
            pace=rules.intervals,
            seed=request.seed,
            holder=holder,
        )
        opened = partial(Ledger.open, request.ledger, cluster=request.cluster, clock=clock)
        stack.enter_context(serving_metrics(request.metrics, opened))
        yield OpenedLoop(loop, ledger, settings, rules)


def check_source(request: CapacityRequest, clock: Clock) -> None:
    """Look whether what ``request.source`` names is there, and its files are right. Nothing is opened or written.

    Raises ``OptionError``, ``SettingsError`` or ``ClusterError``.
    """
    if request.prices and request.source.partition(":")[0] != "aws":
        raise OptionError(
            f"--on-demand-prices are of nodes on AWS; the source is {request.source!r}, got {request.prices!r}"
        )
    node_source(request).check(request, clock)


@contextmanager
def opened_nodes(request: CapacityRequest, ledger: Ledger, clock: Clock) -> Iterator[Nodes]:
    """Open what ``request.source`` names. Raises ``OptionError`` for a source that there is not."""
    with node_source(request).opened(request, ledger, clock) as nodes:
        yield nodes


# --- sources ----------------------------------------------------------------------------------------------------


class NodeSource(Protocol):
    """A kind of nodes, known by what stands before the colon of ``CapacityRequest.source``.

    A new one implements these two and stands in ``NODE_SOURCES``. Its ``Nodes`` need a ``CapacitySource``; a fleet
    that can be scaled brings a ``FleetControl`` as well, and one on which processes can be ended by force an
    ``Evictor``.
    """

    def check(self, request: CapacityRequest, clock: Clock) -> None:
        """Raise where what ``request.source`` names is not there, or its files are wrong; open and write nothing."""
        ...

    def opened(self, request: CapacityRequest, ledger: Ledger, clock: Clock) -> AbstractContextManager[Nodes]:
        """Open the nodes; they are let go of at the end, and stay."""
        ...


class _Local:
    """Nodes that are processes of this machine."""

    def check(self, request: CapacityRequest, clock: Clock) -> None:
        self._attach(request, clock).close()

    @contextmanager
    def opened(self, request: CapacityRequest, ledger: Ledger, clock: Clock) -> Iterator[Nodes]:
        fleet = self._attach(request, clock)
        try:
            yield Nodes(fleet, fleet, LocalEvictor(fleet))
        finally:
            fleet.close()

    def _attach(self, request: CapacityRequest, clock: Clock) -> "LocalFleet":
        from ebbflow.infra.local_fleet import LocalFleet

        return LocalFleet.attach(request.source.partition(":")[2] or "local", hazard=hazard, clock=clock)


class _SparkMaster:
    """The workers of a standalone Spark master, which only come and go."""

    def check(self, request: CapacityRequest, clock: Clock) -> None:
        check_master(request.source)

    @contextmanager
    def opened(self, request: CapacityRequest, ledger: Ledger, clock: Clock) -> Iterator[Nodes]:
        from ebbflow.infra.spark.master_capacity import MasterCapacity

        found = MasterCapacity(self.url(request), hazard=hazard, clock=clock)
        try:
            yield Nodes(found)
        finally:
            found.close()

    def url(self, request: CapacityRequest) -> str:
        return request.source


class _Aws:
    """The pools of a fleet on AWS."""

    def check(self, request: CapacityRequest, clock: Clock) -> None:
        asked = self._asked(request)
        asked.settings(), asked.rules(), asked.listed()

    def _asked(self, request: CapacityRequest) -> "FleetRequest":
        from ebbflow.tasks.fleet.request import FleetRequest

        config = request.source.partition(":")[2] or None
        return FleetRequest(terraform_output=config, config=request.config, prices=request.prices)

    @contextmanager
    def opened(self, request: CapacityRequest, ledger: Ledger, clock: Clock) -> Iterator[Nodes]:
        from ebbflow.infra.aws.capacity import REFRESH, AwsCapacity
        from ebbflow.tasks.fleet.steps import observe, opened

        # EC2 is asked for instances as often as the loop wants to know of them, but for its throttling
        refresh = min(REFRESH, max(1.0, 2.0 * request.rules().intervals.fleet_poll_interval))
        with opened(self._asked(request), clock) as cluster:
            feed = cluster.feed()
            source = AwsCapacity(cluster.control, feed, hazard=hazard, refresh=refresh, clock=clock)
            # EC2 does not say what a node costs, and a lease without a price counts in no budget
            priced = PricedSource(
                source, lambda: {name: cluster.prices.offers(name) for name in cluster.settings.pools}
            )

            def begin() -> None:
                feed.start()
                source.start()

            accounts = RateLimited(cluster.stays.look, _STAYS, clock)

            def rented() -> FleetObservation:
                # what the source has seen last, so that EC2 is asked once for both
                seen = observe(ObservedFleet(source.fleet, cluster.control), cluster.prices)
                priced.learn(seen.offers)
                accounts()
                return FleetObservation(seen.fleet, seen.offers)

            runner = cluster.runner(_REGISTER)
            try:
                yield Nodes(
                    FirstLook(priced, begin),
                    cluster.control,
                    RemoteEvictor(runner, lambda app: services_of(ledger, app)),
                    rented,
                    lambda: source.status().seen,
                )
            finally:
                source.close()
                feed.close()


NODE_SOURCES: Mapping[str, NodeSource] = {
    "local": _Local(),
    "aws": _Aws(),
    "spark": _SparkMaster(),
}


def node_source(request: CapacityRequest) -> NodeSource:
    """Return what ``request.source`` names. Raises ``OptionError``."""
    found = NODE_SOURCES.get(request.source.partition(":")[0])
    if found is None:
        raise OptionError(f"source must be one of {SOURCES}; got {request.source!r}")
    return found


class FirstLook:
    """A source that ``begin`` is called for before the first look, which only the loop that leads takes.

    A queue of notices has one reader: one that reads while another leads would take the notices away from it.
    """

    def __init__(self, source: CapacitySource, begin: Callable[[], object]) -> None:
        self._source, self._begin = source, begin
        self._lock = threading.Lock()
        self._begun = False

    def capacity(self) -> Capacity:
        """See ``CapacitySource``. Raises what ``begin`` raises, which is tried again at the next look."""
        with self._lock:
            if not self._begun:
                self._begin()
                self._begun = True
        return self._source.capacity()


class ObservedFleet:
    """A fleet as somebody else has seen it; everything but ``observe`` is the fleet's own."""

    def __init__(self, look: Callable[[], Fleet], fleet: FleetControl) -> None:
        self.observe = look
        self.take_notices, self.apply, self.terminate = fleet.take_notices, fleet.apply, fleet.terminate
        self.repair, self.close = fleet.repair, fleet.close


class RateLimited:
    """Does something that may fail, no more often than ``every`` seconds."""

    def __init__(self, work: Callable[[], object], every: float, clock: Clock) -> None:
        self._work, self._every, self._clock = work, every, clock
        self._due = 0.0

    def __call__(self) -> None:
        if self._clock.now() < self._due:
            return
        self._due = self._clock.now() + self._every
        try:
            self._work()
        except InfraError as error:
            log.warning("prices of nodes could not be recorded; retrying: %s", error)


def services_of(ledger: Ledger, app: str) -> Sequence[str]:
    """Return the services that ``app`` may have on AWS nodes: each pool that it last reported runs one on a node."""
    report = ledger.reports([app]).get(app)
    return report.pools if report is not None else ()
