"""Watches the iterations of a running training: when it computes, when it submits collectives, when it waits."""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Final

from ebbflow.infra.communication.payloads import Exchanged, Payload
from ebbflow.planners.communication.dag import Kind
from ebbflow.planners.communication.recorded import (
    Block,
    Iteration,
    RankProfile,
    Submission,
    Wait,
    median_profile,
)

WARM_UP: Final = 3  # iterations that are not looked at: DDP makes its buckets anew after the first
MAX_PENDING: Final = 8  # submissions of a collective that are waited for
ITERATIONS: Final = 10  # that a profile is the median of


def kind_of(payload: Payload) -> tuple[Kind, float]:
    """Return what collective a payload is for, and one rank's bytes of it."""
    if isinstance(payload, Exchanged):
        return "all-to-all", float(payload.sent.nbytes)
    return "all-reduce", float(payload.tensor.nbytes)


class IterationProfiler:
    """Takes down the last iterations of one rank. A clock reading for each event; a GPU's work is not waited for.

    ``begin`` starts an iteration and ends the one before. In between, in the training's own thread, ``submitted``,
    ``waited`` and ``mark`` end the block of compute under way; submissions of other threads end none, and count as
    made when the iteration begins.

    Args:
        clock: s.
        keep: iterations of which it remembers the last.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, keep: int = ITERATIONS) -> None:
        self._clock, self._keep = clock, keep
        self._done: deque[Iteration] = deque(maxlen=keep)
        self._seen = 0  # iterations that were begun
        self._from = WARM_UP  # number of the last of them that is not looked at
        self._lock = threading.Lock()
        self._thread = 0
        self._open = False
        self._began = self._cursor = 0.0
        self._blocks: list[Block] = []
        self._submissions: list[Submission] = []
        self._waits: list[tuple[str, int]] = []  # op and lag, for the block to come
        self._all_waits: list[Wait] = []
        # op -> iterations of submissions that were not waited for yet
        self._pending: dict[str, deque[int]] = defaultdict(lambda: deque(maxlen=MAX_PENDING))

    @property
    def ready(self) -> bool:
        """Return whether there are enough iterations for a profile."""
        return len(self._done) >= self._keep

    @property
    def seconds(self) -> tuple[float, ...]:
        """Return the durations of the last iterations."""
        return tuple(one.seconds for one in self._done)

    def forget(self) -> None:
        """Begin from scratch, as after a change of what is measured."""
        with self._lock:
            self._done.clear()
            self._from, self._open = self._seen + WARM_UP, False

    def begin(self) -> None:
        """Begin an iteration, and end the one before."""
        with self._lock:
            now = self._clock()
            if self._open:
                self._block("end", now)
                if self._seen > self._from:
                    self._done.append(
                        Iteration(
                            tuple(self._blocks),
                            tuple(self._submissions),
                            tuple(self._all_waits),
                            now - self._began,
                        )
                    )
            self._thread, self._open = threading.get_ident(), True
            self._seen += 1
            self._began = self._cursor = now
            self._blocks, self._submissions, self._waits, self._all_waits = [], [], [], []

    def abandon(self) -> None:
        """Forget the iteration under way: it was interrupted."""
        with self._lock:
            self._open = False

    def submitted(self, op: str, payload: Payload) -> None:
        """Take note of a collective that is submitted now."""
        with self._lock:
            if not self._open:
                self._pending[op].append(self._seen)
                return
            after = ""
            if threading.get_ident() == self._thread:
                after = self._block(f"before {op}", self._clock())
            kind, size = kind_of(payload)
            self._pending[op].append(self._seen)
            self._submissions.append(Submission(op, kind, size, after))

    def waited(self, *ops: str, since: float | None = None, prefix: str = "") -> None:
        """Take note that collectives are done now, and that the thread has waited for them since then.

        Args:
            ops: their names; all that were submitted and not waited for unless given.
            since: s of the clock; the last event unless given.
            prefix: of the names that count where ``ops`` are not given.
        """
        with self._lock:
            if not self._open:
                return
            now = self._clock()
            names = ops or tuple(op for op, some in self._pending.items() if some and op.startswith(prefix))
            if since is not None and since > self._cursor:
                self._block("until " + "+".join(names), since)
            self._cursor = now
            for op in names:
                if self._pending[op]:
                    self._waits.append((op, self._seen - self._pending[op].popleft()))

    def mark(self, name: str, *, shared: bool = False) -> None:
        """End the block of compute under way as ``name``; ``shared``: all ranks end it at once."""
        with self._lock:
            if self._open:
                self._block(name, self._clock(), shared=shared)

    def profile(self, rank: int, ranks: int) -> RankProfile:
        """Return the median of the last iterations.

        Raises ``OptionError`` where iterations submit different collectives.
        """
        return median_profile(rank, ranks, tuple(self._done))

    def _block(self, name: str, now: float, *, shared: bool = False) -> str:
        taken = {one.name for one in self._blocks}
        unique, k = name, 2
        while unique in taken:
            unique, k = f"{name} ({k})", k + 1
        self._blocks.append(Block(unique, max(now - self._cursor, 0.0), shared))
        self._all_waits += [Wait(op, unique, lag) for op, lag in self._waits]
        self._waits = []
        self._cursor = now
        return unique
