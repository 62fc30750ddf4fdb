"""One warm node and what it makes of scripts of all kinds, spoken to as its launcher would."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ebbflow.infra.errors import ClusterError
from ebbflow.infra.machine import processes
from ebbflow.infra.training import local_nodes
from ebbflow.infra.training.channel.exchange import Exchange
from ebbflow.infra.training.channel.wire import AgentEnd, Entry, Order, RankState
from ebbflow.infra.training.launcher.node import Node
from ebbflow.infra.training.local_nodes import LocalNodes

LONG = 150.0  # seconds: a bound for a busy machine, not an expectation


class Launcher:
    """The launcher's end of one node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.exchange = Exchange("127.0.0.1", 0)
        self.nodes = LocalNodes(folder / "nodes")
        self.wire = self.exchange.wire("key")
        self.generation = 0
        address, server = self.exchange.address, self.exchange.public
        entry = Entry(address, server, "run", "node-1", "key", "", "", beat=0.1, deserted=3.0)
        self.nodes.start("node-1", 2, entry, self.wire.admit)

    def run(self, source: str, *arguments: str, slots: int = 1, nodes: int = 1, **fields: object) -> AgentEnd:
        """Have the node run a script and return how that ended."""
        self.send(source, *arguments, slots=slots, nodes=nodes, **fields)
        return self.ended()

    def ended(self) -> AgentEnd:
        """Return how the generation has ended, once it has."""
        end = time.monotonic() + LONG
        while (found := self.wire.agent_end(self.generation)) is None:
            assert time.monotonic() < end, self.nodes.log("node-1")
            assert not self.nodes.lost("node-1"), self.nodes.log("node-1")
            time.sleep(0.01)
        return found

    def send(self, source: str, *arguments: str, slots: int = 1, nodes: int = 1, **fields: object) -> None:
        self.generation += 1
        script = self.folder / f"script{self.generation}.py"
        script.write_text(source)
        self.exchange.open(self.generation, {"key": range(slots)}, 1)
        self.wire.send(
            Order("launch", self.generation, nodes=nodes, slots=slots, world=slots, script=str(script),
                  arguments=arguments, logs=str(self.logs), **fields)
        )  # fmt: skip

    @property
    def logs(self) -> Path:
        return self.folder / "logs" / str(self.generation)

    def ranks(self) -> list[int]:
        """Return the process ids of the generation, once all have begun."""
        end = time.monotonic() + LONG
        while True:
            beat = self.wire.beat()
            if beat is not None and beat.generation == self.generation and beat.ranks:
                return [rank.pid for rank in beat.ranks]
            assert time.monotonic() < end, self.nodes.log("node-1")
            time.sleep(0.01)


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path_factory.mktemp("node"))
    with launcher.nodes:
        yield launcher
    assert launcher.nodes.gone(launcher.nodes.uid)
    assert launcher.exchange.refusals.take(0.0, everything=True) == []
    launcher.exchange.close()


def test_a_script_is_main_with_its_arguments_its_folder_and_its_exit_handlers(launcher: Launcher) -> None:
    source = """
import atexit, os, sys, __main__
import beside
atexit.register(print, "bye")
assert __name__ == "__main__" and __main__.beside is beside
print(sys.argv[1:], os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["TOLD"], os.getcwd())
print("to the other stream", file=sys.stderr)
"""
    (launcher.folder / "beside.py").write_text("")
    end = launcher.run(source, "a b", "${local_rank}", slots=2, environment={"TOLD": "so"})
    assert end.state == "succeeded"
    for rank in "01":
        out = (launcher.logs / f"rank-{rank}.out").read_text()
        assert out == f"['a b', '${{local_rank}}'] {rank} 2 so {Path.cwd()}\nbye\n"
        assert (launcher.logs / f"rank-{rank}.err").read_text() == "to the other stream\n"


def test_processes_differ_in_their_random_numbers_and_share_no_signal_handlers(launcher: Launcher) -> None:
    source = """
import random, signal, numpy
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
print(random.random(), numpy.random.rand())
"""
    assert launcher.run(source, slots=2).state == "succeeded"
    first, second = ((launcher.logs / f"rank-{rank}.out").read_text().split() for rank in "01")
    assert not set(first) & set(second)


def test_the_error_of_the_rank_that_failed_first_comes_with_its_traceback(launcher: Launcher) -> None:
    source = """
import os, time
if os.environ["RANK"] == "0":
    time.sleep(60)
print("about to fail")
raise KeyError("no such label: 17")
"""
    end = launcher.run(source, slots=2)
    assert end.state == "failed"
    assert [(f.rank, f.exit_code, f.signal) for f in end.failures] == [(1, 1, "")]
    assert "no such label: 17" in end.failures[0].error
    assert "script" in end.failures[0].error
    assert "KeyError" in end.failures[0].log


@pytest.mark.parametrize(
    ("source", "exit_code", "signal", "error"),
    [
        ("def f(:\n", 1, "", "SyntaxError"),
        ("import no_such_module\n", 1, "", "no_such_module"),
        ("import sys; sys.exit(3)\n", 3, "", ""),
        ("import sys; sys.exit('bad input')\n", 1, "", "bad input"),
        ("import os; os.kill(os.getpid(), 9)\n", -9, "SIGKILL", ""),
        ("import os; os.abort()\n", -6, "SIGABRT", ""),
    ],
)
def test_a_bad_end_is_told_as_it_was(
    launcher: Launcher, source: str, exit_code: int, signal: str, error: str
) -> None:
    end = launcher.run(source)
    assert end.state == "failed"
    [failure] = end.failures
    assert (failure.exit_code, failure.signal) == (exit_code, signal)
    assert error in failure.error + failure.log


@pytest.mark.parametrize("source", ["", "raise SystemExit\n", "import sys; sys.exit(0)\n"])
def test_a_good_end_is_told_as_it_was(launcher: Launcher, source: str) -> None:
    assert launcher.run(source).state == "succeeded"


def test_a_process_that_leaves_without_a_word_is_noticed(launcher: Launcher) -> None:
    assert launcher.run("import os; os._exit(0)\n").state == "succeeded"


def test_what_has_failed_has_not_succeeded_where_the_agent_is_late(launcher: Launcher) -> None:
    launcher.send("import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\nos._exit(3)\n")
    [rank] = launcher.ranks()
    agent = psutil.Process(rank).parent()
    assert agent is not None
    time.sleep(5.0)  # longer than processes may be gone without a report
    agent.resume()
    end = launcher.ended()
    assert end.state == "failed"
    assert [failure.exit_code for failure in end.failures] == [3]


def test_an_agent_that_gets_no_time_is_not_taken_for_one_that_sees_no_end() -> None:
    """It may have collected a process that has failed, and be yet to say so."""
    node = object.__new__(Node)
    node._entry, node._empty_since = Entry("", "", "", "", "", "", "", deserted=3.0), None
    with subprocess.Popen(
        [sys.executable, "-c", "import time\nfor _ in range(40_000): time.sleep(0.01)"]
    ) as agent:
        try:
            os.kill(agent.pid, signal.SIGSTOP)
            node._agent, gone = agent.pid, (RankState(0, 0, "X", 0.0, 0.0),)
            assert not node._has_dead_ranks(gone, 0.0)
            time.sleep(0.5)  # in which one that is not stopped looks more than twenty times
            assert not node._has_dead_ranks(gone, 100.0)
            os.kill(agent.pid, signal.SIGCONT)
            deadline = time.monotonic() + LONG
            while not node._has_dead_ranks(gone, 100.0):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            agent.kill()


def test_nodes_that_do_not_meet_in_time_say_so(launcher: Launcher) -> None:
    end = launcher.run("", nodes=2, form=1.0)
    assert end.state == "unformed"
    assert "Timeout" in end.error


def test_on_order_all_processes_of_a_generation_end_and_the_next_one_starts(launcher: Launcher) -> None:
    launcher.send("import subprocess, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
                  "subprocess.run(['sleep', '60'], start_new_session=True)\n")  # fmt: skip
    launcher.ranks()
    launcher.wire.send(Order("end", launcher.generation))
    end = time.monotonic() + LONG
    while (found := launcher.wire.agent_end(launcher.generation)) is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert found.state == "ended"
    assert len(launcher.nodes.pids("node-1")) == 1  # the node alone, no agent, no process, no child of one
    assert launcher.run("").state == "succeeded"


def test_new_processes_can_be_started_from_nothing(launcher: Launcher) -> None:
    source = """
import sys
from pathlib import Path
if __name__ == "__main__":
    print("torch" in sys.modules)
"""
    assert launcher.run(source, start="spawn").state == "succeeded"
    assert (launcher.logs / "rank-0.out").read_text()


def test_a_node_that_cannot_be_held_to_its_memory_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(local_nodes, "_NODE", "tests.infra.local_fleet.sleeper")
    monkeypatch.setattr(LocalNodes, "_memory_group", lambda *_: tmp_path / "absent")
    with LocalNodes(tmp_path) as nodes:
        with pytest.raises(ClusterError, match="absent is gone"):
            nodes.start("n1", 1, Entry("x:1", "00" * 32, "run", "n1", "key", "", ""))
        assert nodes.lost("n1") == "it could not be held to its limits"
        assert processes.members(f"{nodes.uid}/") == []
