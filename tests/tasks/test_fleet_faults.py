"""Scripted faults of a local fleet."""

import pytest

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.local_fleet.state.pools import LocalPool
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.faults import Fault
from ebbflow.tasks.nodes import FAULTS, schedule_of
from tests.infra.local_fleet.quick_provider import QuickFleet, there


@pytest.mark.parametrize(
    ("text", "fault", "told"),
    [
        ("20s:notice:gpu-2:5s", Fault(20, "notice", "gpu-2", 5), "notice to gpu-2: it terminates in 5 s"),
        (
            "20:recommend:gpu:1.5s",
            Fault(20, "recommend", "gpu", 1.5),
            "rebalance recommended for gpu: it may terminate in 1.5 s",
        ),
        ("30s:kill:spark-1", Fault(30, "kill", "spark-1"), "spark-1 is killed without notice"),
        ("0.5s:pause:gpu", Fault(0.5, "pause", "gpu"), "gpu is paused (SIGSTOP)"),
        ("1s:resume:gpu", Fault(1, "resume", "gpu"), "gpu is resumed (SIGCONT)"),
        ("1s:add:gpu", Fault(1, "add", "gpu"), "add 1 node to gpu"),
        ("1s:add:gpu:3", Fault(1, "add", "gpu", count=3), "add 3 nodes to gpu"),
        ("1s:remove:gpu:2", Fault(1, "remove", "gpu", count=2), "remove 2 nodes from gpu"),
        (
            "1s:outage:gpu:9s",
            Fault(1, "outage", "gpu", 9),
            "simulated capacity outage: gpu gets no node for 9 s",
        ),
    ],
)
def test_a_fault_names_a_node_or_a_pool(text, fault, told):
    assert FAULTS.parse(text) == fault
    assert fault.describe() == told


@pytest.mark.parametrize(
    "text", ["", "20s", "20s:kill", "20s:kill:", "x:kill:gpu", "1s:notice:gpu", "1s:notice:gpu:z", "1s:add:gpu:0",
             "1s:kill:gpu:1", "1s:burn:gpu"],
)  # fmt: skip
def test_what_is_no_fault_is_refused_with_the_form(text):
    with pytest.raises(OptionError, match=r"such as 20s:notice:gpu-2:5s; its verbs are kill:NODE, .*got"):
        FAULTS.parse(text)


def test_faults_happen_in_their_order_and_what_cannot_be_done_is_said(tmp_path):
    quick = QuickFleet(tmp_path, [LocalPool("gpu", "gpu", initial=2, max_nodes=4)])
    quick.until(lambda state: len(there(state)) == 2)
    said, texts = (
        [],
        ["0.3s:kill:gpu-9", "0.2s:add:gpu:9", "0s:pause:gpu", "0.1s:kill:gpu", "0.4s:resume:gpu"],
    )
    faults = schedule_of([FAULTS.parse(t) for t in texts], quick.fleet, said.append, SystemClock())
    faults.begin()
    faults.wait()
    faults.end()
    assert said[:4] == [
        "scripted: gpu-1 is paused (SIGSTOP)",
        "scripted: gpu-2 is killed without notice",
        "scripted: add 9 nodes to gpu",
        "scripted: gpu-9 is killed without notice",
    ]
    assert said[4].startswith("scripted: fault not injected: there is no node 'gpu-9'")
    assert said[5:] == ["scripted: gpu-1 is resumed (SIGCONT)"]
    assert quick.fleet.lost("gpu-2") == "killed without notice"
    assert quick.fleet.state.plans["gpu"].nodes == 4
    quick.close()
