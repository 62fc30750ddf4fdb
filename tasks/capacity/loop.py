"""The capacity loop of one cluster. Its state is three sets of nodes for each pool (``planners.model.fleet``):

- *planned*: what should exist, by the loop's last decision; kept durably by ``FleetControl``;
- *requested*: what the provider has been asked for;
- *observed*: the nodes that are there, by ``CapacitySource``, and the leases that the ledger has on them.

One ``step`` observes, decides what is to be planned and leased, acts so that what is requested follows what is
planned, and records. ``node_sources.NodeSource`` says what a new source of nodes must implement.

Safe at every point, whatever is killed when. The order of a step makes it so:

1. *What is seen is written first*: a decision rests on nodes that the ledger has.
2. *Grants are written before anybody starts.* An app begins on a GPU because the ledger says so. A loop killed
   before the write has promised nothing; killed after it, the app has its lease, and the next loop finds it there.
3. *Then the fleet and the processes.* A target is planned durably by ``FleetControl`` before it asks for anything,
   and ``repair`` asks again for what a crash cut off. A target that was decided but never handed over is decided
   again, since the fleet still differs from what is wanted.
4. *Ends are written last*, when an app has said that no process of it uses the GPU, or when its processes were
   ended and that was certain. Killed in between, the next loop ends them once more, which harms nobody, and then
   writes the end. The other order could grant a GPU that is still in use.

All of a step's changes are one transaction with the loop's token. So there is nothing that a new loop needs beside
the ledger, the fleet's plan and what it observes; what it remembers between cycles only makes decisions better.

A ledger that is away: for how long it is waited for, and that it is told once.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import LedgerError, LedgerUnavailableError, StaleLoopError
from ebbflow.infra.ledger import Ledger, UnreadableReport
from ebbflow.infra.protocols import CapacitySource, FleetControl
from ebbflow.planners.capacity.values import Cycle, Settings
from ebbflow.planners.model.ledger import AppReport
from ebbflow.planners.model.ledger_state import State
from ebbflow.tasks.apps.loop_report import LOOP, RESERVED, LoopStatusRecord, asked_to_stop
from ebbflow.tasks.apps.loop_report import problems as unread_problems
from ebbflow.tasks.capacity.actuator import ActionExecutor, Evictor
from ebbflow.tasks.capacity.cycle import CycleComponents, Cycles, Point, concerned
from ebbflow.tasks.capacity.intervals import LoopIntervals
from ebbflow.tasks.capacity.leadership import Lead, holder_name
from ebbflow.tasks.capacity.listeners import EventDispatcher, LoopEvent, LoopListener
from ebbflow.tasks.capacity.metrics import LoopMetrics
from ebbflow.tasks.capacity.observation import FleetObservation, Watch

_FIRST = 0.1  # s before the first attempt


_MOST = 5.0  # s between attempts


class Outage:
    """Counts one outage after another. Attempts back off with jitter, so that many processes do not come at once."""

    def __init__(self, timeout: float, clock: Clock, seed: str = "") -> None:
        self._timeout, self._clock = timeout, clock
        self._jitter = random.Random(f"outage {seed}")  # noqa: S311 - spreads attempts, no secret
        self.since: float | None = None
        self.why = ""
        self.count = 0
        self.away = 0.0  # s, of outages that are over
        self._attempts = 0

    def failed(self, error: Exception) -> float:
        """Note that an attempt failed; return for how long, s, to wait. Raises ``error`` beyond the timeout."""
        now = self._clock.now()
        if self.since is None:
            self.since, self._attempts = now, 0
            self.count += 1
            log.warning(
                "the ledger does not respond: no leases are granted, apps keep their leases; retrying for %.0f s: %s",
                self._timeout,
                error,
            )
        self.why = str(error)
        if now - self.since > self._timeout:
            log.error("the ledger has been unavailable for %.0f s; the loop exits", now - self.since)
            raise error
        delay = min(_MOST, _FIRST * 2.0**self._attempts)
        self._attempts = min(self._attempts + 1, 16)
        return delay * self._jitter.uniform(0.5, 1.0)

    def answered(self) -> float | None:
        """Note that the ledger answers; return how long, s, it was away if it was."""
        if self.since is None:
            return None
        seconds = self._clock.now() - self.since
        self.away += seconds
        self.since, self.why = None, ""
        log.warning("the ledger is available again after %.1f s", seconds)
        return seconds


_MOST_REST = 5.0  # s between cycles, however long one took: notices do not wait
_JUMP = 1.0  # s by which the machine's clock must jump to be told

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoopEnd:
    """Why a loop ended well."""

    reason: str
    asked: bool  # by ``ebbflow capacity stop``, not by its own process
    metrics: Mapping[str, object] = field(default_factory=dict)


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
        pace: LoopIntervals | None = None,
        rented: Callable[[], FleetObservation] | None = None,
        answered: Callable[[], float | None] | None = None,
        holder: str = "",
        seed: int = 0,
        point: Point | None = None,
    ) -> None:
        self._ledger = ledger
        self._clock = clock or ledger.clock
        self._pace = pace or LoopIntervals()
        self._wake = threading.Event()
        self._watch = Watch(source, fleet, self._pace, self._clock, rented, answered)
        self._lead = Lead(ledger, holder or holder_name(), self._pace, self._clock)
        self._hands = ActionExecutor(fleet, evictor, self._clock, self._wake, lambda: self._lead.sure)
        self._announcer = EventDispatcher(listener)
        self._outage = Outage(self._pace.ledger_timeout, self._clock, self._lead.holder)
        self._cycles = Cycles(
            CycleComponents(
                ledger,
                self._lead,
                self._watch,
                self._hands,
                self._announcer,
                settings or Settings(),
                self._pace,
                self._clock,
                evictor,
                point or (lambda _: None),
            ),
            seed,
        )
        self._asked = False
        self._unread: Mapping[str, UnreadableReport] = {}
        self._status_at = 0.0
        self._off = 0.0  # s by which the machine's clock has jumped
        self._zero = time.time() - time.monotonic()
        self._began = self._clock.now()

    @property
    def leads(self) -> bool:
        """Tell whether this loop leads the cluster, as far as it knows."""
        return self._lead.taken and not self._lead.lost.is_set()

    @property
    def metrics(self) -> LoopMetrics:
        """Return counts and times so far."""
        return self._cycles.metrics

    # --- running ------------------------------------------------------------------------------------------------

    def run(self, stop: threading.Event, *, take_over: bool = False) -> LoopEnd:
        """Lead the cluster until ``stop`` is set or somebody asks for the end by the ledger; leases stay as they are.

        Waits while another loop lives, unless ``take_over``. Raises ``StaleLoopError`` once another has taken over,
        ``LedgerUnavailableError`` when the ledger has been away for longer than the pace's ledger timeout.
        """
        if self._lead.take(stop, take_over=take_over) is None:
            return LoopEnd("stopped while another loop was the leader", False)
        try:
            self._lead.start(self._wake)
            self._watch.start(self._wake)
            self._hands.start()
            self._patiently(self._cycles.recover, stop)
            while not stop.is_set() and not self._asked:
                began = self._clock.now()
                self._patiently(self.step, stop)
                self._rest(stop, began)
        except StaleLoopError:
            self._lead.lost.set()
            raise
        finally:
            self._end()
        reason = "stop requested" if self._asked else "stopped"
        return LoopEnd(reason, self._asked, self.metrics.to_dict())

    def begin(self, *, take_over: bool = False) -> None:
        """Take the lead without threads: whoever calls ``step`` lets time pass. Raises ``LedgerBusyError``."""
        self._lead.take_now(take_over=take_over)
        self._cycles.recover()

    def end(self) -> None:
        """Give the lead back, after ``begin``."""
        self._end()

    def step(self) -> Cycle | None:
        """Observe, decide, act and record once; return what was decided, ``None`` when there was nothing to decide.

        Raises ``StaleLoopError`` and ``LedgerUnavailableError``.
        """
        self._still_leads()
        self._lead.renew_if_due()
        state = self._ledger.state()
        reports = self._reports(state)
        self._asked = self._asked or asked_to_stop(reports, self._lead.leadership.token)
        cycle = self._cycles.once(state, reports)
        now = self._clock.now()
        if now >= self._status_at:
            self._status_at = now + self._pace.status_interval
            self._ledger.report(LOOP, self._row().report(now))
        return cycle

    def _reports(self, state: State) -> Mapping[str, AppReport]:
        """Return what apps said last; of one whose report cannot be read, that it lives and holds what it has."""
        memory = self._cycles.memory
        unread: dict[str, UnreadableReport] = {}
        reports = self._ledger.reports(concerned(state, memory), unread=unread)
        for app, one in unread.items():
            if app not in self._unread:
                log.warning("the report of %s is ignored: %s", app, one.why)
            if app not in RESERVED:
                held = [lease.number for lease in state.held(app)]
                held += [number for number, left in memory.left.items() if left.lease.app == app]
                reports[app] = AppReport(one.at, tuple(held))
        self._unread = unread
        return reports

    def _patiently(self, work: Callable[[], object], stop: threading.Event) -> None:
        """Do ``work``; without the ledger, wait within bounds instead. What was seen is decided on afterwards."""
        while not self._lead.lost.is_set() and not stop.is_set():
            try:
                work()
            except LedgerUnavailableError as error:
                # whether a write that got no answer was done is seen in the ledger when it is back
                delay = self._outage.failed(error)
                self._cycles.again()
                self._clock.wait(stop, delay)
                continue
            if (away := self._outage.answered()) is not None:
                self.metrics.outages, self.metrics.away = self._outage.count, self._outage.away
                text = f"the ledger is available again after {away:.1f} s"
                self._cycles.notify(
                    [LoopEvent("recovered", text, self._clock.now(), {"seconds": round(away, 1)})]
                )
            return
        self._still_leads()

    def _still_leads(self) -> None:
        if self._lead.lost.is_set():
            raise StaleLoopError(f"{self._lead.holder} is no longer the leader: another loop has taken over")

    def _rest(self, stop: threading.Event, began: float) -> None:
        """Wait for something to do. A cycle that took long is followed by as long a rest, and changes gather."""
        took = self._clock.now() - began
        if took > self._pace.poll_interval:
            self.metrics.rested += 1
            self._clock.wait(stop, min(took, _MOST_REST))
        else:
            self._clock.wait(stop, self._pace.batch_delay)
        left = min(self._pace.poll_interval, self._cycles.next - self._clock.now())
        if left > 0 and not stop.is_set():
            self._clock.wait(self._wake, left)
        self._wake.clear()

    # --- telling ------------------------------------------------------------------------------------------------

    def _row(self, phase: str = "running") -> LoopStatusRecord:
        now, sight = self._clock.now(), self._cycles.sight
        off = time.time() - time.monotonic() - self._zero
        if abs(off - self._off) > _JUMP:
            log.warning("the system clock jumped by %.1f s; the loop's own clock continues", off - self._off)
            self._off = off
        return LoopStatusRecord(
            self._lead.leadership.token,
            self._lead.holder,
            self._cycles.parts.settings.policy.name,
            self._began,
            phase,
            self.metrics.cycles,
            round(sight.age(now), 1) if sight.capacity is not None else None,
            round(now - sight.rented_at, 1) if sight.rented is not None else None,
            self._hands.waiting,
            self._announcer.waiting,
            self._announcer.dropped,
            round(self._off, 1),
            (*sight.problems, *unread_problems(self._unread)),
            self.metrics.to_dict(),
            self._cycles.parts.settings.termination_grace_s,
        )

    def _end(self) -> None:
        """Leave in order; leases stay, apps hold what they have until another loop leads."""
        self._watch.stop()
        self._hands.close(self._pace.action_timeout)
        if not self._lead.lost.is_set():
            try:
                self._ledger.report(LOOP, self._row("stopped").report(self._clock.now()))
            except LedgerError as error:
                log.warning("the final status could not be written: %s", error)
        self._lead.close(resign=True)
        self._announcer.close()
