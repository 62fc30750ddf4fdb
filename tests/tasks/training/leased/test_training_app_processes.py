"""Training apps with real processes on nodes of this machine."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ebbflow.infra.ledger import Ledger
from ebbflow.infra.machine import processes
from ebbflow.planners.model.ledger import Lease
from ebbflow.tasks.training.report import TrainingReport
from tests.tasks.apps import app_child
from tests.tasks.apps.app_loops import Outage, ScriptedLoop, begin, until

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[4]
SCRIPT = str(Path(__file__).parents[3] / "infra" / "training" / "launched_script.py")
A, B = f"a{os.getpid()}", f"b{os.getpid()}"  # as no other run of the tests on this machine calls its nodes
NODES = {A: 1, B: 1}


def on_node(name: str) -> list[int]:
    """Return the processes that any pool of this machine has started as ``name``: their mark is POOL/NAME-KEY."""
    found = []
    for process in psutil.process_iter():
        try:
            mark = process.environ().get(processes.MARK, "")
        except (psutil.Error, OSError):
            continue
        if mark.partition("/")[2].startswith(f"{name}-"):
            found.append(process.pid)
    return found


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[ScriptedLoop]:
    with ScriptedLoop(tmp_path / "ledger.db", NODES) as loop:
        yield loop


def steps_beyond(loop: ScriptedLoop, step: int) -> None:
    until(lambda: loop.report("t").step > step + 3, f"steps beyond {step}")


def test_a_lease_moves_to_another_node_and_the_first_is_free_when_its_processes_are_gone(
    tmp_path: Path, loop: ScriptedLoop
) -> None:
    left: dict[int, list[int]] = {}
    stop = threading.Event()

    def look(lease: Lease) -> None:
        left[lease.number] = on_node(lease.node)

    loop.before = look
    with Ledger.open(str(tmp_path / "ledger.db")) as ledger:
        outage = Outage(ledger)
        run = begin(app_child.run, outage, SCRIPT, tmp_path, str(tmp_path), "1000000", "0.01", stop=stop)
        until(lambda: run.done() or loop.phase("t") == "waiting", "entry")
        (first,) = loop.grant("t", (A, 0))
        steps_beyond(loop, 0)
        assert on_node(A)
        loop.grant("t", (B, 0))
        loop.recall(first, seconds=60.0)
        until(lambda: loop.ended(first), "end of the first lease")
        assert left == {first: []}
        steps_beyond(loop, loop.report("t").step)
        assert on_node(B)
        assert not on_node(A)

        outage.away = True  # the ledger, while the training goes on
        alive = on_node(B)
        until(lambda: loop.report("t").at + 1.0 < ledger.clock.now(), "a second without a report")
        outage.away = False
        steps_beyond(loop, loop.report("t").step)
        assert on_node(B) == alive

        loop.die()  # the loop, and another takes its place
        steps_beyond(loop, loop.report("t").step)
        assert on_node(B) == alive
        stop.set()
        report: TrainingReport = run.result(150)
    assert report.state == "stopped"
    placed = [[share.node for share in generation.placement] for generation in report.generations]
    assert (placed[0], placed[-1]) == ([A], [B])
    assert report.lost_steps == 0
    assert not on_node(A)
    assert not on_node(B)


def test_a_killed_app_goes_on_under_its_id_once_nothing_of_it_is_left(
    tmp_path: Path, loop: ScriptedLoop
) -> None:
    arguments = [SCRIPT, str(tmp_path), str(tmp_path), "1000000", "0.01"]
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", app_child.__name__, str(tmp_path / "ledger.db"), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    stop = threading.Event()
    try:
        until(lambda: child.poll() is not None or loop.phase("t") == "waiting", "entry")
        (lease,) = loop.grant("t", (A, 0))
        steps_beyond(loop, 0)
        step, earlier = loop.report("t").step, set(on_node(A))
        assert earlier
        child.send_signal(signal.SIGKILL)
        child.wait()
        with Ledger.open(str(tmp_path / "ledger.db")) as ledger:
            run = begin(app_child.run, ledger, SCRIPT, tmp_path, str(tmp_path), "1000000", "0.01", stop=stop)
            try:
                until(lambda: run.done() or set(on_node(A)) - earlier, "processes of the second")
                assert not earlier & set(on_node(A)), "both at once"
                assert lease in ledger.state().leases, "it has kept its lease"
                steps_beyond(loop, step)
            finally:
                stop.set()
            report: TrainingReport = run.result(150)
    finally:
        child.kill()
        child.wait()
    assert report.state == "stopped"
    assert report.generations[0].first_step >= step, "from where the first was saved"
    assert loop.phase("t") == "stopped"
    until(lambda: loop.ended(lease), "end of the lease")
    assert not on_node(A)
