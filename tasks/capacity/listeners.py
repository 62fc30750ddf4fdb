"""Events of a capacity loop for listeners, for which it never waits."""

import logging
import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

LoopEventKind = Literal["changed", "auction", "revoked", "scaled", "rejected", "recovered", "lost"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoopEvent:
    """Something that the loop saw or did."""

    kind: LoopEventKind
    # changed: nodes or notices; auction: it is completed; revoked: leases; scaled: nodes were requested or released;
    # rejected: by a quota or the provider; recovered: a loop took over, or the ledger responds again; lost: an app
    # missed its heartbeats and may be resumed
    text: str
    at: float  # s since the Unix epoch
    payload: Mapping[str, Any] = field(default_factory=dict)  # plain JSON, no secrets


class LoopListener(Protocol):
    """Hears of everything, in one thread of its own, in order."""

    def on_event(self, event: LoopEvent) -> None: ...


class EventDispatcher:
    """Hands events to a listener from a thread of its own; what a slow one has no room for is dropped and counted.

    Nothing here ever blocks the caller or raises.
    """

    def __init__(self, listener: LoopListener | None, max_queued: int = 1000) -> None:
        self._listener = listener
        self._queue: queue.Queue[LoopEvent | None] = queue.Queue(max_queued)
        self._thread: threading.Thread | None = None
        self._drops_logged = False
        self.dropped = 0
        self.failed = 0

    def notify(self, event: LoopEvent) -> None:
        """Queue ``event``; it is dropped when there is no room."""
        if self._listener is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="loop-announcer", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            self.dropped += 1
            if not self._drops_logged:
                self._drops_logged = True
                log.warning("the listener is too slow: events are dropped; the ledger keeps all of them")

    @property
    def waiting(self) -> int:
        """Return how many events have not been handed over."""
        return self._queue.qsize()

    def close(self, timeout: float = 5.0) -> None:
        """Hand over what is queued, for ``timeout`` seconds at most."""
        if self._thread is None:
            return
        try:
            self._queue.put(None, timeout=timeout)
        except queue.Full:
            return
        self._thread.join(timeout)

    def _run(self) -> None:
        assert self._listener is not None
        while (event := self._queue.get()) is not None:
            try:
                self._listener.on_event(event)
            except Exception as error:
                self.failed += 1
                if self.failed == 1:  # once: the next one fails likely, too
                    log.warning("the listener failed at %s: %r; the loop continues", event.kind, error)
