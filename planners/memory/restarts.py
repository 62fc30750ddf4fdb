"""Whether and when a daemon that has crashed is started again. Pure; times are those of the caller's clock."""

from dataclasses import dataclass, field, replace

from ebbflow.planners.errors import OptionError


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Waits of first · 2ⁿ up to ``most``, and no start after ``limit`` crashes in a row.

    Args:
        first: seconds before the first start again.
        most: seconds before any.
        limit: crashes in a row after which it stays down; at least 1.
        settled: seconds of service after which earlier crashes count no longer.

    Raises ``OptionError`` for values outside these rules.
    """

    first: float = 1.0
    most: float = 60.0
    limit: int = 6
    settled: float = 300.0

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.most or self.limit < 1 or not self.settled >= 0:
            raise OptionError(
                "restarts need 0 <= first <= most, limit >= 1 and settled >= 0; got "
                f"{self.first:g}, {self.most:g}, {self.limit}, {self.settled:g}"
            )

    @property
    def waited(self) -> float:
        """Return the seconds that are waited before all starts in a row together."""
        return sum(min(self.first * 2.0**n, self.most) for n in range(self.limit - 1))


@dataclass(frozen=True, slots=True)
class Restarts:
    """One daemon's crashes.

    Args:
        policy: what follows from them.
        crashes: in a row.
        since: when the newest one was started.
        due: when it is started again; ``None``: it runs, or is given up.
    """

    policy: RestartPolicy = field(default_factory=RestartPolicy)
    crashes: int = 0
    since: float = 0.0
    due: float | None = None

    @property
    def given_up(self) -> bool:
        """Tell whether it has crashed too often to be started again."""
        return self.crashes >= self.policy.limit

    def started(self, now: float) -> "Restarts":
        """Return what is known as its next start begins, whatever becomes of that."""
        return replace(self, since=now, due=None)

    def crashed(self, now: float) -> "Restarts":
        """Return what is known once it was seen to have crashed, or its start has failed."""
        crashes = 1 + (0 if now - self.since >= self.policy.settled else self.crashes)
        later = replace(self, crashes=crashes, due=None)
        if later.given_up:
            return later
        wait = min(self.policy.first * 2.0 ** (crashes - 1), self.policy.most)
        return replace(later, due=now + wait)
