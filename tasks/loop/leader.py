"""Whether a loop leads, for those who only look: their clock may be another than the loop's."""

from ebbflow.infra.clock import Clock
from ebbflow.infra.ledger import Lead, Ledger

_SPARE = 1.0  # s that a renewal may be late
_LOOK = 0.1  # s


def leads(ledger: Ledger, clock: Clock) -> bool:
    """Tell whether a loop leads the cluster of ``ledger``.

    A loop's clock goes on steadily when the machine's is set, so a process that began later may see the end of a
    lead in the past, or too far in the future. What is renewed while it looks, for a third of the lead's time, is
    alive all the same. Raises ``LedgerError``.
    """
    lead = ledger.leader()
    if lead is None or lead.until == 0:
        return False
    if lead.alive(clock.now()):
        return True
    end = clock.now() + lead.seconds / 3 + _SPARE
    while clock.now() < end:
        clock.sleep(_LOOK)
        now = ledger.leader()
        if now is not None and now != lead:
            return now.until != 0
    return False


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
