"""What the capacity loop sees, is set to, remembers and decides. Times are in seconds since the Unix epoch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf, isfinite
from typing import Any, NamedTuple

from ebbflow.planners.aggregation.demand import AggregationDemand
from ebbflow.planners.errors import OptionError
from ebbflow.planners.fleet.fallback import Fallback
from ebbflow.planners.fleet.limits import Limits, Quota
from ebbflow.planners.fleet.scaling.scale_in import NodeUse
from ebbflow.planners.fleet.scaling.steady import StabilizationWindow, StabilizedTarget
from ebbflow.planners.model.capacity import Notice
from ebbflow.planners.model.fleet import Fleet, Offer, PoolState, Target
from ebbflow.planners.model.ledger import AppReport, Change, Lease
from ebbflow.planners.model.ledger_state import State
from ebbflow.planners.model.scheduling import Placement, Policy
from ebbflow.planners.scheduling.placement_cost import ClusterLinks
from ebbflow.planners.scheduling.rho_bounded.policy import RhoBounded


class Evict(NamedTuple):
    """What is left of an app on a node is to be ended by force."""

    app: str
    node: str
    why: str


@dataclass(frozen=True, slots=True)
class SchedulerInput:
    """All that one decision is based on. Nothing in it is changed."""

    now: float
    state: State
    reports: Mapping[str, AppReport] = field(default_factory=dict)  # newest by app
    fleet: Fleet | None = None  # None: nodes cannot be rented or given back
    offers: Mapping[str, tuple[Offer, ...]] = field(default_factory=dict)  # by pool, where they are known
    uses: Mapping[str, NodeUse] = field(default_factory=dict)  # what nodes do and hold besides leases
    elsewhere: frozenset[str] = frozenset()  # what storage has a copy of
    evicted: frozenset[tuple[str, str]] = frozenset()  # (app, node) of which no process is left for certain
    asks: bool = False  # nodes that leave are replaced before they are gone only where that is asked for
    network: float = 0.0  # MB/s of each node's link, as its source has it; 0: not known
    aggregation: AggregationDemand | None = None  # None: no service, or nothing is known of it


@dataclass(frozen=True, slots=True)
class Team:
    """What the apps of one team may hold together, and what they count."""

    weight: float = 1.0
    gpus: float = inf
    dollars_per_hour: float = inf
    budget: float = inf  # dollars of all its apps that the ledger knows

    def __post_init__(self) -> None:
        if not (self.weight > 0 and isfinite(self.weight)):
            raise OptionError(f"the weight of a team must be > 0 and finite; got {self.weight}")
        for name in ("gpus", "dollars_per_hour", "budget"):
            if not getattr(self, name) >= 0:
                raise OptionError(f"{name} of a team must be >= 0; got {getattr(self, name)}")


def teams_of(weights: Mapping[str, float], quotas: Limits) -> dict[str, Team]:
    """Return the teams by name: those with a weight, which is 1 unless given, and those with a quota."""
    names = sorted({*weights, *quotas.teams})
    found = {}
    for name in names:
        quota = quotas.teams.get(name, Quota())
        found[name] = Team(weights.get(name, 1.0), quota.gpus, quota.dollars_per_hour, quota.budget)
    return found


@dataclass(frozen=True, slots=True)
class Scaling:
    """When nodes are launched and terminated. Raises ``OptionError`` for values outside their rules."""

    pools: Mapping[str, str] = field(
        default_factory=dict
    )  # pool -> "gpus", "cores" or "aggregators"; else by its nodes
    provision_time_s: float = 180.0  # from the launch request of a node to the first work on it
    scale_out_after_s: float = 60.0  # that an app is pending before nodes are launched for it
    scale_in_idle_s: float = 300.0  # that nodes are unneeded before they are drained
    cooldown_s: float = 120.0  # after a change of size before the next scale-in
    scale_tolerance: float = 0.0  # share of the nodes; a smaller scale-in is not made
    deadline_safety_factor: float = 1.1  # times the expected time of work, for deadlines
    min_marginal_goodput: float | None = (
        None  # share of a single GPU's goodput that each provisioned one must add; None: for requests only
    )
    fallback: Fallback | None = field(default_factory=Fallback)

    def __post_init__(self) -> None:
        for name in ("provision_time_s", "scale_out_after_s", "scale_in_idle_s", "cooldown_s"):
            if not 0 <= getattr(self, name) < inf:
                raise OptionError(f"{name} must be >= 0 s and finite; got {getattr(self, name)}")
        if not 1 <= self.deadline_safety_factor < inf:
            raise OptionError(
                f"deadline_safety_factor must be >= 1 times the expected time; got {self.deadline_safety_factor}"
            )
        if self.min_marginal_goodput is not None and not 0 < self.min_marginal_goodput <= 1:
            raise OptionError(
                "min_marginal_goodput must be above 0 and at most 1, a share of goodput; "
                f"got {self.min_marginal_goodput}"
            )
        if not 0 <= self.scale_tolerance < 1:
            raise OptionError(
                f"scale_tolerance must be in [0, 1), a share of the nodes; got {self.scale_tolerance}"
            )
        for pool, kind in self.pools.items():
            if kind not in ("gpus", "cores", "aggregators"):
                raise OptionError(f"pool {pool} must be for 'gpus', 'cores' or 'aggregators'; got {kind!r}")

    def purpose(self, pool: PoolState) -> str:
        """Return what a pool is for as far as it is said: by these rules, else by the pool."""
        return self.pools.get(pool.name) or pool.purpose

    @property
    def steady(self) -> StabilizationWindow:
        """Return what keeps wishes from becoming a flapping fleet."""
        return StabilizationWindow(self.scale_in_idle_s, self.cooldown_s, tolerance=self.scale_tolerance)


@dataclass(frozen=True, slots=True)
class Settings:
    """How the loop decides. Raises ``OptionError`` for values outside their rules."""

    policy: Policy = field(default_factory=RhoBounded)
    lease_s: float = 300.0  # that leases last unless the policy says how long
    interval_s: float = 60.0  # between auctions when nothing happens
    debounce_s: float = 0.2  # that changes are gathered for before they are decided on
    drain_lead_s: float = (
        30.0  # before a notice's deadline, by which GPUs are free; a quarter of the time at most
    )
    termination_grace_s: float = 60.0  # to save a checkpoint and release a preempted GPU
    heartbeat_timeout_s: float = 15.0  # without a heartbeat, after which an app is marked lost
    plan_timeout_s: float = 120.0  # that a plan stands while GPUs are awaited, beyond the termination grace
    unsaved_work_s: float = 1800.0  # of unsaved work, above which an app is protected from preemption
    preempt_exempt_s: float = 600.0  # that an app is protected from preemption at most, each time
    deadline_priority_boost_max: float = 4.0  # times its weight that an app counts at most near its deadline
    limits: Limits = field(default_factory=Limits)
    teams: Mapping[str, Team] = field(default_factory=dict)
    scaling: Scaling | None = field(default_factory=Scaling)  # None: the fleet is left alone
    links: ClusterLinks = field(default_factory=ClusterLinks)

    def __post_init__(self) -> None:
        for name in ("lease_s", "interval_s", "heartbeat_timeout_s"):
            if not 0 < getattr(self, name) < inf:
                raise OptionError(f"{name} must be > 0 s and finite; got {getattr(self, name)}")
        for name in (
            "debounce_s",
            "drain_lead_s",
            "termination_grace_s",
            "plan_timeout_s",
            "unsaved_work_s",
            "preempt_exempt_s",
        ):
            if not 0 <= getattr(self, name) < inf:
                raise OptionError(f"{name} must be >= 0 s and finite; got {getattr(self, name)}")
        if not 1 <= self.deadline_priority_boost_max < inf:
            raise OptionError(
                "deadline_priority_boost_max must be >= 1 times the weight and finite; "
                f"got {self.deadline_priority_boost_max}"
            )

    @property
    def elastic(self) -> bool:
        """Tell whether the policy may give an app other numbers of GPUs than it asked for."""
        return bool(getattr(self.policy, "elastic", False))


SCALING_KEYS: Mapping[str, str] = {
    f.name.removesuffix("_s"): f.name for f in fields(Scaling) if f.name not in ("pools", "fallback")
}
"""Key in ``ebbflow.toml`` and in a pipeline's file -> field of ``Scaling``."""
LOOP_KEYS: Mapping[str, str] = {"lease_duration": "lease_s", "auction_interval": "interval_s"} | {
    f.name.removesuffix("_s"): f.name
    for f in fields(Settings)
    if f.name == "deadline_priority_boost_max"
    or (f.name.endswith("_s") and f.name not in ("lease_s", "interval_s"))
}
"""Key in ``ebbflow.toml`` and in a pipeline's file -> field of ``Settings``."""


@dataclass(frozen=True, slots=True)
class DesiredAllocation:
    """What the standing plan has for one app."""

    placement: Placement = ()
    until: float = inf  # by the policy's word
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a decision wants everyone to hold; GPUs that others must let go of first are granted later."""

    wanted: Mapping[str, DesiredAllocation] = field(default_factory=dict)
    revision: int = -1
    at: float = -inf
    complete: bool = True  # False: something of it is still to be carried out


@dataclass(frozen=True, slots=True)
class LastHeartbeat:
    """When an app was last heard of."""

    reported: tuple[float, str]  # its report's own time, and its phase
    quiet: float = 0.0  # s of the loop's own time since that was new


@dataclass(frozen=True, slots=True)
class OrphanedLease:
    """A lease that ended because its node was gone, while its app may not know: its processes may live on there."""

    lease: Lease
    at: float  # when it ended
    reported: float | None  # the time in its app's report that was the newest then
    mute: bool = (
        False  # its app fell silent since: what it says when it is back is no word about its former self
    )


@dataclass(frozen=True, slots=True)
class AppHistoryRecord:
    """What the loop has seen of one app's life."""

    crowd: float  # app-seconds of the cluster when it was first seen
    since: float
    seconds: float = 0.0  # holding GPUs
    restarts: int = 0
    most: int = 0  # GPUs at once
    held: Placement = ()


@dataclass(frozen=True, slots=True)
class Memory:
    """What one cycle leaves to the next. A fresh one is right at any time: it only knows less."""

    at: float = -inf  # of the last cycle
    policy: Any = None  # the policy's own
    plan: Plan = field(default_factory=Plan)
    decided: float = -inf  # when the last auction was held
    recorded: float = -inf  # when the last auction was written down
    whole: float = -inf  # when one was that tells of all apps
    seen: Any = None  # what the last auction was decided on
    dirty: float | None = None  # since when there are changes that no auction has seen
    asked: float = inf  # when the policy wants to be asked again
    lacking: float | None = None  # since when trainings lack aggregators
    heartbeats: Mapping[str, LastHeartbeat] = field(default_factory=dict)
    ran: Mapping[str, AppHistoryRecord] = field(default_factory=dict)
    crowd: tuple[float, float] = (0.0, 0.0)  # app-seconds up to the last cycle, and the apps since then
    spared: Mapping[str, float] = field(default_factory=dict)  # app -> since when
    last_logged: Mapping[str, str] = field(
        default_factory=dict
    )  # what was said of each thing, not to say it twice
    evicting: Mapping[tuple[str, str], float] = field(default_factory=dict)  # when it was last asked for
    left: Mapping[int, OrphanedLease] = field(
        default_factory=dict
    )  # leases of nodes that are gone, by number
    pools: Mapping[str, StabilizedTarget] = field(default_factory=dict)
    sizes: Mapping[tuple[str, str], int] = field(default_factory=dict)  # GPUs and cores of a node, by pool
    draining: frozenset[str] = frozenset()  # nodes, as last known
    waits: Mapping[str, float] = field(default_factory=dict)  # app -> since when it waits for GPUs
    replacing: Mapping[str, float] = field(
        default_factory=dict
    )  # leaving node -> when another was last asked for


@dataclass(frozen=True, slots=True)
class Cycle:
    """What is to be done now, in this order: write the changes, apply the targets, end by force, end nodes."""

    changes: tuple[Change, ...] = ()
    targets: tuple[Target, ...] = ()
    evict: tuple[Evict, ...] = ()
    memory: Memory = field(default_factory=Memory)
    wake: float = inf  # when something is due even if nothing happens
    end: tuple[str, ...] = ()  # drained nodes on which nothing is left, to be ended
    auction: bool = False  # the policy was asked
    replace: tuple[Notice, ...] = ()  # of nodes that others are to be started for now
    drain: tuple[tuple[str, float], ...] = ()  # aggregators that are to be empty, and by when
