"""Folders of fleets that are down: old ones go, and never one that somebody has or starts just now."""

import os
import threading
import time
from dataclasses import replace

import pytest

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import ClusterError
from ebbflow.infra.local_fleet import begin
from ebbflow.infra.local_fleet.begin import prune
from ebbflow.infra.local_fleet.fleet import LocalFleet
from ebbflow.infra.local_fleet.state import labels
from ebbflow.infra.local_fleet.state.pools import LocalPool
from ebbflow.infra.local_fleet.state.store import LocalFleetStateFile
from ebbflow.infra.storage import files

POOL = LocalPool("gpu", "gpu")
CLOCK = SystemClock()


def claimed(folder, name):
    file = LocalFleetStateFile(folder / name, CLOCK)
    with file.starting():
        return file, begin.claim(file, name, [POOL], (), True, CLOCK)


def fleet(folder, name, age=0.0, **changes):
    """Make the folder of a fleet that went down ``age`` s ago."""
    file, uid = claimed(folder, name)
    file.change(uid, lambda state: replace(state, **{"up": False, **changes}))
    (folder / name / "logs").mkdir()
    then = time.time() - age
    os.utime(file.path, (then, then))
    return file


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_that_are_down_are_kept(tmp_path):
    for number in range(6):
        fleet(tmp_path, f"run-{number}", age=100.0 * number)
    assert prune(tmp_path, CLOCK, keep=2) == ["run-5", "run-4", "run-3", "run-2"]
    assert names(tmp_path) == ["run-0", "run-1"]
    assert prune(tmp_path, CLOCK, keep=2) == []


def test_what_lives_is_never_touched(tmp_path):
    fleet(tmp_path, "stays", up=True)
    fleet(tmp_path, "owned", up=True, owner=labels.own())
    fleet(tmp_path, "kept", supervisor=labels.own())
    gone = labels.own()._replace(ticks=1)
    fleet(tmp_path, "crashed", up=True, owner=gone, supervisor=gone)
    (tmp_path / "odd").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "fleet.json").write_text("{")
    assert prune(tmp_path, CLOCK, keep=0) == ["crashed"]
    assert names(tmp_path) == ["broken", "kept", "odd", "owned", "stays"]


@pytest.mark.processes
def test_a_fleet_of_which_something_runs_is_left_alone(tmp_path):
    import subprocess
    import sys

    file = fleet(tmp_path, "left")
    code = "import sys; print(1, flush=True); sys.stdin.read()"
    mark = labels.mark(file.read().uid, "gpu-1", "app", "p", "k")
    left = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "EBBFLOW_NODE": mark},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        left.stdout.readline()
        assert prune(tmp_path, CLOCK, keep=0) == []
    finally:
        left.kill()
        left.wait()
    assert prune(tmp_path, CLOCK, keep=0) == ["left"]


def test_one_that_is_being_started_is_left_alone(tmp_path):
    file = fleet(tmp_path, "again")
    with file.starting():
        assert prune(tmp_path, CLOCK, keep=0) == []
    with files.locked(str(file.folder / ".lock"), CLOCK):
        assert prune(tmp_path, CLOCK, keep=0) == []
    assert prune(tmp_path, CLOCK, keep=0) == ["again"]
    with pytest.raises(ClusterError, match="taken down"):
        file.change("another", lambda state: state)


def test_what_a_crash_left_half_removed_is_removed(tmp_path):
    (tmp_path / ".removed-abc" / "logs").mkdir(parents=True)
    fleet(tmp_path, "one")
    assert prune(tmp_path, CLOCK) == []
    assert names(tmp_path) == ["one"]


def test_many_that_start_fleets_and_remove_folders_at_once_get_in_nobodys_way(tmp_path):
    """Whoever has started a fleet finds it there, with the state that it wrote, whatever others remove meanwhile."""
    problems, stop = [], threading.Event()

    def starts(name):
        for _ in range(5):
            file, uid = claimed(tmp_path, name)
            state = file.read()
            if state is None or state.uid != uid or not state.up:
                problems.append(f"{name} is not there after its start: {state}")
            file.change(uid, lambda state: replace(state, up=False))

    def removes():
        while not stop.wait(0.002):
            prune(tmp_path, CLOCK, keep=0)

    def guarded(work, *given):
        try:
            work(*given)
        except Exception as error:
            problems.append(repr(error))

    removers = [threading.Thread(target=guarded, args=(removes,)) for _ in range(2)]
    starters = [threading.Thread(target=guarded, args=(starts, f"run-{n}")) for n in range(3)]
    for thread in [*removers, *starters]:
        thread.start()
    for thread in starters:
        thread.join(150)
    stop.set()
    for thread in removers:
        thread.join(150)
    assert problems == []


def test_whoever_starts_a_fleet_removes_old_folders(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setenv("EBBFLOW_HOME", str(tmp_path))
    monkeypatch.setattr("ebbflow.infra.local_fleet.fleet.prune", lambda parent, _: asked.append(parent))
    monkeypatch.setattr(LocalFleet, "_ensure_supervisor", lambda _: None)
    with LocalFleet.start([POOL], "one", gpus=(), wait=None):
        assert asked == [tmp_path / "fleets"]
