"""How far the clock of a cluster's loop is from an app's own: times in the ledger are the loop's."""

from collections import deque
from dataclasses import replace

from ebbflow.infra.ledger import LeaderLease
from ebbflow.planners.model.ledger import Lease

LEAST = 3.0  # s below which clocks are taken to agree: less than what short leases can spare
_SEEN = 9  # renewals that are remembered
_NEEDED = 3  # of them before anything is said


class Skew:
    """Learns the difference from renewals of the lead: each says what the loop's clock showed a moment ago.

    A renewal that is noticed late makes the loop's clock look slower than it is, never faster, so the largest
    difference is the truest. Where clocks agree to within three seconds, as they do on machines that ask for the
    time, nothing is changed: what is learnt is that uncertain itself where the ledger is slow.
    """

    def __init__(self) -> None:
        self._holder: tuple[int, float] | None = None  # token and end of the lead as last seen
        self._differences: deque[float] = deque(maxlen=_SEEN)

    def look(self, lead: LeaderLease | None, now: float) -> float:
        """Take in the lead as read ``now`` (own clock, Unix s); return by how much the loop's clock is ahead, s."""
        if lead is not None and lead.until > 0:
            seen = (lead.token, lead.until)
            if self._holder is not None and self._holder[0] != lead.token:
                self._differences.clear()  # another loop, perhaps of another machine
            elif self._holder is not None and self._holder != seen:
                self._differences.append(lead.until - lead.seconds - now)
            self._holder = seen
        if len(self._differences) < _NEEDED:
            return 0.0
        ahead = max(self._differences)
        return ahead if abs(ahead) > LEAST else 0.0


def shifted(lease: Lease, seconds: float) -> Lease:
    """Return a lease with all its times so much later."""
    recalled = None if lease.recalled is None else lease.recalled + seconds
    return replace(lease, since=lease.since + seconds, until=lease.until + seconds, recalled=recalled)
