"""Nodes in multiples of what holds one replica of a model (HSDP, tensor parallelism)."""

from collections.abc import Mapping


def whole_replicas(placement: Mapping[str, int], replica: int, most: int | None = None) -> dict[str, int]:
    """Return the slots to use of each node, so that replicas are whole; nodes of which none is used are left out.

    Ranks are numbered in this order: nodes with room for a replica come first, each with whole ones, so that none
    begins on a small node and ends on a large one.

    Args:
        placement: node -> slots that are there.
        replica: slots that hold one replica of the model. None spans two nodes that has room on one.
        most: slots to use at most; all unless given.
    """
    large = {name: slots - slots % replica for name, slots in placement.items() if slots >= replica}
    room = large | {name: slots for name, slots in placement.items() if slots < replica}
    left = sum(room.values()) if most is None else min(most, sum(room.values()))
    left -= left % replica
    chosen = {}
    for name, slots in room.items():
        if (take := min(slots, left)) > 0:
            chosen[name] = take
            left -= take
    return chosen


def least_whole(least: int, replica: int) -> int:
    """Return the smallest multiple of ``replica`` that is not below ``least`` slots."""
    return -(-least // replica) * replica
