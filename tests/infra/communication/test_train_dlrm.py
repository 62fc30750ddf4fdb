"""The example with embedding tables across processes learns, and learns the same with planned communication."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.free_ports import free_port

pytestmark = pytest.mark.processes

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_dlrm.py"


def losses(communication: str, steps: int = 200) -> list[float]:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE),
         "--communication", communication, "--steps", str(steps), "--batch", "64", "--tables", "5"],
        capture_output=True, text=True, timeout=170, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return _losses(done.stdout)


def _losses(said: str) -> list[float]:
    return [float(one) for one in re.findall(r"loss ([0-9.]+)", said)]


@pytest.mark.slow
def test_a_planned_dlrm_learns_as_the_plain_one_does() -> None:
    plain, planned = losses("ddp"), losses("planned")
    assert len(plain) == 4
    assert plain[-1] < plain[0] - 0.02
    assert planned == pytest.approx(plain, abs=2e-3)


def test_a_planned_dlrm_learns() -> None:
    """The processes are those that torchrun would start; here they are forks."""
    begin = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    given = [str(EXAMPLE), "--steps", "100", "--batch", "64", "--tables", "5"]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", begin, *given],
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=170) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    first, last = _losses(said[0][0])
    assert last < first
