"""The example with embedding tables across processes learns, and learns the same with planned communication."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_dlrm.py"


def losses(communication: str, steps: int = 200) -> list[float]:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE),
         "--communication", communication, "--steps", str(steps), "--batch", "64", "--tables", "5"],
        capture_output=True, text=True, timeout=170, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(one) for one in re.findall(r"loss ([0-9.]+)", done.stdout)]


@pytest.mark.slow
def test_a_planned_dlrm_learns_as_the_plain_one_does() -> None:
    plain, planned = losses("ddp"), losses("planned")
    assert len(plain) == 4
    assert plain[-1] < plain[0] - 0.02
    assert planned == pytest.approx(plain, abs=2e-3)


def test_a_planned_dlrm_learns() -> None:
    first, *_, last = losses("planned", 100)
    assert last < first
