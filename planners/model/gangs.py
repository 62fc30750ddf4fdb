"""Gangs: nodes that are wanted all at once or not at all, for one run."""

import re
from dataclasses import dataclass
from math import inf

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Market

MOST = 1000  # nodes; EC2's bound of a minimum target capacity
_CHEAPEST = 0.001  # dollars per hour; EC2 takes no lower limit
_NAME = re.compile(r"[a-z0-9](-?[a-z0-9]){0,39}")


@dataclass(frozen=True, slots=True)
class GangRequest:
    """``size`` equal places, at once or not at all, in one zone (``one_zone``) or of one type (``one_type``) or both.

    ``max_price`` is in dollars per hour for one node; None stands for the on-demand price, which AWS never exceeds.
    Raises ``OptionError``.
    """

    name: str
    pool: str  # whose launch template, instance types and subnets are used
    size: int
    market: Market = "spot"
    one_zone: bool = True
    one_type: bool = True
    max_price: float | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise OptionError(
                "a gang's name must be 1 to 40 lower-case letters, digits and single dashes, with no dash first or "
                f"last; got {self.name!r}"
            )
        if not 1 <= self.size <= MOST:
            raise OptionError(f"a gang's size must be 1 to {MOST} nodes; got {self.size}")
        if self.market not in ("spot", "on-demand"):
            raise OptionError(f"a gang's market must be spot or on-demand; got {self.market!r}")
        if not (self.one_zone or self.one_type):
            raise OptionError(
                "a gang must be in one zone or of one type: AWS promises all or nothing only then"
            )
        if self.max_price is not None and (self.market != "spot" or not _CHEAPEST <= self.max_price < inf):
            raise OptionError(
                "max_price is for spot nodes and must be at least 0.001 dollars; got "
                f"{self.max_price!r} for {self.market}"
            )

    @property
    def shown(self) -> str:
        """Return the name of the pool as which a fleet shows the gang."""
        return f"{self.pool}/{self.name}"


@dataclass(frozen=True, slots=True)
class GangTarget:
    """A gang that may be started, decided for a fleet's ``revision`` and beside pools of so many planned nodes.

    One for an old revision, or beside a pool that has been let grow since, is not started.
    ``planners.fleet.guard_gang.check_gang`` alone makes them, and nothing else can be started: so no gang gets past
    the limits.
    """

    request: GangRequest
    revision: int
    reason: str
    beside: tuple[tuple[str, int], ...] = ()  # pool, nodes that it is planned to have
