"""``AppAgent``: an app's own line to the ledger. It enters the app, follows its leases and reports every second."""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import LedgerError, LedgerUnavailableError, RunLockedError
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.logs.json_lines import log_ids
from ebbflow.infra.storage.locks import RunLock
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.ledger import (
    OVER,
    AppEntered,
    AppMoved,
    AppPhase,
    AppReport,
    AppSpec,
    Decided,
    DecisionKind,
    Saved,
)
from ebbflow.planners.model.ledger_state import State
from ebbflow.tasks.apps.allocation import AllocationStatus
from ebbflow.tasks.apps.cancelling import cancel_id, interrupt_process
from ebbflow.tasks.apps.lease_table import LeaseTable, Rules, rules_of
from ebbflow.tasks.apps.outbox import Outbox
from ebbflow.tasks.apps.skew import Skew, shifted

_LOCK_LOOK = 0.2  # s between attempts on the app's lock

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AgentIntervals:
    """How often an agent looks and speaks, and how long it waits. Seconds."""

    look: float = 0.25  # between looks at the ledger
    report: float = 1.0  # between reports where nothing changes
    entry: float = 300.0  # that the ledger may be away at the entry, and an earlier self may hold the lock
    parting: float = 10.0  # for the last words


class AppAgent:
    """Speaks for one app; a context manager. Its thread never waits for the app, nor the app for it.

    While the ledger does not answer, the app continues with what it has, what it says is kept and said later; that is
    told once. An app that its loop takes for lost although it lives enters again.

    Args:
        ledger: the cluster's; it stays open.
        spec: what the app asks for.
        clock: the ledger's unless given.
        rules: when leases count as over; ``grace`` must be the loop's. As the loop says itself unless given.
        pace: how often it looks and speaks.
        changed: called in the agent's thread with each new standing; it must be quick.
        notify: called with sentences for people.
        lock: held while the app lives, so that no two processes speak for one app.
        settle: called at the start, before any lease is used or let go of: it returns when nothing of an earlier self
            of the app runs any more, and raises when that cannot be had.
        cancel: called once when the app's cancellation is requested (``ebbflow apps cancel``).
    """

    def __init__(
        self,
        ledger: Ledger,
        spec: AppSpec,
        clock: Clock | None = None,
        *,
        rules: Rules | None = None,
        pace: AgentIntervals | None = None,
        changed: Callable[[AllocationStatus], None] = lambda _: None,
        notify: Callable[[str], None] = lambda _: None,
        lock: RunLock | None = None,
        settle: Callable[[], None] = lambda: None,
        cancel: Callable[[], None] = interrupt_process,
    ) -> None:
        self._ledger, self.spec = ledger, spec
        self._clock = clock or ledger.clock or SystemClock()
        self._pace = pace or AgentIntervals()
        self._changed, self._notify = changed, notify
        self._lock_of_app, self._settle, self._cancel = lock, settle, cancel
        self._cancelled = False
        self._former_request: float | None = None  # time of the one that was meant for an earlier run
        self.lease_table = LeaseTable(spec.id, self._clock, rules or rules_of(ledger))
        self._lock = threading.Lock()
        self._outbox = Outbox(ledger, self._log_and_notify)
        self._phase: AppPhase = "waiting"
        self._reason = ""
        self._fields: dict[str, Any] = {}  # of the report
        self._standing = AllocationStatus()
        self._skew = Skew()
        self._state: State | None = None
        self._away: float | None = None  # since when the ledger does not answer
        self._reported = float("-inf")
        self._last_content: tuple[Any, ...] = ()
        self._pools: tuple[str, ...] = ()  # of the last report that the ledger has taken
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"agent-{spec.id}", daemon=True)

    # --- life -----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Enter the app. Raises ``RunLockedError``, ``LedgerError``, and what ``settle`` raises."""
        self._take_lock()
        try:
            self._enter()
        except BaseException:
            self._let_go_of_lock()
            raise
        self._thread.start()
        try:
            self._settle()
        except BaseException as error:
            self._leave("stopped" if not isinstance(error, Exception) else "failed", str(error))
            raise
        self.lease_table.settle()
        self.poke()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give everything back and say how the app ended: as ``moved`` said last, else by the error."""
        if self._phase in OVER:
            self._leave(self._phase, self._reason)
        elif error is None:
            self._leave("finished", "")
        elif isinstance(error, Exception):
            self._leave("failed", str(error) or type(error).__name__)
        else:
            self._leave("stopped", "interrupted")

    # --- what the app says ----------------------------------------------------------------------------------

    @property
    def phase(self) -> AppPhase:
        return self._phase

    def moved(self, phase: AppPhase, reason: str = "") -> None:
        """Say that the app is in another phase."""
        with self._lock:
            if (phase, reason) == (self._phase, self._reason):
                return
            self._phase, self._reason = phase, reason
            self._outbox.add(AppMoved(self.spec.id, phase, reason))
        self.poke()

    def saved(self, uri: str, step: int = 0) -> None:
        """Say that there is a new checkpoint at ``uri``."""
        self._outbox.add(Saved(self.spec.id, uri, step))
        self._wake.set()

    def decided(
        self,
        kind: DecisionKind,
        reason: str,
        *,
        inputs: Mapping[str, Any] | None = None,
        outcome: Mapping[str, Any] | None = None,
        revision: int = 0,
        seconds: float = 0.0,
    ) -> None:
        """Write down a decision of the app with what it was based on."""
        self._outbox.add(Decided(kind, reason, self.spec.id, revision, seconds, inputs or {}, outcome or {}))
        self._wake.set()

    def update_metrics(self, **fields: Any) -> None:
        """Say more of oneself in the reports: any fields of ``AppReport`` but those of leases and phase."""
        with self._lock:
            self._fields |= fields

    def is_pool_reported(self, pool: str) -> bool:
        """Tell whether the ledger has it from the app that this pool is its own: what is left there can be ended."""
        return pool in self._pools

    def release(self, numbers: "tuple[int, ...] | None" = None) -> None:
        """Give leases back that nothing uses, by default all, although nobody has called them back."""
        if self.lease_table.release(numbers):
            self.poke()

    def left(self, user: str) -> None:
        """Say that no process of ``user`` is left on its GPUs; see ``LeaseTable.enter``."""
        self.lease_table.leave(user)
        self._wake.set()

    # --- what the app hears ---------------------------------------------------------------------------------

    @property
    def standing(self) -> AllocationStatus:
        """Return what may be used now."""
        return AllocationStatus(
            self.lease_table.allowed(),
            self.lease_table.placement(),
            self.lease_table.due(),
            self.lease_table.led,
        )

    @property
    def state(self) -> State | None:
        """Return the ledger's state as last read. It must not be changed."""
        return self._state

    @property
    def away(self) -> float | None:
        """Return since when the ledger does not answer (Unix s); ``None``: it does."""
        return self._away

    def wait(self, timeout: float) -> None:
        """Return when something has changed, or after ``timeout`` seconds."""
        with self._news:
            self._news.wait(timeout)

    def poke(self) -> None:
        """Look and report at once."""
        self._reported = float("-inf")
        self._wake.set()

    # --- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        with log_ids(app=self.spec.id):
            while not self._stop.is_set():
                self._wake.clear()
                try:
                    self._round()
                except Exception:
                    # a defect here must not silence the app: it would be taken for lost
                    log.exception("the agent of %s failed in a cycle", self.spec.id)
                self._clock.wait(self._wake, self._pace.look)

    def _round(self) -> None:
        try:
            self._look()
            self._outbox.send()
            self._report()
            if self._away is not None:
                self._log_and_notify(
                    f"the ledger is available again after {self._clock.now() - self._away:.0f} s"
                )
                self._away = None
        except LedgerError as error:
            if self._away is None:
                self._away = self._clock.now()
                self._log_and_notify(
                    f"the ledger does not respond; the app continues with its leases: {error}"
                )
        self._notice()

    def _look(self) -> None:
        at = self._clock.now()
        lead = self._ledger.leader()
        state = self._ledger.state()
        self._state = state
        skew = self._skew.look(lead, at)
        led = lead.until - skew if lead is not None and lead.alive(at + skew) else 0.0
        leases = state.held(self.spec.id)
        self.lease_table.learn(leases if not skew else [shifted(lease, -skew) for lease in leases], led, at)
        record = state.apps.get(self.spec.id)
        # one that was lost for long the ledger's state does not name any more
        lost = (record is None or record.phase == "lost") and self._phase not in OVER
        if lost and self._outbox.enter_again(self.spec, self._phase, self._reason):
            self._log_and_notify("marked lost (heartbeat timeout); re-registering")

    def _report(self) -> None:
        holds, released = self.lease_table.account()
        with self._lock:
            fields, phase = dict(self._fields), self._phase
        news = (holds, released, phase)
        now = self._clock.now()
        if news == self._last_content and now - self._reported < self._pace.report:
            return
        report = AppReport(at=now, holds=holds, released=released, phase=phase, **fields)
        try:
            self._ledger.report(self.spec.id, report)
        except OptionError as error:  # a figure that cannot be kept must not silence the app
            log.warning("%s: a report without its metrics: %s", self.spec.id, error)
            pools = tuple(fields.get("pools", ()))
            report = AppReport(at=now, holds=holds, released=released, phase=phase, pools=pools)
            self._ledger.report(self.spec.id, report)
        self._last_content, self._reported, self._pools = news, now, report.pools
        self._hear_cancellation()

    def _hear_cancellation(self) -> None:
        """End the app where that was requested since it registered."""
        if self._cancelled or self._phase in OVER or self._stop.is_set():
            return
        if self._ledger.reported_at(cancel_id(self.spec.id)) == self._former_request:
            return
        self._cancelled = True
        self._log_and_notify("cancellation requested: the app saves its work and ends")
        self._cancel()

    def _notice(self) -> None:
        """Tell the app of a standing that differs from the last."""
        standing, before = self.standing, self._standing
        if standing == before:
            return
        self._standing = standing
        with self._news:
            self._news.notify_all()
        try:
            self._changed(standing)
        except Exception:
            log.exception("the app %s failed at a change of its leases", self.spec.id)

    def _log_and_notify(self, text: str) -> None:
        log.info("%s: %s", self.spec.id, text)
        try:
            self._notify(text)
        except Exception:
            log.exception("notifying the app %s failed", self.spec.id)

    # --- beginning and end ----------------------------------------------------------------------------------

    def _take_lock(self) -> None:
        """Wait, bounded, until an earlier self has let go of the app's lock. Raises ``RunLockedError``."""
        if self._lock_of_app is None:
            return
        begun = self._clock.now()
        while True:
            try:
                self._lock_of_app.acquire()
                return
            except RunLockedError:
                patience = self._pace.entry if self._recently_lost() else self._lock_of_app.lingers
                if self._clock.now() - begun >= patience:
                    raise
            self._clock.sleep(_LOCK_LOOK)

    def _recently_lost(self) -> bool:
        """Tell whether the ledger has the app down as lost: whoever holds its lock is about to go."""
        try:
            record = self._ledger.state().apps.get(self.spec.id)
        except LedgerError:
            return True
        return record is not None and record.phase == "lost"

    def _enter(self) -> None:
        end = self._clock.now() + self._pace.entry
        while True:
            try:
                self._former_request = self._ledger.reported_at(cancel_id(self.spec.id))
                self._ledger.write([AppEntered(self.spec)])
                self._look()
                self._report()
                return
            except LedgerUnavailableError as error:
                if self._clock.now() >= end:
                    raise
                if self._away is None:
                    self._away = self._clock.now()
                    self._log_and_notify(f"the ledger does not respond; the app waits to register: {error}")
            self._clock.sleep(self._pace.look)

    def _leave(self, phase: AppPhase, reason: str) -> None:
        """Stop speaking, with the last words: what is let go of, then how the app ended."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(self._pace.parting)
        self.lease_table.release()
        with self._lock:
            if self._phase != phase or not self._is_phase_reported(phase):
                self._outbox.add(AppMoved(self.spec.id, phase, reason))
            self._phase, self._reason = phase, reason
        end = self._clock.now() + self._pace.parting
        while True:
            try:
                self._reported = float("-inf")
                self._report()
                self._outbox.send()
                break
            except LedgerError as error:
                if self._clock.now() >= end:
                    self._log_and_notify(f"the ledger does not respond; it will mark the app lost: {error}")
                    break
            self._clock.sleep(self._pace.look)
        self._let_go_of_lock()

    def _let_go_of_lock(self) -> None:
        if self._lock_of_app is not None:
            self._lock_of_app.release()

    def _is_phase_reported(self, phase: AppPhase) -> bool:
        """Tell whether the phase is in the ledger or on its way there."""
        if self._outbox.moves_to(phase):
            return True
        record = self._state.apps.get(self.spec.id) if self._state is not None else None
        return record is not None and record.phase == phase
