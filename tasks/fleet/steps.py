"""A fleet in four steps, one function each: observe, decide, guard, act. Every choice is a planner's.

>>> with opened(FleetRequest(terraform_output="ebbflow.json")) as fleet:  # doctest: +SKIP
...     seen = observe(fleet.control, fleet.prices)
...     target = decide(seen, wish(seen, "etl", nodes=5, why="asked for"), fleet.rules)
...     verdict = guard(seen, target, fleet.rules)
...     done = act(fleet.control, verdict, dry_run=True)
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ebbflow.infra.aws.clients import Clients
from ebbflow.infra.aws.fleet.fleet import SpotFleet
from ebbflow.infra.aws.fleet.state import FolderStore
from ebbflow.infra.aws.fleet.usage import UsageStore
from ebbflow.infra.aws.notices.dead_letters import DeadLetters
from ebbflow.infra.aws.notices.feed import NoticeFeed
from ebbflow.infra.aws.notices.store import NoticeFile
from ebbflow.infra.aws.prices.prices import PriceCache
from ebbflow.infra.aws.remote import RemoteRunner
from ebbflow.infra.aws.settings import Settings
from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import InfraError, StorageError
from ebbflow.infra.protocols import ApplyResult, FleetControl, GangControl, PriceSource, Refusal
from ebbflow.infra.storage.files import home
from ebbflow.infra.storage.jsonstore import JsonStore
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError
from ebbflow.planners.fleet import guard as guarding
from ebbflow.planners.fleet.fallback import amended
from ebbflow.planners.fleet.guard import GuardResult, RunMoney, new_nodes
from ebbflow.planners.fleet.scaling.scale_in import NodeUse, with_drains
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.fleet import Fleet, Offer, PoolState, Target
from ebbflow.tasks.fleet.request import FleetRequest, FleetRules


@dataclass(frozen=True)
class OpenedFleet:
    """Everything of one cluster, ready to be used."""

    settings: Settings
    rules: FleetRules
    clients: Clients
    control: FleetControl
    gangs: GangControl
    prices: PriceSource
    stays: UsageStore
    notices: NoticeFile
    clock: Clock

    def runner(self, register: float) -> RemoteRunner:
        """Return what runs commands on nodes; a node that is starting is waited for ``register`` seconds."""
        return RemoteRunner(
            self.clients, self.settings.names, self.settings.documents, register=register, clock=self.clock
        )

    def feed(self) -> NoticeFeed:
        """Return a reader of the notice queue; two readers would take each other's notices away."""
        return NoticeFeed(
            self.clients, self.settings.notice_queue_url, self.notices, wait=1, clock=self.clock
        )

    def dead_letters(self) -> DeadLetters:
        """Return the notices that could not be handled."""
        return DeadLetters(self.clients, self.settings.dead_letter_queue_url)

    def waiting(self) -> int:
        """Return about how many notices nobody has read yet. Raises ``AwsError``."""
        return DeadLetters(self.clients, self.settings.notice_queue_url).count()

    def read_here(self) -> bool:
        """Tell whether a process of this machine reads the notices."""
        try:
            with self.notices.held():
                return False
        except StorageError:
            return True


@contextmanager
def opened(request: FleetRequest, clock: Clock | None = None) -> Iterator[OpenedFleet]:
    """Open the cluster that ``request`` names; nothing is asked of AWS yet.

    Raises ``SettingsError`` or ``OptionError`` for files that are missing or wrong, ``AwsError`` without boto3.
    """
    clock = clock or SystemClock()
    settings, rules, listed = request.settings(), request.rules(), request.listed()
    clients = Clients(
        settings.region,
        request.endpoint_url,
        request.profile,
        role_arn=None if request.own_credentials else settings.capacity_role_arn,
    )
    folder, cluster = request.directory(), settings.cluster
    control = SpotFleet(settings, clients, FolderStore(folder, cluster, clock), clock)
    try:
        yield OpenedFleet(
            settings,
            rules,
            clients,
            control,
            control.gangs,
            PriceCache(
                clients, settings, JsonStore(StorageLocation(home() / "prices")), listed=listed, clock=clock
            ),
            # a cluster's name has no dots, so these are nobody's plans
            UsageStore(clients, settings.names, folder / f"{cluster}.stays.json", clock),
            NoticeFile(folder / f"{cluster}.notices.json", clock),
            clock,
        )
    finally:
        control.close()


# --- observe ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Observation:
    """A fleet whose nodes have their present prices, and what can be had beside them."""

    fleet: Fleet
    offers: Mapping[str, tuple[Offer, ...]] = field(default_factory=dict)  # by pool, where they are known
    problems: tuple[str, ...] = ()  # what could not be had, as sentences

    def pool(self, name: str) -> PoolState:
        """Return one pool. Raises ``OptionError`` for a name that there is not."""
        for pool in self.fleet.pools:
            if pool.name == name:
                return pool
        known = ", ".join(pool.name for pool in self.fleet.pools) or "none"
        raise OptionError(f"there is no pool {name!r} in this cluster; there are {known}")

    def pool_of(self, node: str) -> PoolState:
        """Return the pool of a node. Raises ``OptionError`` for a node that is not the cluster's."""
        for pool in self.fleet.pools:
            if any(one.id == node for one in pool.nodes):
                return pool
        raise OptionError(
            f"{node} is no running node of this cluster: it is terminated or has other tags; ebbflow fleet status "
            "lists the running nodes"
        )


def observe(control: FleetControl, prices: PriceSource) -> Observation:
    """Look at the fleet and at the market. Prices that cannot be had are problems, no errors.

    Raises ``AwsError`` and ``StorageError`` where the fleet cannot be looked at.
    """
    fleet = control.observe()
    offers: dict[str, tuple[Offer, ...]] = {}
    problems: list[str] = []
    for name in dict.fromkeys(pool.family for pool in fleet.pools):
        try:
            offers[name] = prices.offers(name)
        except OptionError:
            continue  # nodes without a pool
        except InfraError as error:
            problems.append(f"prices of {name} are not known: {error}")
    pools = tuple(
        replace(pool, nodes=tuple(_priced(node, offers.get(pool.family, ())) for node in pool.nodes))
        for pool in fleet.pools
    )
    return Observation(replace(fleet, pools=pools), offers, (*problems, *prices.problems()))


def _priced(node: Node, offers: Sequence[Offer]) -> Node:
    wanted = node.instance_type, node.zone, node.market
    found = (o.price for o in offers if (o.instance_type, o.zone, o.market) == wanted)
    return replace(node, price=next(found, node.price))


@contextmanager
def take_notices(fleet: OpenedFleet) -> Iterator[NoticeFeed]:
    """Read notices in this process; what they say is the fleet's once the block ends.

    Raises ``NoticeError`` where another process of this machine reads them.
    """
    feed = fleet.feed()
    feed.open()
    try:
        yield feed
        fleet.control.take_notices(feed.notices())
    finally:
        feed.close()


# --- decide -------------------------------------------------------------------------------------------------


def wish(
    seen: Observation,
    pool: str,
    nodes: int,
    why: str,
    *,
    drain: Sequence[str] = (),
    on_demand: int | None = None,
) -> Target:
    """Return a target as somebody wants it; ``on_demand`` is the present plan's unless given."""
    state = seen.pool(pool)
    planned = state.on_demand if on_demand is None else on_demand
    return Target(pool, nodes, seen.fleet.revision, why, max(0, min(planned, nodes)), tuple(drain))


def size_without(pool: PoolState, ids: Sequence[str]) -> int:
    """Return what to plan so that ``ids`` leave and nobody comes in their place.

    A node that is drained already counts only as far as the plan still has a place for it: a command that was
    interrupted can be given again.
    """
    drained = set(ids) & set(pool.draining)
    staying = sum(node.id not in pool.draining for node in pool.nodes)
    coming = max(0, pool.requested - len(pool.nodes))
    places = max(0, pool.planned - staying - coming)
    return max(0, pool.planned - (len(set(ids)) - len(drained)) - min(len(drained), places))


def decide(seen: Observation, wanted: Target, rules: FleetRules) -> Target:
    """Return what a pool is to be: the wish, on-demand nodes where spot is dry, and who leaves if it is too large.

    ``wanted`` comes from ``wish``, or from a rule of ``planners.fleet.scaling``.
    """
    pool, notices = seen.pool(wanted.pool), seen.fleet.notices
    target = amended(wanted, pool, seen.fleet.at, rules.fallback, notices)
    if target.drain:
        return target  # who leaves has been said
    return with_drains(target, pool, {}, notices=notices)


# --- guard --------------------------------------------------------------------------------------------------


def guard(
    seen: Observation,
    target: Target,
    rules: FleetRules,
    *,
    uses: Mapping[str, NodeUse] | None = None,
    elsewhere: Collection[str] = (),
    run: RunMoney | None = None,
) -> GuardResult:
    """Return what of ``target`` may be applied.

    ``uses`` says what nodes hold, ``elsewhere`` what storage has a copy of, ``run`` what the run that the pool works
    for has cost; what is not known limits nothing.
    """
    return guarding.check(
        target,
        seen.fleet,
        rules.limits,
        new=new_nodes(seen.offers),
        uses=uses,
        elsewhere=elsewhere,
        run=run,
    )


# --- act ----------------------------------------------------------------------------------------------------


def act(control: FleetControl, verdict: GuardResult, *, dry_run: bool = False) -> ApplyResult:
    """Apply what the guard has let through; a dry run says what would be asked. Raises ``AwsError``."""
    if verdict.target is None:
        return ApplyResult(
            -1, refused=tuple(Refusal("guard", why) for why in verdict.reasons), dry_run=dry_run
        )
    return control.apply(verdict.target, dry_run=dry_run)


def same_choice(first: GuardResult, second: GuardResult) -> bool:
    """Tell whether two verdicts change a fleet alike, whatever the revision they are for."""
    if first.target is None or second.target is None:
        return first.target is second.target
    return replace(first.target, revision=0, reason="") == replace(second.target, revision=0, reason="")
