"""Being the one loop of a cluster: taking the lead, keeping it, and noticing its loss.

A lead is a row with a token and a time. Whoever writes nodes or leases names its token, and the ledger refuses every
token but the newest: so a loop that was suspended, cut off or has a wrong clock can do nothing, whatever it believes.
The time only decides when another may take over without being told to.

Whether a loop leads, for those who only look: their clock may be another than the loop's.
"""

import logging
import os
import random
import socket
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import LedgerBusyError, LedgerError, LedgerUnavailableError, StaleLoopError
from ebbflow.infra.ledger import LeaderLease as Row
from ebbflow.infra.ledger import Leadership, Ledger
from ebbflow.tasks.capacity.intervals import LoopIntervals

_DEAD = 1.5  # of a lead's time without a renewal, after which its loop is dead, whatever clocks say
_RETRY = 1.0  # s between attempts to renew when the ledger does not answer
_END = 5.0  # s for a renewal that is under way at the end

log = logging.getLogger(__name__)


def holder_name() -> str:
    """Return who leads, for people: machine, process, and a word that no other process has."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:6]}"


@dataclass
class ElectionDelay:
    """What had to be waited for before the lead was taken."""

    seconds: float = 0.0
    former: str = ""  # who led


class Lead:
    """The lead of one loop. ``lost`` is set once another loop has it, and ``wake`` with it."""

    def __init__(self, ledger: Ledger, holder: str, pace: LoopIntervals, clock: Clock) -> None:
        self._ledger, self._pace, self._clock = ledger, pace, clock
        self.holder = holder
        self.lost = threading.Event()
        self._leadership: Leadership | None = None
        self._wake: threading.Event | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._renewed = 0.0
        self._jitter = random.Random(holder)  # noqa: S311 - spreads attempts, no secret

    @property
    def taken(self) -> bool:
        """Tell whether the lead was ever taken."""
        return self._leadership is not None

    @property
    def leadership(self) -> Leadership:
        """Return the lead that was taken."""
        assert self._leadership is not None
        return self._leadership

    def take(
        self, stop: threading.Event, *, take_over: bool = False, say: Callable[[str], None] | None = None
    ) -> ElectionDelay | None:
        """Wait until the lead is free, and take it; ``None`` when ``stop`` was set before.

        ``take_over`` takes it from one that lives. One whose row has not changed for the whole time of a lead, by
        this process' own measure, is dead: then a clock that is wrong here or there delays nobody.

        Raises ``LedgerUnavailableError`` when the ledger has been away for longer than the pace's ledger timeout.
        """
        begun = self._clock.now()
        waited = ElectionDelay()
        away: float | None = None
        row: Row | None = None
        since = begun  # when the row was last seen to change
        pause = min(1.0, self._pace.leader_lease / 10)
        while not stop.is_set():
            now = self._clock.now()
            try:
                self.take_now(take_over=take_over)
            except LedgerBusyError as error:
                away = None
                if not waited.former:
                    waited.former = error.holder
                    log.warning("waiting for leader election: %s", error)
                    if say is not None:
                        say(f"waiting for leader election: {error}")
                held = self._leader()
                if held != row:
                    row, since = held, now
                elif held is not None and now - since > _DEAD * held.seconds:
                    log.warning(
                        "%s has not renewed its leader lease for %.0f s; this loop takes over",
                        error.holder,
                        now - since,
                    )
                    take_over = True
                    continue
            except LedgerUnavailableError as error:
                if away is None:
                    away = now
                    log.warning(
                        "the ledger does not respond, retrying for %.0f s: %s",
                        self._pace.ledger_timeout,
                        error,
                    )
                if now - away > self._pace.ledger_timeout:
                    raise
            else:
                waited.seconds = self._renewed - begun
                return waited
            self._clock.wait(stop, pause * self._jitter.uniform(0.5, 1.0))
        return None

    @property
    def sure(self) -> bool:
        """Tell whether the lead was taken or renewed so lately that no other loop can think it over.

        A loop that was suspended is not sure of it until it has asked the ledger.
        """
        return not self.lost.is_set() and self._clock.now() - self._renewed < self._pace.leader_lease

    def take_now(self, *, take_over: bool = False) -> None:
        """Take the lead without waiting. Raises ``LedgerBusyError`` while another holds it."""
        asked = self._clock.now()
        self._leadership = self._ledger.lead(self.holder, self._pace.leader_lease, take_over=take_over)
        self._renewed = asked

    def start(self, wake: threading.Event) -> None:
        """Renew in a thread of its own from now on, however long a decision takes."""
        self._wake = wake
        self._thread = threading.Thread(target=self._run, name="loop-lead", daemon=True)
        self._thread.start()

    def renew_if_due(self) -> None:
        """Renew when a third of the lead's time is over, for loops without threads. Raises ``StaleLoopError``."""
        if self._thread is None and self._clock.now() - self._renewed >= self._pace.leader_lease / 3:
            self._renew()

    def close(self, *, resign: bool) -> None:
        """Stop renewing, and free the lead for the next loop where that can be done at once."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_END)
        if resign and self._leadership is not None and not self.lost.is_set():
            try:
                self._leadership.resign()
            except LedgerError as error:
                log.warning("the leader lease was not released; it expires by itself: %s", error)

    def _leader(self) -> Row | None:
        try:
            return self._ledger.leader()
        except LedgerUnavailableError:
            return None

    def _renew(self) -> None:
        asked = self._clock.now()
        self.leadership.renew()
        self._renewed = asked

    def _run(self) -> None:
        delay = self._pace.leader_lease / 3
        while not self._clock.wait(self._stop, delay):
            try:
                self._renew()
            except StaleLoopError:
                self.lost.set()
                if self._wake is not None:
                    self._wake.set()
                return
            except LedgerUnavailableError:
                delay = min(
                    _RETRY, self._pace.leader_lease / 3
                )  # the loop itself says that the ledger is away
            except Exception:
                log.exception("the leader lease could not be renewed")
                delay = min(_RETRY, self._pace.leader_lease / 3)
            else:
                delay = self._pace.leader_lease / 3


_SPARE = 1.0  # s that a renewal may be late


_LONGEST = 60.0  # s that is waited for a renewal; a lead of ``LoopIntervals`` is 15 s


_POLL = 0.1  # s


def leads(ledger: Ledger, clock: Clock) -> bool:
    """Tell whether a loop leads the cluster of ``ledger``.

    A loop's clock advances steadily when the machine's is set, so a process that began later may see the end of a
    lead in the past, or too far in the future. A loop whose renewal is late leads on as long as nobody takes over. So
    what looks as if it had run out is watched for the time of a whole lead, and leads if it is renewed meanwhile; a
    ledger that does not answer is asked again as long. Raises ``LedgerError``.
    """
    lead = ledger.leader()
    if lead is None or lead.until == 0:
        return False
    if lead.alive(clock.now()):
        return True
    found = _next(ledger, clock, lead)
    return found is not None and found.until != 0


def led_soon(ledger: Ledger, clock: Clock) -> bool:
    """Tell whether a loop leads, or begins to within the time of the last lead: one that stands by takes over.

    Raises ``LedgerError``.
    """
    if leads(ledger, clock):
        return True
    last = ledger.leader()
    if last is None or last.until != 0:  # nobody ever led, or it was watched already
        return False
    found = _next(ledger, clock, last)
    return found is not None and found.until != 0


def _next(ledger: Ledger, clock: Clock, lead: Row) -> Row | None:
    """Return what follows a lead within its time; ``None``: nothing."""
    end = clock.now() + min(lead.seconds, _LONGEST) + _SPARE
    while True:
        clock.sleep(_POLL)
        late = clock.now() >= end
        try:
            found = ledger.leader()
        except LedgerUnavailableError:
            if late:
                raise
            continue
        if found is not None and found != lead:
            return found
        if late:
            return None


class LeaseExpiryWatch:
    """Sees a lead come to its end without regard to clocks: it was given back, or not renewed for all of its time."""

    def __init__(self, token: int, clock: Clock) -> None:
        self._token, self._clock = token, clock
        self._row: Row | None = None
        self._since = clock.now()

    def over(self, lead: Row | None) -> bool:
        """Tell whether it has ended, by the cluster's lead as read now."""
        if lead is None or lead.token != self._token or lead.until == 0:
            return True
        now = self._clock.now()
        if lead != self._row:
            self._row, self._since = lead, now
        return now - self._since > lead.seconds
