"""Scripted faults, nodes, failure tables on disk, the screen."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ebbflow.flows.training.terminal import TrainingScreen
from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import ClusterError
from ebbflow.infra.protocols import TrainingEvent
from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.failures.failures import RankEnd, classify
from ebbflow.tasks.faults import Fault
from ebbflow.tasks.training.capacity import Nodes
from ebbflow.tasks.training.failures import built_in, failure_table
from ebbflow.tasks.training.faults import FAULTS, schedule_of
from ebbflow.tasks.training.listening import event_text
from ebbflow.tasks.training.report import EventReport, PointReport


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("20s:kill:node-2", Fault(20.0, "kill", "node-2")),
        ("35s:notice:node-1:10s", Fault(35.0, "notice", "node-1", seconds=10.0)),
        ("50s:add:1", Fault(50.0, "add", count=1)),
        ("0.5:remove:2", Fault(0.5, "remove", count=2)),
        ("1s:pause:a", Fault(1.0, "pause", "a")),
        ("2s:resume:a", Fault(2.0, "resume", "a")),
    ],
)
def test_faults(text: str, fault: Fault) -> None:
    assert FAULTS.parse(text) == fault
    assert fault.describe()


@pytest.mark.parametrize(
    "text", ["", "20s", "20s:kill", "x:kill:a", "1s:notice:a", "1s:add:0", "1s:kill:a:b", "1s:resize:2"]
)
def test_bad_faults(text: str) -> None:
    with pytest.raises(OptionError, match="a fault of a training is TIME:VERB"):
        FAULTS.parse(text)


class Recorder:
    def __init__(self) -> None:
        self.done: list[str] = []

    def kill(self, name: str) -> None:
        if name == "gone":
            raise ClusterError("there is no node 'gone'")
        self.done.append(f"kill {name}")

    def notice(self, name: str, seconds: float) -> float:
        self.done.append(f"notice {name} {seconds:g}")
        return seconds

    def pause(self, name: str) -> None:
        self.done.append(f"pause {name}")

    def resume(self, name: str) -> None:
        self.done.append(f"resume {name}")


def test_a_schedule_goes_on_after_what_does_not_work() -> None:
    nodes, said = Recorder(), []
    texts = (
        "0s:kill:gone",
        "0.01s:notice:a:3s",
        "0.02s:add:2",
        "0.03s:pause:a",
        "0.04s:resume:a",
        "0.05s:remove:1",
    )
    faults = [FAULTS.parse(text) for text in texts]
    add, remove = (lambda n: nodes.done.append(f"add {n}")), (lambda n: nodes.done.append(f"remove {n}"))
    schedule = schedule_of(faults, nodes, add, remove, said.append, SystemClock())
    schedule.end()
    schedule.begin()  # too late
    assert not nodes.done
    schedule = schedule_of(faults, nodes, add, remove, said.append, SystemClock())
    schedule.begin()
    schedule.wait()
    schedule.end()
    assert nodes.done == ["notice a 3", "add 2", "pause a", "resume a", "remove 1"]
    assert any("no node 'gone'" in line for line in said)


def test_nodes_up_to_the_most_and_never_below_the_least() -> None:
    nodes = Nodes({"node-1": 4, "node-2": 2}, most=5, least=3)
    assert nodes.placement() == {"node-1": 4, "node-2": 1}
    nodes.remove(["node-1"])
    assert nodes.placement() is None
    assert nodes.add(1) == ["node-3"]
    assert nodes.placement() == {"node-2": 2, "node-3": 3}
    nodes.replace_nodes(["node-2", "unknown"])
    assert nodes.there() == {"node-3": 4, "node-4": 2}
    assert nodes.newest(1) == ["node-4"]
    nodes.adopt({"node-1": 4, "node-9": 1})  # node-1 is gone for good
    assert nodes.there() == {"node-3": 4, "node-4": 2, "node-9": 1}
    assert nodes.add(1) == ["node-10"]


def test_nodes_are_given_back_the_newest_first() -> None:
    nodes = Nodes({"a": 1, "b": 1, "c": 1}, most=9)
    nodes.shrink(2)
    assert nodes.there() == {"a": 1}
    nodes.shrink(5)
    assert nodes.there() == {}


def test_a_run_that_was_asked_to_leave_may_begin_again() -> None:
    nodes = Nodes({"a": 1}, most=9)
    assert not nodes.stopped
    nodes.stop(17.0)
    assert (nodes.stopped, nodes.stop_by) == (True, 17.0)
    nodes.restart()
    assert (nodes.stopped, nodes.stop_by) == (False, None)


def test_more_memory_means_fewer_processes() -> None:
    nodes = Nodes({"a": 4, "b": 1}, most=10)
    assert nodes.placement(1.5) == {"a": 2, "b": 1}


def test_trials_are_spread() -> None:
    assert Nodes({"a": 4, "b": 4}, 8).preflight(2, 2) == {"a": 1, "b": 1}
    assert Nodes({"a": 4}, 8).preflight(2, 1) == {"a": 2}
    assert Nodes({"a": 1}, 8).preflight(1, 1) == {"a": 1}


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6), st.integers(1, 20), st.integers(1, 20))
def test_any_placement_keeps_its_bounds(slots: list[int], most: int, least: int) -> None:
    there = {f"node-{n}": count for n, count in enumerate(slots, 1)}
    found = Nodes(there, most, least).placement()
    if found is None:
        assert min(sum(slots), most) < least
    else:
        assert least <= sum(found.values()) <= most
        assert all(1 <= found[name] <= there[name] for name in found)


def test_tables_on_disk(tmp_path: Path) -> None:
    log = (
        'Traceback (most recent call last):\n  File "a.py", line 1, in f\nRuntimeError: no licence is free\n'
    )
    toml, yaml = tmp_path / "mine.toml", tmp_path / "mine.yaml"
    toml.write_text('[[rule]]\nreason = "licence"\nclass = "infrastructure"\npatterns = ["no licence"]\n')
    yaml.write_text("rule:\n  - {reason: licence, class: infrastructure, patterns: [no licence]}\n")
    for path in (toml, yaml):
        assert classify([RankEnd(0, 1, log)], failure_table(path)).reason == "licence"
    assert classify([RankEnd(0, 1, log)], failure_table()).reason == "traceback"
    assert failure_table() is built_in()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.toml", "rule = [", "is not TOML"),
        ("a.yaml", "a: [", "is not YAML"),
        ("a.json", "{}", "is a .toml, .yaml or .yml"),
        ("a.toml", "rules = 1", "keys rule and ignored"),
    ],
)
def test_bad_tables_on_disk(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(OptionError, match=words) as error:
        failure_table(tmp_path / name)
    assert name in str(error.value)
    with pytest.raises(OptionError, match="No such file"):
        failure_table(tmp_path / "missing.toml")


def test_lines_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    with TrainingScreen(Console(file=out, width=200)) as screen:
        for at, lost in ((0.0, 0), (1.0, 0), (6.0, 3)):
            point = PointReport(at, int(at), gpus=2, nodes=1, batch=64, loss=0.5, throughput=10.0, passes=2)
            screen.point(replace(point, lost_steps=lost, dollars=at / 100))
        screen.metrics(6, 0, {"accuracy": 0.5})
        screen.event(EventReport(6.5, "node-lost", "node-2 is lost: \x1b[31mkilled"))
    lines = out.getvalue().splitlines()
    assert sum(line.startswith("step ") for line in lines) == 2
    assert "2 GPUs on 1 node" in lines[0]
    assert "64 in 2 passes" in lines[0]
    assert "lost" not in lines[0]
    assert "$" not in lines[0]
    assert lines[1].endswith("3 lost · $0.06")
    assert "epoch 0, step 6: accuracy 0.5" in lines
    assert "\x1b" not in out.getvalue()


def test_what_the_launcher_says_in_words() -> None:
    def words(kind: str, **content: object) -> str:
        return event_text(TrainingEvent(1, 0.0, kind, 3, content))

    assert words("generation", placement={"a": 2, "b": 1}) == "generation 3: 3 GPUs on 2 nodes"
    assert words("started", restored=None, world=1) == "training begins on 1 GPU"
    assert words("started", restored=7, world=2) == "training resumes from step 7 on 2 GPUs"
    running = words("started", restored=40, world=1, oldest=33, perturbation=0.1234)
    assert running == (
        "training resumes from step 40 of the running checkpoint (oldest parameters of step 33; they had moved on by "
        "0.123, L2 norm, when last measured) on 1 GPU"
    )
    assert words("node-lost", node="a", how="killed\nmore") == "a was lost: killed"
    assert words("stopped", step=5, saved=True) == "stopped at step 5: saved"
    assert words("stopped", step=5, saved=False) == "stopped at step 5: nothing saved"
    assert words("stopped", step=5, saved=False, error="peer") == ""
    assert words("checkpoint", error="disk full") == "no checkpoint: disk full"
    assert words("checkpoint") == words("node-started") == ""
