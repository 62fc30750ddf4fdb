"""The process of a shared aggregator: it serves a cluster's trainings until it is told to end, or was drained.

Nodes of a fleet run it as ``python -m ebbflow.infra.aggregation.shared_process NAME CLUSTER HOST THREADS NODE ENDED
[NOTICE]``; the ledger is ``$EBBFLOW_LEDGER``. The file ``ENDED`` is made once all its tensors are with others.
``NOTICE`` holds the time, seconds since the Unix epoch, by which the node will be gone: it is read at each signal.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from ebbflow.infra.aggregation.aggregator import Aggregator
from ebbflow.infra.aggregation.registry import ServiceRegistry, incarnation
from ebbflow.infra.aggregation.shared import SharedAggregator
from ebbflow.infra.clock import SystemClock
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.machine.memory_segments import allow_open_segments
from ebbflow.infra.storage import private
from ebbflow.planners.model import names

_WITHIN = 120.0  # seconds in which others must have taken its tensors after a signal
_MARGIN = 5.0  # seconds before its node is gone by which it ends


def serve_shared(
    ledger: Ledger,
    name: str,
    host: str,
    port: int,
    threads: int,
    within_s: float,
    started: Callable[[str], None],
    node: str = "",
    notice: Path | None = None,
) -> bool:
    """Run an aggregator of a cluster until SIGINT or SIGTERM, after which its tensors are moved to others.

    Returns whether it ended without a signal, as the ledger asked it to.

    Args:
        ledger: of the cluster.
        name: of the aggregator.
        host: address to listen on.
        port: number; 0: any free one.
        threads: that sum and update.
        within_s: seconds in which others must have taken its tensors; a second signal does not wait.
        started: called with its address.
        node: ID of the node that it is on; empty: not known.
        notice: file with the time by which the node will be gone, where somebody writes one before a signal; then a
            second signal can only say that it is earlier.

    Raises ``AggregationError`` where it cannot listen or its name is taken, and ``LedgerError``.
    """
    names.AGGREGATOR.check(name)
    allow_open_segments()
    aggregator = Aggregator(incarnation(name), host, port, threads=threads)
    try:
        shared = SharedAggregator(aggregator, ServiceRegistry(ledger.records), node=node)
    except BaseException:
        aggregator.close()
        raise
    stop, told = threading.Event(), False

    def end(*_: object) -> None:
        nonlocal told
        if told and notice is None:
            stop.set()
        told = True
        shared.leave(within_s if notice is None else time_left(notice, within_s))

    handlers = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        started(aggregator.address)
        shared.serve(stop)
    finally:
        shared.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return not told


def time_left(notice: Path, unless: float) -> float:
    """Return the seconds for which others may take tensors; ``unless`` where the notice says nothing."""
    with contextlib.suppress(OSError, ValueError):
        return max(float(notice.read_text(encoding="ascii")) - _MARGIN - SystemClock().now(), 0.0)
    return unless


def main(
    name: str, cluster: str, host: str, threads: int, node: str, ended: Path, notice: Path | None = None
) -> None:
    """Serve until the capacity loop, or a signal, ends it."""
    with Ledger.open(cluster=cluster) as ledger:
        drained = serve_shared(ledger, name, host, 0, threads, _WITHIN, lambda _: None, node, notice)
    if drained:  # else its node is taken to be lost, and another is launched
        private.write_text(ended, "drained")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5], *map(Path, sys.argv[6:]))
