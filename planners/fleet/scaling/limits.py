"""What all scaling rules share: the pool's limits, and targets within them."""

from collections.abc import Callable
from typing import ClassVar, Protocol

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.fleet import PoolState, Target

Curve = Callable[[int], float]
"""What a number of nodes is worth: goodput per GPU, utility, or seconds to the end; each rule says which."""


class Rule(Protocol):
    """Says how many nodes a pool is to have. Equal rules, pools and curves give equal targets."""

    name: ClassVar[str]

    def decide(self, pool: PoolState, revision: int, curve: Curve) -> Target:
        """Return what ``pool`` is to be from now on, decided for ``revision``, with the reason."""
        ...


def limits(pool: PoolState) -> tuple[int, int]:
    """Return the fewest and the most nodes that ``pool`` may have.

    Raises ``OptionError`` unless 0 <= least <= most.
    """
    if not 0 <= pool.min_nodes <= pool.max_nodes:
        raise OptionError(
            f"pool {pool.name}: 0 <= least <= most must hold; got {pool.min_nodes}, {pool.max_nodes}"
        )
    return pool.min_nodes, pool.max_nodes


def to(pool: PoolState, revision: int, nodes: int, reason: str) -> Target:
    """Return the target of ``nodes`` for ``pool``; the pool's own on-demand base stays."""
    verb = "keep" if nodes == pool.planned else "grow to" if nodes > pool.planned else "shrink to"
    said = f"{verb} {nodes}: {reason}"
    return Target(pool.name, nodes, revision, said, min(pool.on_demand, nodes))
