"""Pipelines on emulated AWS with interruptions: is anything lost, doubled or left over?

Run from the repository root: ``python -m tests.benchmarks.aws_pipelines --seeds 50 --out DIR``. Each run is decided
by its seed (``tests/chaos/aws_run.py`` says what happens in it and what must hold). Runs in which all held are kept
in ``--runs`` and are not repeated: the same command continues where it was interrupted. The folder of a run in which
anything did not hold stays there. Writes ``aws_pipelines.json``; exits with 1 if anything did not hold, or not all
runs are done.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ebbflow.infra.storage.files import write_text
from tests.benchmarks.system_chaos import held, kept, run_seed, tell

LIMIT = 1500.0  # s for one run
WORDS = {
    "interrupt": "interruption notice of 4 to 30 s",
    "take": "instance gone without a notice",
    "kill": "all processes of an instance killed",
    "stop": "pipeline stopped, and resumed",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where the results go")
    parser.add_argument("--seeds", type=int, default=50, help="how many runs")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--time-limit", type=float, default=7200.0, help="begin no run after so many seconds")
    parser.add_argument("--runs", type=Path, help="where finished runs are kept")
    parser.add_argument("--no-spark", action="store_true", help="the queries on DuckDB, without a Spark pool")
    given = parser.parse_args(arguments)
    kind = "duckdb" if given.no_spark else "spark"
    runs = given.runs or Path(tempfile.gettempdir()) / f"ebbflow-aws-pipelines-{os.getuid()}-{kind}"
    runs.mkdir(parents=True, exist_ok=True)
    given.out.mkdir(parents=True, exist_ok=True)
    wanted = range(given.first, given.first + given.seeds)
    options = ["--no-spark"] if given.no_spark else []
    began = time.monotonic()
    for seed in wanted:
        if (known := held(runs, seed)) is not None:
            tell(known, "was done before")
        elif time.monotonic() - began < given.time_limit:
            outcome = run_seed(seed, runs, "tests.chaos.aws_run", *options, limit=LIMIT)
            tell(outcome, f"{time.monotonic() - began:.0f} s in all")
    found = [json.loads(kept(runs, seed).read_text()) for seed in wanted if kept(runs, seed).exists()]
    summary = summarised(found, len(wanted))
    write_text(given.out / "aws_pipelines.json", json.dumps(summary, indent=1) + "\n")
    return 0 if summary["whole"] == len(wanted) else 1


def summarised(found: Sequence[dict[str, Any]], wanted: int) -> dict[str, Any]:
    """Return the figures of all runs."""
    faults = Counter(fault["kind"] for one in found for fault in one["faults"] if fault["proof"])
    seconds = [one["seconds"] for one in found]
    return {
        "runs": len(found),
        "wanted": wanted,
        "whole": sum(not one["violations"] for one in found),
        "violations": {str(one["seed"]): one["violations"] for one in found if one["violations"]},
        "spark": sum(bool(one.get("spark")) for one in found),
        "faults": {WORDS[kind]: faults[kind] for kind in WORDS if faults[kind]},
        "missed": sum(len(one.get("missed", ())) for one in found),  # events whose step was over before
        "leases": sum(one["seen"].get("leases", 0) for one in found),
        "restarts": sum(sum(one["restarts"].values()) for one in found),
        "seconds": round(sum(seconds), 1),
        "run_s": round(statistics.median(seconds), 1) if seconds else None,
        "longest_s": max(seconds, default=None),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
    }


if __name__ == "__main__":
    sys.exit(main())
