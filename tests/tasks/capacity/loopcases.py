"""A loop to play with: a source that is told what there is, apps that follow a script, and what they break."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import LedgerUnavailableError
from ebbflow.infra.ledger import Ledger
from ebbflow.planners.capacity.values import Settings
from ebbflow.planners.model.capacity import Capacity, Node, Notice
from ebbflow.planners.model.ledger import AppEntered, AppMoved, AppReport, AppSpec, Ended, Granted, Lease
from ebbflow.planners.scheduling.leased.simple import equal_share
from ebbflow.tasks.capacity.intervals import LoopIntervals
from ebbflow.tasks.capacity.listeners import LoopEvent
from ebbflow.tasks.capacity.loop import CapacityLoop
from tests.evaluation.renting.virtual_clock import VirtualClock

WAIT = 150.0  # seconds; what does not happen within them does not happen
FAST = LoopIntervals(
    poll_interval=0.05,
    capacity_poll_interval=0.05,
    fleet_poll_interval=0.05,
    batch_delay=0.01,
    leader_lease=30.0,  # a machine that stands still for some seconds changes nothing
    ledger_timeout=20.0,
    status_interval=0.1,
)
BRIEF = replace(FAST, leader_lease=0.6)  # the next loop has not to wait for long


def node(name: str, gpus: int = 2, **more: Any) -> Node:
    return Node(name, 4, 16.0, gpus=gpus, price=1.0, **more)


def nodes(count: int, gpus: int = 2) -> tuple[Node, ...]:
    return tuple(node(f"n{number}", gpus) for number in range(count))


def settings(**changes: Any) -> Settings:
    """Return settings that decide at once, by a policy that gives every app what it can use, evenly."""
    given: dict[str, Any] = {
        "policy": equal_share(20.0),
        "lease_s": 60.0,
        "interval_s": 20.0,
        "debounce_s": 0.0,
        "heartbeat_timeout_s": 30.0,
        "termination_grace_s": 10.0,
        "scaling": None,
    }
    return Settings(**{**given, **changes})


class FakeSource:
    """A ``CapacitySource`` that sees what it is told. ``broken`` is raised instead."""

    def __init__(self, *there: Node, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._there = {one.id: one for one in there}
        self._notices: dict[str, Notice] = {}
        self._revision = 1
        self.broken: Exception | None = None
        self.looks = 0

    def capacity(self) -> Capacity:
        with self._lock:
            self.looks += 1
            if self.broken is not None:
                raise self.broken
            there = tuple(self._there[name] for name in sorted(self._there))
            notices = tuple(self._notices[name] for name in sorted(self._notices) if name in self._there)
            return Capacity(self._revision, there, notices, self._clock.now())

    def add(self, *some: Node) -> None:
        with self._lock:
            self._there |= {one.id: one for one in some}
            self._revision += 1

    def take(self, *names: str) -> None:
        with self._lock:
            for name in names:
                self._there.pop(name, None)
                self._notices.pop(name, None)
            self._revision += 1

    def notice(self, name: str, seconds: float) -> None:
        with self._lock:
            self._notices[name] = Notice(name, self._clock.now() + seconds)
            self._revision += 1


@dataclass
class ScriptedApp:
    """Follows its leases as an app flow does: holds what it is granted, lets go of what is called back."""

    ledger: Ledger
    id: str
    gpus: int = 1
    obeys: bool = True  # lets go when it is told to
    holding: dict[int, Lease] = field(default_factory=dict)
    released: set[int] = field(default_factory=set)
    more: dict[str, Any] = field(default_factory=dict)  # of its spec

    def enter(self) -> "ScriptedApp":
        sizes = {"gpus": self.gpus, "min_gpus": 1, "max_gpus": self.gpus}
        self.ledger.write([AppEntered(AppSpec(self.id, "training", **{**sizes, **self.more}))])
        return self

    def step(self) -> "ScriptedApp":
        """Look and report once."""
        state, now = self.ledger.state(), self.ledger.clock.now()
        mine = {lease.number: lease for lease in state.held(self.id)}
        self.released = {
            number
            for number, lease in mine.items()
            if number in self.released or (self.obeys and (lease.recalled is not None or lease.until <= now))
        }
        self.holding = {number: lease for number, lease in mine.items() if number not in self.released}
        self.ledger.report(
            self.id,
            AppReport(
                now,
                tuple(sorted(self.holding)),
                tuple(sorted(self.released)),
                "running" if self.holding else "waiting",
            ),
        )
        return self

    def finish(self) -> None:
        """Let go of everything, then say that it is over."""
        held = tuple(lease.number for lease in self.ledger.state().held(self.id))
        self.ledger.report(self.id, AppReport(self.ledger.clock.now(), (), held, "finished"))
        self.ledger.write([AppMoved(self.id, "finished")])

    @property
    def nodes(self) -> list[str]:
        return sorted(lease.node for lease in self.holding.values())


class Recorder:
    """A ``LoopListener`` that keeps everything."""

    def __init__(self) -> None:
        self.events: list[LoopEvent] = []

    def on_event(self, event: LoopEvent) -> None:
        self.events.append(event)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


@dataclass
class FakeEvictor:
    """Says that it ended what it was asked to, unless told otherwise."""

    reaches: bool = True
    broken: Exception | None = None
    there: list[tuple[str, str]] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)

    def evict(self, app: str, node: str) -> bool:
        self.asked.append((app, node))
        if self.broken is not None:
            raise self.broken
        if self.reaches and (app, node) in self.there:
            self.there.remove((app, node))
        return self.reaches

    def present(self) -> Sequence[tuple[str, str]]:
        return list(self.there)


class FlakyLedger:
    """A ledger whose database can be away: every call raises ``LedgerUnavailableError`` while ``away``."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.away = False
        self.refused = 0

    def _check(self) -> None:
        if self.away:
            self.refused += 1
            raise LedgerUnavailableError("the database is away, for a test")

    def lead(self, *given: Any, **more: Any) -> "_FlakyLead":
        self._check()
        return _FlakyLead(self._ledger.lead(*given, **more), self._check)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ledger, name)
        if not callable(found):
            return found

        def call(*given: Any, **more: Any) -> Any:
            self._check()
            return found(*given, **more)

        return call


class _FlakyLead:
    def __init__(self, lead: Any, check: Callable[[], None]) -> None:
        self._lead, self._check = lead, check

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._lead, name)
        if not callable(found):
            return found

        def call(*given: Any, **more: Any) -> Any:
            self._check()
            return found(*given, **more)

        return call


def until(reached: Callable[[], object], what: str, step: Callable[[], object] = lambda: None) -> None:
    """Wait for something, doing ``step`` again and again; fail after ``WAIT`` seconds."""
    clock = SystemClock()
    end = clock.now() + WAIT
    while not reached():
        assert clock.now() < end, f"{what} has not happened within {WAIT:g} s"
        step()
        clock.sleep(0.03)


START = 1_700_000_000.0


class World:
    """A cluster on a virtual clock: one ledger, one source, apps, and a loop that is stepped."""

    def __init__(self, folder: Path, there: Sequence[Node] | None = None) -> None:
        self.clock = VirtualClock(START)
        self.ledger = Ledger.open(str(folder / "ledger.db"), clock=self.clock)
        self.source = FakeSource(*(nodes(2) if there is None else there), clock=self.clock)
        self.apps: list[ScriptedApp] = []
        self.pace = LoopIntervals(
            poll_interval=0.2, capacity_poll_interval=0.1, fleet_poll_interval=0.1, status_interval=1.0
        )
        self.loop: CapacityLoop

    def another(self, **changes: Any) -> CapacityLoop:
        """Return a loop that has not begun."""
        given = {
            "source": self.source,
            "fleet": None,
            "settings": settings(),
            "pace": self.pace,
            "clock": self.clock,
        } | changes
        return CapacityLoop(
            self.ledger, given.pop("fleet"), given.pop("source"), given.pop("settings"), **given
        )

    def begin(self, **changes: Any) -> CapacityLoop:
        self.loop = self.another(**changes)
        self.loop.begin()
        return self.loop

    def app(
        self, id_: str, gpus: int, *, obeys: bool = True, more: dict[str, Any] | None = None
    ) -> ScriptedApp:
        made = ScriptedApp(self.ledger, id_, gpus, obeys, more=more or {}).enter()
        self.apps.append(made)
        return made

    def step(self, seconds: float = 1.0) -> None:
        """Let time pass, the loop decide and every app look; twice, since one answers the other."""
        self.clock.sleep(seconds / 2)
        for _ in range(2):
            for app in self.apps:
                app.step()
            self.loop.step()
            self.clock.sleep(seconds / 4)
        for app in self.apps:
            app.step()

    def steps(self, count: int, seconds: float = 1.0) -> None:
        for _ in range(count):
            self.step(seconds)

    def gpus(self, app: str) -> int:
        return len(self.ledger.state().held(app))

    def double_bookings(self) -> list[str]:
        """Replay everything; return what two apps held at once, and what the ledger says against itself."""
        return [*double_bookings(self.ledger), *self.ledger.verify()]

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: object) -> None:
        self.ledger.close()


def double_bookings(ledger: Ledger) -> list[str]:
    """Return every GPU that two leases held at once, from the events alone."""
    taken: dict[tuple[str, int], int] = {}
    of: dict[int, tuple[str, int]] = {}
    found = []
    after = 0
    while some := ledger.events(after):
        after = some[-1].number
        for event in some:
            if isinstance(event.change, Granted):
                for lease in event.change.leases:
                    slot = lease.node, lease.slot
                    if slot in taken:
                        found.append(f"event {event.number}: {slot} is held by lease {taken[slot]}")
                    taken[slot], of[lease.number] = lease.number, slot
            elif isinstance(event.change, Ended):
                for number in event.change.leases:
                    taken.pop(of[number], None)
    return found
