"""What a look at the capacity changes in the ledger: pure."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ebbflow.planners.model.capacity import Capacity, CapacityDiff, Node, Notice
from ebbflow.planners.model.ledger import CapacityChanged, State

PRICE = 0.05
"""Share by which a price must differ to be news: spot prices move all the time, and each change is kept for ever."""
HAZARD = 0.5  # the same of the hazard
DEADLINE = 1.0  # s by which a deadline must differ


def change(state: State, seen: Capacity) -> CapacityChanged | None:
    """Return what ``seen`` changes in ``state``; ``None`` where it is no news.

    The epoch is the ledger's own: it goes on across loops, while a source counts anew in each process.
    """
    here = {node.id: node for node in seen.nodes}
    came = tuple(node for id_, node in sorted(here.items()) if _differs(state.nodes.get(id_), node))
    left = tuple(sorted(id_ for id_ in state.nodes if id_ not in here))
    # a notice of a node that is not there says nothing yet: it counts from the look that has the node
    notices = _firmest(notice for notice in seen.notices if notice.node_id in here)
    if not (came or left or _news(state, notices) or _hazard(state, seen)):
        return None
    return CapacityChanged(
        state.epoch + 1, came, left, notices, seen.hazard, _said(state, replace(seen, notices=notices))
    )


def known(state: State) -> Capacity:
    """Return the capacity as the ledger has it."""
    nodes = tuple(node for _, node in sorted(state.nodes.items()))
    notices = tuple(notice for _, notice in sorted(state.notices.items()))
    return Capacity(state.epoch, nodes, notices, state.at, state.hazard)


def _firmest(notices: Iterable[Notice]) -> tuple[Notice, ...]:
    """Return one notice of each node, by node: a firm one before advice, then that with the earliest deadline."""
    found: dict[str, Notice] = {}
    for notice in sorted(notices, key=lambda one: (one.kind != "interruption", one.deadline)):
        found.setdefault(notice.node_id, notice)
    return tuple(notice for _, notice in sorted(found.items()))


def _differs(before: Node | None, after: Node) -> bool:
    if before == after:
        return False
    if before is None or replace(before, price=after.price) != after:
        return True
    return abs(after.price - before.price) > PRICE * max(before.price, after.price)


def _news(state: State, notices: Sequence[Notice]) -> bool:
    """Tell whether the notices say something else than those known; sources may estimate deadlines anew each time."""
    return len(notices) != len(state.notices) or any(
        (before := state.notices.get(notice.node_id)) is None
        or before.kind != notice.kind
        or abs(before.deadline - notice.deadline) > DEADLINE
        for notice in notices
    )


def _hazard(state: State, seen: Capacity) -> bool:
    return abs(seen.hazard - state.hazard) > HAZARD * max(seen.hazard, state.hazard)


def _said(state: State, seen: Capacity) -> str:
    said = str(CapacityDiff.between(known(state), seen))
    return said if said != "no change" else "nodes are described anew"
