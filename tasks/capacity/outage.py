"""A ledger that is away: for how long it is waited for, and that it is told once."""

import logging
import random

from ebbflow.infra.clock import Clock

_FIRST = 0.1  # s before the first attempt
_MOST = 5.0  # s between attempts

log = logging.getLogger(__name__)


class Outage:
    """Counts one outage after another. Attempts back off with jitter, so that many processes do not come at once."""

    def __init__(self, patience: float, clock: Clock, seed: str = "") -> None:
        self._patience, self._clock = patience, clock
        self._jitter = random.Random(f"outage {seed}")  # noqa: S311 - spreads attempts, no secret
        self.since: float | None = None
        self.why = ""
        self.count = 0
        self.away = 0.0  # s, of outages that are over
        self._attempts = 0

    def failed(self, error: Exception) -> float:
        """Note that an attempt failed; return for how long, s, to wait. Raises ``error`` beyond the patience."""
        now = self._clock.now()
        if self.since is None:
            self.since, self._attempts = now, 0
            self.count += 1
            log.warning(
                "the ledger does not answer: nothing is granted, apps keep what they hold; trying for %.0f s: %s",
                self._patience,
                error,
            )
        self.why = str(error)
        if now - self.since > self._patience:
            log.error("the ledger has been away for %.0f s; the loop gives up", now - self.since)
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
        log.warning("the ledger answers again, after %.1f s", seconds)
        return seconds
