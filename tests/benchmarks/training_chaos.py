"""Trainings in chaos: is a sample lost or used twice, are parameters others, does anything hang?

Run from the repository root: ``python -m tests.benchmarks.training_chaos --seeds 100 --out DIR``. Each run is
decided by its mode and seed (``tests/infra/training/chaos_runs.py`` says what happens in it). Nodes are forks of an
interpreter that has imported what they need, one for each of ``--jobs``. Finished runs are kept in ``--runs`` and
are not repeated: the same command takes up what was left, and what a run that failed has written stays there. Writes
``training_chaos.json``, on a machine with a GPU, on which all processes train then, ``training_chaos_cuda.json``:
runs of seeds that it has already are left out, others are added to its rows. Exits with 1 if anything did not hold.
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
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

import torch

from ebbflow.infra.storage.files import write_text
from tests.benchmarks.ranks import machine
from tests.forked_python import forked_python
from tests.infra.training.chaos_runs import ATOL, CLUSTERS, RTOL, ChaosRun, Mode, schedule

EVENTS = 6  # strikes of a run
_A_PROCESS = 20  # runs
_held = ExitStack()  # of a process that does runs, to its end


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
    kept = given.out / f"training_chaos{'_cuda' if torch.cuda.is_available() else ''}.json"
    before = json.loads(kept.read_text()) if kept.exists() else {"modes": {}}
    rows = before["modes"]
    seeds = range(given.first, given.first + given.seeds)
    wanted = [(mode, seed) for seed in seeds for mode in modes if seed not in seeds_of(rows.get(mode, {}))]
    _all([one for one in wanted if not _path(runs, *one).exists()], given.jobs, runs, given.limit)
    found = [json.loads(_path(runs, *one).read_text()) for one in wanted if _path(runs, *one).exists()]
    summary = summarised(found, modes)
    for mode, row in summary["modes"].items():
        print(f"{mode}: {row}")
    added = {mode: added_to(rows.get(mode, {}), row) for mode, row in summary["modes"].items()}
    summary["modes"] = {mode: (rows | added)[mode] for mode in get_args(Mode) if mode in rows | added}
    if "note" in before:  # what is to be said of the runs besides
        summary["note"] = before["note"]
    write_text(kept, json.dumps(summary, indent=1) + "\n")
    done = sum(not one["wrong"] for one in found)
    return 0 if done == len(wanted) else 1


def _path(runs: Path, mode: str, seed: int) -> Path:
    return runs / f"{mode}-{seed}.json"


def _all(wanted: Sequence[tuple[Mode, int]], jobs: int, runs: Path, limit: float) -> None:
    """Do the runs, some at a time, and tell how they ended."""
    spawn, end = multiprocessing.get_context("spawn"), time.time() + limit
    # new processes now and then by new pools: one with max_tasks_per_child hangs where tasks outlive its first ones
    for at in range(0, len(wanted), _A_PROCESS * jobs):
        with ProcessPoolExecutor(jobs, spawn, _prepare) as pool:
            some = wanted[at : at + _A_PROCESS * jobs]
            for done in as_completed([pool.submit(_one, *one, runs, end) for one in some]):
                if (found := done.result()) is not None:
                    said = found["wrong"] or ", ".join(found["happened"])
                    print(f"{found['mode']} {found['seed']}: {found['seconds']:.0f} s, {said}", flush=True)


def _prepare() -> None:
    """Prepare a process that does runs: it computes on one processor, and its nodes are forks."""
    torch.set_num_threads(1)  # two wait for each other, and runs for them
    if not torch.cuda.is_available():  # a GPU's libraries bear no fork
        _held.enter_context(forked_python())


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


def summarised(found: Sequence[dict[str, Any]], modes: Sequence[str]) -> dict[str, Any]:
    """Return what the runs say together."""
    rows = {}
    for mode in modes:
        mine = [one for one in found if one["mode"] == mode]
        struck = [event for one in mine for strike in one["happened"] for event in strike.split("+")]
        rows[mode] = {
            "seeds": spans(one["seed"] for one in mine),
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


def spans(numbers: Iterable[int]) -> list[list[int]]:
    """Return whole numbers as the first and last of each run of them."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found


def seeds_of(row: dict[str, Any]) -> set[int]:
    """Return the seeds whose runs a row has."""
    return {seed for first, last in row.get("seeds", ()) for seed in range(first, last + 1)}


def added_to(row: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the runs of another one, of other seeds; the newer one's ``run_s``."""
    if not row or not more["runs"]:
        return row or more
    found: dict[str, Any] = {}
    for name, value in more.items():
        if name == "seeds":
            found[name] = spans(seeds_of(row) | seeds_of(more))
        elif name == "run_s":
            found[name] = value
        elif isinstance(value, dict):
            found[name] = dict(sorted((collections.Counter(row[name]) + collections.Counter(value)).items()))
        else:
            found[name] = row[name] + value
    return found


if __name__ == "__main__":
    sys.exit(main())
