"""Scripted faults, nodes, failure tables on disk, the screen."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ebbflow.flows.training.terminal import TrainingScreen
from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import ClusterError
from ebbflow.infra.protocols import TrainingEvent, TrainingStatus
from ebbflow.infra.training.process.channel import Report
from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.failures.failures import RankEnd, classify
from ebbflow.planners.training.replicas import whole_replicas
from ebbflow.tasks.faults import Fault
from ebbflow.tasks.training.capacity import Nodes
from ebbflow.tasks.training.failures import built_in, failure_table
from ebbflow.tasks.training.faults import FAULTS, schedule_of
from ebbflow.tasks.training.leased.nodes import LeasedNodes
from ebbflow.tasks.training.leased.spec import training_spec
from ebbflow.tasks.training.listening import NullTrainingListener, event_text
from ebbflow.tasks.training.node_names import node_of
from ebbflow.tasks.training.recorder import RunRecorder
from ebbflow.tasks.training.report import EventReport, PointReport, RecoveryReport, SavingReport
from ebbflow.tasks.training.request import TrainingRequest
from tests.tasks.apps.lease_cases import book_of, lease


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


def test_processes_of_this_machine_are_counted_as_torchrun_does() -> None:
    assert node_of("auto", 4, 64) == "local:1x4"
    assert node_of("auto", 0, 6) == "local:1x6"
    assert node_of("3", 4, 64) == "local:1x3"
    for wrong in ("0", "1000", "-1", "all", "1.5", ""):
        with pytest.raises(OptionError, match="nproc must be a whole number from 1 to 999, or auto"):
            node_of(wrong, 4, 64)


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


@pytest.mark.parametrize(
    ("slots", "replica", "most", "used"),
    [
        ([3, 3], 2, 9, [2, 2]),  # none spans two nodes that has room on one
        ([1] * 7, 3, 99, [1] * 6),
        ([2, 2, 2], 4, 99, [2, 2]),
        ([4, 4], 2, 7, [4, 2]),
        ([1, 2], 4, 99, None),
        ([5], 1, 99, [5]),
        ([1, 4], 2, 99, [4]),  # not one of a small node and the first of a large one
        ([1, 2, 1], 2, 99, [2, 1, 1]),
    ],
)
def test_a_run_uses_whole_replicas(slots: list[int], replica: int, most: int, used: list[int] | None) -> None:
    nodes = Nodes({f"node-{i}": count for i, count in enumerate(slots)}, most, replica=replica)
    leases = (lease(i * 10 + j, f"node-{i}", j) for i, count in enumerate(slots) for j in range(count))
    book, clock = book_of(*leases)
    for one in (nodes, LeasedNodes(book, most, 1, clock, replica=replica)):
        found = one.placement()
        assert (list(found.values()) if found else None) == used
        assert not one.enough({"a": replica + 1}) or replica == 1
        assert sum(one.preflight(replica, 2).values()) == (replica if used else 0)


@given(st.lists(st.integers(1, 9), max_size=6), st.integers(1, 9), st.integers(0, 60))
def test_no_replica_spans_nodes_that_has_room_on_one(slots: list[int], replica: int, most: int) -> None:
    found = whole_replicas({f"node-{i}": count for i, count in enumerate(slots)}, replica, most)
    ranks = [name for name, count in found.items() for _ in range(count)]
    assert len(ranks) % replica == 0
    assert len(ranks) <= most
    for first in range(0, len(ranks), replica):
        group = set(ranks[first : first + replica])
        assert len(group) == 1 or all(slots[int(name[5:])] < replica for name in group)
    assert ranks or min(sum(slots), most) < replica, "one is found where there is room for one"


def test_the_least_is_of_whole_replicas(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    request = TrainingRequest(str(tmp_path / "train.py"), run_id="t", nodes="local:7x1", replica_gpus=2)
    assert Nodes({"a": 5}, 9, 3, replica=2).least == 4
    spec = training_spec(replace(request, min_gpus=3))
    assert (spec.gpus, spec.min_gpus, spec.max_gpus) == (6, 4, 6), "no lease stays idle"
    for nodes, least, usable in (("local:1x3", 3, 2), ("local:2x3", 5, 4)):
        with pytest.raises(OptionError, match=f"min_gpus must be <= {usable}, .*; got {least}"):
            replace(request, nodes=nodes, min_gpus=least)
    with pytest.raises(OptionError, match="min_gpus must be <= 4"):
        replace(request, min_gpus=5, max_gpus=5)


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
    assert Nodes({"a": 4, "b": 4}, 8, replica=2).preflight(2, 2) == {"a": 2}, "a whole replica"
    assert Nodes({"a": 1, "b": 1, "c": 1}, 8, replica=2).preflight(2, 2) == {"a": 1, "b": 1}
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
    fixed = words("started", restored=7, world=2, fixed="the model is sharded")
    assert "step 7, and starts again at each change of nodes (the model is sharded), on 2 GPUs" in fixed
    running = words("started", restored=40, world=1, oldest=33, perturbation=0.1234)
    assert running == (
        "training resumes from step 40 of the running checkpoint (oldest parameters of step 33; they had moved on by "
        "0.123, L2 norm, when last measured) on 1 GPU"
    )
    assert words("node-lost", node="a", how="killed\nmore") == "a was lost: killed"
    assert words("stopped", step=5, saved=True) == "stopped at step 5: saved"
    assert words("stopped", step=5, saved=False) == "stopped at step 5: nothing saved"
    assert words("stopped", step=5, saved=False, error="peer") == ""
    assert words("saving", step=5, error="away") == "step 5 is not saved yet, retrying: away"
    away = words("saving", step=0, reading=True, error="away")
    assert away == "the run's checkpoints cannot be read yet, retrying: away"
    assert words("checkpoint", error="disk full") == "no checkpoint: disk full"
    assert words("checkpoint", reason="nodes' memory", error="no node lends memory") == "no node lends memory"
    assert words("checkpoint") == words("node-started") == ""


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"communication": "planned"}, "communication=planned"),
        ({"partial_checkpoint_interval": 8}, "partial_checkpoint_interval"),
        ({"own_checkpoints": True}, "own_checkpoints"),
        ({"sync": "service"}, "sync=service"),
    ],
)
def test_processes_cannot_stay_with_what_belongs_to_one_generation(
    tmp_path: Path, given: dict[str, object], what: str
) -> None:
    script = tmp_path / "fit.py"
    script.write_text("")
    options = {"script": str(script), "nodes": "local:2x1", "runs_dir": str(tmp_path / "runs"), **given}
    with pytest.raises(OptionError, match=f"^{what}.* cannot be used with recovery=in-place"):
        TrainingRequest(**options, recovery="in-place")  # type: ignore[arg-type]
    made = TrainingRequest(**options, recovery="auto")  # type: ignore[arg-type]
    assert not made.plan(made.placement, resumes=False).settings.in_place


@pytest.mark.parametrize(
    ("given", "said", "way", "reason"),
    [
        ({}, {"recovery": "in-place", "why": "each process has the whole model"}, "in-place", "each process"),
        ({}, {"recovery": "restart", "fixed": "the model is sharded"}, "restart", "the model is sharded"),
        (
            {"recovery": "restart"},
            {"recovery": "restart", "why": "it is asked for"},
            "restart",
            "it is asked",
        ),
        ({"own_checkpoints": True}, {}, "restart", "the script has checkpoints of its own"),
        ({"sync": "service"}, {"recovery": "in-place", "why": "aggregators"}, "in-place", "aggregators"),
    ],
)
def test_a_report_has_the_recovery_that_was_chosen_and_why(
    tmp_path: Path, given: dict[str, Any], said: dict[str, Any], way: str, reason: str
) -> None:
    recorder = recorder_of(tmp_path, **given)
    recorder.record_report(Report("started", 0, 0.0, 0, {"world": 2, **said}))
    found = recorder.report(TrainingStatus("stopped", 1, {}, 5)).recovery
    assert found is not None
    assert found.way == way
    assert found.reason.startswith(reason)
    assert found.changes == 0


def test_a_report_follows_what_the_script_is_found_to_do_and_counts_changes(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path)
    recorder.record_report(Report("started", 0, 0.0, 0, {"world": 2, "recovery": "in-place"}))
    for number, kind in enumerate(("worker-lost", "worker-joins", "worker-lost"), 1):
        recorder.event(TrainingEvent(number, 0.0, kind, 1, {"node": "node-2", "how": "killed"}))
    recorder.record_report(Report("members", 0, 0.0, 9, {"fixed": "", "first": "it has asked"}))
    status = TrainingStatus("stopped", 1, {}, 5)
    found = recorder.report(status).recovery
    assert found is not None
    assert (found.way, found.changes) == ("in-place", 3)
    assert found.reason.endswith("without its first process it restarts, for it has asked")
    recorder.record_report(Report("members", 0, 0.0, 9, {"fixed": "it has groups", "first": ""}))
    assert recorder.report(status).recovery == RecoveryReport("restart", "it has groups", 3)


def test_a_report_has_the_interval_of_checkpoints_and_which_losses_it_follows(tmp_path: Path) -> None:
    recorder, status = recorder_of(tmp_path), TrainingStatus("stopped", 1, {}, 5)
    recorder.record_report(Report("checkpoint", 0, 0.0, 3, {"reason": "stop", "saved_step": 3}))
    assert recorder.report(status).saving is None
    said = {
        "reason": "periodic",
        "saved_step": 4,
        "interval": 91.5,
        "hazard": "each lost node loses state (once in 22 h)",
    }
    recorder.record_report(Report("checkpoint", 0, 0.0, 4, said))
    recorder.record_report(Report("checkpoint", 0, 0.0, 5, {"reason": "finished", "saved_step": 5}))
    assert recorder.report(status).saving == SavingReport(91.5, "each lost node loses state (once in 22 h)")


def recorder_of(folder: Path, **options: Any) -> RunRecorder:
    script = folder / "fit.py"
    script.write_text("")
    request = TrainingRequest(str(script), runs_dir=str(folder / "runs"), run_id="r", **options)
    return RunRecorder(request, SystemClock(), NullTrainingListener())


def test_whether_nodes_may_change_is_told_where_there_is_something_to_say() -> None:
    def words(**content: str) -> str:
        return event_text(TrainingEvent(1, 0.0, "members", 1, content))

    assert words(fixed="", first="") == ""
    assert words(fixed="it has groups") == (
        "each change of nodes restarts all processes from now on: it has groups"
    )
    assert words(fixed="", first="it has asked") == (
        "all processes restart where the first one fails or leaves: it has asked"
    )


def test_who_starts_again_and_why_is_told() -> None:
    event = TrainingEvent(1, 0.0, "restarts", 1, {"node": "node-2", "reason": "the script itself failed"})
    assert event_text(event) == "all processes start again without those of node-2: the script itself failed"
