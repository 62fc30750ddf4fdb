"""The ledger in SQLite and in PostgreSQL: commits, polls, reports of many apps, opening after a long life.

Run from the repository root: ``python -m tests.benchmarks.ledger --out DIR``. Writes ``ledger.json`` and
``ledger.svg``. Both databases sync each commit to disk, as in production; PostgreSQL is a temporary server on a Unix
socket. The folder of both is the temporary one: point ``TMPDIR`` at the disk that is meant.
"""

import argparse
import json
import multiprocessing
import os
import platform
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.synchronize import Event as Flag
from pathlib import Path
from typing import Any

from ebbflow.infra.ledger import Leadership, Ledger
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.ledger import (
    AppEntered,
    AppReport,
    AppSpec,
    CapacityChanged,
    Change,
    Decided,
    Ended,
    Extended,
    Granted,
    Lease,
)
from ebbflow.tasks.drawing.charts import bars_svg
from tests.infra.ledger.postgres import server

APPS, NODES, GPUS = 200, 500, 8
HELD = 4 * APPS  # leases at any time
REPORT_EVERY = 1.0  # s, each app, with a look at the state
REPORTERS = 2  # processes that the apps are spread over
SETTLE = 2.0  # s before figures count


class Cluster:
    """A loop's lead over a cluster of 500 nodes on which 200 apps hold four GPUs each."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.lead: Leadership = ledger.lead("benchmark", 3600.0)
        self.held: list[int] = []
        self.next = 1
        changes: list[Change] = [AppEntered(AppSpec(f"app{n}", "training", gpus=4)) for n in range(APPS)]
        changes.append(
            CapacityChanged(1, tuple(Node(f"node{n}", 64, 256.0, gpus=GPUS) for n in range(NODES)))
        )
        self.lead.write(changes)
        while len(self.held) < HELD:
            self.lead.write(self.grant(min(100, HELD - len(self.held))))

    def grant(self, count: int) -> list[Change]:
        now = time.time()
        leases = []
        for number in range(self.next, self.next + count):
            gpu = number % (NODES * GPUS)
            leases.append(
                Lease(
                    number,
                    f"app{number % APPS}",
                    f"node{gpu // GPUS}",
                    gpu % GPUS,
                    now,
                    now + 600,
                    1,
                    0.5,
                    None,
                    "rho",
                )
            )
        self.next += count
        self.held += [lease.number for lease in leases]
        return [Granted(tuple(leases))]

    def cycle(self) -> list[Change]:
        """Return what a small decision writes: its reason, one lease ended, one granted, some extended."""
        ended, self.held = self.held[:1], self.held[1:]
        rho = {f"app{n}": 1.0 + n / APPS for n in range(0, APPS, 10)}
        return [
            Decided("auction", "the worst-off bid", "", 1, 0.05, {"rho": rho}, {"won": {"app1": 1}}),
            Ended(tuple(ended), "over"),
            *self.grant(1),
            Extended(tuple(self.held[:16]), time.time() + 600, "goes on"),
        ]


def commits(cluster: Cluster, seconds: float, pause: float = 0.0) -> dict[str, float]:
    """Write one small decision after another, at most one each ``pause`` seconds; return how long each took."""
    took: list[float] = []
    late = 0
    begun = due = time.perf_counter()
    while (now := time.perf_counter()) - begun < seconds:
        if pause and now < due:
            time.sleep(due - now)
        late += time.perf_counter() - due > pause
        start = time.perf_counter()
        cluster.lead.write(cluster.cycle())
        took.append(time.perf_counter() - start)
        due += pause
    whole = time.perf_counter() - begun
    found = {"per_s": len(took) / whole, "commits": len(took), **_spread(took)}
    return {**found, "late": late} if pause else found


def apps(url: str, first: int, count: int, stop: Flag, answers: Any) -> None:
    """Be ``count`` apps of one process: each reports and looks at the state about once a second."""
    took: dict[str, list[float]] = {"report": [], "poll": []}
    job = {"rho": 1.5, "goodput": [1.0] * 16, "sizes": {str(n): n * 1.5 for n in range(12)}}
    with Ledger.open(url) as ledger:
        ledger.state()

        over = threading.Event()

        def be(name: str, delay: float) -> None:
            over.wait(delay)
            step = 0
            while not over.is_set():
                due = time.perf_counter() + REPORT_EVERY
                step += 1
                report = AppReport(time.time(), (1, 2, 3, 4), progress=0.5, step=step, job=job)
                took["report"].append(_timed(partial(ledger.report, name, report)))
                took["poll"].append(_timed(ledger.state))
                over.wait(max(0.0, due - time.perf_counter()))

        threads = [
            threading.Thread(target=be, args=(f"app{n}", REPORT_EVERY * (n - first) / count))
            for n in range(first, first + count)
        ]
        for thread in threads:
            thread.start()
        stop.wait()
        over.set()
        for thread in threads:
            thread.join()
    answers.put(took)


def under_load(cluster: Cluster, url: str, seconds: float) -> dict[str, Any]:
    """Return commits at 50 a second while 200 apps of other processes report and poll."""
    context = multiprocessing.get_context("spawn")
    stop, answers = context.Event(), context.Queue()
    share = APPS // REPORTERS
    children = [
        context.Process(target=apps, args=(url, n * share, share, stop, answers)) for n in range(REPORTERS)
    ]
    for child in children:
        child.start()
    while len(cluster.ledger.reports()) < APPS:
        time.sleep(0.1)
    time.sleep(SETTLE)
    begun = time.perf_counter()
    found = commits(cluster, seconds, pause=0.02)
    whole = time.perf_counter() - begun
    stop.set()
    told = [answers.get(timeout=120) for _ in children]
    for child in children:
        child.join(60)
    reports = [t for one in told for t in one["report"]]
    polls = [t for one in told for t in one["poll"]]
    return {
        "commits": found,
        "reports": {"per_s": len(reports) / (whole + SETTLE), **_spread(reports)},
        "polls": _spread(polls),
    }


def polls(cluster: Cluster, url: str) -> dict[str, float]:
    """Return what a look at the state costs another process' ledger: with nothing new, and after a commit."""
    with Ledger.open(url) as reader:
        reader.state()
        idle = [_timed(reader.state) for _ in range(2000)]
        after = []
        for _ in range(100):
            cluster.lead.write(cluster.cycle())
            after.append(_timed(reader.state))
        for n in range(APPS):
            reader.report(f"app{n}", AppReport(1.0, job={"rho": 1.5, "goodput": [1.0] * 16}))
        fresh = _timed(reader.reports)
        again = statistics.median(_timed(reader.reports) for _ in range(50))
        return {
            "idle_us": statistics.median(idle) * 1e6,
            "after_commit_us": statistics.median(after) * 1e6,
            "reports_fresh_ms": fresh * 1e3,
            "reports_again_ms": again * 1e3,
        }


def long_life(cluster: Cluster, url: str, events: int) -> dict[str, float]:
    """Grow the ledger to so many events; return what opening costs then, by snapshot and by replay, and verifying."""
    begun = time.perf_counter()
    while cluster.ledger.state().number < events:
        cluster.lead.write([change for _ in range(25) for change in cluster.cycle()])
    grown = time.perf_counter() - begun
    number = cluster.ledger.state().number
    context = multiprocessing.get_context("spawn")
    found: dict[str, float] = {"events": number, "grown_per_s": number / grown}
    for name, work in (("open", _open), ("replay", _replay), ("verify", _verify)):
        answers = context.Queue()
        child = context.Process(target=work, args=(url, answers))
        child.start()
        seconds, before, after, size = answers.get(timeout=1800)
        child.join(60)
        found |= {f"{name}_s": seconds, f"{name}_memory_mib": after, "imports_mib": before, "bytes": size}
    return found


def _open(url: str, answers: Any) -> None:
    _measured(url, answers, lambda ledger: ledger.state())


def _replay(url: str, answers: Any) -> None:
    from ebbflow.infra.ledger import history

    history.newest_snapshot = lambda connection, cluster: None
    _measured(url, answers, lambda ledger: ledger.state())


def _verify(url: str, answers: Any) -> None:
    def work(ledger: Ledger) -> None:
        problems = ledger.verify()
        if problems:
            raise RuntimeError(f"the ledger does not verify: {problems[:3]}")

    _measured(url, answers, work)


def _measured(url: str, answers: Any, work: Callable[[Ledger], object]) -> None:
    Ledger.open(url).close()  # imports
    before = _peak()
    start = time.perf_counter()
    with Ledger.open(url) as ledger:
        work(ledger)
        took = time.perf_counter() - start
        answers.put((took, before, _peak(), ledger.overview().bytes))


def flat(cluster: Cluster, commits_: int) -> dict[str, float]:
    """Return by how much a writer's memory grows over so many further commits."""
    for _ in range(200):
        cluster.lead.write(cluster.cycle())
    before = _resident()
    for _ in range(commits_):
        cluster.lead.write(cluster.cycle())
    return {"commits": commits_, "grown_mib": _resident() - before, "resident_mib": _resident()}


def _spread(took: list[float]) -> dict[str, float]:
    ordered = sorted(took)
    return {
        "median_ms": statistics.median(ordered) * 1e3,
        "share_99_ms": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e3,
        "worst_ms": ordered[-1] * 1e3,
    }


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measured(url: str, given: argparse.Namespace) -> dict[str, Any]:
    """Return all figures of the database at ``url``."""
    with Ledger.open(url) as ledger:
        cluster = Cluster(ledger)
        found: dict[str, Any] = {"alone": commits(cluster, given.seconds)}
        found["polls"] = polls(cluster, url)
        found["load"] = under_load(cluster, url, given.seconds)
        found["flat"] = flat(cluster, given.flat)
        found["long"] = long_life(cluster, url, given.events)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run of commits")
    parser.add_argument("--events", type=int, default=100_000, help="that the long-lived ledger holds")
    parser.add_argument("--flat", type=int, default=3000, help="commits over which memory is watched")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "apps": APPS, "nodes": NODES, "leases": HELD, "databases": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        found["databases"]["SQLite"] = measured(f"{folder}/ledger.db", given)
    with server(durable=True) as postgres:
        found["databases"]["PostgreSQL"] = measured(postgres.url, given)
    (given.out / "ledger.json").write_text(json.dumps(found, indent=1) + "\n")
    shown = {
        "commit alone, median": lambda one: one["alone"]["median_ms"],
        "commit under load, median": lambda one: one["load"]["commits"]["median_ms"],
        "commit under load, 99 %": lambda one: one["load"]["commits"]["share_99_ms"],
        "report under load, median": lambda one: one["load"]["reports"]["median_ms"],
        "look with nothing new": lambda one: one["polls"]["idle_us"] / 1e3,
        "look after a commit": lambda one: one["polls"]["after_commit_us"] / 1e3,
    }
    series = {name: [figure(one) for figure in shown.values()] for name, one in found["databases"].items()}
    (given.out / "ledger.svg").write_text(
        bars_svg("The ledger, milliseconds", list(shown), series, unit="ms")
    )
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
