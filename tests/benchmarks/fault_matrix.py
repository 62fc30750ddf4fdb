"""The cells of the fault matrix (docs/reliability.md) that take too long for each run of the tests.

Run from the repository root: ``python -m tests.benchmarks.fault_matrix --out DIR``. Runs the tests of faults that are
marked ``slow``, one after another: real processes that stand still, disks that are full, clocks that jump by an hour
(libfaketime), networks that are cut, silent or slow (a TCP proxy). What is random in them has fixed seeds. Writes
``fault_matrix.json``; ends with status 1 if one failed. Ten minutes on two cores.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ebbflow.infra.storage.files import write_text

FILES = (
    "tests/chaos/test_loop_faults.py",
    "tests/flows/test_pipeline_faults.py",
    "tests/flows/test_train_faults.py",
    "tests/tasks/query/test_faults_around_queries.py",
    "tests/tasks/test_faults_spark_still.py",
)
LIMIT = 3600.0  # s for all of them


def results(report: Path) -> list[dict[str, Any]]:
    """Return each test of a JUnit file: its name, seconds, and what became of it."""
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        ends = {child.tag for child in case} & {"failure", "error", "skipped"}
        where = case.get("classname", "").replace(".", "/") + ".py"
        found.append(
            {
                "test": f"{where}::{case.get('name')}",
                "seconds": round(float(case.get("time", "0")), 1),
                "end": min(ends) if ends else "passed",
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "slow", f"--junitxml={report}", *FILES]
        subprocess.run(command, check=False, timeout=LIMIT)
        rows = results(report)
    found = {"cells": rows, "machine": f"{os.cpu_count()} cores, {platform.machine()}"}
    write_text(given.out / "fault_matrix.json", json.dumps(found, indent=1) + "\n")
    bad = [row["test"] for row in rows if row["end"] != "passed"]
    print(f"{len(rows)} cells, {len(bad)} not passed", *bad, sep="\n")
    sys.exit(1 if bad or not rows else 0)


if __name__ == "__main__":
    main()
