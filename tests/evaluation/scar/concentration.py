"""How unevenly the blocks change: what an eighth of them can save at most, whatever the strategy."""

from typing import Any

import numpy as np

from tests.evaluation.scar.failures import record
from tests.evaluation.scar.runs import CHAINS, made

PART = 1 / 8


def concentration(problem: str, base: int, period: int, chains: int = CHAINS) -> dict[str, Any]:
    """Return how much of the squared change over ``period`` iterations the most changed eighth of the blocks holds.

    And how much of the size that eighth has: blocks need not be equal.
    """
    kept = record(made(problem, 0, chains), base)
    sizes = np.diff(kept.problem.offsets)
    count = max(1, round(PART * len(sizes)))
    held, size = [], []
    for iteration in range(period, base, max(1, period // 4)):
        far = kept.problem.distances(kept.states[iteration], kept.states[iteration - period])
        first = np.argsort(-far, axis=1, kind="stable")[:, :count]
        squares = far**2
        held.append(np.mean(np.take_along_axis(squares, first, axis=1).sum(1) / squares.sum(1)))
        size.append(np.mean(sizes[first].sum(1) / sizes.sum()))
    return {"change": float(np.mean(held)), "size": float(np.mean(size)), "blocks": len(sizes)}
