"""What an app has to say and has not said yet: changes for the ledger, kept while it is away."""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from ebbflow.infra.errors import LedgerUnavailableError
from ebbflow.infra.ledger import Ledger
from ebbflow.planners.errors import EbbflowError
from ebbflow.planners.model.ledger import AppEntered, AppMoved, AppPhase, AppSpec, Change, Saved

_MOST = 1000  # changes that are kept, the newest


class Outbox:
    """Changes in the order in which they were made. Safe for several threads; one of them sends.

    ``notify`` is called with a sentence for each change that the ledger refuses.
    """

    def __init__(self, ledger: Ledger, notify: Callable[[str], None]) -> None:
        self._ledger, self._notify = ledger, notify
        self._lock = threading.Lock()
        self._changes: deque[Change] = deque(maxlen=_MOST)

    def add(self, change: Change) -> None:
        """Keep a change to be sent. Of checkpoints only the newest is."""
        with self._lock:
            if isinstance(change, Saved):
                for other in [other for other in self._changes if isinstance(other, Saved)]:
                    self._changes.remove(other)
            self._changes.append(change)

    def enter_again(self, spec: AppSpec, phase: AppPhase, reason: str) -> bool:
        """Say first of all that the app is there, in its present phase; return False where that is on its way."""
        with self._lock:
            if any(isinstance(change, AppEntered) for change in self._changes):
                return False
            if phase != "waiting":
                self._changes.appendleft(AppMoved(spec.id, phase, reason))
            self._changes.appendleft(AppEntered(spec))
            return True

    def moves_to(self, phase: AppPhase) -> bool:
        """Tell whether it is on its way that the app is in this phase."""
        with self._lock:
            return any(isinstance(change, AppMoved) and change.phase == phase for change in self._changes)

    def send(self) -> None:
        """Write all there is. Raises ``LedgerUnavailableError``; what was not written is kept."""
        while True:
            with self._lock:
                batch = list(self._changes)
            if not batch:
                return
            try:
                self._ledger.write(batch)
            except LedgerUnavailableError:
                raise
            except EbbflowError as error:
                self._send_singly(batch, error)
            with self._lock:
                for change in batch:
                    with suppress(ValueError):
                        self._changes.remove(change)

    def _send_singly(self, batch: list[Change], why: EbbflowError) -> None:
        """Write what can be written of a batch that was refused."""
        if len(batch) == 1:
            self._notify(f"{type(batch[0]).__name__} is not in the ledger: {why}")
            return
        for change in batch:
            try:
                self._ledger.write([change])
            except LedgerUnavailableError:
                raise
            except EbbflowError as error:
                self._notify(f"{type(change).__name__} is not in the ledger: {error}")
