"""What control groups grant this process of cores and memory: imitated trees, and a real quota."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.machine import cgroups
from ebbflow.infra.machine.granted import around, granted_cores, granted_memory

TIMEOUT = 150.0  # s
MIB = 1 << 20
ALL = len(os.sched_getaffinity(0))
SAYS = "import sys; sys.stdin.readline(); from ebbflow.infra.machine.granted import *; print(granted_cores())"


def tree(tmp_path: Path, own: str, files: dict[str, str]) -> tuple[Path, Path]:
    """Imitate what the kernel tells: the groups of a process, and files in groups."""
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(own)
    groups.mkdir()
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text)
    return proc, groups


def test_of_nested_quotas_of_version_2_the_least_counts(tmp_path: Path) -> None:
    files = {"a/cpu.max": "40000 100000\n", "a/b/cpu.max": "max 100000\n", "a/b/c/cpu.max": "30000 50000\n"}
    assert granted_cores(*tree(tmp_path, "0::/a/b/c\n", files)) == pytest.approx(0.4)


def test_a_quota_of_version_1_beside_groups_of_version_2_counts(tmp_path: Path) -> None:
    quotas = {"cpu/own": "25000", "cpu": "-1", "cpu/other": "1000"}
    files = {f"{folder}/cpu.cfs_quota_us": f"{quota}\n" for folder, quota in quotas.items()}
    files |= {f"{folder}/cpu.cfs_period_us": "100000\n" for folder in quotas}
    found = tree(tmp_path, "4:memory:/elsewhere\n2:cpu,cpuacct:/own\n0::/\n", files)
    assert granted_cores(*found) == pytest.approx(0.25)
    assert [folder.name for _, folder in around("cpu", *found)] == ["own", "cpu", "groups"]


@pytest.mark.parametrize("quota", ["max 100000\n", f"{(ALL + 1) * 100000} 100000\n", "", "nonsense"])
def test_without_a_tighter_quota_the_processors_count(tmp_path: Path, quota: str) -> None:
    assert granted_cores(*tree(tmp_path, "0::/\n", {"cpu.max": quota})) == ALL
    assert granted_cores(tmp_path / "absent", tmp_path / "absent") == ALL


def test_the_least_limit_of_memory_around_a_process_counts(tmp_path: Path) -> None:
    files = {
        "memory/own/part/memory.limit_in_bytes": str(7 * MIB),
        "memory/own/memory.limit_in_bytes": str(5 * MIB),
        "memory/memory.limit_in_bytes": str(1 << 62),
    }
    assert granted_memory(*tree(tmp_path, "4:memory:/own/part\n", files)) == 5 * MIB
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert granted_memory(tmp_path / "absent", tmp_path / "absent") == whole


@pytest.mark.processes
def test_a_real_quota_is_seen_by_a_process_that_is_put_under_it() -> None:
    controller = cgroups.find_controller()
    if controller is None:
        pytest.skip("needs root, or a delegated control group")
    group = cgroups.create(controller, f"granted-{os.getpid()}", 0.4)
    try:
        with subprocess.Popen(
            [sys.executable, "-c", SAYS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child:
            cgroups.join(group, [child.pid])
            said, _ = child.communicate("\n", timeout=TIMEOUT)
        assert float(said) == pytest.approx(0.4)
    finally:
        cgroups.remove(group, SystemClock())
