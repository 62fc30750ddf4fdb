"""A guardian ends what its owner leaves behind, however the owner goes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ebbflow.infra.machine import processes

pytestmark = pytest.mark.processes

OWNER = """
import os, sys, time
from pathlib import Path
from ebbflow.infra.machine import processes
from ebbflow.infra.machine.guardian import Guardian

mark, folder, grace = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
arguments = [mark + "/", str(os.getpid()), grace, "", str(folder / "scratch")]
guardian = Guardian("ebbflow.infra.machine.guardian", arguments, folder)
processes.spawn(["sleep", "600"], os.environ, mark + "/a", folder / "a.log")
if os.fork() == 0:
    time.sleep(600)  # a child that keeps the guardian's pipe open
print(guardian.pid, flush=True)
word = sys.stdin.readline().strip()
if word:
    getattr(guardian, word)()
    print(word, flush=True)
time.sleep(600)
"""


class Owner:
    def __init__(self, folder: Path, grace: float) -> None:
        self.mark = f"guarded-{os.getpid()}-{time.monotonic_ns()}"
        (folder / "scratch").mkdir()
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, self.mark, str(folder), str(grace)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.guardian = int(self.process.stdout.readline())

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == word + "\n"

    @property
    def guarded(self) -> list[int]:
        return processes.members(f"{self.mark}/")

    def end(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pid in self.guarded:
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def owner(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Owner]:
    owner = Owner(tmp_path, getattr(request, "param", 0.0))
    try:
        yield owner
    finally:
        owner.end()


def eventually(reached: Callable[[], bool]) -> bool:
    end = time.monotonic() + 150
    while not reached():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_it_ends_what_a_killed_owner_has_left(owner: Owner, tmp_path: Path) -> None:
    assert len(owner.guarded) == 1
    os.kill(owner.process.pid, signal.SIGKILL)
    assert eventually(lambda: not owner.guarded)
    assert eventually(lambda: gone(owner.guardian))
    assert not (tmp_path / "scratch").exists()


@pytest.mark.parametrize("owner", [1.5], indirect=True)
def test_it_gives_time_to_end_by_oneself(owner: Owner) -> None:
    os.kill(owner.process.pid, signal.SIGKILL)
    begun = time.monotonic()
    assert eventually(lambda: not owner.guarded)
    assert time.monotonic() - begun >= 1.0


def test_released_it_ends_and_leaves_all_alone(owner: Owner) -> None:
    owner.say("release")
    assert eventually(lambda: gone(owner.guardian))
    assert len(owner.guarded) == 1


def test_detached_it_stays_and_leaves_all_alone(owner: Owner) -> None:
    owner.say("detach")
    os.kill(owner.process.pid, signal.SIGKILL)
    time.sleep(1.2)  # two looks
    assert len(owner.guarded) == 1
    assert not gone(owner.guardian)
    os.kill(owner.guardian, signal.SIGKILL)
