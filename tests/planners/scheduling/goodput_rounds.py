"""Rounds for the tests of Pollux: apps whose goodput is a table, and every feasible matrix of a small one."""

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ebbflow.planners.model.capacity import Capacity, Node
from ebbflow.planners.model.scheduling import App, View
from ebbflow.planners.scheduling.goodput.objective import Objective, Problem, problem_of


@dataclass(frozen=True)
class Table:
    """Goodput by GPUs, on one node and on several."""

    local: tuple[float, ...]
    spread: tuple[float, ...]

    def best(self, nodes: np.ndarray[Any, Any], gpus: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        wide = np.asarray(nodes) > 1
        return np.where(wide, np.array(self.spread)[gpus], np.array(self.local)[gpus])


def concave(power: float, loss: float = 0.8, most: int = 128) -> Table:
    """Return goodput that grows as a power of the GPUs, times ``loss`` across nodes."""
    local = tuple(float(k) ** power if k else 0.0 for k in range(most + 1))
    return Table(local, tuple(loss * value for value in local))


def cluster(nodes: int, gpus: int) -> Capacity:
    return Capacity(0, tuple(Node(f"n{i:02}", 8, 32.0, gpus=gpus) for i in range(nodes)))


@st.composite
def problems(
    draw: st.DrawFn, most_apps: int = 6, nodes: int = 4, gpus: int = 4, spread: bool = True
) -> Problem:
    """Draw a round whose present allocation is feasible."""
    count = draw(st.integers(1, most_apps))
    free = [gpus] * nodes
    taken = [False] * nodes
    apps = []
    for j in range(count):
        curve = Table(
            (0.0, *draw(st.lists(st.floats(0.01, 20.0), min_size=nodes * gpus, max_size=nodes * gpus))),
            (0.0, *draw(st.lists(st.floats(0.01, 20.0), min_size=nodes * gpus, max_size=nodes * gpus))),
        )
        held: list[tuple[str, int]] = []
        wanted = draw(st.lists(st.integers(0, gpus), min_size=nodes, max_size=nodes))
        if not spread or draw(st.booleans()):
            wanted = [w if i == wanted.index(max(wanted)) else 0 for i, w in enumerate(wanted)]
        several = sum(w > 0 for w in wanted) > 1
        for node, want in enumerate(wanted):
            given = 0 if several and taken[node] else min(want, free[node])
            if given:
                held.append((f"n{node:02}", given))
        if len(held) > 1:
            for node_id, _ in held:
                taken[int(node_id[1:])] = True
        for node_id, given in held:
            free[int(node_id[1:])] -= given
        total = sum(g for _, g in held)
        apps.append(
            App(
                f"app-{j}",
                number=j,
                arrival=draw(st.floats(0, 3600)),
                max_gpus=draw(st.integers(max(total, 1), nodes * gpus)),
                weight=draw(st.sampled_from([1.0, 1.0, 2.0])),
                held=tuple(held),
                service=draw(st.floats(0, 1e4)),
                restarts=draw(st.integers(0, 5)),
                most_gpus=max(total, draw(st.integers(0, nodes * gpus))),
                goodput=curve if draw(st.booleans()) else None,
            )
        )
    p = draw(st.sampled_from([-1.0, -1.0, -10.0, 0.0, 1.0]))
    return problem_of(View(3600.0, apps, cluster(nodes, gpus)), Objective(p))


def every_matrix(problem: Problem) -> np.ndarray[Any, Any]:
    """Return all feasible matrices of a small round."""
    apps = len(problem.ids)
    rows = list(product(*(range(int(room) + 1) for room in problem.room)))
    found = [
        np.array(chosen, np.int16)
        for chosen in product(rows, repeat=apps)
        if (np.sum(chosen, axis=0) <= problem.room).all()
    ]
    return np.array([matrix for matrix in found if problem.feasible(matrix)])
