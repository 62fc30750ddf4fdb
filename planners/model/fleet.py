"""What the fleet planners see of the market and of a fleet, and what they decide."""

from dataclasses import dataclass

from ebbflow.planners.model.capacity import Market, Node, Notice


@dataclass(frozen=True, slots=True)
class Offer:
    """One kind of machine that can be had in one zone and market."""

    instance_type: str
    zone: str
    market: Market
    price: float  # dollars per hour, now
    cores: int
    memory: float  # GiB
    gpus: int = 0
    interruptions: float = 0.0  # expected per node-hour


@dataclass(frozen=True, slots=True)
class PoolState:
    """One pool of nodes: what should exist, was asked for, and has arrived."""

    name: str
    planned: int  # nodes that should exist
    requested: int  # nodes asked for
    nodes: tuple[Node, ...]  # observed, sorted by id; leaving ones too
    on_demand: int = 0  # of the planned, those that must be on-demand
    min_nodes: int = 0
    max_nodes: int = 0
    short_since: float | None = None  # Unix time, s: since then fewer have arrived than were asked for
    short_why: str = ""  # what the provider says about it, for people
    base: int = 0  # nodes that are to be on-demand at any time
    on_demand_since: float = 0.0  # Unix time, s, of the last change of ``on_demand``
    draining: tuple[str, ...] = ()  # nodes that targets have named to leave, not ended yet
    purpose: str = ""  # "aggregators" for nodes that can do nothing else

    @property
    def family(self) -> str:
        """Return the pool that it is, or that it is a gang of."""
        return family(self.name)


def family(pool: str) -> str:
    """Return the pool whose machines, offers and limits count for ``pool``: a gang is called ``pool/gang``.

    >>> family("gpu/run-1"), family("gpu")
    ('gpu', 'gpu')
    """
    return pool.partition("/")[0]


@dataclass(frozen=True, slots=True)
class Fleet:
    """All pools of one cluster at one revision, which grows at every change of nodes or notices."""

    revision: int
    at: float  # seconds since the Unix epoch
    pools: tuple[PoolState, ...]  # sorted by name
    notices: tuple[Notice, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """What one pool is to be from now on, decided for a fleet's ``revision``; one for an old revision is dropped."""

    pool: str
    nodes: int
    revision: int
    reason: str
    on_demand: int = 0  # of ``nodes``
    drain: tuple[str, ...] = ()  # nodes that are to leave, the first to go first
