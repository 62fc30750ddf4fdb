"""How long a training stands still when a process is killed and nodes leave and come, beside other launchers.

Run from the repository root: ``python -m tests.benchmarks.training_pauses --out DIR``; a quarter of an hour on two
quiet cores. Two members of this machine train a small model and one of 100 MB, in turns under ``--recovery in-place``
and ``restart``, plain torchrun, and torchft at its default heartbeat timeout and at one of 200 ms. In each turn a
process is killed and comes back, a node gets a notice and leaves, one comes, one is taken away, and one comes. Writes
``training_pauses.json`` and ``training_pauses.svg``. torchft is installed for it, into a folder of its own.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ebbflow.infra.machine import devices
from ebbflow.infra.storage.files import write_text
from ebbflow.tasks.drawing.charts import bars_svg
from tests.benchmarks.pause_systems import (
    LONG,
    TORCHFT,
    Ours,
    System,
    Torchft,
    Torchrun,
    install_torchft,
    lives,
    until,
)
from tests.benchmarks.ranks import machine

SIZES = {"small": 960, "100 MB": 4980, "500 MB": 11_160}  # width of the hidden layers
EVENTS = ("SIGKILL", "notice", "grow", "shrink")
TURN = ("SIGKILL", "notice", "grow", "shrink", "grow")  # from two members to two
BEST = 200  # ms, heartbeat timeout of torchft
WARM, AFTER = 1.0, 0.5  # seconds of training before and after what happens
STEPS = 3  # that a member has to do before it counts as there

Row = dict[str, Any]


class Bench:
    """A system, and what its processes note."""

    def __init__(self, system: System, folder: Path, width: int) -> None:
        self.system, self.notes = system, folder / "notes"
        self.notes.mkdir()
        system.start(folder, self.notes, width)
        self.count = 2
        self.await_members(0.0, set())

    def steps(self) -> list[tuple[float, int, int]]:
        """Return when each process did each step: time, step, process ID."""
        found = []
        for path in self.notes.iterdir():
            for line in path.read_text().split("\n")[:-1]:
                step, at = line.split()
                found.append((float(at), int(step), int(path.name)))
        return sorted(found)

    def await_members(self, since: float, gone: set[int]) -> None:
        """Wait until all members have trained since then, and processes are gone."""
        until(lambda: not any(map(lives, gone)), "end of a process")
        since = max(since, time.time() if gone else 0.0)

        def there() -> bool:
            counts: dict[int, int] = {}
            for at, _, pid in self.steps():
                counts[pid] = counts.get(pid, 0) + (at > since)
            mine = self.system.pids().values()
            return len(mine) == self.count and all(counts.get(pid, 0) >= STEPS for pid in mine)

        until(there, f"{self.count} members that train")

    def suffer(self, event: str) -> Row:
        """Let something happen to the member that came last, and return what that cost."""
        time.sleep(WARM)
        pids = self.system.pids()
        member = list(pids)[-1]
        begun = time.time()
        gone: set[int] = set()
        if event == "SIGKILL":
            self.system.kill(member)
            gone = {pids[member]}
        elif event == "grow":
            self.system.grow()
            self.count += 1
        else:
            (self.system.notice if event == "notice" else self.system.shrink)(member)
            self.count -= 1
            gone = {pids[member]}
        self.await_members(begun, gone)
        ended = time.time() + AFTER
        time.sleep(AFTER)
        return {"event": event, **pause(self.steps(), begun, ended)}


def pause(steps: list[tuple[float, int, int]], begun: float, ended: float) -> Row:
    """Return the longest time without a step since shortly before ``begun``, and the steps that were done again."""
    before = [one for one in steps if one[0] <= begun]
    mine = before[-1:] + [one for one in steps if begun < one[0] <= ended]
    longest = max((b[0] - a[0] for a, b in pairwise(mine)), default=ended - begun)
    reached, again = max((step for _, step, _ in before), default=0), 0
    for _, step, _ in mine:
        again = max(again, reached - step + 1) if step < reached else again
        reached = max(reached, step)
    usual = [b[0] - a[0] for a, b in pairwise(before[-200:]) if b[1] > a[1]]
    return {"pause_s": longest, "again": again, "step_s": statistics.median(usual) if usual else 0.0}


def turn(make: Callable[[], System], width: int, cycles: int) -> list[Row]:
    """Return what happened in a turn of one system."""
    system = make()
    with tempfile.TemporaryDirectory(prefix="ebbflow-pauses-") as folder:
        try:
            bench = Bench(system, Path(folder), width)
            return [bench.suffer(event) for _ in range(cycles) for event in TURN]
        finally:
            system.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=2, help="turns of each system")
    parser.add_argument("--cycles", type=int, default=1, help="times that all happens in a turn")
    parser.add_argument("--sizes", default="small,100 MB", help=f"of the model, some of {', '.join(SIZES)}")
    parser.add_argument("--systems", default="", help="only those whose names begin with one of these")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="all members share a GPU")
    parser.add_argument("--name", default="training_pauses", help="of the files that are written")
    given = parser.parse_args()
    if given.device == "cpu":
        os.environ[devices.VISIBLE] = ""
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(f"ended by signal {number}")
    )  # members end, too
    given.out.mkdir(parents=True, exist_ok=True)
    sizes = [one.strip() for one in given.sizes.split(",")]
    if wrong := set(sizes) - set(SIZES):
        parser.error(f"--sizes: some of {', '.join(SIZES)}; got {', '.join(sorted(wrong))}")
    with tempfile.TemporaryDirectory(prefix="ebbflow-torchft-") as packages:
        systems = all_systems(Path(packages))
        if given.systems:
            chosen = tuple(one.strip() for one in given.systems.split(","))
            systems = {name: make for name, make in systems.items() if name.startswith(chosen)}
        without = ""
        if any(name.startswith("torchft") for name in systems) and (
            without := install_torchft(Path(packages))
        ):
            print(f"torchft is not measured: {without}", flush=True)
            systems = {name: make for name, make in systems.items() if not name.startswith("torchft")}
        rows = measure(systems, sizes, given.rounds, given.cycles)
    found = {
        "machine": machine(),
        "torch": torch.__version__,
        "torchft": without or TORCHFT[0],
        "load": os.getloadavg()[0],
        "sizes": {size: SIZES[size] for size in sizes},
        "events": list(EVENTS),
        "rows": rows,
    }
    write_text(given.out / f"{given.name}.json", json.dumps(found, indent=1) + "\n")
    write_text(given.out / f"{given.name}.svg", drawn(found))


def all_systems(packages: Path) -> dict[str, Callable[[], System]]:
    """Return what makes each system, by its name."""
    return {
        "in place": lambda: Ours("in-place"),
        "restart": lambda: Ours("restart"),
        "torchrun": Torchrun,
        "torchft 5 s": lambda: Torchft(packages, None),
        f"torchft {BEST / 1000:g} s": lambda: Torchft(packages, BEST),
    }


def measure(
    systems: dict[str, Callable[[], System]], sizes: list[str], rounds: int, cycles: int
) -> list[Row]:
    """Return all that happened; systems take turns. One that fails in a turn is told, and its turn is none."""
    rows: list[Row] = []
    for number in range(rounds):
        for size in sizes:
            for name, make in systems.items():
                begun = time.monotonic()
                try:
                    mine = turn(make, SIZES[size], cycles)
                except TimeoutError as exc:
                    print(f"{number + 1} {size} {name}: {exc}", flush=True)
                    mine = [{"event": "failed", "pause_s": LONG, "again": 0, "step_s": 0.0}]
                rows += [{"system": name, "size": size, "round": number, **row} for row in mine]
                said = ", ".join(f"{row['event']} {row['pause_s']:.2f} ({row['again']})" for row in mine)
                print(f"{number + 1} {size} {name}: {said}; {time.monotonic() - begun:.0f} s", flush=True)
    return rows


def chosen(found: Row, system: str, size: str, event: str) -> list[Row]:
    """Return the rows of one cell."""
    wanted = (system, size, event)
    return [row for row in found["rows"] if (row["system"], row["size"], row["event"]) == wanted]


def drawn(found: Row) -> str:
    """Return a picture of the medians."""
    names = list(dict.fromkeys(row["system"] for row in found["rows"]))
    kinds = [(size, event) for size in found["sizes"] for event in found["events"]]
    return bars_svg(
        "Longest time without a step, median",
        [f"{size}: {event}" for size, event in kinds],
        {
            name: [
                statistics.median([row["pause_s"] for row in chosen(found, name, *kind)] or [0.0])
                for kind in kinds
            ]
            for name in names
        },
        unit="s",
    )


if __name__ == "__main__":
    main()
