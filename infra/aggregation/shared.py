"""``SharedAggregator``: an aggregator that serves trainings of several runs, as the cluster's ledger says.

It admits the workers of the trainings that are registered, moves its tensors to where the placement wants them, and
writes what it holds and measured. Whichever of them is in charge also decides; see ``manager``.
"""

import logging
import threading
import time
from dataclasses import replace

from ebbflow.infra.aggregation.aggregator import SERVICE, Aggregator
from ebbflow.infra.aggregation.manager import ServiceManager
from ebbflow.infra.aggregation.registry import (
    AGGREGATOR,
    HEARTBEAT,
    AggregatorRecord,
    ServiceRegistry,
    ServiceView,
    plain_name,
)
from ebbflow.infra.errors import AggregationError, InfraError
from ebbflow.planners.aggregation.assignment import RECOMMENDED, HeuristicOptions

_POLL = 0.25  # seconds between two looks at the ledger
_MOVING = 0.5  # of the time until it leaves, in which its tensors are to be elsewhere

log = logging.getLogger(__name__)


class SharedAggregator:
    """One process's part of a shared service. Used by one thread, but for ``leave``.

    Args:
        aggregator: that listens.
        registry: of the cluster's service.
        options: of the assignment, where it is in charge.
        node: ID of the node that it is on; empty: not known.

    Raises ``AggregationError`` where another aggregator has its name.
    """

    def __init__(
        self,
        aggregator: Aggregator,
        registry: ServiceRegistry,
        options: HeuristicOptions = RECOMMENDED,
        *,
        node: str = "",
    ) -> None:
        self._aggregator, self._registry, self._name = aggregator, registry, aggregator.name
        self._manager = ServiceManager(registry, aggregator.name, options)
        self._record = AggregatorRecord(aggregator.address, aggregator.public, aggregator.peer, node=node)
        self._admitted: dict[str, int] = {}
        self._refused: dict[str, int] = {}  # the same of those whose workers cannot be admitted
        self._peers: dict[str, str] = {}  # keys of other aggregators
        self._written = float("-inf")
        self._deadline: float | None = None  # seconds since the Unix epoch
        self._asked_to_leave = threading.Event()
        self._within = 0.0
        plain = plain_name(self._name)
        view = registry.read()
        if plain in map(plain_name, view.aggregators()):
            raise AggregationError(f"aggregator {plain} serves this cluster already; choose another name")
        for name in view.kind(AGGREGATOR):  # what is left of earlier ones
            if plain_name(name) == plain:
                registry.drop_aggregator(name)

    def leave(self, within_s: float) -> None:
        """Let others take its tensors; ``serve`` ends when it has none, or after ``within_s`` seconds.

        Another call can only bring the end forward.
        """
        self._within = within_s
        self._asked_to_leave.set()

    def serve(self, stop: threading.Event) -> None:
        """Serve until ``stop`` is set, or it has left; an unreachable ledger is tried again."""
        while not stop.is_set():
            try:
                if self.look():
                    return
            except InfraError as exc:
                log.warning("aggregator %s: %s", self._name, exc)
            stop.wait(_POLL)

    def look(self) -> bool:
        """Do what the ledger says, once, and return whether it has left. Raises ``InfraError``."""
        view = self._registry.read()
        asked = [by for by in (self._deadline, view.drain_of(self._name)) if by is not None]
        if self._asked_to_leave.is_set():
            self._asked_to_leave.clear()
            asked.append(view.now + self._within)
        self._deadline = min(asked, default=None)
        self._admit(view)
        self._move(view)
        left = self._deadline is not None and (not self._serves() or view.now >= self._deadline)
        # mirrors go with it, of which their trainings are told as of a loss
        self._announce(ended=left and not self._aggregator.held())
        if left:
            self._manager.resign()
            return True
        try:
            self._manager.act(view)
        except InfraError:
            raise
        except Exception:  # of a plan: what is placed stays as it is, and its tensors are not lost by it
            log.exception("aggregator %s could not plan", self._name)
        return False

    def close(self) -> None:
        """Write that it is gone, and end. Raises ``LedgerError``."""
        try:
            if not self._record.ended:
                self._registry.drop_aggregator(self._name)
                self._manager.resign()
        finally:
            self._aggregator.close()

    def _serves(self) -> bool:
        return any(not one.mirror for one in self._aggregator.held())

    def _admit(self, view: ServiceView) -> None:
        there = view.aggregators()
        for name in self._peers.keys() - there.keys():
            self._aggregator.dismiss(SERVICE, name)
            self._aggregator.keep_from(name)
            del self._peers[name]
        for name, one in there.items():
            if name != self._name and self._peers.get(name) != one.peer:
                self._aggregator.dismiss(SERVICE, name)
                self._aggregator.admit(SERVICE, {name: one.peer})
                self._peers[name] = one.peer
        trainings = view.trainings()
        for job in (self._admitted | self._refused).keys() - trainings.keys():
            self._aggregator.remove(job)
            self._admitted.pop(job, None)
            self._refused.pop(job, None)
        for job, training in trainings.items():
            number = training.revision
            if job == SERVICE or number in (self._admitted.get(job), self._refused.get(job)):
                continue
            try:
                self._aggregator.admit(job, dict(training.peers))
                self._admitted[job] = number
            except AggregationError as exc:  # the others are served
                self._refused[job] = number
                log.warning("aggregator %s does not admit workers of %s: %s", self._name, job, exc)

    def _move(self, view: ServiceView) -> None:
        placement, there = view.placement(), view.aggregators()
        targets = {}
        for one in self._aggregator.held():
            key = one.job_id, one.name
            target = placement.get(key, self._name)
            if target != self._name and target in there and not one.mirror:
                targets[key] = target, there[target].where
        left = self._deadline - view.now if self._deadline is not None else None
        self._aggregator.move(targets, None if left is None else _MOVING * left)

    def _announce(self, *, ended: bool) -> None:
        held = self._aggregator.summaries()
        record = replace(
            self._record, held=held, admitted=dict(self._admitted), leaving=self._deadline, ended=ended,
            moved=self._aggregator.moved, waited=self._aggregator.waited, updates=self._aggregator.rounds,
        )  # fmt: skip
        now = time.monotonic()
        old = self._record
        same = (old.admitted, old.leaving, old.ended, old.moved) == (
            record.admitted, record.leaving, record.ended, record.moved
        )  # fmt: skip
        if same and now - self._written < HEARTBEAT:
            return
        self._registry.put_aggregator(self._name, record)
        self._record, self._written = record, now
