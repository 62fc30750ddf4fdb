"""One cycle after another: what is seen, decided, written and done; ``loop`` says why in this order."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import DoubleBookingError, InfraError, LedgerUnavailableError
from ebbflow.infra.ledger import Ledger
from ebbflow.planners.capacity.decision import decide
from ebbflow.planners.capacity.values import Cycle, Memory, SchedulerInput, Settings
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Capacity
from ebbflow.planners.model.ledger import AppReport, Change, Decided, Event, Granted
from ebbflow.planners.model.ledger_state import State
from ebbflow.tasks.apps.aggregation import ServiceWatch
from ebbflow.tasks.apps.loop_report import RESERVED
from ebbflow.tasks.capacity import events as loop_events
from ebbflow.tasks.capacity.actuator import ActionExecutor, Done, EvictionResult, Evictor, ScaleResult
from ebbflow.tasks.capacity.intervals import LoopIntervals
from ebbflow.tasks.capacity.leadership import Lead
from ebbflow.tasks.capacity.listeners import EventDispatcher, LoopEvent
from ebbflow.tasks.capacity.metrics import LoopMetrics
from ebbflow.tasks.capacity.observation import ObservedState, Watch, change
from ebbflow.tasks.drawing.wording import plural

_REFUSED = 5  # decisions in a row that the ledger refuses before the loop gives up on its memory
_FAILURES = 10  # decisions in a row that raise before the loop ends
_AGAIN = 5.0  # s until the next try after one

log = logging.getLogger(__name__)

Point = Callable[[str], None]
"""Is told where in a cycle the loop is, for tests that kill it there."""


@runtime_checkable
class Inspector(Protocol):
    """An evictor that can list what runs (optional)."""

    def present(self) -> Sequence[tuple[str, str]]:
        """Return (app, node) pairs of which processes live. Raises ``InfraError``."""
        ...


@dataclass(slots=True)
class _Pending:
    """What was seen and not answered yet: when, and whether a decision is due because of it."""

    stamps: list[float] = field(default_factory=list)
    due: bool = True  # the first cycle decides in any case


def concerned(state: State, memory: Memory) -> list[str]:
    """Return whose reports a cycle needs: apps that are not over or may use GPUs still, and what is for loops."""
    holding = {lease.app for lease in state.leases.values()} | {one.lease.app for one in memory.left.values()}
    return [*RESERVED, *sorted(holding | {record.spec.id for record in state.active()})]


@dataclass(frozen=True)
class CycleComponents:
    """What cycles work with."""

    ledger: Ledger
    lead: Lead
    watch: Watch
    hands: ActionExecutor
    announcer: EventDispatcher
    settings: Settings
    pace: LoopIntervals
    clock: Clock
    evictor: Evictor | None = None
    point: Point = lambda _: None


class Cycles:
    """The cycles of one loop, and what it remembers between them. For one thread."""

    def __init__(self, parts: CycleComponents, seed: int = 0) -> None:
        self.parts = parts
        self._ledger, self._lead, self._watch, self._hands = (
            parts.ledger,
            parts.lead,
            parts.watch,
            parts.hands,
        )
        self._settings, self._pace, self._clock = parts.settings, parts.pace, parts.clock
        self._point = parts.point
        self._rng = np.random.default_rng(seed)
        self._service = ServiceWatch(parts.ledger.records)
        self.metrics = LoopMetrics()
        self.sight = ObservedState()  # what the last cycle saw
        self.memory = Memory()
        self.next = 0.0  # when a decision is due even if nothing happens
        self._pending = _Pending()
        self._known = 0  # number of the last event that a decision has seen
        self._stamped = 0  # number of the last event whose apps' arrivals are counted
        self._reported: dict[str, object] = {}  # what of each app's report a decision has seen
        self._evicted: set[tuple[str, str]] = set()
        self._repair_at = 0.0
        self._refused = 0
        self._failures = 0
        self._dropped = False

    def once(self, state: State, reports: Mapping[str, AppReport]) -> Cycle | None:
        """Do one cycle; return what was decided, ``None`` when there was nothing to decide.

        ``state`` and ``reports`` were read by the caller. Raises ``StaleLoopError`` and ``LedgerUnavailableError``.
        """
        self.sight = sight = self._watch.take()
        self._pending.stamps += sight.changed
        if sight.changed:
            self._pending.due = True
        state = self._seen(state, sight)
        self._point("observed")
        apps = {name: report for name, report in reports.items() if name not in RESERVED}
        now = self._clock.now()
        done = self._hands.done()
        self.notify(loop_events.of_done(done, now))
        self._notice(state, apps, done, now)
        if now >= self.next or self._service.look(state, now, self._launchable(sight)):
            self._pending.due = True
        cycle = self._decide(state, apps, sight, now) if self._pending.due else None
        if now >= self._repair_at:
            self._put_right(now)
        return cycle

    def again(self) -> None:
        """Decide at the next cycle in any case."""
        self._pending.due = True

    def recover(self) -> None:
        """Say that a loop has begun and what it found; ``once`` repairs, since it always compares all with all."""
        state = self._ledger.state()
        reason = (
            f"{self._lead.holder} is the leader (fencing token {self._lead.leadership.token}): "
            f"{plural(len(state.nodes), 'node')}, "
            f"{plural(len(state.leases), 'lease')} and {plural(len(state.active()), 'app')} are in the ledger"
        )
        self._write(state, [Decided("recovery", reason, revision=state.revision)])
        self._repair_at = 0.0

    # --- observe ------------------------------------------------------------------------------------------------

    def _seen(self, state: State, sight: ObservedState) -> State:
        """Write what is seen where it is news, and return the state with it."""
        found = change(state, sight.capacity) if sight.capacity is not None else None
        if found is None:
            return state
        self._write(state, [found])
        self._point("capacity written")
        self._pending.due = True
        return self._ledger.state()

    def _notice(
        self, state: State, reports: Mapping[str, AppReport], done: Sequence[Done], now: float
    ) -> None:
        """Find what others have written that a decision must see."""
        if state.number > self._known:
            for record in state.apps.values():
                if record.number > self._stamped and 0 <= now - record.entered < self._pace.ledger_timeout:
                    self._pending.stamps.append(record.entered)
            self._stamped = state.number
            self._pending.due = True
        if len(self._reported) > 2 * len(reports):
            self._reported = {name: said for name, said in self._reported.items() if name in reports}
        for name, report in reports.items():
            said = report.phase, report.released
            if self._reported.get(name) != said:
                self._reported[name] = said
                if any(number in state.leases for number in report.released):
                    self._pending.stamps.append(now)
                self._pending.due = True
        for one in done:
            if isinstance(one, EvictionResult):
                self._pending.due = True
                if one.done:
                    self._evicted.add((one.app, one.node))
                else:
                    log.warning(
                        "the processes of %s on %s could not be terminated: %s", one.app, one.node, one.why
                    )
            elif isinstance(one, ScaleResult):
                if one.error:
                    log.warning("%s: %s", one.what, one.error)
                elif one.applied is not None and (one.applied.asked or one.applied.refused):
                    self._watch.refresh()  # it is another fleet now, or was when it was asked

    def _launchable(self, sight: ObservedState) -> int:
        """Return how many nodes for aggregators there may be."""
        rules = self._settings.scaling
        if rules is None or sight.rented is None:
            return 0
        pools = sight.rented.fleet.pools
        return sum(pool.max_nodes for pool in pools if rules.purpose(pool) == "aggregators")

    # --- decide -------------------------------------------------------------------------------------------------

    def _decide(
        self, state: State, reports: Mapping[str, AppReport], sight: ObservedState, now: float
    ) -> Cycle | None:
        rented = sight.fresh(now, self._pace.observation_max_age)
        situation = SchedulerInput(
            now,
            state,
            reports,
            rented.fleet if rented else None,
            rented.offers if rented else {},
            rented.uses if rented else {},
            rented.elsewhere if rented else frozenset(),
            frozenset(self._evicted),
            self._hands.replaces,
            sight.capacity.network if sight.capacity is not None else 0.0,
            self._service.demand,
        )
        before = time.perf_counter()
        try:
            cycle = decide(situation, self._settings, self.memory, self._rng)
        except Exception as error:
            self._failed(error, now)
            return None
        self._failures = 0
        seconds = time.perf_counter() - before
        self.metrics.cycles += 1
        self.metrics.deciding.append(seconds)
        self._point("decided")
        if self._moved_on(cycle, self._watch.newest()):
            self.metrics.dropped += 1
            self._dropped, self.next = True, 0.0
            return cycle
        self._dropped = False
        if not self._act(cycle, state, seconds):
            return cycle
        self.memory = cycle.memory
        self.next = min(cycle.wake, now + self._settings.interval_s)
        self._pending.due = False
        self._evicted.clear()
        if cycle.auction or cycle.memory.dirty is None:  # else changes are still gathered
            self.metrics.saw(self._pending.stamps, self._clock.now())
            self._pending.stamps.clear()
            self.metrics.answered = sight.capacity.revision if sight.capacity is not None else -1
            self._point("answered")
        return cycle

    def _failed(self, error: Exception, now: float) -> None:
        """Try again soon, without what was remembered: a policy of a user's own may fail at one situation."""
        self._failures += 1
        if self._failures > _FAILURES:
            raise error
        log.exception("a decision failed; retry in %.0f s", _AGAIN)
        self.memory = Memory()
        self.next, self._pending.due = now + _AGAIN, False

    def _moved_on(self, cycle: Cycle, newest: Capacity | None) -> bool:
        """Tell whether grants are for nodes that have left, or got a notice, while it was decided.

        Such a decision is dropped whole, since a gang that lacks a node helps nobody; but never two in a row, or a
        cluster that changes faster than it is decided on would get none.
        """
        if newest is None or self._dropped:
            return False
        usable = {node.id for node in newest.usable}
        return any(
            lease.node not in usable
            for one in cycle.changes
            if isinstance(one, Granted)
            for lease in one.leases
        )

    # --- act and record -----------------------------------------------------------------------------------------

    def _act(self, cycle: Cycle, state: State, seconds: float) -> bool:
        """Write, then have it done; return false where the ledger refused what was decided."""
        changes = [
            replace(one, seconds=seconds) if isinstance(one, Decided) and not one.seconds else one
            for one in cycle.changes
        ]
        self._known = state.number
        if changes:
            try:
                written = self._write(state, changes)
            except (DoubleBookingError, OptionError) as error:
                self._refuse(error)
                return False
            except LedgerUnavailableError:
                self._unsure(cycle)
                raise
            self.metrics.written += 1
            # else others wrote in between, and that is to be decided on
            if written[0].number == state.number + 1:
                self._known = written[-1].number
        self._refused = 0
        self._point("written")
        self._hands.scale(cycle.targets)
        self._hands.replace(cycle.replace)
        self._point("scaled")
        for app, node, why in cycle.evict:
            self._hands.evict(app, node, why)
        self._point("evicted")
        self._hands.terminate(cycle.end)
        self._point("ended")
        for aggregator, by in cycle.drain:
            self._service.drain(aggregator, by)
        return True

    def _unsure(self, cycle: Cycle) -> None:
        """Forget what was ended by force, for the write may have landed, with new leases for the same apps there.

        What is in the way still is ended once more.
        """
        self._evicted.clear()
        self.memory = replace(self.memory, evicting={}, left={**self.memory.left, **cycle.memory.left})

    def _refuse(self, error: Exception) -> None:
        """The state has moved under the decision: decide again, at first with what is remembered, then without."""
        self._refused += 1
        self.metrics.dropped += 1
        self.next = 0.0
        log.warning("the ledger rejected a decision; the loop re-plans with fresh state: %s", error)
        if self._refused >= _REFUSED:
            if self._refused >= 2 * _REFUSED:
                raise error
            self.memory = Memory()

    def _write(self, state: State, changes: Sequence[Change]) -> Sequence[Event]:
        written = self._lead.leadership.write(changes)
        self.notify(loop_events.of_changes(state, changes, self._clock.now()))
        return written

    def notify(self, events: Iterable[LoopEvent]) -> None:
        for event in events:
            self.parts.announcer.notify(event)

    # --- putting right ------------------------------------------------------------------------------------------

    def _put_right(self, now: float) -> None:
        """Ask for what was planned and not asked for; end processes that no lease allows."""
        self._repair_at = now + self._pace.reconcile_interval
        self._hands.repair()
        inspector: object = self.parts.evictor
        if not isinstance(inspector, Inspector):
            return
        try:
            present = inspector.present()
        except InfraError as error:
            log.warning("running processes cannot be listed: %s", error)
            return
        # read after the list: a lease is written before anybody starts, so what has none by now has none
        state = self._ledger.state()
        held = {(lease.app, lease.node) for lease in state.leases.values()}
        for app, node in sorted(set(present) - held):
            # what the ledger does not know is not ours to judge
            if app in state.apps or self._ledger.app(app) is not None:
                self._hands.evict(app, node, "it runs there without a valid lease")
