"""GPUs that an auction left over go to apps that did not bid, at random (Themis, NSDI 2020, section 5.1)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from ebbflow.planners.model.scheduling import App

Leftovers = Literal["gpu", "machine", "affine"]
"""``gpu``: one draw a GPU. ``machine``: one draw for all that is left on a machine, which keeps gangs together.
``affine``: as ``gpu``, but among apps that held GPUs of that machine until now, if there are any."""

Accepts = Callable[[App, Mapping[str, int], Mapping[str, int]], bool]
"""Whether an app holding the first counts by node wants to hold the second."""


def give_away(
    free: dict[str, int],
    apps: Sequence[App],
    holding: dict[str, dict[str, int]],
    before: Mapping[str, Mapping[str, int]],
    accepts: Accepts,
    mode: Leftovers,
    rng: np.random.Generator,
) -> dict[str, dict[str, int]]:
    """Draw an owner among ``apps`` for what is ``free`` by node; return what each got.

    ``free`` and ``holding`` (all GPUs by app and node) are updated. An app takes part while it has unmet demand, and
    may decline. One that cannot run on a single GPU more takes as many as it needs, from the drawn node first.
    """
    given: dict[str, dict[str, int]] = {}
    wanting = [i for i, a in enumerate(apps) if a.max_gpus > sum(holding[a.id].values())]
    for node in list(free):
        able = list(wanting)
        while free[node] > 0 and able:
            drawn = able
            if mode == "affine":
                had = {i: (before.get(apps[i].id, {}), holding[apps[i].id]) for i in able}
                drawn = [i for i, (was, now) in had.items() if was.get(node, 0) > now.get(node, 0)] or able
            index = drawn[int(rng.integers(len(drawn)))]
            app = apps[index]
            has = sum(holding[app.id].values())
            number = max(app.min_gpus - has, 1)
            if mode == "machine":
                number = max(number, min(free[node], app.max_gpus - has))
            taken = _take(free, node, number)
            after = dict(holding[app.id])
            for where, gpus in taken.items():
                after[where] = after.get(where, 0) + gpus
            if not taken or not accepts(app, holding[app.id], after):
                able.remove(index)
                continue
            for where, gpus in taken.items():
                free[where] -= gpus
                mine = given.setdefault(app.id, {})
                mine[where] = mine.get(where, 0) + gpus
            holding[app.id] = after
            if sum(after.values()) >= app.max_gpus:
                wanting.remove(index)
                able.remove(index)
    return given


def _take(free: Mapping[str, int], first: str, number: int) -> dict[str, int]:
    """Return ``number`` GPUs, from ``first`` and then the fullest offers; nothing if there are fewer."""
    taken: dict[str, int] = {}
    for node in (
        [first, *sorted((n for n in free if n != first), key=lambda n: -free[n])] if number > 1 else [first]
    ):
        gpus = min(free[node], number)
        if gpus:
            taken[node] = gpus
            number -= gpus
        if not number:
            return taken
    return {}
