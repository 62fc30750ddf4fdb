"""Jobs on real worker processes that come, go, and are killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from elastic_samples import Broken, Mixing, expected, same

from ebbflow.infra.elastic import ElasticJob, Settings
from ebbflow.infra.elastic.apps.mlr import Mlr
from ebbflow.infra.errors import ElasticError, MicroTaskError
from ebbflow.infra.machine import processes
from ebbflow.planners.errors import OptionError
from tests.elastic_results import undisturbed


def until(condition: Callable[[], object], seconds: float = 150.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def iterations(job: ElasticJob) -> int:
    return len(job.driver.history)  # type: ignore[attr-defined]


def balanced(job: ElasticJob, workers: int) -> Callable[[], bool]:
    """Tell whether so many workers hold an even share each."""

    def check() -> bool:
        held = [executors for executors, _ in job.holds().values() if executors]
        return len(held) == workers and max(held) - min(held) <= 1

    return check


def test_two_four_two_workers_end_as_ever(digits: str, tmp_path: Path) -> None:
    app = Mlr(digits, classes=10, executors=16, iterations=10**6, exact=True)
    with ElasticJob(app, 2, directory=tmp_path) as job:
        pids = {}
        until(lambda: iterations(job) >= 5)
        job.scale_to(4)
        until(balanced(job, 4))
        pids.update(job.workers())
        assert len(pids) == 4
        job.scale_to(2)
        until(balanced(job, 2))
        until(lambda: len(job.workers()) == 2)
        # as many iterations as that took, however busy the machine is
        job.driver._schedule.iterations = iterations(job) + 50  # type: ignore[attr-defined]
        result = job.result(150)
    assert not [pid for pid in pids.values() if psutil.pid_exists(pid)]
    assert same(result.parameters, undisturbed(app, len(result.driver.history)))  # type: ignore[attr-defined]
    kinds = [event.kind for event in result.events]
    assert kinds.count("joined") == 4
    assert kinds.count("left") == 2
    assert "lost" not in kinds


def test_a_killed_and_a_stopped_worker_cost_no_bit(tmp_path: Path) -> None:
    app = Mixing(executors=8, iterations=600)
    with ElasticJob(app, 2, directory=tmp_path, settings=Settings(snapshot_every=0.4), silence=6.0) as job:
        until(lambda: any(event.kind == "snapshot" for event in job.events()))
        os.kill(job.workers()["n1"], signal.SIGKILL)
        until(lambda: any(event.kind == "restored" for event in job.events()))
        stopped = job.workers()["n2"]
        os.kill(stopped, signal.SIGSTOP)
        until(lambda: sum(event.kind == "restored" for event in job.events()) == 2)
        assert not psutil.pid_exists(stopped)
        result = job.result(150)
    assert same(result.parameters, expected(app))
    reasons = [event.details["reason"] for event in result.events if event.kind == "lost"]
    assert reasons == ["n1 ended with status -9", "n2 missed heartbeats for 6 s"]
    assert (tmp_path / "logs" / "n1.log").exists()


def test_lost_shards_alone_come_back(digits: str, tmp_path: Path) -> None:
    app = Mlr(digits, classes=10, executors=8, iterations=120)
    settings = Settings(recovery="partial", running_every=0.1)
    with ElasticJob(app, 2, directory=tmp_path, settings=settings) as job:
        until(lambda: iterations(job) >= 30)
        os.kill(job.workers()["n2"], signal.SIGKILL)
        result = job.result(150)
    kinds = [event.kind for event in result.events]
    assert "patched" in kinds
    assert "restored" not in kinds
    assert app.objective(result.parameters) < 0.45


def test_workers_start_without_heavy_libraries() -> None:
    heavy = "[name for name in ('torch', 'scipy', 'pyarrow', 'sklearn', 'prefect') if name in sys.modules]"
    code = f"import sys, ebbflow.infra.elastic.worker.node, ebbflow.infra.elastic.apps.lda; print({heavy})"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout == "[]\n"


SCRIPT = """
import sys, time
from elastic_samples import Mixing
from ebbflow.infra.elastic import ElasticJob
if __name__ == "__main__":
    with ElasticJob(Mixing(executors=4, iterations=10**6), 2) as job:
        while len(job.workers()) < 2 or not job.driver.history:
            time.sleep(0.01)
        print(*job.workers().values(), job._uid, flush=True)
        time.sleep(600)
"""


def test_workers_end_with_their_master(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(tmp_path / "main.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as master:
        assert master.stdout
        *_, uid = master.stdout.readline().split()
        assert len(processes.members(f"elastic-{uid}/")) == 2
        master.kill()
    until(lambda: not processes.members(f"elastic-{uid}/"))


def test_a_master_that_stands_still_goes_on_with_its_workers_and_costs_no_bit(tmp_path: Path) -> None:
    """For longer than workers may be silent."""
    code = (
        "import json, sys\n"
        "from elastic_samples import Mixing\n"
        "from ebbflow.infra.elastic import ElasticJob, Settings\n"
        "app = Mixing(executors=8, iterations=400)\n"
        "settings = Settings(snapshot_every=0.2)\n"
        f"with ElasticJob(app, 2, directory={str(tmp_path)!r}, settings=settings, silence=1.0) as job:\n"
        "    print('begun', flush=True)\n"
        "    result = job.result(120)\n"
        "print(json.dumps([[list(key), value.tolist()] for key, value in sorted(result.parameters.items())]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment
    ) as master:
        assert master.stdout
        assert master.stdout.readline() == "begun\n"
        master.send_signal(signal.SIGSTOP)
        time.sleep(2.0)  # the fault itself
        master.send_signal(signal.SIGCONT)
        (said,) = master.stdout.readlines()
    assert master.returncode == 0
    wanted = expected(Mixing(executors=8, iterations=400))
    assert {tuple(key): value for key, value in json.loads(said)} == {
        key: value.tolist()
        for key, value in wanted.items()  # type: ignore[union-attr]
    }


def test_mistakes_reach_the_user() -> None:
    with (
        ElasticJob(Broken("raise"), 1) as job,
        pytest.raises(MicroTaskError, match="a mistake in the application"),
    ):
        job.result(150)
    with pytest.raises(OptionError, match="resume needs the directory"):
        ElasticJob(Mixing(), 1, resume=True)
    with ElasticJob(Mixing(iterations=10**6), 1) as job:
        with pytest.raises(OptionError, match="workers must be >= 1; got 0"):
            job.scale_to(0)
        with pytest.raises(ElasticError, match=r"the job has not ended within 0.5 s"):
            job.result(0.5)
        pids = list(job.workers().values())
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_workers_that_cannot_start_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbflow.infra.elastic.workers.sys.executable", "/bin/false")
    with (
        ElasticJob(Mixing(), 1) as job,
        pytest.raises(ElasticError, match="3 workers ended before they joined"),
    ):
        job.result(150)
