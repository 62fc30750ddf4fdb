"""Chaotic runs of the whole system: what is lost, booked twice or left over? ``make chaos`` runs it.

Run from the repository root: ``python -m tests.benchmarks.system_chaos --seeds 20 --out DIR``. Each run is decided
by its seed (``tests/chaos`` says what happens in it and what must hold) and takes one and a half to three minutes.
Runs in which all held are kept in ``--runs`` and are not repeated: the same command goes on where it was
interrupted. The folder of a run in which anything did not hold stays there. Writes ``system_chaos.json`` and
``system_chaos.svg``; exits with 1 if anything did not hold, or not all runs are done.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from ebbflow.infra.storage.files import write_text
from ebbflow.tasks.drawing.charts import bars_svg
from tests.chaos.faults import Kind
from tests.chaos.invariants import marked
from tests.chaos.run import OUTCOME
from tests.chaos.scene import uid_of

ROOT = Path(__file__).parents[2]
LIMIT = 1200.0  # s for one run
ENDS = 90.0  # s for one that is cut short to take down what it has started
WORDS: dict[Kind, str] = {
    "kill-spark": "Spark worker killed",
    "kill-gpu": "training node killed",
    "kill-worker": "training process killed",
    "kill-app": "pipeline's process killed",
    "kill-loop": "capacity loop killed",
    "freeze-spark": "Spark worker stopped for a while",
    "freeze-gpu": "training node stopped for a while",
    "freeze-app": "pipeline's process stopped for a while",
    "freeze-loop": "capacity loop stopped for a while",
    "notice-spark": "notice to a Spark worker",
    "notice-gpu": "notice to a training node",
    "database": "database cut off or locked",
    "disk": "disk full",
    "clock": "wall clock jumped",
    "twin-app": "second process for one run",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=20, help="how many runs")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--time-limit", type=float, default=7200.0, help="begin no run after so many seconds")
    parser.add_argument(
        "--runs", type=Path, help="where finished runs are kept; default: a folder of the user's"
    )
    parser.add_argument("--again", action="store_true", help="repeat finished runs, too")
    given = parser.parse_args(arguments)
    runs = given.runs or Path(tempfile.gettempdir()) / f"ebbflow-system-chaos-{os.getuid()}"
    runs.mkdir(parents=True, exist_ok=True)
    given.out.mkdir(parents=True, exist_ok=True)
    wanted = range(given.first, given.first + given.seeds)
    began = time.monotonic()
    for seed in wanted:
        if (known := held(runs, seed)) is not None and not given.again:
            tell(known, "was done before")
        elif time.monotonic() - began < given.time_limit:
            tell(run_seed(seed, runs), f"{time.monotonic() - began:.0f} s in all")
    found = [json.loads(kept(runs, seed).read_text()) for seed in wanted if kept(runs, seed).exists()]
    summary = summarised(found, len(wanted))
    write_text(given.out / "system_chaos.json", json.dumps(summary, indent=1) + "\n")
    write_text(given.out / "system_chaos.svg", _drawn(summary))
    _table(found, runs)
    return 0 if summary["whole"] == len(wanted) else 1


def kept(runs: Path, seed: int) -> Path:
    return runs / f"{seed}.json"


def held(runs: Path, seed: int) -> dict[str, Any] | None:
    """Return the outcome of a run that is done and in which all held."""
    if not kept(runs, seed).exists():
        return None
    outcome: dict[str, Any] = json.loads(kept(runs, seed).read_text())
    return None if outcome["violations"] else outcome


def run_seed(
    seed: int, runs: Path, program: str = "tests.chaos.run", *options: str, limit: float = LIMIT
) -> dict[str, Any]:
    """Do a run in a process of its own; what it leaves behind stays only if something did not hold."""
    folder = runs / str(seed)
    if (folder / "disk").is_mount():  # of a run that was cut short
        subprocess.run(["umount", "-l", str(folder / "disk")], check=False, timeout=60)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder / "run.log"
    command = [sys.executable, "-m", program, str(seed), str(folder), "--data", str(runs / "data"), *options]
    with (
        log.open("wb") as out,
        subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT) as process,
    ):
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(limit)
        finally:
            end(process)
    try:
        outcome: dict[str, Any] = json.loads((folder / OUTCOME).read_text())
    except (OSError, ValueError):
        said = log.read_text(errors="replace")[-1000:]
        outcome = {"seed": seed, "seconds": limit, "ledger": "", "seen": {}, "faults": [], "restarts": {}}
        outcome["violations"] = [f"the run itself did not come to its end: {said}"]
    write_text(kept(runs, seed), json.dumps(outcome))
    if not outcome["violations"]:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a run that is cut short, with all that it has started."""
    if process.poll() is not None:
        return
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(ENDS)
    process.kill()
    for left in marked(uid_of(process.pid)):
        with contextlib.suppress(psutil.Error):
            left.kill()


def tell(outcome: dict[str, Any], more: str) -> None:
    wrong = outcome["violations"]
    seen = outcome["seen"]
    restarts = sum(outcome["restarts"].values())
    verdict = "all held" if not wrong else f"{len(wrong)} VIOLATIONS: {wrong[0][:160]}"
    print(
        f"seed {outcome['seed']:3}  {outcome['seconds']:5.0f} s  {outcome['ledger']:<10}  "
        f"{seen.get('faults', 0):2} faults  {restarts:2} restarts  {seen.get('leases', 0):3} leases  "
        f"{verdict}  ({more})",
        flush=True,
    )


def _table(found: Sequence[dict[str, Any]], runs: Path) -> None:
    print("\nseed  seconds  ledger      faults  restarts  stretches  steps again  violations")
    for one in found:
        seen = one["seen"]
        print(
            f"{one['seed']:4}  {one['seconds']:7.0f}  {one['ledger']:<10}  {seen.get('faults', 0):6}  "
            f"{sum(one['restarts'].values()):8}  {seen.get('stretches', 0):9}  {seen.get('steps_again', 0):11}  "
            f"{len(one['violations']):10}"
        )
    for one in found:
        if one["violations"]:
            print(f"\nseed {one['seed']}; files in {runs / str(one['seed'])}; again: make chaos "
                  f'ARGS="--first {one["seed"]} --seeds 1 --again"')  # fmt: skip
            for sentence in one["violations"]:
                print(f"  {sentence[:600]}")


def summarised(found: Sequence[dict[str, Any]], wanted: int) -> dict[str, Any]:
    """Return the figures of all runs."""
    seen: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for one in found:
        seen.update(one["seen"])
        faults.update(fault["kind"] for fault in one["faults"] if fault["proof"])
    seconds = [one["seconds"] for one in found]
    return {
        "runs": len(found),
        "wanted": wanted,
        "whole": sum(not one["violations"] for one in found),
        "violations": {str(one["seed"]): one["violations"] for one in found if one["violations"]},
        "faults": {WORDS[kind]: faults[kind] for kind in WORDS if faults[kind]},
        "seen": dict(seen),
        "restarts": sum(sum(one["restarts"].values()) for one in found),
        "postgresql": sum(one["ledger"] == "PostgreSQL" for one in found),
        "seconds": round(sum(seconds), 1),
        "run_s": round(statistics.median(seconds), 1) if seconds else None,
        "longest_s": max(seconds, default=None),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
    }


def _drawn(summary: dict[str, Any]) -> str:
    counts = summary["faults"]
    return bars_svg(
        "Faults of all runs, by kind",
        list(counts),
        {"faults": [float(count) for count in counts.values()]},
        unit="",
    )


if __name__ == "__main__":
    sys.exit(main())
