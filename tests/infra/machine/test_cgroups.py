"""CPU quotas: the arithmetic, finding a controller, and the kernel keeping to it."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import ClusterError
from ebbflow.infra.machine import cgroups
from ebbflow.infra.machine.cgroups import Controller, find_controller, per_core_quota

pytestmark = pytest.mark.processes

BURN = """
import sys, time
sys.stdin.readline()
start = time.monotonic()
while time.monotonic() - start < 1.0:
    pass
print(time.process_time())
"""


@given(machine=st.integers(1, 256), asked=st.integers(0, 1024))
def test_quotas_never_promise_more_than_the_machine_has(machine: int, asked: int) -> None:
    quota = per_core_quota(machine, asked)
    assert 0 < quota <= 1
    assert quota * asked <= machine


def test_three_workers_on_two_cores_get_six_tenths_each() -> None:
    assert per_core_quota(2, 3) == pytest.approx(0.6)


def test_the_controller_of_version_1_is_found_in_hybrid_mounts(tmp_path: Path) -> None:
    (tmp_path / "cpu" / "own").mkdir(parents=True)
    (tmp_path / "cpu" / "own" / "cgroup.procs").touch()
    (tmp_path / "unified").mkdir()
    mounts, own = tmp_path / "mounts", tmp_path / "cgroup"
    mounts.write_text(
        f"cgroup2 {tmp_path}/unified cgroup2 rw 0 0\ncgroup {tmp_path}/cpu cgroup rw,cpu,cpuacct 0 0\n"
    )
    own.write_text("3:cpu,cpuacct:/own\n0::/\n")
    assert find_controller(mounts, own) == Controller(1, tmp_path / "cpu" / "own")


def test_version_2_takes_the_nearest_parent_that_hands_down_cpu(tmp_path: Path) -> None:
    slice_, scope = tmp_path / "user.slice", tmp_path / "user.slice" / "shell.scope"
    scope.mkdir(parents=True)
    for folder, controllers in ((tmp_path, "cpu memory"), (slice_, "cpu memory pids"), (scope, "")):
        (folder / "cgroup.subtree_control").write_text(controllers)
        (folder / "cgroup.procs").touch()
    mounts, own = tmp_path / "mounts", tmp_path / "cgroup"
    mounts.write_text(f"cgroup2 {tmp_path} cgroup2 rw 0 0\n")
    own.write_text("0::/user.slice/shell.scope\n")
    controller = find_controller(mounts, own)
    assert controller == Controller(2, slice_)
    group = cgroups.create(controller, "node", 0.6)
    assert (group / "cpu.max").read_text() == "60000 100000"


def test_a_memory_group_of_version_2_holds_the_cpu_groups_of_its_node(tmp_path: Path) -> None:
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory")
    (tmp_path / "cgroup.procs").touch()
    mounts, own = tmp_path / "mounts", tmp_path / "cgroup"
    mounts.write_text(f"cgroup2 {tmp_path} cgroup2 rw 0 0\n")
    own.write_text("0::/\n")
    controller = find_controller(mounts, own, kind="memory")
    assert controller == Controller(2, tmp_path)
    node = tmp_path / "node"
    node.mkdir()
    for name, text in (("cgroup.controllers", "cpu memory"), ("memory.swap.max", "max")):
        (node / name).write_text(text)
    (node / "rest").mkdir()
    (node / "rest" / "cgroup.procs").touch()
    assert cgroups.create_memory(controller, "node", 5 << 20) == node
    assert (node / "memory.max").read_text() == str(5 << 20)
    assert (node / "memory.swap.max").read_text() == "0"
    assert (node / "cgroup.subtree_control").read_text() == "+cpu"
    cgroups.join(node, [7])
    assert (node / "rest" / "cgroup.procs").read_text() == "7"
    assert cgroups.inside(controller, node) == Controller(2, node)
    apart = Controller(1, tmp_path / "cpu")
    assert (cgroups.inside(apart, node), cgroups.inside(controller, None)) == (apart, controller)


def test_memory_is_limited_where_cpu_can_be_too_else_without_a_cpu_group(tmp_path: Path) -> None:
    user = tmp_path / "user.slice" / "user-0.slice"
    user.mkdir(parents=True)
    for folder, controllers in ((tmp_path, "cpu memory"), (user.parent, "memory"), (user, "memory pids")):
        (folder / "cgroup.subtree_control").write_text(controllers)
        (folder / "cgroup.procs").touch()
    mounts, own = tmp_path / "mounts", tmp_path / "cgroup"
    mounts.write_text(f"cgroup2 {tmp_path} cgroup2 rw 0 0\n")
    own.write_text("0::/user.slice/user-0.slice\n")
    both = Controller(2, tmp_path)
    assert find_controller(mounts, own, kind="memory") == both
    (tmp_path / "cgroup.subtree_control").write_text("memory")
    assert find_controller(mounts, own) is None
    assert find_controller(mounts, own, kind="memory") == Controller(2, user)
    node = user / "node"
    node.mkdir()
    (node / "cgroup.controllers").write_text("memory pids")
    cgroups.create_memory(Controller(2, user), "node", 1 << 20)
    assert not (node / "cgroup.subtree_control").exists()
    assert cgroups.inside(both, node) is None, "of another process, which may limit CPU elsewhere"
    (tmp_path / "apart").mkdir()
    assert cgroups.inside(both, tmp_path / "apart") == both, "a memory group of version 1"


def test_what_is_not_handed_down_makes_no_group(tmp_path: Path) -> None:
    (tmp_path / "cgroup.subtree_control").write_text("cpu")
    (tmp_path / "cgroup.procs").touch()
    (tmp_path / "mounts").write_text(f"cgroup2 {tmp_path} cgroup2 rw 0 0\n")
    (tmp_path / "cgroup").write_text("0::/\n")
    assert find_controller(tmp_path / "mounts", tmp_path / "cgroup", kind="memory") is None
    with pytest.raises(ClusterError, match=r"cannot be made: .* go without a limit of memory"):
        cgroups.create_memory(Controller(2, tmp_path / "absent"), "node", 1 << 20)
    with pytest.raises(ClusterError, match="is gone"):
        cgroups.join(tmp_path / "absent", [1])


def test_a_group_goes_although_another_process_removes_one_in_it_meanwhile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    group, rmdir = tmp_path / "node", Path.rmdir
    (group / "cpu").mkdir(parents=True)

    def late(self: Path) -> None:
        if self.name == "cpu" and self.exists():
            rmdir(self)  # by another process
        rmdir(self)

    monkeypatch.setattr(Path, "rmdir", late)
    cgroups.remove(group, SystemClock())
    assert not group.exists()


def test_no_cgroups_mean_no_controller(tmp_path: Path) -> None:
    (tmp_path / "mounts").write_text("proc /proc proc rw 0 0\n")
    (tmp_path / "cgroup").write_text("")
    assert find_controller(tmp_path / "mounts", tmp_path / "cgroup") is None
    assert find_controller(tmp_path / "absent", tmp_path / "absent") is None


def test_the_kernel_holds_a_process_to_its_quota() -> None:
    controller = find_controller()
    if controller is None:
        pytest.skip("no writable control group with a CPU quota")
    group = cgroups.create(controller, "ebbflow-test", 0.3)
    burner = subprocess.Popen(
        [sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        cgroups.join(group, [burner.pid])
        output, _ = burner.communicate("go\n", timeout=60)
    finally:
        burner.kill()
        burner.wait(timeout=150)
        cgroups.remove(group, SystemClock())
    assert float(output) < 0.6  # of one second's wall time; the quota and some slack for a period begun
    assert not group.exists()
