"""What ``--metrics`` costs a capacity decision, in processor time, so that a busy machine changes little.

Run from the repository root: ``python -m tests.benchmarks.metrics_cost --out DIR`` (a minute or two). The loop, the
policy, the ledger and the server are the real ones; nodes and apps change on a virtual clock, one cycle a second, and
each cycle is with or without the server, by a draw. Another process scrapes between cycles. A scrape that meets a
cycle holds it up by its own processor time at most, since both are threads of one interpreter. Prometheus scrapes
each 15 s unless told otherwise, so of cycles that begin each second few are met: the expected cost is the idle
server's, and a scrape's times the share of cycles that it meets. Writes ``metrics_cost.json``; ends with 1 if that is
1 % or more.
"""

import argparse
import json
import multiprocessing
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean
from typing import Any

import httpx

from ebbflow.infra.ledger import Ledger
from ebbflow.infra.storage.files import write_text
from ebbflow.tasks.capacity.loop import CapacityLoop
from ebbflow.tasks.capacity.metrics import serving_metrics
from tests.benchmarks.capacity_churn import Apps, Churn, SureEvictor
from tests.benchmarks.capacity_load import settings
from tests.evaluation.renting.virtual_clock import VirtualClock

EVERY = 15.0  # s between two scrapes
BAR = 0.01  # of a cycle's time
WARM = 60  # cycles before any is measured


def scrape(orders: Connection) -> None:
    """Scrape each address that is ordered, and say when that is done."""
    with httpx.Client(timeout=60) as client:
        while url := orders.recv():
            client.get(url).raise_for_status()
            orders.send("done")


def measured(apps: int, nodes: int, cycles: int, seed: int) -> dict[str, list[float]]:
    """Return processor seconds of cycles without and beside the server, and of scrapes."""
    clock = VirtualClock(1_700_000_000.0)
    times: dict[str, list[float]] = {"off": [], "idle": [], "scrape": []}
    drawn = random.Random(seed)
    here, there = multiprocessing.Pipe()
    scraper = multiprocessing.get_context("spawn").Process(target=scrape, args=(there,), daemon=True)
    scraper.start()
    with tempfile.TemporaryDirectory() as folder, Ledger.open(f"{folder}/ledger.db", clock=clock) as ledger:
        churn = Churn(nodes, seed, clock)
        crowd = Apps(ledger, apps, seed + 1, every=5.0)
        evictor = SureEvictor(clock, 0.0)
        loop = CapacityLoop(
            ledger, None, churn, settings("rho-bounded"), evictor=evictor, clock=clock, seed=seed
        )
        loop.begin()
        for number in range(WARM + 2 * cycles):
            churn.change()
            crowd.step()
            way = (
                "warm" if number < WARM else drawn.choice(("idle", "off"))
            )  # cycles differ in turns of their own
            with serving_metrics(
                "127.0.0.1:0" if way == "idle" else "", lambda: nullcontext(ledger)
            ) as server:
                before = time.process_time()
                loop.step()
                took = time.process_time() - before
                if server is not None:
                    before = time.process_time()
                    here.send(f"{server.url}metrics")
                    here.recv()
                    times["scrape"].append(time.process_time() - before)
            if way != "warm":
                times[way].append(took)
            clock.sleep(1.0)
        loop.end()
    here.send("")
    scraper.join(30)
    return times


def figures(times: dict[str, list[float]]) -> dict[str, Any]:
    """Return milliseconds, means, and what is expected of a loop that is scraped each ``EVERY`` seconds."""
    middle = {name: mean(values) for name, values in times.items()}
    idle = mean(times["idle"]) / mean(times["off"]) - 1
    met = (middle["off"] + middle["scrape"]) / EVERY
    scrapes = met * middle["scrape"] / middle["off"]
    return {
        "milliseconds": {name: round(1000 * value, 2) for name, value in middle.items()},
        "idle_server_adds": round(idle, 4),
        "cycles_met": round(met, 5),
        "scrapes_add": round(scrapes, 5),
        "expected": round(max(idle, 0.0) + scrapes, 5),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--apps", type=int, default=60)
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--cycles", type=int, default=150, help="with the server, and as many without")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    times = measured(given.apps, given.nodes, given.cycles, given.seed)
    found = {
        "apps": given.apps,
        "nodes": given.nodes,
        "cycles": given.cycles,
        "scraped_every_s": EVERY,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "load": round(load, 1),
        **figures(times),
    }
    write_text(given.out / "metrics_cost.json", json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return 0 if found["expected"] < BAR else 1


if __name__ == "__main__":
    sys.exit(main())
