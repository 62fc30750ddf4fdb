"""The registry of active queries: arrivals and departures are seen, crashed holders vanish, clocks do not matter."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import StorageError
from ebbflow.infra.query.shares import FileShareRegistry, RegistryIntervals
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError

pytestmark = pytest.mark.processes

FAST = RegistryIntervals(beat=0.05, expiry=0.5, look=0.0)
STEADY = RegistryIntervals(beat=0.05, expiry=600.0, look=0.0)  # what a busy machine holds up is not given up
MASTER = "spark://127.0.0.1:7077"

HOLDER = """
import sys, time
from ebbflow.infra.query.shares import FileShareRegistry
from ebbflow.infra.storage.places import StorageLocation
handle = FileShareRegistry(StorageLocation(sys.argv[1]), sys.argv[2]).join(float(sys.argv[3]), application="other")
print("JOINED", flush=True)
sys.stdin.read()
handle.leave()
"""


class Steps:
    """A clock that a test moves."""

    def __init__(self, now: float = 1000.0) -> None:
        self.time = now

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def wait(self, event: threading.Event, timeout: float) -> bool:
        return event.wait(3600)  # no signs of life but those that a test writes


def registry(
    folder: Path, clock: SystemClock | Steps | None = None, cluster: str = MASTER
) -> FileShareRegistry:
    pace = FAST if isinstance(clock, Steps) else STEADY
    return FileShareRegistry(StorageLocation(folder), cluster, clock, pace)


def weights(found: FileShareRegistry) -> list[float]:
    return [claim.weight for claim in found.claims()]


def until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + 150
    while not reached():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), MASTER, "3"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "JOINED\n"
    yield process
    process.kill()
    process.communicate()


def test_queries_are_listed_in_the_order_of_their_arrival(tmp_path: Path) -> None:
    clock = Steps()
    ours = registry(tmp_path, clock)
    handles = []
    for weight in (2.0, 1.0, 5.0):
        handles.append(ours.join(weight, application="app"))
        clock.time += 1
    reader = registry(tmp_path)
    assert weights(reader) == [2.0, 1.0, 5.0]
    assert reader.claims()[0] == handles[0].claim
    handles[1].leave()
    assert weights(reader) == [2.0, 5.0]
    for handle in handles:
        handle.leave()
        handle.leave()
    assert weights(reader) == []
    assert list(tmp_path.rglob("*.json")) == []


def test_clusters_do_not_see_each_other(tmp_path: Path) -> None:
    handle = registry(tmp_path).join(1)
    assert weights(registry(tmp_path, cluster="spark://127.0.0.1:7078")) == []
    handle.leave()


def test_a_limit_is_seen_by_the_others(tmp_path: Path) -> None:
    handle, reader = registry(tmp_path).join(1), registry(tmp_path)
    assert reader.claims()[0].limit == math.inf
    handle.limit(2.0)
    assert reader.claims()[0].limit == 2.0
    handle.limit(math.inf)
    assert reader.claims()[0].limit == math.inf
    handle.leave()


def test_another_process_is_seen_and_its_departure_too(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    ours = registry(tmp_path)
    assert weights(ours) == [3.0]
    handle = ours.join(1)
    assert weights(ours) == [3.0, 1.0]
    holder.communicate("", timeout=30)
    assert weights(ours) == [1.0]
    handle.leave()


def test_a_killed_process_disappears_at_once_on_its_own_machine(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    ours = registry(tmp_path)  # long before its claim expires
    assert weights(ours) == [3.0]
    holder.kill()  # not waited for: even a zombie holds nothing
    until(lambda: weights(ours) == [])
    assert list(tmp_path.rglob("*.json")) == []


def test_a_process_that_hangs_expires_and_counts_again_when_it_goes_on(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    ours = FileShareRegistry(StorageLocation(tmp_path), MASTER, None, RegistryIntervals(expiry=2.0, look=0.0))
    assert weights(ours) == [3.0]
    os.kill(holder.pid, signal.SIGSTOP)
    until(lambda: weights(ours) == [])
    os.kill(holder.pid, signal.SIGCONT)
    until(lambda: weights(ours) == [3.0])


def _elsewhere(tmp_path: Path, beat: int) -> None:
    """Write a claim of a machine that nobody can look into."""
    (folder := tmp_path / "spark-127.0.0.1-7077").mkdir(exist_ok=True)
    claim = {
        "format": 1, "id": "far", "weight": 4.0, "limit": None, "application": "", "beat": beat,
        "place": "another machine", "pid": os.getpid(),
    }  # fmt: skip
    (folder / "000000000000001-far.json").write_text(json.dumps(claim))


@pytest.mark.parametrize("start", [0.0, 1000.0, 4e9])
def test_another_machines_claim_expires_by_the_readers_clock_whatever_that_shows(
    tmp_path: Path, start: float
) -> None:
    clock = Steps(start)
    ours = registry(tmp_path, clock)
    for beat in range(5):
        _elsewhere(tmp_path, beat)
        assert weights(ours) == [4.0]
        clock.time += 0.4
    assert weights(ours) == [4.0]
    clock.time += 0.2
    assert weights(ours) == []
    _elsewhere(tmp_path, 6)
    assert weights(ours) == [4.0]


def test_a_number_that_goes_back_is_a_sign_of_life_too(tmp_path: Path) -> None:
    clock = Steps()
    ours = registry(tmp_path, clock)
    _elsewhere(tmp_path, 7)
    assert weights(ours) == [4.0]
    clock.time += 10
    _elsewhere(tmp_path, 1)  # the holder's machine started anew
    assert weights(ours) == [4.0]


def test_what_is_left_for_long_is_deleted(tmp_path: Path) -> None:
    clock = Steps()
    ours = registry(tmp_path, clock)
    _elsewhere(tmp_path, 1)
    assert weights(ours) == [4.0]
    clock.time += 601
    assert weights(ours) == []
    assert list(tmp_path.rglob("*.json")) == []


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"format": 9}', "no json"])
def test_what_is_no_claim_is_ignored(tmp_path: Path, content: str) -> None:
    (folder := tmp_path / "spark-127.0.0.1-7077").mkdir()
    (folder / "000000000000002-x.json").write_text(content)
    (folder / ".000000000000003-y.json.tmp").write_text(content)
    _elsewhere(tmp_path, 1)
    assert weights(registry(tmp_path)) == [4.0]


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan])
def test_a_weight_must_be_positive_and_finite(tmp_path: Path, weight: float) -> None:
    with pytest.raises(OptionError, match="weight must be > 0 and finite"):
        registry(tmp_path).join(weight)


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"write to the checkpoint store file://.*/file"):
        registry(tmp_path / "file").join(1)


def test_many_threads_come_and_go(tmp_path: Path) -> None:
    ours, wrong = registry(tmp_path), list[Exception]()

    def live(weight: int) -> None:
        try:
            mine = registry(tmp_path)
            for _ in range(5):
                handle = mine.join(weight)
                assert any(c.id == handle.claim.id for c in mine.claims())
                handle.leave()
                assert all(c.id != handle.claim.id for c in mine.claims())
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=live, args=(i + 1,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(150)
    assert wrong == []
    assert weights(ours) == []
