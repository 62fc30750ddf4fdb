"""The short form of ``make chaos``: one seed, without Spark."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.run import OUTCOME

ROOT = Path(__file__).parents[2]
SEED = 1


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_pipeline_survives_kills_outages_a_full_disk_and_a_clock_that_jumps(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tests.chaos.run", str(SEED), str(tmp_path / "run"), "--brief"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads((tmp_path / "run" / OUTCOME).read_text())
    assert outcome["violations"] == []
    seen = outcome["seen"]
    assert seen["faults"] >= 3, outcome["faults"]
    assert seen["queries"] == 1
    assert seen["trainings"] == 1
    assert seen["leases"] >= 1
