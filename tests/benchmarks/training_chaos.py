"""Trainings in chaos: is a sample lost or used twice, are parameters others, does anything hang?

Run from the repository root: ``python -m tests.benchmarks.training_chaos --seeds 100 --out DIR``. Each run is decided
by its mode and seed (``tests/infra/training/chaos_runs.py`` says what happens in it) and takes half a minute and more
on two cores, most of it waiting. Finished runs are kept in ``--runs`` and are not repeated: the same command takes up
what was left, and what a run that failed has written stays there. Writes ``training_chaos.json``, on a machine with a
GPU, on which all processes train then, ``training_chaos_cuda.json``; in it modes that are not asked for keep their
rows. Exits with 1 if anything did not hold.
"""

import argparse
import collections
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, get_args

import torch

from ebbflow.infra.storage.files import write_text
from tests.benchmarks.ranks import machine
from tests.infra.training.chaos_runs import ATOL, CLUSTERS, RTOL, ChaosRun, Mode, schedule

EVENTS = 6  # strikes of a run
_A_PROCESS = 20  # runs


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=100, help="how many runs of each mode")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--modes", default=",".join(get_args(Mode)), help="how models are parallel")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    parser.add_argument("--limit", type=float, default=6 * 3600.0, help="seconds after which no run begins")
    parser.add_argument(
        "--runs", type=Path, help="where finished runs are kept; default: a folder of the user's"
    )
    given = parser.parse_args(arguments)
    runs = given.runs or Path(tempfile.gettempdir()) / f"ebbflow-training-chaos-{os.getuid()}"
    runs.mkdir(parents=True, exist_ok=True)
    given.out.mkdir(parents=True, exist_ok=True)
    modes = given.modes.split(",")
    if wrong := set(modes) - set(get_args(Mode)):
        parser.error(f"--modes: some of {', '.join(get_args(Mode))}; got {', '.join(sorted(wrong))}")
    wanted = [(mode, seed) for seed in range(given.first, given.first + given.seeds) for mode in modes]
    _all([one for one in wanted if not _path(runs, *one).exists()], given.jobs, runs, given.limit)
    found = [json.loads(_path(runs, *one).read_text()) for one in wanted if _path(runs, *one).exists()]
    summary = {"first": given.first, **summarised(found, given.seeds, modes)}
    for mode, row in summary["modes"].items():
        print(f"{mode}: {row}")
    kept = given.out / f"training_chaos{'_cuda' if torch.cuda.is_available() else ''}.json"
    whole = all(row["whole"] == given.seeds for row in summary["modes"].values())
    rows = (json.loads(kept.read_text())["modes"] if kept.exists() else {}) | summary["modes"]
    summary["modes"] = {mode: rows[mode] for mode in get_args(Mode) if mode in rows}
    write_text(kept, json.dumps(summary, indent=1) + "\n")
    return 0 if whole else 1


def _path(runs: Path, mode: str, seed: int) -> Path:
    return runs / f"{mode}-{seed}.json"


def _all(wanted: Sequence[tuple[Mode, int]], jobs: int, runs: Path, limit: float) -> None:
    """Do the runs, some at a time, and tell how they ended."""
    spawn, end = multiprocessing.get_context("spawn"), time.time() + limit
    # new processes now and then by new pools: one with max_tasks_per_child hangs where tasks outlive its first ones
    for at in range(0, len(wanted), _A_PROCESS * jobs):
        with ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
            some = wanted[at : at + _A_PROCESS * jobs]
            for done in as_completed([pool.submit(_one, *one, runs, end) for one in some]):
                if (found := done.result()) is not None:
                    said = found["wrong"] or ", ".join(found["happened"])
                    print(f"{found['mode']} {found['seed']}: {found['seconds']:.0f} s, {said}", flush=True)


def _one(mode: Mode, seed: int, runs: Path, end: float) -> dict[str, Any] | None:
    """Do a run, and write down what became of it."""
    if time.time() > end:
        return None
    begun, wrong, steps = time.monotonic(), "", 0
    folder = runs / f"{mode}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    run = ChaosRun(folder, mode)
    try:
        steps = run.through(schedule(seed, EVENTS))
    except Exception as exc:  # of a run that does not hold; it is told, and the next one begins
        wrong = f"{type(exc).__name__}: {exc}"
    finally:
        run.close()
    events = run.trainer.events()
    found = {
        "mode": mode,
        "seed": seed,
        "seconds": time.monotonic() - begun,
        "steps": steps,
        "generations": run.trainer.status().generation,
        "happened": run.happened,
        "restarts": [str(event.content["reason"]) for event in events if event.kind == "restarts"],
        "wrong": wrong,
        "events": [[event.time, event.kind, event.generation, dict(event.content)] for event in events]
        if wrong
        else [],
    }
    write_text(_path(runs, mode, seed), json.dumps(found, indent=1, default=str) + "\n")
    if not wrong:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def summarised(found: Sequence[dict[str, Any]], seeds: int, modes: Sequence[str]) -> dict[str, Any]:
    """Return what the runs say together."""
    rows = {}
    for mode in modes:
        mine = [one for one in found if one["mode"] == mode]
        struck = [event for one in mine for strike in one["happened"] for event in strike.split("+")]
        rows[mode] = {
            "runs": len(mine),
            "whole": sum(not one["wrong"] for one in mine),
            "wrong": [f"{one['seed']}: {one['wrong'][:200]}" for one in mine if one["wrong"]],
            "events": dict(sorted(collections.Counter(struck).items())),
            "two_at_once": sum("+" in strike for one in mine for strike in one["happened"]),
            "steps": sum(one["steps"] for one in mine),
            "generations": sum(one["generations"] for one in mine),
            "one_generation": sum(one["generations"] == 1 for one in mine),
            "restarts": dict(collections.Counter(reason for one in mine for reason in one["restarts"])),
            "run_s": statistics.median(one["seconds"] for one in mine) if mine else 0.0,
        }
    return {
        "wanted": seeds,
        "strikes": EVENTS,
        "rtol": RTOL,
        "atol": ATOL,
        "clusters": {
            mode: [CLUSTERS[mode].nodes, CLUSTERS[mode].most, CLUSTERS[mode].slots] for mode in CLUSTERS
        },
        "torch": torch.__version__,
        "machine": machine(),
        "modes": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
