"""What GPU schedulers see and answer: the same values in the simulator and on a live cluster.

``planners/scheduling`` holds the policies; whoever runs them (the simulator, the capacity loop) keeps the apps
up to date and carries decisions out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple, Protocol

import numpy as np

from ebbflow.planners.model.capacity import Capacity

Placement = tuple[tuple[str, int], ...]
"""(node id, GPUs) in the order in which they were taken; no zeros, no node twice."""


def gpus_of(placement: Placement) -> int:
    """Return the number of GPUs of ``placement``."""
    return sum(gpus for _, gpus in placement)


class Speed(Protocol):
    """What an app believes about its speed: measured, fitted or known."""

    def iteration_time(self, gpus: int) -> float:
        """Return seconds per iteration on ``gpus`` well-placed GPUs."""
        ...


class Goodput(Protocol):
    """What an app believes about its goodput (Pollux, OSDI 2021, section 3)."""

    def best(self, nodes: np.ndarray[Any, Any], gpus: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the best goodput over batch sizes for each pair of node and GPU counts (equal shapes)."""
        ...


class Bidder(Protocol):
    """What an app answers an auctioneer (Themis, NSDI 2020, section 4): its finish-time fairness with a bundle."""

    def rho(self, placement: Placement, capacity: Capacity, now: float) -> float:
        """Return finish time shared over finish time alone if the app held exactly ``placement`` from now on."""
        ...


@dataclass(slots=True)
class App:
    """What a policy may know of one training app. Whoever runs the policy updates it; a policy never does."""

    id: str
    number: int = 0  # order of submission: the last tie-break
    arrival: float = 0.0  # s
    gpus: int = 1  # what its user asked for: a gang that a rigid policy starts whole
    min_gpus: int = 1  # of an elastic app
    max_gpus: int = 1
    weight: float = 1.0
    team: str = ""
    model: str = ""
    skewed: bool = (
        False  # few large tensors: speed suffers from being spread (Tiresias, NSDI 2019, section 3.4)
    )
    held: Placement = ()
    lease_until: float = inf  # s
    service: float = 0.0  # attained, GPU-seconds
    run_time: float = 0.0  # s holding GPUs
    restart_time: float = 0.0  # s of `run_time` that restarts took
    first_start: float | None = None  # s
    restarts: int = 0
    most_gpus: int = 0  # the most it ever held at once
    remaining: float = inf  # iterations
    throughputs: Mapping[str, float] = field(default_factory=dict)  # iterations/s on `gpus` GPUs, by GPU type
    speed: Speed | None = None
    goodput: Goodput | None = None
    goodput_left: float = (
        inf  # what `goodput` has yet to work off, in its unit: examples at the initial batch
    )
    bidder: Bidder | None = None


class Run(NamedTuple):
    """One lease that has ended: what an app got of it. The app itself may be gone by now."""

    app: str
    type: str  # of its GPUs
    seconds: float  # of useful time, overheads not counted
    failed: bool = False  # nothing was gained


@dataclass(frozen=True, slots=True)
class View:
    """What a policy decides on. ``apps`` are the active ones in order of submission.

    ``ran`` are the leases that ended since the last decision, where whoever runs the policy keeps account of
    them; only round-based policies read it.
    """

    now: float  # s
    apps: tuple[App, ...] | list[App]
    capacity: Capacity
    ran: Sequence[Run] = ()


@dataclass(frozen=True, slots=True)
class Grant:
    """GPUs for one app until ``until``; an empty placement says why the app waits."""

    placement: Placement = ()
    until: float = inf  # s
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """Who holds what from now on, for every active app; an app left out holds nothing.

    ``memory`` is handed to the policy at its next decision. ``wake`` is when it wants to be asked again even if
    nothing happens.
    """

    grants: Mapping[str, Grant]
    memory: Any = None
    wake: float = inf  # s
    notes: Mapping[str, float] = field(
        default_factory=dict
    )  # figures for reports: gap, fitness, leftover share


def take(free: dict[str, int], app: App, placement: Placement, *, elastic: bool) -> str:
    """Take the GPUs of ``placement`` out of what is ``free`` by node; return which rule that breaks, or nothing.

    They must exist and be free, and be what the app can use: its gang, or where the policy is ``elastic`` any number
    within its bounds. Some may have been taken when a rule is broken.
    """
    held = 0
    seen = set()
    for id_, gpus in placement:
        if id_ not in free:
            return f"node {id_} does not exist"
        if id_ in seen:
            return f"node {id_} comes twice in {placement}"
        if gpus < 1 or gpus != int(gpus):
            return f"GPUs on node {id_} must be a whole number >= 1; got {gpus}"
        if gpus > free[id_]:
            return f"{gpus} GPUs on node {id_}, where {free[id_]} are free"
        seen.add(id_)
        held += gpus
        free[id_] -= gpus
    if held == app.gpus:
        return ""
    if not elastic:
        return f"{held} GPUs for a gang of {app.gpus}"
    if not app.min_gpus <= held <= app.max_gpus:
        return f"{held} GPUs; it can use {app.min_gpus} to {app.max_gpus}"
    return ""


class Agent(Protocol):
    """Chooses one job's batch size and says what policies may believe about it (Pollux, OSDI 2021, section 4).

    Whoever runs the job asks for a split at every placement and after every stretch of training, and tells the
    agent what it measured.
    """

    @property
    def adaptive(self) -> bool:
        """Tell whether the split may change while the placement does not."""
        ...

    def split(self, nodes: int, gpus: int) -> tuple[int, int]:
        """Return the batch of one GPU's forward-backward pass, and the accumulation passes before the last one."""
        ...

    def observe(
        self, nodes: int, gpus: int, local: int, passes: int, step: float, sync: float, sqr: float, var: float
    ) -> None:
        """Take one measurement: ``step`` and ``sync`` s of a pass; squared norm and variance of the gradient."""
        ...

    def report(self, app: App) -> None:
        """Set on ``app`` what policies read: ``speed``, ``goodput``, ``max_gpus``."""
        ...


class Policy(Protocol):
    """Apps and capacity in, grants with reasons out. Equal inputs, memory and generator give equal decisions.

    A policy that may give an app other counts than it asked for (``min_gpus`` to ``max_gpus``) says so with a class
    attribute ``elastic = True``; any other must give the whole gang of ``gpus`` or nothing.
    """

    @property
    def name(self) -> str: ...

    def decide(self, view: View, memory: Any, rng: np.random.Generator) -> Decision:
        """Return what everyone holds from now on; ``memory`` is the last decision's, ``None`` at first."""
        ...


UNFAIR = 1.05
"""A job with a larger ρ counts as unfairly treated (Shockwave, NSDI 2023)."""
