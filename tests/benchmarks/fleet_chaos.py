"""Chaotic runs of a capacity loop on the emulated AWS: is a node leaked, another's ended, a notice lost?

Run from the repository root: ``python -m tests.benchmarks.fleet_chaos --seeds 200 --out DIR``. Each run is decided by
its seed (``tests/aws/chaos.py`` says what happens in it) and takes some seconds, most of them waiting. Finished runs
are kept in ``--runs`` and are not repeated: the same command goes on where it was interrupted. Writes
``fleet_chaos.json`` and ``fleet_chaos.svg``; exits with 1 if anything did not hold.
"""

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ebbflow.infra.storage.files import write_text
from ebbflow.tasks.drawing.charts import cdf_svg

SPEED = 30.0  # seconds of the clock per second of the wall
LIMIT = 4 * 3600  # seconds for all runs


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=200, help="how many runs")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=2 * (os.cpu_count() or 1), help="runs at a time")
    parser.add_argument(
        "--speed", type=float, default=SPEED, help="how much faster the clock goes than the wall"
    )
    parser.add_argument(
        "--runs", type=Path, help="where finished runs are kept; default: a folder of the user's"
    )
    given = parser.parse_args(arguments)
    runs = given.runs or Path(tempfile.gettempdir()) / f"ebbflow-fleet-chaos-{os.getuid()}"
    runs.mkdir(parents=True, exist_ok=True)
    given.out.mkdir(parents=True, exist_ok=True)
    wanted = range(given.first, given.first + given.seeds)
    missing = [seed for seed in wanted if not _path(runs, seed).exists()]
    if len(missing) < given.seeds:
        print(f"{given.seeds - len(missing)} of {given.seeds} runs are in {runs} already", flush=True)
    _all(missing, min(given.jobs, len(missing)), given.speed, runs)
    found = [json.loads(_path(runs, seed).read_text()) for seed in wanted if _path(runs, seed).exists()]
    summary = summarised(found, len(wanted), given.speed)
    write_text(given.out / "fleet_chaos.json", json.dumps(summary, indent=1) + "\n")
    write_text(given.out / "fleet_chaos.svg", _drawn(found))
    for name, value in summary.items():
        print(f"{name}: {value}")
    return 0 if summary["whole"] == len(wanted) else 1


def _path(runs: Path, seed: int) -> Path:
    return runs / f"{seed}.json"


def _all(seeds: Sequence[int], jobs: int, speed: float, runs: Path) -> None:
    """Do the runs in ``jobs`` processes, each with an emulator of its own, and tell how far they are."""
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=_work, args=(seeds[at::jobs], speed, runs)) for at in range(jobs)]
    began = time.monotonic()
    for worker in workers:
        worker.start()
    told = 0
    try:
        while any(worker.is_alive() for worker in workers) and time.monotonic() - began < LIMIT:
            time.sleep(0.5)
            done = [seed for seed in seeds if _path(runs, seed).exists()]
            if len(done) > told:
                told = len(done)
                seconds = time.monotonic() - began
                bad = [seed for seed in done if json.loads(_path(runs, seed).read_text())["violations"]]
                left = seconds / told * (len(seeds) - told)
                print(
                    f"{told} of {len(seeds)} after {seconds:.0f} s, {left:.0f} s to go"
                    + (f"; wrong: {', '.join(map(str, bad))}" if bad else ""),
                    flush=True,
                )
    finally:
        for worker in workers:
            if worker.exitcode:
                print(f"a worker ended with {worker.exitcode}", flush=True)
            if worker.is_alive():
                worker.terminate()
            worker.join(30)


def _work(seeds: Sequence[int], speed: float, runs: Path) -> None:
    from tests.aws.chaos import run, warm
    from tests.aws.emulator import Emulator

    warm()
    scratch = Path(tempfile.mkdtemp(prefix="ebbflow-chaos-"))
    try:
        with Emulator.start(scratch, speed) as emulator:
            for seed in seeds:
                found = run(emulator, seed, scratch / str(seed))
                if found["violations"]:
                    shutil.copytree(scratch / str(seed), runs / f"{seed}-wrong", dirs_exist_ok=True)
                write_text(_path(runs, seed), json.dumps(found))
                emulator.reset()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def summarised(found: Sequence[dict[str, Any]], wanted: int, speed: float) -> dict[str, Any]:
    """Return the figures of all runs."""
    notices = sorted(value for one in found for value in one["notice_seconds"])
    faults: dict[str, int] = {}
    for one in found:
        for kind, count in one["faults"].items():
            faults[kind] = faults.get(kind, 0) + count
    wrong = {str(one["seed"]): one["violations"] for one in found if one["violations"]}
    return {
        "runs": len(found),
        "wanted": wanted,
        "whole": sum(not one["violations"] for one in found),
        "violations": wrong,
        "kills": sum(one["kills"] for one in found),
        "calls": sum(one["calls"] for one in found),
        "faults": faults,
        "launched": sum(one["launched"] for one in found),
        "interrupted": sum(one["interrupted"] for one in found),
        "noticed": len(notices),
        "notice_s": {
            "median": statistics.median(notices) if notices else None,
            "share_95": notices[int(0.95 * (len(notices) - 1))] if notices else None,
            "worst": notices[-1] if notices else None,
        },
        "run_s": statistics.median(one["seconds"] for one in found) if found else None,
        "speed": speed,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
    }


def _drawn(found: Sequence[dict[str, Any]]) -> str:
    calm = [v for one in found if not one["kills"] for v in one["notice_seconds"]]
    killed = [v for one in found if one["kills"] for v in one["notice_seconds"]]
    series = {"runs without a kill": calm, "runs in which the controller was killed": killed}
    return cdf_svg(
        "From an interruption warning to the revision that has it",
        {name: values for name, values in series.items() if values},
        label="time",
        mark=2.0,
    )


if __name__ == "__main__":
    sys.exit(main())
