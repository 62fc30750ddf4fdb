"""``AwsCapacity``: the nodes of a fleet as a query or a training may count on them, with notices as they come."""

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ebbflow.infra.aws.notices.events import Event, StateChange
from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import AwsError, EngineUnavailableError, StorageError
from ebbflow.infra.protocols import FleetControl
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import Capacity, Node, Notice
from ebbflow.planners.model.fleet import Fleet

REFRESH = 10.0
"""Seconds between looks at EC2. Notices, and instances that start or end, do not wait for the next one."""
_LEAST = 1.0  # seconds between looks, however much happens: EC2 throttles
_MOST_DELAY = 60.0  # seconds between looks in an outage

log = logging.getLogger(__name__)


class Notices(Protocol):
    """What is told about nodes; ``NoticeFeed`` is one."""

    def notices(self) -> tuple[Notice, ...]: ...

    def ended(self) -> frozenset[str]: ...

    def listen(self, on_events: Callable[[Sequence[Event]], None]) -> None: ...


class NullNotices:
    """The notices of who must not read the queue, because another process does: none but those the fleet shows."""

    def notices(self) -> tuple[Notice, ...]:
        return ()

    def ended(self) -> frozenset[str]:
        return frozenset()

    def listen(self, on_events: Callable[[Sequence[Event]], None]) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class CapacityStatus:
    """How well the nodes are known, for people."""

    seen: float | None = None  # seconds since the Unix epoch: the last look that was answered
    stale_since: float | None = None  # looks have failed since then; None: they do not
    error: str = ""


def merge_notices(first: Iterable[Notice], second: Iterable[Notice]) -> tuple[Notice, ...]:
    """Return one notice a node, sorted by id: the firmest, and of equally firm ones the earliest."""
    found: dict[str, Notice] = {}
    for notice in (*first, *second):
        found[notice.node_id] = min(
            notice, found.get(notice.node_id, notice), key=lambda n: (n.kind != "interruption", n.deadline)
        )
    return tuple(found[name] for name in sorted(found))


def _forgotten(reported: Iterable[Notice], fleet: Fleet) -> bool:
    """Tell whether a node that the fleet shows has a notice that the fleet does not know of."""
    there = {node.id for pool in fleet.pools for node in pool.nodes}
    known = {notice.node_id for notice in fleet.notices}
    return any(notice.node_id in there - known for notice in reported)


class AwsCapacity:
    """A ``CapacitySource`` that merges what a fleet looks like with what is told about its nodes.

    A notice is in the next ``capacity`` after the feed has it, whether EC2 answers or not. Notices of instances that
    the fleet does not hold are not shown: they are others', or not seen yet, and then they count from the first look
    that finds the instance. With ``start`` a thread looks at the fleet and tells it of notices; without, ``capacity``
    looks. Safe for several threads.

    Args:
        fleet: whose nodes count.
        feed: the notices, opened or started by the caller, who closes it too.
        hazard: estimates losses per node-hour from losses and node-seconds seen (``planners.hazard.hazard``).
        pools: whose nodes count; ``None``: all.
        refresh: seconds between looks.

    Raises ``OptionError`` for a ``refresh`` below a second.
    """

    def __init__(
        self,
        fleet: FleetControl,
        feed: Notices,
        *,
        hazard: Callable[[int, float], float],
        pools: Collection[str] | None = None,
        refresh: float = REFRESH,
        clock: Clock | None = None,
    ) -> None:
        if not refresh >= _LEAST:
            raise OptionError(f"refresh must be >= {_LEAST:g} s; got {refresh}")
        self._control, self._feed, self._hazard = fleet, feed, hazard
        self._pools = frozenset(pools) if pools is not None else None
        self._refresh = refresh
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._fleet: Fleet | None = None
        self._reported: tuple[Notice, ...] = ()  # what the fleet was told last
        self._last: Capacity | None = None
        self._looked = 0.0  # when the last look began
        self._status = CapacityStatus()
        self._released: set[str] = set()
        self._losses = 0
        self._node_seconds = 0.0
        self._changed = threading.Event()  # replaced whenever the revision grows
        self._wake = threading.Event()
        self._hurry = False  # an instance has started or ended
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        feed.listen(self._hear)

    # --- what there is ------------------------------------------------------------------------------------

    def capacity(self) -> Capacity:
        """Return what is there now; see ``CapacitySource``.

        Raises ``EngineUnavailableError`` when EC2 has never answered.
        """
        if self._fleet is None:
            try:
                self.look()
            except (AwsError, StorageError) as error:
                raise EngineUnavailableError(f"polling the fleet failed: {error}") from error
        elif self._thread is None and self._clock.now() - self._looked >= self._refresh:
            self._try_look()
        return self._merge()

    def fleet(self) -> Fleet:
        """Return the fleet as it was last seen, with the notices that have come since, for deciding about it.

        Its revision is the fleet's own, which targets must name. Raises ``EngineUnavailableError`` like ``capacity``.
        """
        self.capacity()
        if self._thread is None:
            self._try_notify()
        with self._lock:
            assert self._fleet is not None
            return self._fleet

    def wait(self, revision: int, timeout: float) -> Capacity:
        """Return when the capacity's revision is not ``revision`` any more, or after ``timeout`` seconds.

        Raises ``EngineUnavailableError`` as ``capacity`` does.
        """
        end = self._clock.now() + timeout
        while True:
            changed = self._changed
            found = self.capacity()
            left = end - self._clock.now()
            if found.revision != revision or left <= 0:
                return found
            self._clock.wait(changed, left if self._thread else min(left, self._refresh))

    def status(self) -> CapacityStatus:
        """Return how well the nodes are known."""
        with self._lock:
            return self._status

    @property
    def losses(self) -> int:
        """Return how many nodes have had a firm notice or vanished so far, those not counted that were released."""
        return self._losses

    def release(self, ids: Iterable[str]) -> None:
        """Say that these nodes leave because we want it: their end says nothing about the hazard."""
        with self._lock:
            self._released.update(ids)

    # --- looking ------------------------------------------------------------------------------------------

    def look(self) -> Capacity:
        """Look at the fleet now. Raises ``AwsError`` and ``StorageError``; what was known then stays."""
        with self._looking:
            self._looked = self._clock.now()
            self._try_notify()
            fleet = self._control.observe()
            with self._lock:
                forgotten = _forgotten(self._reported, fleet)
                if forgotten:
                    self._reported = ()
                self._fleet = fleet
                self._released.update(name for pool in fleet.pools for name in pool.draining)
                recovered = self._status.stale_since
                self._status = CapacityStatus(self._clock.now())
            if forgotten:  # it was told while a look left the node out
                self._try_notify()
        if recovered is not None:
            log.warning("the fleet is available again after %.0f s", self._clock.now() - recovered)
        return self._merge()

    def start(self) -> None:
        """Look from now on in a thread of its own."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ebbflow-capacity", daemon=True)
            self._thread.start()

    def close(self, timeout: float = 30.0) -> None:
        """Stop looking, within ``timeout`` seconds. Fleet and feed stay open. May be called twice."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def __enter__(self) -> "AwsCapacity":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- how ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        due, delay = self._looked + self._refresh if self._fleet else 0.0, self._refresh
        while not self._stop.is_set():
            now = self._clock.now()
            if now >= due or (self._hurry and now >= self._looked + _LEAST):
                self._hurry = False
                delay = self._refresh if self._try_look() else min(2 * delay, _MOST_DELAY)
                due = self._clock.now() + delay
            else:
                self._try_notify()
            soon = min(due, self._looked + _LEAST) if self._hurry else due
            self._clock.wait(self._wake, max(0.0, soon - self._clock.now()))
            self._wake.clear()

    def _hear(self, events: Sequence[Event]) -> None:
        """Take note, in the feed's thread, that something was told."""
        if any(isinstance(event, StateChange) and self._concerns(event) for event in events):
            self._hurry = True
        if self._fleet is not None:
            self._merge()
        self._wake.set()

    def _concerns(self, event: StateChange) -> bool:
        """Tell whether a look is due: one of our nodes changes, or an instance runs that may be ours."""
        fleet = self._fleet
        known = {node.id for pool in fleet.pools for node in pool.nodes} if fleet else set()
        missing = fleet is None or any(len(pool.nodes) < pool.planned for pool in fleet.pools)
        return event.instance in known or (event.state == "running" and missing)

    def _try_look(self) -> bool:
        try:
            self.look()
        except (AwsError, StorageError) as error:
            self._failed(error)
            return False
        return True

    def _try_notify(self) -> None:
        try:
            self._notify()
        except (AwsError, StorageError) as error:
            log.warning("interruption notices cannot be sent to the fleet yet: %s", error)

    def _notify(self) -> None:
        """Hand notices to the fleet, which keeps them and whose revision grows."""
        notices = self._feed.notices()
        if notices == self._reported:
            return
        revision = self._control.take_notices(notices)
        with self._lock:
            self._reported = notices
            if self._fleet is not None:
                there = {node.id for pool in self._fleet.pools for node in pool.nodes}
                ours = [notice for notice in notices if notice.node_id in there]
                merged = merge_notices(self._fleet.notices, ours)
                self._fleet = replace(self._fleet, revision=revision, notices=merged)

    def _failed(self, error: Exception) -> None:
        now = self._clock.now()
        with self._lock:
            first = self._status.stale_since is None
            since = now if first else self._status.stale_since
            self._status = replace(self._status, stale_since=since, error=str(error))
        if first:
            log.warning("polling the fleet failed; its last known nodes are used: %s", error)

    def _merge(self) -> Capacity:
        """Return the present capacity, from what is known already."""
        now, told, ended = self._clock.now(), self._feed.notices(), self._feed.ended()
        with self._lock:
            assert self._fleet is not None
            nodes = self._nodes(self._fleet, ended)
            there = {node.id for node in nodes}
            merged = merge_notices(self._fleet.notices, told)
            notices = tuple(notice for notice in merged if notice.node_id in there)
            last = self._last
            if last is None:
                self._last = Capacity(1, nodes, notices, now, self._hazard(0, 0.0))
                return self._last
            found = Capacity(last.revision, nodes, notices, now)
            self._node_seconds += len(last.usable) * max(0.0, now - last.at)
            still = {node.id for node in found.usable}
            self._losses += sum(n.id not in still and n.id not in self._released for n in last.usable)
            revision = last.revision + (not found.same_nodes(last))
            hazard = self._hazard(self._losses, self._node_seconds)
            self._last = Capacity(revision, nodes, notices, max(now, last.at), hazard)
            if revision != last.revision:
                self._changed.set()
                self._changed = threading.Event()
            return self._last

    def _nodes(self, fleet: Fleet, ended: frozenset[str]) -> tuple[Node, ...]:
        return tuple(
            sorted(
                (
                    node
                    for pool in fleet.pools
                    if self._pools is None or pool.name in self._pools
                    for node in pool.nodes
                    if node.id not in ended
                ),
                key=lambda node: node.id,
            )
        )
