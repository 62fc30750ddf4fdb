"""The capacity loop of one cluster: observe, decide, act, record.

Safe at every point, whatever is killed when. The order of a cycle makes it so:

1. *What is seen is written first*: a decision rests on nodes that the ledger has.
2. *Grants are written before anybody starts.* An app begins on a GPU because the ledger says so. A loop killed
   before the write has promised nothing; killed after it, the app has its lease, and the next loop finds it there.
3. *Then the fleet and the processes.* A target is planned durably by ``FleetControl`` before it asks for anything,
   and ``repair`` asks again for what a crash cut off. A target that was decided but never handed over is decided
   again, since the fleet still differs from what is wanted.
4. *Ends are written last*, when an app has said that no process of it uses the GPU, or when its processes were
   ended and that was certain. Killed in between, the next loop ends them once more, which harms nobody, and then
   writes the end. The other order could grant a GPU that is still in use.

All of a cycle's changes are one transaction with the loop's token. So there is nothing that a new loop needs beside
the ledger, the fleet's plan and what it observes; what it remembers between cycles only makes decisions better.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import DoubleBookingError, InfraError, LedgerUnavailableError, StaleLoopError
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.protocols import CapacitySource, FleetControl
from ebbflow.planners.errors import OptionError
from ebbflow.planners.loop import Cycle, Memory, Settings, Situation, decide
from ebbflow.planners.model.capacity import Capacity
from ebbflow.planners.model.ledger import AppReport, Change, Decided, Event, Granted, State
from ebbflow.tasks.loop import telling
from ebbflow.tasks.loop.change import change
from ebbflow.tasks.loop.evicting import Evictor
from ebbflow.tasks.loop.figures import Figures
from ebbflow.tasks.loop.hands import Done, Evicted, Hands, Scaled
from ebbflow.tasks.loop.leading import Lead, holder_name
from ebbflow.tasks.loop.listening import Announcer, LoopEvent, LoopListener
from ebbflow.tasks.loop.observing import Rented, Sight, Watch
from ebbflow.tasks.loop.outage import Outage
from ebbflow.tasks.loop.pace import LoopPace
from ebbflow.tasks.loop.row import LOOP, RESERVED, LoopRow, asked_to_stop

_REFUSED = 5  # decisions in a row that the ledger refuses before the loop gives up on its memory
_FAILURES = 10  # decisions in a row that raise before the loop ends
_AGAIN = 5.0  # s until the next try after one
_MOST_REST = 5.0  # s between cycles, however long one took: notices do not wait
_JUMP = 1.0  # s by which the machine's clock must jump to be told

log = logging.getLogger(__name__)

Point = Callable[[str], None]
"""Is told where in a cycle the loop is, for tests that kill it there."""


@runtime_checkable
class Inspector(Protocol):
    """An evictor that can list what runs (optional)."""

    def present(self) -> Sequence[tuple[str, str]]:
        """Return (app, node) pairs of which processes live. Raises ``InfraError``."""
        ...


@dataclass(frozen=True, slots=True)
class LoopEnd:
    """Why a loop ended well."""

    reason: str
    asked: bool  # by ``ebbflow capacity stop``, not by its own process
    figures: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class _Pending:
    """What was seen and not answered yet: when, and whether a decision is due because of it."""

    stamps: list[float] = field(default_factory=list)
    due: bool = True  # the first cycle decides in any case


class CapacityLoop:
    """Observes, decides, acts and records until it is told to stop. One cycle at a time, in one thread.

    Args:
        ledger: of the cluster; its clock is the loop's unless another is given.
        fleet: nodes that are rented; ``None``: nothing is scaled.
        source: which nodes there are.
        settings: how it decides.
        evictor: ends processes by force; ``None``: leases are waited for instead.
        listener: hears what happens, from a thread of its own.
        rented: looks at fleet and prices at once; by default ``fleet.observe``.
        answered: when the source last had an answer, for one that hides an outage.
        seed: of the generator that policies draw from.
        point: told where in a cycle the loop is.
    """

    def __init__(
        self,
        ledger: Ledger,
        fleet: FleetControl | None,
        source: CapacitySource,
        settings: Settings | None = None,
        *,
        evictor: Evictor | None = None,
        clock: Clock | None = None,
        listener: LoopListener | None = None,
        pace: LoopPace | None = None,
        rented: Callable[[], Rented] | None = None,
        answered: Callable[[], float | None] | None = None,
        holder: str = "",
        seed: int = 0,
        point: Point | None = None,
    ) -> None:
        self._ledger, self._settings = ledger, settings or Settings()
        self._clock = clock or ledger.clock
        self._pace = pace or LoopPace()
        self._wake = threading.Event()
        self._fleet, self._evictor = fleet, evictor
        self._watch = Watch(source, fleet, self._pace, self._clock, rented, answered)
        self._hands = Hands(fleet, evictor, self._clock, self._wake)
        self._lead = Lead(ledger, holder or holder_name(), self._pace, self._clock)
        self._announcer = Announcer(listener)
        self._outage = Outage(self._pace.patience, self._clock, self._lead.holder)
        self._rng = np.random.default_rng(seed)
        self._point = point or (lambda _: None)
        self.figures = Figures()
        self._memory = Memory()
        self._pending = _Pending()
        self._known = 0  # number of the last event that a decision has seen
        self._stamped = 0  # number of the last event whose apps' arrivals are counted
        self._heard: dict[str, object] = {}  # what of each app's report a decision has seen
        self._evicted: set[tuple[str, str]] = set()
        self._next = 0.0  # when a decision is due even if nothing happens
        self._repair_at = 0.0
        self._status_at = 0.0
        self._refused = 0
        self._failures = 0
        self._dropped = False
        self._asked = False
        self._off = 0.0
        self._zero = time.time() - time.monotonic()
        self._sight = Sight()
        self._began = self._clock.now()

    # --- running ------------------------------------------------------------------------------------------------

    def run(self, stop: threading.Event, *, take_over: bool = False) -> LoopEnd:
        """Lead the cluster until ``stop`` is set or somebody asks for the end by the ledger; leases stay as they are.

        Waits while another loop lives, unless ``take_over``. Raises ``StaleLoopError`` once another has taken over,
        ``LedgerUnavailableError`` when the ledger has been away for longer than the pace's patience.
        """
        if self._lead.take(stop, take_over=take_over) is None:
            return LoopEnd("stopped while another loop had the lead", False)
        try:
            self._lead.start(self._wake)
            self._watch.start(self._wake)
            self._hands.start()
            self._patiently(self._recover, stop)
            while not stop.is_set() and not self._asked:
                began = self._clock.now()
                self._patiently(self.once, stop)
                self._rest(stop, began)
        except StaleLoopError:
            self._lead.lost.set()
            raise
        finally:
            self._end()
        reason = "somebody asked for it" if self._asked else "stopped"
        return LoopEnd(reason, self._asked, self.figures.to_dict())

    def begin(self, *, take_over: bool = False) -> None:
        """Take the lead without threads: whoever calls ``once`` lets time pass. Raises ``LedgerBusyError``."""
        self._lead.take_now(take_over=take_over)
        self._recover()

    def end(self) -> None:
        """Give the lead back, after ``begin``."""
        self._end()

    def once(self) -> Cycle | None:
        """Do one cycle; return what was decided, ``None`` when there was nothing to decide.

        Raises ``StaleLoopError`` and ``LedgerUnavailableError``.
        """
        self._still_leads()
        self._lead.renew_if_due()
        self._sight = sight = self._watch.take()
        self._pending.stamps += sight.changed
        if sight.changed:
            self._pending.due = True
        reports = self._ledger.reports()
        self._asked = self._asked or asked_to_stop(reports, self._lead.leadership.token)
        state = self._seen(self._ledger.state(), sight)
        self._point("observed")
        apps = {name: report for name, report in reports.items() if name not in RESERVED}
        now = self._clock.now()
        done = self._hands.done()
        self._tell(telling.of_done(done, now))
        self._notice(state, apps, done, now)
        if now >= self._next:
            self._pending.due = True
        cycle = self._decide(state, apps, sight, now) if self._pending.due else None
        if now >= self._repair_at:
            self._put_right(now)
        if now >= self._status_at:
            self._status_at = now + self._pace.status
            self._ledger.report(LOOP, self._row(sight).report(now))
        return cycle

    def _patiently(self, step: Callable[[], object], stop: threading.Event) -> None:
        """Take a step; without the ledger, wait within bounds instead. What was seen is decided on afterwards."""
        while not self._lead.lost.is_set() and not stop.is_set():
            try:
                step()
            except LedgerUnavailableError as error:
                # whether a write that got no answer was done is seen in the ledger when it is back
                delay = self._outage.failed(error)
                self._pending.due = True
                self._clock.wait(stop, delay)
                continue
            if (away := self._outage.answered()) is not None:
                self.figures.outages, self.figures.away = self._outage.count, self._outage.away
                text = f"the ledger answers again, after {away:.1f} s"
                self._tell([LoopEvent("recovered", text, self._clock.now(), {"seconds": round(away, 1)})])
            return
        self._still_leads()

    def _still_leads(self) -> None:
        if self._lead.lost.is_set():
            raise StaleLoopError(f"{self._lead.holder} leads no more: another loop has taken over")

    def _rest(self, stop: threading.Event, began: float) -> None:
        """Wait for something to do. A cycle that took long is followed by as long a rest, and changes gather."""
        took = self._clock.now() - began
        if took > self._pace.look:
            self.figures.rested += 1
            self._clock.wait(stop, min(took, _MOST_REST))
        else:
            self._clock.wait(stop, self._pace.settle)
        left = min(self._pace.look, self._next - self._clock.now())
        if left > 0 and not stop.is_set():
            self._clock.wait(self._wake, left)
        self._wake.clear()

    # --- observe ------------------------------------------------------------------------------------------------

    def _seen(self, state: State, sight: Sight) -> State:
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
                if record.number > self._stamped and 0 <= now - record.entered < self._pace.patience:
                    self._pending.stamps.append(record.entered)
            self._stamped = state.number
            self._pending.due = True
        if len(self._heard) > 2 * len(reports):
            self._heard = {name: said for name, said in self._heard.items() if name in reports}
        for name, report in reports.items():
            said = report.phase, report.released
            if self._heard.get(name) != said:
                self._heard[name] = said
                if any(number in state.leases for number in report.released):
                    self._pending.stamps.append(now)
                self._pending.due = True
        for one in done:
            if isinstance(one, Evicted):
                self._pending.due = True
                if one.done:
                    self._evicted.add((one.app, one.node))
                else:
                    log.warning("what %s runs on %s could not be ended: %s", one.app, one.node, one.why)
            elif isinstance(one, Scaled):
                if one.error:
                    log.warning("%s: %s", one.what, one.error)
                elif one.applied is not None and one.applied.asked:
                    self._watch.refresh()

    # --- decide -------------------------------------------------------------------------------------------------

    def _decide(
        self, state: State, reports: Mapping[str, AppReport], sight: Sight, now: float
    ) -> Cycle | None:
        rented = sight.fresh(now, self._pace.stale)
        situation = Situation(
            now,
            state,
            reports,
            rented.fleet if rented else None,
            rented.offers if rented else {},
            rented.uses if rented else {},
            rented.elsewhere if rented else frozenset(),
            frozenset(self._evicted),
        )
        before = time.perf_counter()
        try:
            cycle = decide(situation, self._settings, self._memory, self._rng)
        except Exception as error:
            self._failed(error, now)
            return None
        self._failures = 0
        seconds = time.perf_counter() - before
        self.figures.cycles += 1
        self.figures.deciding.append(seconds)
        self._point("decided")
        if self._moved_on(cycle, self._watch.newest()):
            self.figures.dropped += 1
            self._dropped, self._next = True, 0.0
            return cycle
        self._dropped = False
        if not self._act(cycle, state, seconds):
            return cycle
        self._memory = cycle.memory
        self._next = min(cycle.wake, now + self._settings.interval_s)
        self._pending.due = False
        self._evicted.clear()
        if cycle.auction or cycle.memory.dirty is None:  # else changes are still gathered
            self.figures.saw(self._pending.stamps, self._clock.now())
            self._pending.stamps.clear()
            self.figures.answered = sight.capacity.epoch if sight.capacity is not None else -1
            self._point("answered")
        return cycle

    def _failed(self, error: Exception, now: float) -> None:
        """Try again soon, without what was remembered: a policy of a user's own may fail at one situation."""
        self._failures += 1
        if self._failures > _FAILURES:
            raise error
        log.exception("a decision failed, the next try follows in %.0f s", _AGAIN)
        self._memory = Memory()
        self._next, self._pending.due = now + _AGAIN, False

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
            self.figures.written += 1
            # else others wrote in between, and that is to be decided on
            if written[0].number == state.number + 1:
                self._known = written[-1].number
        self._refused = 0
        self._point("written")
        self._hands.scale(cycle.targets)
        self._point("scaled")
        for app, node, why in cycle.evict:
            self._hands.evict(app, node, why)
        self._point("evicted")
        self._hands.terminate(cycle.end)
        self._point("ended")
        return True

    def _refuse(self, error: Exception) -> None:
        """The state has moved under the decision: decide again, at first with what is remembered, then without."""
        self._refused += 1
        self.figures.dropped += 1
        self._next = 0.0
        log.warning("the ledger refused a decision, it is made again: %s", error)
        if self._refused >= _REFUSED:
            if self._refused >= 2 * _REFUSED:
                raise error
            self._memory = Memory()

    def _write(self, state: State, changes: Sequence[Change]) -> Sequence[Event]:
        written = self._lead.leadership.write(changes)
        self._tell(telling.of_changes(state, changes, self._clock.now()))
        return written

    def _tell(self, events: Iterable[LoopEvent]) -> None:
        for event in events:
            self._announcer.tell(event)

    # --- putting right ------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Say that a loop has begun and what it found; ``once`` repairs, since it always compares all with all."""
        state = self._ledger.state()
        reason = (
            f"{self._lead.holder} leads with token {self._lead.leadership.token}: {len(state.nodes)} nodes, "
            f"{len(state.leases)} leases and {len(state.active())} apps are on record"
        )
        self._write(state, [Decided("recovery", reason, epoch=state.epoch)])
        self._repair_at = 0.0

    def _put_right(self, now: float) -> None:
        """Ask for what was planned and not asked for; end processes that no lease allows."""
        self._repair_at = now + self._pace.repair
        self._hands.repair()
        if not isinstance(self._evictor, Inspector):
            return
        try:
            present = self._evictor.present()
        except InfraError as error:
            log.warning("what runs cannot be listed: %s", error)
            return
        # read after the list: a lease is written before anybody starts, so what has none by now has none
        state = self._ledger.state()
        held = {(lease.app, lease.node) for lease in state.leases.values()}
        # what the ledger does not know is not ours to judge
        strays = {(app, node) for app, node in present if app in state.apps} - held
        for app, node in sorted(strays):
            self._hands.evict(app, node, "it runs there without a lease")

    # --- telling ------------------------------------------------------------------------------------------------

    def _row(self, sight: Sight, phase: str = "running") -> LoopRow:
        now = self._clock.now()
        off = time.time() - time.monotonic() - self._zero
        if abs(off - self._off) > _JUMP:
            log.warning(
                "the machine's clock has jumped by %.1f s; the loop's own goes on as before", off - self._off
            )
            self._off = off
        return LoopRow(
            self._lead.leadership.token,
            self._lead.holder,
            self._settings.policy.name,
            self._began,
            phase,
            self.figures.cycles,
            round(sight.age(now), 1) if sight.capacity is not None else None,
            round(now - sight.rented_at, 1) if sight.rented is not None else None,
            self._hands.waiting,
            self._announcer.waiting,
            self._announcer.dropped,
            round(self._off, 1),
            sight.problems,
            self.figures.to_dict(),
        )

    def _end(self) -> None:
        """Leave in order; leases stay, apps hold what they have until another loop leads."""
        self._watch.stop()
        self._hands.close(self._pace.act)
        if not self._lead.lost.is_set():
            try:
                self._ledger.report(LOOP, self._row(self._sight, "stopped").report(self._clock.now()))
            except LedgerUnavailableError:
                log.warning("the ledger is away: the last status could not be written")
        self._lead.close(resign=True)
        self._announcer.close()
