"""The capacity loop under load: 500 nodes of which 50 change a second, 200 apps that report each second.

Run from the repository root: ``python -m tests.benchmarks.capacity_load --out DIR``. The loop, the policy and the
ledger are the real ones, in real time; nodes and apps are simulated: a source in the loop's process, all apps in one
other process, which reads and writes the same ledger. Nodes come (20 a second), die (10), get a notice (10) and leave
by it (10); apps ask for 1 to 32 GPUs, report each second, let go of leases that are called back after a random while,
finish, or die without a word; another enters for each that is gone. Beside it an hour on a virtual clock with the
same sizes tells whether memory grows. ``--ledger postgresql://...`` takes another database than SQLite. Writes
``capacity_load.json`` and ``capacity_load.svg``; ends with 1 if something does not hold.
"""

import argparse
import gc
import json
import multiprocessing
import os
import platform
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.ledger.audit import audit
from ebbflow.infra.storage.files import write_text
from ebbflow.planners.capacity.values import Settings
from ebbflow.planners.model.ledger import AppEntered, CapacityChanged, Ended, Event, Granted, Recalled
from ebbflow.planners.scheduling.live import live_policy
from ebbflow.tasks.capacity.intervals import LoopIntervals
from ebbflow.tasks.capacity.loop import CapacityLoop
from ebbflow.tasks.capacity.metrics import percentile
from ebbflow.tasks.drawing.charts import lines_svg
from tests.benchmarks.capacity_churn import Apps, Churn, SureEvictor, run_apps
from tests.evaluation.renting.virtual_clock import VirtualClock

GOAL = 2.0  # s, p99 of change -> leases
SILENT = 15.0
WARM = 20.0  # s before changes are counted: the cluster fills


def settings(policy: str) -> Settings:
    return Settings(
        policy=live_policy(policy),
        heartbeat_timeout_s=SILENT,
        drain_lead_s=2.0,
        termination_grace_s=5.0,
        scaling=None,
    )


# --- in real time -------------------------------------------------------------------------------------------------


def real_time(
    url: str | None, apps: int, nodes: int, rate: float, seconds: float, seed: int, policy: str
) -> dict[str, Any]:
    """Run the loop against both, and return its figures."""
    clock = SystemClock()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        address = url or f"{folder}/ledger.db"
        with Ledger.open(address, cluster="local", clock=clock) as ledger:
            churn = Churn(nodes, seed, clock)
            answers: list[tuple[float, int]] = []  # (when, revision of the source)

            def point(name: str) -> None:
                if name == "answered":
                    answers.append((clock.now(), loop.metrics.answered))

            loop = CapacityLoop(
                ledger,
                None,
                churn,
                settings(policy),
                evictor=SureEvictor(clock),
                pace=LoopIntervals(capacity_poll_interval=0.2),
                seed=seed,
                point=point,
            )
            stop, stop_apps, told = threading.Event(), spawn.Event(), spawn.Queue()
            child = spawn.Process(
                target=run_apps, args=(address, apps, seed + 1, stop_apps, told), daemon=True
            )
            thread = threading.Thread(target=loop.run, args=(stop,), daemon=True)
            child.start()
            thread.start()
            clock.sleep(WARM)
            loop.metrics.latencies.clear()
            loop.metrics.deciding.clear()
            cpu, memory = time.process_time(), []
            began = clock.now()
            slept = 0
            while clock.now() < began + seconds:
                churn.change()
                slept += 1
                clock.sleep(began + slept / rate - clock.now())
                if slept % max(1, int(10 * rate)) == 0:
                    memory.append((round(clock.now() - began, 1), _rss()))
            made = clock.now()
            clock.sleep(5.0)
            used = time.process_time() - cpu
            stop_apps.set()
            of_apps = told.get(timeout=60)
            child.join(30)
            stop.set()
            thread.join(120)
            events = all_events(ledger)
            found = figures(churn.times, answers, began, made)
            return {
                "changes": len(churn.times),
                "changes_s": round(len(churn.times) / (made - began), 1),
                "apps": of_apps | {"entered": sum(isinstance(e.change, AppEntered) for e in events)},
                "loop": dict(loop.metrics.to_dict()),
                "loop_cpu": round(used / (made - began + 5.0), 3),
                "memory_mib": memory,
                "events": len(events),
                "granted": sum(len(e.change.leases) for e in events if isinstance(e.change, Granted)),
                "ended": sum(len(e.change.leases) for e in events if isinstance(e.change, Ended)),
                **found,
                **by_kind(events, began),
                "violations": audit(events)[:20] + ledger.verify()[:20],
                "ledger": str(ledger.address).split(":", maxsplit=1)[0],
            }


def figures(
    times: Sequence[float], answers: Sequence[tuple[float, int]], began: float, made: float
) -> dict[str, Any]:
    """Return how long changes waited for their decision, and how many waited, second by second."""
    latency, answered_at, at = [], [], 0
    for number, time_ in enumerate(times, 1):
        while at < len(answers) and answers[at][1] < number:
            at += 1
        if at == len(answers):
            answered_at.append(float("inf"))
            continue
        answered_at.append(answers[at][0])
        latency.append(answers[at][0] - time_)
    backlog = []
    for second in range(int(made - began) + 1):
        now = began + second
        waiting = sum(t <= now < a for t, a in zip(times, answered_at, strict=True))
        backlog.append((float(second), float(waiting)))
    third = len(backlog) // 3
    first = sum(b for _, b in backlog[:third]) / max(1, third)
    last = sum(b for _, b in backlog[-third:]) / max(1, third)
    return {
        "latency_s": {
            name: round(percentile(latency, share) or 0.0, 3)
            for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("worst", 1.0))
        },
        "unanswered": sum(value == float("inf") for value in answered_at),
        "backlog": backlog,
        "backlog_mean": {"first_third": round(first, 1), "last_third": round(last, 1)},
    }


def by_kind(events: Sequence[Event], began: float) -> dict[str, Any]:
    """Return seconds from an arrival to the first lease, from a written notice to the recall, from a loss to the end.

    The latter two are between events of the ledger; most are in one transaction.
    """
    entered: dict[str, float] = {}
    arrival, notice, death = [], [], []
    held: dict[int, str] = {}
    told: dict[str, float] = {}
    gone: dict[str, float] = {}
    for event in events:
        change = event.change
        match change:
            case AppEntered():
                entered.setdefault(change.spec.id, event.at)
            case CapacityChanged():
                fresh = {one.node_id for one in change.notices} - set(told)
                told |= dict.fromkeys(fresh, event.at)
                gone |= dict.fromkeys(change.left, event.at)
            case Granted():
                for lease in change.leases:
                    held[lease.number] = lease.node
                    if (at := entered.pop(lease.app, None)) is not None and at >= began:
                        arrival.append(event.at - at)
            case Recalled():
                notice += [
                    event.at - told[held[n]]
                    for n in change.leases
                    if held.get(n) in told and event.at >= began
                ]
            case Ended():
                death += [
                    event.at - gone[held[n]] for n in change.leases if held[n] in gone and event.at >= began
                ]
                for number in change.leases:
                    held.pop(number)
            case _:
                pass
    return {
        name: {"count": len(values), "p50": percentile(values, 0.5), "p99": percentile(values, 0.99)}
        for name, values in (("arrival_s", arrival), ("notice_s", notice), ("death_s", death))
    }


# --- on a virtual clock -------------------------------------------------------------------------------------------


def virtual_hour(
    apps: int, nodes: int, rate: float, minutes: float, seed: int, policy: str
) -> dict[str, Any]:
    """Run the loop without threads on a virtual clock; return the memory of the process as time goes by."""
    clock = VirtualClock(1_700_000_000.0)
    with tempfile.TemporaryDirectory() as folder, Ledger.open(f"{folder}/ledger.db", clock=clock) as ledger:
        churn = Churn(nodes, seed, clock)
        crowd = Apps(ledger, apps, seed + 1, every=5.0)
        loop = CapacityLoop(
            ledger, None, churn, settings(policy), evictor=SureEvictor(clock, 0.0), clock=clock, seed=seed
        )
        loop.begin()
        began, wall = clock.now(), time.monotonic()
        memory: list[tuple[float, float]] = []
        due = began
        while clock.now() < began + 60 * minutes:
            while due <= clock.now():
                churn.change()
                due += 1 / rate
            crowd.step()
            loop.step()
            clock.sleep(1.0)
            if clock.now() - began >= 60 * len(memory):
                gc.collect()
                memory.append((round((clock.now() - began) / 60, 1), _rss()))
                if len(memory) % 5 == 1:
                    print(f"minute {len(memory) - 1} of {minutes:g}: {memory[-1][1]:g} MiB", flush=True)
        loop.end()
        half = [value for at, value in memory if at >= minutes / 4]
        quarter = max(1, len(half) // 3)
        return {
            "minutes": minutes,
            "changes_s": rate,
            "wall_s": round(time.monotonic() - wall, 1),
            "cycles": loop.metrics.cycles,
            "memory_mib": memory,
            "first_mib": round(sum(half[:quarter]) / quarter, 1),
            "last_mib": round(sum(half[-quarter:]) / quarter, 1),
            "violations": audit(all_events(ledger))[:20],
        }


def all_events(ledger: Ledger) -> list[Event]:
    found: list[Event] = []
    while some := ledger.events(found[-1].number if found else 0, 5000):
        found += some
    return found


def _rss() -> float:
    return round(psutil.Process().memory_info().rss / 2**20, 1)


# --- all of it ----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--apps", type=int, default=200)
    parser.add_argument("--nodes", type=int, default=500)
    parser.add_argument("--rate", type=float, default=50.0, help="changes a second")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--minutes", type=float, default=60.0, help="of virtual time; 0: none")
    parser.add_argument("--virtual-rate", type=float, default=0.5, help="changes a second of virtual time")
    parser.add_argument("--policy", default="rho-bounded")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ledger", help="of a database other than a SQLite file of its own")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    found: dict[str, Any] = {
        "apps": given.apps,
        "nodes": given.nodes,
        "rate": given.rate,
        "seconds": given.seconds,
        "policy": given.policy,
        "goal_s": GOAL,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "load": round(load, 1),
    }
    if given.seconds:
        found["real"] = real_time(
            given.ledger, given.apps, given.nodes, given.rate, given.seconds, given.seed, given.policy
        )
        found["peak_mib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
    if given.minutes:
        found["virtual"] = virtual_hour(
            given.apps, given.nodes, given.virtual_rate, given.minutes, given.seed, given.policy
        )
    found["holds"] = verdicts(found)
    write_text(given.out / "capacity_load.json", json.dumps(found, indent=1) + "\n")
    if given.seconds:
        write_text(given.out / "capacity_load.svg", drawn(found))
    for name, value in found.items():
        print(name, _short(value), flush=True)
    return 0 if all(found["holds"].values()) else 1


def verdicts(found: dict[str, Any]) -> dict[str, bool]:
    """Return what must hold, and whether it does."""
    held = {}
    if real := found.get("real"):
        backlog = real["backlog_mean"]
        held |= {
            "p99 of change to leases under 2 s": real["latency_s"]["p99"] < GOAL,
            "no change unanswered": real["unanswered"] == 0,
            "the backlog does not grow": backlog["last_third"]
            <= 1.5 * backlog["first_third"] + found["rate"],
            "no GPU booked twice, the ledger replays": not real["violations"],
        }
    if virtual := found.get("virtual"):
        held["memory is flat over the virtual time"] = virtual["last_mib"] <= 1.05 * virtual["first_mib"] + 5
        held["no GPU booked twice in it"] = not virtual["violations"]
    return held


def drawn(found: dict[str, Any]) -> str:
    real = found["real"]
    return lines_svg(
        f"Changes that wait for their decision, {found['rate']:g} new ones a second",
        {"waiting": real["backlog"]},
        label="seconds",
        unit="changes",
    )


def _short(value: object) -> str:
    if isinstance(value, dict):
        return json.dumps({k: v for k, v in value.items() if not isinstance(v, list) or len(v) < 5})
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
