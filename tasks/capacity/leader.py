"""Whether a loop leads, for those who only look: their clock may be another than the loop's."""

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import LedgerUnavailableError
from ebbflow.infra.ledger import Lead, Ledger

_SPARE = 1.0  # s that a renewal may be late
_LONGEST = 60.0  # s that is waited for a renewal; a lead of ``LoopPace`` is 15 s
_LOOK = 0.1  # s


def leads(ledger: Ledger, clock: Clock) -> bool:
    """Tell whether a loop leads the cluster of ``ledger``.

    A loop's clock goes on steadily when the machine's is set, so a process that began later may see the end of a
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


def _next(ledger: Ledger, clock: Clock, lead: Lead) -> Lead | None:
    """Return what follows a lead within its time; ``None``: nothing."""
    end = clock.now() + min(lead.seconds, _LONGEST) + _SPARE
    while True:
        clock.sleep(_LOOK)
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


class Watched:
    """Sees a lead come to its end without regard to clocks: it was given back, or not renewed for all of its time."""

    def __init__(self, token: int, clock: Clock) -> None:
        self._token, self._clock = token, clock
        self._row: Lead | None = None
        self._since = clock.now()

    def over(self, lead: Lead | None) -> bool:
        """Tell whether it has ended, by the cluster's lead as read now."""
        if lead is None or lead.token != self._token or lead.until == 0:
            return True
        now = self._clock.now()
        if lead != self._row:
            self._row, self._since = lead, now
        return now - self._since > lead.seconds
