"""Simulated nodes and apps that come and go, for the capacity loop under load."""

import random
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event as StopEvent
from typing import Any

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import LedgerUnavailableError
from ebbflow.infra.ledger import Ledger
from ebbflow.planners.model.capacity import Capacity, Node, Notice
from ebbflow.planners.model.ledger import AppEntered, AppMoved, AppReport, AppSpec
from ebbflow.planners.model.ledger_state import State
from ebbflow.planners.training.speed.batch_size import BatchLimits, BatchSplit
from ebbflow.planners.training.speed.goodput import GradientStatistics
from ebbflow.planners.training.speed.job_report import JobReport
from ebbflow.planners.training.speed.throughput import ThroughputParameters

GPUS = (1, 2, 4, 8)  # of a node
ASKED = (1, 1, 2, 2, 4, 4, 8, 16, 32)  # GPUs of an app
LEAD = 10.0  # s from a notice to the end of its node
AGAIN = 5.0  # s before the same node changes once more, so that no change hides another


# --- nodes --------------------------------------------------------------------------------------------------------


class Churn:
    """A source whose revision is the number of changes so far. ``change`` makes one and says when it was made."""

    def __init__(self, count: int, seed: int, clock: Clock) -> None:
        self._random, self._clock = random.Random(seed), clock
        self._lock = threading.Lock()
        self._count, self._made = count, 0
        self._there: dict[str, Node] = {}
        self._notices: dict[str, Notice] = {}
        self._touched: dict[str, float] = {}
        self._revision = 0
        self.times: list[float] = []  # of each change; its number is its revision
        for _ in range(count):
            self._join()
        self._revision = 0

    def _join(self) -> str:
        self._made += 1
        name = f"n{self._made:06d}"
        gpus = self._random.choice(GPUS)
        self._there[name] = Node(
            name, 4 * gpus, 16.0 * gpus, gpus=gpus, price=0.4 * gpus, zone="abc"[gpus % 3]
        )
        return name

    def capacity(self) -> Capacity:
        with self._lock:
            there = tuple(self._there[name] for name in sorted(self._there))
            notices = tuple(self._notices[name] for name in sorted(self._notices))
            return Capacity(self._revision, there, notices, self._clock.now(), 1.0)

    def change(self) -> None:
        with self._lock:
            now = self._clock.now()
            name = self._left(now) or self._new(now)
            self._touched[name] = now
            self._revision += 1
            self.times.append(now)
            if len(self._touched) > 4 * self._count:
                self._touched = {n: at for n, at in self._touched.items() if now - at < AGAIN}

    def _left(self, now: float) -> str:
        """Take away a node whose notice has run out."""
        name = next((n for n, notice in self._notices.items() if notice.deadline <= now), "")
        if name:
            del self._notices[name], self._there[name]
        return name

    def _new(self, now: float) -> str:
        quiet = [n for n in self._there if n not in self._notices and now - self._touched.get(n, 0.0) > AGAIN]
        short = len(self._there) < self._count
        what = self._random.random()
        if not quiet or (short and what < 0.8) or what < 0.3:
            return self._join()
        name = self._random.choice(quiet)
        if what < 0.65:
            self._notices[name] = Notice(name, now + LEAD)
        else:
            del self._there[name]
        return name


class SureEvictor:
    """Ends everything, after a moment."""

    def __init__(self, clock: Clock, seconds: float = 0.1) -> None:
        self._clock, self._seconds = clock, seconds

    def evict(self, app: str, node: str) -> bool:
        self._clock.sleep(self._seconds)
        return True


# --- apps ---------------------------------------------------------------------------------------------------------


@dataclass
class LoadApp:
    """One app: what it asked for, what it has done, when it lets go of what."""

    id: str
    gpus: int
    work: float  # GPU-seconds
    job: dict[str, Any]
    dies: float  # Unix time, s
    at: float = 0.0  # of its last step
    done: float = 0.0
    going: dict[int, float] = field(default_factory=dict)  # lease -> when it is let go of
    over: bool = False


class Apps:
    """Keeps ``count`` apps going. One step reads the ledger once and lets every app report that is due."""

    def __init__(self, ledger: Ledger, count: int, seed: int, every: float = 1.0) -> None:
        self._ledger, self._count, self._every = ledger, count, every
        self._random = random.Random(seed)
        self._apps: dict[str, LoadApp] = {}
        self._number = 0
        self.reports = 0
        self.finished = 0
        self.died = 0

    def step(self) -> None:
        now = self._ledger.clock.now()
        self._fill(now)
        state = self._ledger.state()
        mine: dict[str, list[int]] = {}
        for number, lease in state.leases.items():
            mine.setdefault(lease.app, []).append(number)
        for app in list(self._apps.values()):
            if now - app.at >= self._every or any(at <= now for at in app.going.values()):
                self._report(app, state, sorted(mine.get(app.id, ())), now)

    def _fill(self, now: float) -> None:
        new = []
        while len(self._apps) < self._count:
            self._number += 1
            gpus = self._random.choice(ASKED)
            spread = now - self._every * self._random.random()
            dies = now + self._random.expovariate(1 / 900.0)
            work = gpus * self._random.uniform(30.0, 240.0)
            app = LoadApp(f"app{self._number:06d}", gpus, work, job_of(gpus, self._random), dies, spread)
            self._apps[app.id] = app
            spec = AppSpec(
                app.id,
                "training",
                team=f"t{self._number % 5}",
                gpus=gpus,
                min_gpus=gpus if self._number % 2 else 1,
                max_gpus=gpus,
            )
            new.append(AppEntered(spec))
        if new:
            self._ledger.write(new)

    def _report(self, app: LoadApp, state: State, mine: list[int], now: float) -> None:
        if now >= app.dies:  # without a word
            self.died += 1
            del self._apps[app.id]
            return
        app.going = {number: at for number, at in app.going.items() if number in state.leases}
        for number in mine:
            lease = state.leases[number]
            if number not in app.going and (lease.recalled is not None or lease.until <= now):
                app.going[number] = now + min(3.0, self._random.expovariate(2.0))
        holds = tuple(number for number in mine if app.going.get(number, now + 1) > now)
        released = tuple(number for number in mine if number not in holds)
        app.done += len(holds) * (now - app.at)
        app.at = now
        if app.done >= app.work:
            self._ledger.report(app.id, AppReport(now, (), tuple(mine), "finished"))
            self._ledger.write([AppMoved(app.id, "finished")])
            self.finished += 1
            del self._apps[app.id]
            return
        self.reports += 1
        self._ledger.report(
            app.id,
            AppReport(
                now,
                holds,
                released,
                "running" if holds else "waiting",
                progress=app.done / app.work,
                step=int(app.done),
                work_left=app.work - app.done,
                work_total=app.work,
                saved_at=now - 10.0,
                job=app.job,
            ),
        )


def job_of(gpus: int, rng: random.Random) -> dict[str, Any]:
    """Return what an elastic training reports of its speed; nothing for a gang."""
    if rng.random() < 0.5:
        return {}
    speed = ThroughputParameters(
        rng.uniform(0.02, 0.1), rng.uniform(0.5e-3, 3e-3), rng.uniform(0.02, 0.2), 0.002, rng.uniform(0.005, 0.05),
        0.001, rng.uniform(1.5, 4.0),
    )  # fmt: skip
    limits = BatchLimits(64, 4096, 8, 256)
    statistics = GradientStatistics(1.0, rng.uniform(1.0, 50.0))
    return JobReport(limits, statistics, speed, 1, 1, BatchSplit(64, 0), gpus).to_dict()


def run_apps(url: str, count: int, seed: int, stop: StopEvent, told: Any) -> None:
    """Be all apps, in a process of its own, until ``stop``."""
    with Ledger.open(url) as ledger:
        apps, refused, slowest = Apps(ledger, count, seed), 0, 0.0
        while not stop.is_set():
            began = time.monotonic()
            try:
                apps.step()
            except LedgerUnavailableError:
                refused += 1
            took = time.monotonic() - began
            slowest = max(slowest, took)
            stop.wait(max(0.005, 0.05 - took))
        told.put(
            {
                "reports": apps.reports,
                "finished": apps.finished,
                "died": apps.died,
                "ledger_away": refused,
                "slowest_round_s": round(slowest, 3),
                "cpu_s": round(time.process_time(), 1),
            }
        )
