"""Capacity loops as real processes, with faults that are real: stopped, on a full or read-only disk, with a
clock that jumps, and with a network between them and their database that is lost, silent or slow.
"""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ebbflow.infra.ledger import Ledger
from ebbflow.planners.model.ledger import AppMoved, LoopBegan
from ebbflow.tasks.apps.agent import AgentIntervals
from ebbflow.tasks.apps.lease_table import Rules
from ebbflow.tasks.training.leased.app import run_training_app
from ebbflow.tasks.training.leased.spec import training_spec
from ebbflow.tasks.training.request import TrainingRequest
from tests.chaos.faketime import FakeTime
from tests.chaos.proxy import Proxy
from tests.infra.ledger.postgres import Server, server
from tests.tasks.apps.app_loops import begin
from tests.tasks.apps.toy_trainings import Machines, Script
from tests.tasks.capacity.loopcases import ScriptedApp, double_bookings, until
from tests.tasks.capacity.loopprocess import write

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]


class Loops:
    """Loop processes over one ledger, which is at ``url`` for them."""

    def __init__(self, folder: Path, url: str, cluster: str = "local") -> None:
        self.url, self.cluster, self.nodes = url, cluster, folder / "nodes.json"
        self.children: dict[str, subprocess.Popen[str]] = {}
        self.see(["n0", 2], ["n1", 2])

    def see(self, *there: list[Any]) -> None:
        """Have these nodes there: names and GPUs."""
        write(self.nodes, list(there))

    def start(self, name: str, silence: float = 30.0, **environment: str) -> "subprocess.Popen[str]":
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.loop_child", self.url, self.cluster, str(self.nodes), name,
             str(silence)],
            cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.children[name] = child
        return child

    def end(self, name: str) -> str:
        """Wait for the end that is about to come, and return what it said."""
        said, _ = self.children.pop(name).communicate(timeout=150)
        return said

    def close(self) -> None:
        for child in self.children.values():
            child.send_signal(signal.SIGCONT)
            child.kill()
            child.communicate(timeout=150)


@pytest.fixture(name="loops")
def _loops(tmp_path: Path) -> Iterator[Callable[..., Loops]]:
    made: list[Loops] = []

    def make(url: str, cluster: str = "local") -> Loops:
        made.append(Loops(tmp_path, url, cluster))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(name="database", scope="module")
def _database() -> Iterator[Server]:
    with server() as found:
        yield found


def nodes_of(ledger: Ledger) -> set[str]:
    return set(ledger.state().nodes)


def whole(ledger: Ledger) -> None:
    assert double_bookings(ledger) == []
    assert ledger.verify() == []


def stand_still(process: "subprocess.Popen[str]", database: str) -> None:
    """Stop a process where it is not writing: nobody else could write from then on."""

    def stopped() -> bool:
        process.send_signal(signal.SIGSTOP)
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "standstill")
        with contextlib.closing(sqlite3.connect(database, timeout=0.5)) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                process.send_signal(signal.SIGCONT)
                return False
        return True

    until(stopped, "moment in which it writes nothing")


def test_a_leader_that_stands_still_is_followed_and_writes_nothing_when_it_goes_on(
    tmp_path: Path, loops: Callable[..., Loops]
) -> None:
    path = str(tmp_path / "ledger.db")
    cluster = loops(path)
    with Ledger.open(path) as ledger:
        app = ScriptedApp(ledger, "a", 4).enter()
        first = cluster.start("first")
        until(lambda: len(ledger.state().leases) == 4, "leases", app.step)
        second = cluster.start("second")
        stand_still(first, path)
        until(lambda: ledger.state().holder == "second", "another leader", app.step)
        cluster.see(["n1", 2], ["n2", 2])
        until(lambda: nodes_of(ledger) == {"n1", "n2"}, "the nodes of now", app.step)
        first.send_signal(signal.SIGCONT)
        assert "StaleLoopError" in cluster.end("first")
        until(lambda: len(ledger.state().leases) == 4, "leases on the nodes of now", app.step)
        tokens = [event.number for event in ledger.events(kinds=[LoopBegan])]
        assert len(tokens) == 2
        whole(ledger)

        # the one that waits may stand still or be killed: the leader does not notice
        third = cluster.start("third")
        third.send_signal(signal.SIGSTOP)
        third.kill()
        cluster.see(["n1", 2], ["n2", 2], ["n3", 2])
        until(lambda: "n3" in nodes_of(ledger), "another node", app.step)
        assert ledger.state().holder == "second"
        second.send_signal(signal.SIGTERM)
        assert cluster.end("second") == "ended\n"


@pytest.mark.parametrize("fault", [pytest.param("full", marks=pytest.mark.slow), "read-only"])
def test_a_loop_waits_for_a_disk_that_is_full_or_may_only_be_read(
    tmp_path: Path, loops: Callable[..., Loops], fault: str
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        pytest.skip("a disk can be mounted by root only")

    def remount(how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True, timeout=30)

    path = str(disk / "ledger.db")
    cluster, ballast = loops(path), disk / "ballast"
    try:
        with Ledger.open(path) as ledger:
            loop = cluster.start("one")
            until(lambda: nodes_of(ledger) == {"n0", "n1"}, "the nodes")
            ScriptedApp(ledger, "a", 2).enter().step()
            until(lambda: len(ledger.state().leases) == 2, "leases")
            if fault == "full":
                with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                    while file.write(b"x" * 4096):
                        pass
            else:
                # what is open for writing stays so; a writer that comes anew finds a disk that is read-only
                loop.send_signal(signal.SIGSTOP)
                ledger.close()
                loop.send_signal(signal.SIGKILL)
                loop.communicate(timeout=150)
                remount("ro")
                loop = cluster.start("two")
            cluster.see(["n0", 2], ["n1", 2], ["n2", 2])
            refused = "full" if fault == "full" else "read-only"
            assert loop.stderr is not None
            said = ""
            while refused not in said:  # it says so once, and tries on
                said = loop.stderr.readline()
                assert said, f"it ended: {loop.wait(150)}"
            assert "the ledger does not respond" in said
            if fault == "full":
                ballast.unlink()
            else:
                remount("rw")
        with Ledger.open(path) as ledger:
            until(lambda: "n2" in nodes_of(ledger), "the node that came meanwhile")
            assert len(ledger.state().leases) == 2
            whole(ledger)
            loop.send_signal(signal.SIGTERM)
            loop.wait(150)
    finally:
        cluster.close()
        cluster.children.clear()
        subprocess.run(["umount", "-l", str(disk)], check=True, timeout=30)


def test_a_leader_whose_clock_jumps_by_an_hour_keeps_its_apps_and_books_no_gpu_twice(
    tmp_path: Path, loops: Callable[..., Loops]
) -> None:
    path = str(tmp_path / "ledger.db")
    cluster, clock = loops(path), FakeTime(tmp_path / "clock")
    (tmp_path / "train.py").write_text("")
    request = TrainingRequest(
        str(tmp_path / "train.py"), run_id="x", runs_dir=str(tmp_path / "runs"), preflight="never",
        termination_grace=5.0, nodes="local:4x1",
    )  # fmt: skip
    machines, script, stop = Machines(linger=0.05), Script(), threading.Event()
    with Ledger.open(path) as ledger, Ledger.open(path) as other:
        run = begin(
            run_training_app, request, training_spec(request), other, machines.pool, stop=stop,
            rules=Rules(grace=10.0, leave=1.0, fence=60.0), pace=AgentIntervals(look=0.02, report=0.1, parting=5.0),
            make=script.trainer,
        )  # fmt: skip
        # a process keeps the clock that it begins with: each of these leads with another one
        for number, seconds in enumerate((3600.0, -3600.0, 0.0)):
            clock.jump(seconds)
            loop = cluster.start(f"loop-{number}", **clock.environment)
            until(lambda number=number: ledger.state().holder == f"loop-{number}", "a leader")  # type: ignore[misc]
            cluster.see(["n0", 2], ["n1", 2], *([f"m{k}", 2] for k in range(number + 1)))
            until(lambda number=number: f"m{number}" in nodes_of(ledger), "a node")  # type: ignore[misc]
            until(lambda: len(machines.busy) == 4, "all GPUs in use")
            clock.jump(-seconds)
            for _ in range(3):  # it goes on, with leases that are extended
                at = ledger.reports()["x"].step
                until(lambda at=at: ledger.reports()["x"].step > at + 20, "steps")  # type: ignore[misc]
            until(lambda: len(machines.busy) == 4, "all GPUs in use again")
            assert not run.done()
            assert loop.poll() is None
            if number < 2:
                loop.kill()
                loop.wait(150)
        stop.set()
        report = run.result(150)
        assert (report.state, report.lost_steps) == ("stopped", 0)
        moves = [event.change for event in ledger.events(kinds=[AppMoved])]
        assert "lost" not in {move.phase for move in moves if isinstance(move, AppMoved) and move.app == "x"}
        whole(ledger)
        loop.send_signal(signal.SIGTERM)
        assert cluster.end("loop-2") == "ended\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "state",
    ["cut", "silent", "slow"],
)
def test_a_leader_whose_database_is_out_of_reach_waits_and_is_fenced_once_another_has_followed(
    tmp_path: Path, loops: Callable[..., Loops], database: Server, state: Any
) -> None:
    with (
        Proxy(database.folder / ".s.PGSQL.5432") as network,
        Ledger.open(database.url, cluster=state) as ledger,
    ):
        far = loops(f"postgresql://tester@127.0.0.1:{network.port}/ledger?sslmode=disable", state)
        app = ScriptedApp(ledger, "a", 4).enter()
        first = far.start("first", silence=2.0)
        until(lambda: len(ledger.state().leases) == 4, "leases", app.step)
        network.set(state)
        if state == "slow":  # it leads on, only later
            far.see(["n0", 2], ["n1", 2], ["n2", 2])
            until(lambda: "n2" in nodes_of(ledger), "a node that came meanwhile", app.step)
            assert ledger.state().holder == "first"
            network.set("open")
        else:
            near = Loops(tmp_path, database.url, state)
            try:
                second = near.start("second")
                until(lambda: ledger.state().holder == "second", "another leader", app.step)
                assert first.poll() is None  # it waits for its database
                assert len(ledger.state().leases) == 4  # which apps keep meanwhile
                network.set("open")
                assert "StaleLoopError" in far.end("first")
                near.see(["n0", 2], ["n1", 2], ["n2", 2])
                until(lambda: "n2" in nodes_of(ledger), "a node that came since", app.step)
                second.send_signal(signal.SIGTERM)
                assert near.end("second") == "ended\n"
            finally:
                near.close()
        whole(ledger)
