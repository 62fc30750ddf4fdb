"""A capacity loop that does as a test says, and an account of who used which GPU when."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import LedgerUnavailableError
from ebbflow.infra.ledger import Ledger
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.ledger import (
    AppMoved,
    AppReport,
    CapacityChanged,
    Change,
    Ended,
    Extended,
    Granted,
    Lease,
    Recalled,
)
from ebbflow.planners.model.ledger_state import State

LONG = 150.0  # seconds: a bound for a busy machine, not an expectation


def until(reached: Callable[[], Any], what: str, seconds: float = LONG) -> Any:
    """Wait until something is so, and return it."""
    end = time.monotonic() + seconds
    while not (found := reached()):
        assert time.monotonic() < end, f"no {what} in {seconds:g} s"
        time.sleep(0.03)
    return found


def begin(work: Callable[..., Any], *arguments: Any, **options: Any) -> "Future[Any]":
    """Work in a thread that does not keep a failed test's process alive."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work(*arguments, **options))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class ScriptedLoop:
    """Leads, grants and recalls as it is told; in a thread it renews its lead and ends what apps have let go of."""

    def __init__(
        self,
        path: Path,
        nodes: dict[str, int],
        *,
        lead: float = 15.0,
        price: float = 0.0,
        clock: Clock | None = None,
    ) -> None:
        self.ledger = Ledger.open(str(path), clock=clock)
        self._leadership = self.ledger.lead("scripted", lead)
        self._nodes = {name: Node(name, gpus, 4.0, gpus=gpus, price=price) for name, gpus in nodes.items()}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.let_go: dict[int, float] = {}  # lease -> when the loop ended it
        self.before: Callable[[Lease], None] = lambda lease: None  # called with a lease that is let go of
        self._leadership.write([CapacityChanged(1, tuple(self._nodes.values()))])
        self._thread.start()

    # --- what it does when told -----------------------------------------------------------------------------

    def grant(self, app: str, *slots: tuple[str, int], seconds: float = 600.0) -> tuple[int, ...]:
        """Grant GPUs to an app, and return the leases."""
        with self._lock:
            state, now = self.state, self.ledger.clock.now()
            leases = tuple(
                Lease(
                    state.last_lease + place,
                    app,
                    node,
                    slot,
                    now,
                    now + seconds,
                    state.revision,
                    self._nodes[node].price / self._nodes[node].gpus,
                )
                for place, (node, slot) in enumerate(slots, 1)
            )
            self._patiently(lambda: self._leadership.write([Granted(leases)]))
        return tuple(lease.number for lease in leases)

    def recall(self, *leases: int, seconds: float = 30.0) -> None:
        self.write(Recalled(leases, self.ledger.clock.now() + seconds, "for a test"))

    def extend(self, *leases: int, seconds: float) -> None:
        self.write(Extended(leases, self.ledger.clock.now() + seconds))

    def end(self, *leases: int) -> None:
        """End leases whether or not their app has let go."""
        self.write(Ended(leases, "by force"))

    def lose(self, node: str) -> None:
        """Have a node gone, with the leases on it."""
        with self._lock:
            state = self.state
            numbers = tuple(n for n, lease in state.leases.items() if lease.node == node)
            changes: list[Change] = [CapacityChanged(state.revision + 1, left=(node,))]
            changes += [Ended(numbers, "gone")] if numbers else []
            self._patiently(lambda: self._leadership.write(changes))

    def move(self, app: str, phase: Any, reason: str = "") -> None:
        self.write(AppMoved(app, phase, reason))

    def write(self, *changes: Change) -> None:
        with self._lock:
            self._patiently(lambda: self._leadership.write(changes))

    def _patiently(self, act: Callable[[], Any]) -> Any:
        """Act; on a machine that is very busy the database's own patience may be too short."""
        end = time.monotonic() + LONG
        while True:
            try:
                return act()
            except LedgerUnavailableError:
                assert time.monotonic() < end
            time.sleep(0.1)

    # --- what it knows --------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        found: State = self._patiently(self.ledger.state)
        return found

    def report(self, app: str) -> AppReport:
        found: AppReport = until(lambda: self._patiently(self.ledger.reports).get(app), f"report of {app}")
        return found

    def phase(self, app: str) -> str:
        record = self.state.apps.get(app)
        return record.phase if record is not None else ""

    def ended(self, *leases: int) -> bool:
        return not any(number in self.state.leases for number in leases)

    # --- its life -------------------------------------------------------------------------------------------

    def die(self) -> None:
        """Do nothing any more, and let the lead run out."""
        self._stop.set()
        self._thread.join()

    def close(self) -> None:
        self.die()
        self.ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        while not self._stop.wait(0.03):
            with self._lock, suppress(LedgerUnavailableError):
                self._leadership.renew()
                state = self.ledger.state()
                freed = [
                    number
                    for app, report in self.ledger.reports().items()
                    for number in report.released
                    if number in state.leases and state.leases[number].app == app
                ]
                for number in freed:
                    self.before(state.leases[number])
                if freed:
                    self.let_go |= dict.fromkeys(freed, time.time())  # before others can see that they ended
                    self._leadership.write([Ended(tuple(freed), "let go")])


class Outage:
    """A ledger that does not answer while ``away`` is set."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.away = False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ledger, name)
        if name not in ("write", "report", "state", "leader", "reports", "events"):
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            if self.away:
                raise LedgerUnavailableError("it is away, for a test")
            return found(*arguments, **options)

        return call
