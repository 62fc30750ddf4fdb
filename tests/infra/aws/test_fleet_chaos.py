"""A few of the chaotic runs that ``tests/benchmarks/fleet_chaos.py`` does by the hundred."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FIRST, SEEDS = 12, 1  # its controller is killed at its first call, and the next at its tenth


@pytest.mark.processes
def test_nothing_is_lost_when_everything_goes_wrong(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.benchmarks.fleet_chaos",
            f"--first={FIRST}",
            f"--seeds={SEEDS}",
            f"--jobs={SEEDS}",
            f"--out={tmp_path}",
            f"--runs={tmp_path / 'runs'}",
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    found = json.loads((tmp_path / "fleet_chaos.json").read_text())
    assert found["violations"] == {}, done.stdout[-2000:]
    assert (found["whole"], done.returncode) == (SEEDS, 0), done.stderr[-2000:]
    assert found["kills"] >= 2
    assert found["noticed"] >= SEEDS
