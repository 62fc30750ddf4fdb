"""What a loop sees: capacity and fleet, looked at in threads of their own so that a slow answer delays nobody.

What a look at the capacity changes in the ledger: pure.
"""

import logging
import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, Protocol, TypeVar, runtime_checkable

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import InfraError
from ebbflow.infra.protocols import CapacitySource, FleetControl
from ebbflow.planners.fleet.scaling.scale_in import NodeUse
from ebbflow.planners.model.capacity import Capacity, CapacityDiff, Node, Notice
from ebbflow.planners.model.fleet import Fleet, Offer
from ebbflow.planners.model.ledger import CapacityChanged
from ebbflow.planners.model.ledger_state import State
from ebbflow.tasks.capacity.intervals import LoopIntervals

T = TypeVar("T")

_MOST_DELAY = 30.0  # s between looks at something that fails
_STAMPS = 4096  # changes that are told apart between two cycles
_END = 10.0  # s for a look that is under way when the loop ends

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FleetObservation:
    """A fleet, what can be had beside it, and what its nodes do."""

    fleet: Fleet
    offers: Mapping[str, tuple[Offer, ...]] = field(default_factory=dict)  # by pool, where they are known
    uses: Mapping[str, NodeUse] = field(default_factory=dict)  # besides leases
    elsewhere: frozenset[str] = frozenset()  # what storage has a copy of


@dataclass(frozen=True, slots=True)
class ObservedState:
    """What was last seen. Times are seconds of the loop's clock."""

    capacity: Capacity | None = None  # None: never answered
    capacity_at: float = 0.0
    rented: FleetObservation | None = None
    rented_at: float = 0.0
    changed: tuple[float, ...] = ()  # when each change since the last ``take`` was seen
    problems: tuple[str, ...] = ()  # what does not answer now, as sentences

    def age(self, now: float) -> float:
        """Return how old the capacity is, s."""
        return max(0.0, now - self.capacity_at)

    def fresh(self, now: float, stale: float) -> FleetObservation | None:
        """Return the fleet, unless it or the capacity is older than ``stale`` seconds: nothing is scaled by that."""
        if self.rented is None or now - self.rented_at > stale or self.age(now) > stale:
            return None
        return self.rented


@runtime_checkable
class Offering(Protocol):
    """A fleet that knows what can be had."""

    def offers(self, pool: str) -> tuple[Offer, ...]: ...


def look_at(fleet: FleetControl) -> FleetObservation:
    """Look at a fleet, and at its offers where it knows them itself. Raises an ``InfraError``."""
    seen = fleet.observe()
    if not isinstance(fleet, Offering):
        return FleetObservation(seen)
    return FleetObservation(seen, {pool.name: fleet.offers(pool.name) for pool in seen.pools})


class _Poll(Generic[T]):
    """One thing that is looked at again and again; what was seen last stays when a look fails."""

    def __init__(
        self, what: str, ask: Callable[[], T], same: Callable[[T, T], bool], every: float, clock: Clock
    ) -> None:
        self.what, self.every = what, every
        self._ask, self._same, self._clock = ask, same, clock
        self._jitter = random.Random(f"{what}")  # noqa: S311 - spreads looks, no secret
        self.seen: T | None = None
        self.at = 0.0
        self.stamps: list[float] = []  # of changes nobody has taken yet
        self.problem = ""
        self._failed_at = 0.0
        self._failures = 0
        self.due = 0.0
        self._again = False  # another look was asked for since this one began
        self.lock = threading.Lock()

    def look(self) -> bool:
        """Look once; tell whether something else is seen than before."""
        with self.lock:
            self._again = False
        try:
            found = self._ask()
        except (InfraError, OSError) as error:
            self._fail(error)
            return False
        now = self._clock.now()
        with self.lock:
            news = self.seen is None or not self._same(self.seen, found)
            self.seen, self.at = found, now
            if news and len(self.stamps) < _STAMPS:
                self.stamps.append(now)
        if self._failures:
            log.warning("%s is available again after %.0f s", self.what, now - self._failed_at)
        self._failures, self.problem = 0, ""
        with self.lock:
            self.due = now if self._again else now + self.every
        return news

    def soon(self) -> None:
        """Let a look be due at once: also after one under way, which may have seen what was before."""
        with self.lock:
            self.due, self._again = 0.0, True

    def _fail(self, error: Exception) -> None:
        now = self._clock.now()
        self._failures += 1
        if self._failures == 1:
            self._failed_at = now
            log.warning("polling %s failed; the last observed state is used: %s", self.what, error)
        self.problem = f"{self.what} has not answered for {now - self._failed_at:.0f} s: {error}"
        delay = min(_MOST_DELAY, self.every * 2.0 ** min(self._failures - 1, 16))
        self.due = now + delay * self._jitter.uniform(0.5, 1.0)


class Watch:
    """Looks at a source, and a fleet where there is one.

    With ``start`` in threads, which set ``wake`` at each change; without, ``take`` looks when a look is due.
    """

    def __init__(
        self,
        source: CapacitySource,
        fleet: FleetControl | None,
        pace: LoopIntervals,
        clock: Clock,
        rented: Callable[[], FleetObservation] | None = None,
        answered: Callable[[], float | None] | None = None,
    ) -> None:
        # `answered` tells when the source last had an answer, for one that hides for how long it has had none
        self._clock = clock
        self._answered = answered
        self._capacity = _Poll(
            "the capacity", source.capacity, Capacity.same_nodes, pace.capacity_poll_interval, clock
        )
        if rented is None and fleet is not None:
            rented = partial(look_at, fleet)
        self._fleet = (
            _Poll("the fleet", rented, _same_fleet, pace.fleet_poll_interval, clock)
            if rented is not None
            else None
        )
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self._hurry = threading.Event()

    def start(self, wake: threading.Event) -> None:
        """Look once at everything, so that there is something to decide on, then continue in threads."""
        for look in self._looks():
            look.look()
        for look in self._looks():
            thread = threading.Thread(
                target=self._run, args=(look, wake), name=f"loop-{look.what}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def refresh(self) -> None:
        """Look at the fleet soon: something was asked of it."""
        if self._fleet is not None:
            self._fleet.soon()
            self._hurry.set()

    def take(self) -> ObservedState:
        """Return what was last seen, and the changes since the last call."""
        if not self._threads:
            for look in self._looks():
                if self._clock.now() >= look.due:
                    look.look()
        changed: list[float] = []
        for look in self._looks():
            with look.lock:
                changed += look.stamps
                look.stamps.clear()
        fleet, seen = self._fleet, self._capacity.seen
        at = self._capacity.at
        if seen is not None:
            # a source that cannot be reached returns what it knew, with the time of that
            told = self._answered() if self._answered is not None else seen.at
            at = min(at, told) if told else at
        return ObservedState(
            seen,
            at,
            fleet.seen if fleet else None,
            fleet.at if fleet else 0.0,
            tuple(sorted(changed)),
            tuple(look.problem for look in self._looks() if look.problem),
        )

    def newest(self) -> Capacity | None:
        """Return the capacity as last seen; its changes stay to be taken."""
        return self._capacity.seen

    def stop(self) -> None:
        """End the threads; one that waits for an answer is left to itself, being a daemon."""
        self._stop.set()
        self._hurry.set()
        for thread in self._threads:
            thread.join(_END)

    def _looks(self) -> "tuple[_Poll[Capacity] | _Poll[FleetObservation], ...]":
        return (self._capacity,) if self._fleet is None else (self._capacity, self._fleet)

    def _run(self, look: "_Poll[Capacity] | _Poll[FleetObservation]", wake: threading.Event) -> None:
        hurried = look is self._fleet
        while not self._stop.is_set():
            left = look.due - self._clock.now()
            if left > 0:
                self._clock.wait(self._hurry if hurried else self._stop, left)
                if hurried and self._hurry.is_set():
                    self._hurry.clear()
                    continue  # the due time has moved, or it is the end
                if self._stop.is_set():
                    return
            try:
                if look.look():
                    wake.set()
            except Exception:
                # a defect of a source must not end the watch in silence: the loop would continue blindly
                log.exception("polling %s failed", look.what)
                look.due = self._clock.now() + _MOST_DELAY


def _same_fleet(before: FleetObservation, after: FleetObservation) -> bool:
    return before.fleet.revision == after.fleet.revision


PRICE = 0.05
"""Share by which a price must differ to be news: spot prices move all the time, and each change is kept for ever."""


HAZARD = 0.5  # the same of the hazard


DEADLINE = 1.0  # s by which a deadline must differ


def change(state: State, seen: Capacity) -> CapacityChanged | None:
    """Return what ``seen`` changes in ``state``; ``None`` where it is no news.

    The revision is the ledger's own: it continues across loops, while a source counts anew in each process.
    """
    here = {node.id: node for node in seen.nodes}
    came = tuple(node for id_, node in sorted(here.items()) if _differs(state.nodes.get(id_), node))
    left = tuple(sorted(id_ for id_ in state.nodes if id_ not in here))
    # a notice of a node that is not there says nothing yet: it counts from the look that has the node
    notices = _firmest(notice for notice in seen.notices if notice.node_id in here)
    if not (came or left or _news(state, notices) or _hazard(state, seen)):
        return None
    return CapacityChanged(
        state.revision + 1, came, left, notices, seen.hazard, _said(state, replace(seen, notices=notices))
    )


def known(state: State) -> Capacity:
    """Return the capacity as the ledger has it."""
    nodes = tuple(node for _, node in sorted(state.nodes.items()))
    notices = tuple(notice for _, notice in sorted(state.notices.items()))
    return Capacity(state.revision, nodes, notices, state.at, state.hazard)


def _firmest(notices: Iterable[Notice]) -> tuple[Notice, ...]:
    """Return one notice of each node, by node: a firm one before advice, then that with the earliest deadline."""
    found: dict[str, Notice] = {}
    for notice in sorted(notices, key=lambda one: (one.kind != "interruption", one.deadline)):
        found.setdefault(notice.node_id, notice)
    return tuple(notice for _, notice in sorted(found.items()))


def _differs(before: Node | None, after: Node) -> bool:
    if before == after:
        return False
    if before is None or replace(before, price=after.price) != after:
        return True
    return abs(after.price - before.price) > PRICE * max(before.price, after.price)


def _news(state: State, notices: Sequence[Notice]) -> bool:
    """Tell whether the notices say something else than those known; sources may estimate deadlines anew each time."""
    return len(notices) != len(state.notices) or any(
        (before := state.notices.get(notice.node_id)) is None
        or before.kind != notice.kind
        or abs(before.deadline - notice.deadline) > DEADLINE
        for notice in notices
    )


def _hazard(state: State, seen: Capacity) -> bool:
    return abs(seen.hazard - state.hazard) > HAZARD * max(seen.hazard, state.hazard)


def _said(state: State, seen: Capacity) -> str:
    said = str(CapacityDiff.between(known(state), seen))
    return said if said != "no change" else "node attributes changed"
