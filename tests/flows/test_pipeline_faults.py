"""``ebbflow run`` as a process whose clock jumps, or which stands still for a while: nothing is lost or done
twice.
"""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import yaml
from flowcases import COMMAND, TIMEOUT, eventually

from tests.chaos.faketime import FakeTime

pytestmark = [pytest.mark.processes, pytest.mark.slow]
PIPELINE = {
    "name": "shop",
    "cluster": {"local": {"pools": {"gpu": {"kind": "gpu", "nodes": 1, "max_nodes": 1}}}},
    "trainings": {"fit": {"script": "fit.py", "termination_grace": "20s", "preflight": "never"}},
}
FIT = """
import pathlib, sys, time
import torch
from torch import nn
from ebbflow.infra.training import ElasticRun

x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
with ElasticRun.start(seed=1) as run:
    model, _ = run.prepare(nn.Linear(4, 1), lambda p: torch.optim.SGD(p, lr=0.05), batch_size=16)
    for _ in run.epochs(5):
        for (a,) in run.batches((x,)):
            run.backward((model(a) - a.sum(1, keepdim=True)).square().mean())
            run.step()
            pathlib.Path("%s").write_text(str(run.progress.step))
            while run.progress.step == 4 and not pathlib.Path("%s").exists():
                time.sleep(0.01)
    run.report(steps=run.progress.step)
"""


@pytest.mark.parametrize("fault", ["stands still", "an hour ahead", "an hour behind"])
def test_a_pipeline_ends_as_ever(tmp_path: Path, fault: str) -> None:
    reached, on = tmp_path / "reached", tmp_path / "on"
    (tmp_path / "fit.py").write_text(FIT % (reached, on))
    (tmp_path / "shop.yaml").write_text(yaml.safe_dump(PIPELINE))
    ahead = {"an hour ahead": 3600.0, "an hour behind": -3600.0}.get(fault, 0.0)
    clock = FakeTime(tmp_path / "clock", ahead)
    child = subprocess.Popen(
        [*COMMAND, "run", str(tmp_path / "shop.yaml"), "--run-id", "one", "--runs-dir", str(tmp_path / "runs"),
         "--runner", "plain"],
        env={**os.environ, "EBBFLOW_HOME": str(tmp_path / "home"), **clock.environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        eventually(lambda: child.poll() is not None or (reached.exists() and reached.read_text() == "4"))
        if fault == "stands still":
            child.send_signal(signal.SIGSTOP)
            on.touch()
            eventually(lambda: reached.read_text() not in ("", "4"))  # the training goes on
            child.send_signal(signal.SIGCONT)
        else:
            clock.jump(-ahead)
            on.touch()
        said, _ = child.communicate(timeout=TIMEOUT)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate(timeout=150)
    assert child.returncode == 0, said
    (step,) = json.loads((tmp_path / "runs" / "one" / "run.json").read_text())["steps"].values()
    assert (step["state"], step["attempts"]) == ("finished", 1), said
    assert reached.read_text() == "20"  # 5 passes of 4 steps
