"""Seconds that a stage waits: for bytes on nodes' links, for what does not fit into memory, for cold processes.

A node's link carries ``share.link`` MB/s each way at once; without a known rate nothing waits for links.
"""

from math import ceil, floor

from ebbflow.planners.model import Share

_MEGABYTE = 1e6


def shuffle_seconds(size: float, share: Share) -> float:
    """Return the seconds that a shuffle of ``size`` bytes, as they are on the wire, keeps the links busy.

    Of what a node has written, (n-1)/n is for the others, and as much comes from them: size·(n-1)/n² on each link.
    From two nodes on, more nodes take less.

    >>> shuffle_seconds(90e6, Share.uniform(3, 6, 3, network=30))  # 10 MB/s a node
    2.0
    """
    nodes = share.nodes
    if share.link <= 0.0 or nodes < 2:
        return 0.0
    return size * (nodes - 1) / nodes**2 / (share.link * _MEGABYTE)


def broadcast_seconds(size: float, share: Share) -> float:
    """Return the seconds that a broadcast of ``size`` bytes, as they are on the wire, keeps the links busy.

    Each node sends the driver its part, and receives the whole; nodes pass on what they have, so that the driver's
    link is no narrower than theirs.

    >>> broadcast_seconds(30e6, Share.uniform(3, 6, 3, network=30))
    4.0
    """
    if share.link <= 0.0 or share.nodes < 1:
        return 0.0
    return size * (1.0 + 1.0 / share.nodes) / (share.link * _MEGABYTE)


def store_seconds(size: float, share: Share) -> float:
    """Return the seconds that ``size`` bytes, which nodes read from a store or write to it, keep the links busy.

    Each node reads or writes its part; the store itself is as fast as all links together.

    >>> store_seconds(60e6, Share.uniform(3, 6, 3, network=30))  # 10 MB/s a node
    2.0
    """
    if share.link <= 0.0 or share.nodes < 1:
        return 0.0
    return size / (share.nodes * share.link * _MEGABYTE)


def spilled_bytes(size: float, tasks: int, room: float) -> float:
    """Return how many of ``size`` bytes, in ``tasks`` equal parts, do not fit: each task has ``room`` bytes."""
    return max(size - room * max(tasks, 1), 0.0)


def cold_tasks(tasks: int, cold: float, cores: float) -> float:
    """Return how many of ``tasks`` that start on ``cores`` meet a cold one, of which there are ``cold``.

    >>> cold_tasks(2, 3, 6), cold_tasks(12, 3, 6)
    (1.0, 3)
    """
    if cold <= 0.0 or cores <= 0.0:
        return 0.0
    return min(cold, tasks * min(cold / cores, 1.0))


def elapsed_seconds(core_seconds: float, tasks: int, slots: float) -> float:
    """Return how long ``tasks`` equal tasks of ``core_seconds`` in all take on ``slots``: whole waves of them.

    >>> elapsed_seconds(12.0, 4, 3), elapsed_seconds(12.0, 4, 4)
    (6.0, 3.0)
    """
    tasks, whole = max(tasks, 1), max(floor(slots + 1e-9), 1)
    return core_seconds / tasks * ceil(tasks / whole)
