"""Two processes and one run id: locks of the operating system, and leases where there are none."""

import contextlib
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ebbflow.infra.errors import RunLockedError
from ebbflow.infra.storage.lease_files import Conditional, LeaseFile, ReadBack
from ebbflow.infra.storage.locks import RunLock
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError

HOLD = """
import sys, time
from ebbflow.infra.storage.locks import RunLock
from ebbflow.infra.storage.places import StorageLocation
RunLock(StorageLocation(sys.argv[1]), "a").acquire()
print("held", flush=True)
time.sleep(60)
"""


def hold_elsewhere(folder: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    process = hold_elsewhere(tmp_path)
    try:
        with pytest.raises(
            RunLockedError,
            match=rf"run 'a' is being run by process {process.pid} of \S+ on \S+, since 20.* UTC.*stop that process",
        ):
            RunLock(StorageLocation(tmp_path), "a").acquire()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with RunLock(StorageLocation(tmp_path), "a") as lock:
        lock.check()
        with pytest.raises(RunLockedError, match=f"process {os.getpid()} "):
            RunLock(StorageLocation(tmp_path), "a").acquire(take_over=True)
    with pytest.raises(RunLockedError, match="not held by this process"):
        lock.check()
    with lock:
        assert lock.held


def test_a_look_says_who_has_a_run_and_changes_nothing(tmp_path: Path) -> None:
    free = tmp_path / "free"
    RunLock(StorageLocation(free), "a").look()
    assert not free.exists()
    with RunLock(StorageLocation(tmp_path), "a") as lock:
        before = sorted(tmp_path.iterdir())
        with pytest.raises(
            RunLockedError, match=rf"'a' is being run by process {os.getpid()} of .*, since 20"
        ):
            RunLock(StorageLocation(tmp_path), "a").look()
        assert sorted(tmp_path.iterdir()) == before
        lock.check()
    RunLock(StorageLocation(tmp_path), "a").look()


def test_looks_keep_nobody_from_a_run(tmp_path: Path) -> None:
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            with contextlib.suppress(RunLockedError):
                RunLock(StorageLocation(tmp_path), "a").look()

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(200):
            RunLock(StorageLocation(tmp_path), "a").acquire().release()
    finally:
        over.set()
        looking.join(150)


def test_a_forked_child_does_not_keep_the_lock_of_a_dead_parent(tmp_path: Path) -> None:
    lock = RunLock(StorageLocation(tmp_path), "a").acquire()
    (ready, told), (wait, go) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(go)
        os.write(told, b"x")
        os.read(wait, 1)
        os._exit(0)
    try:
        os.read(ready, 1)
        lock._close()  # what the end of this process would do: close, not unlock
        RunLock(StorageLocation(tmp_path), "a").acquire().release()
    finally:
        os.close(go)
        os.waitpid(child, 0)


@pytest.mark.parametrize("taken", [False, True])
def test_whoever_waited_for_a_discarded_lock_makes_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    folder, flock = tmp_path / "a", fcntl.flock
    first = RunLock(StorageLocation(folder), "a").acquire()
    second, third = RunLock(StorageLocation(folder), "a"), RunLock(StorageLocation(folder), "a")

    def late(
        descriptor: int, operation: int
    ) -> None:  # the second has opened the file, and is about to lock it
        monkeypatch.setattr(fcntl, "flock", flock)
        first.discard()
        assert not folder.exists()
        if taken:
            third.acquire()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    if taken:
        with pytest.raises(RunLockedError, match=f"process {os.getpid()} "):
            second.acquire()
        third.check()
        return
    second.acquire()
    with pytest.raises(RunLockedError, match=f"process {os.getpid()} "):
        third.acquire()


@pytest.fixture(params=["local", "s3 conditional", "s3 read back"])
def leased(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place where only a lease can be had."""
    if request.param == "local":

        def none(*_: Any) -> None:
            raise OSError(errno.ENOLCK, "no locks here")

        monkeypatch.setattr(fcntl, "flock", none)
        return str(tmp_path)
    new_bucket: Callable[[], str] = request.getfixturevalue("s3")
    if request.param == "s3 read back":
        monkeypatch.setitem(sys.modules, "boto3", None)
    return f"{new_bucket()}/runs/a"


def test_a_lease_is_refused_while_it_is_renewed_and_free_when_it_is_not(leased: str, clock: Any) -> None:
    ours = RunLock(StorageLocation(leased), "a", ttl=60, heartbeat=False, clock=clock).acquire()
    theirs = RunLock(StorageLocation(leased), "a", ttl=60, heartbeat=False, clock=clock)
    for _ in range(3):
        clock.time += 50
        ours.beat()
        ours.check()
        with pytest.raises(RunLockedError, match=r"is being run by process .* its lease ends at 20"):
            theirs.acquire()
    clock.time += 61
    theirs.acquire()
    theirs.check()
    ours.beat()
    with pytest.raises(RunLockedError, match="another process has taken it over"):
        ours.check()
    ours.release()  # does not free what is theirs
    theirs.beat()
    theirs.check()
    theirs.release()
    ours.acquire()
    ours.check()


def test_a_look_at_a_lease_says_who_holds_it(leased: str, clock: Any) -> None:
    RunLock(StorageLocation(leased), "a", clock=clock).look()
    with (
        RunLock(StorageLocation(leased), "a", heartbeat=False, clock=clock),
        pytest.raises(RunLockedError, match=rf"run by process {os.getpid()} of .* its lease ends at"),
    ):
        RunLock(StorageLocation(leased), "a", clock=clock).look()
    RunLock(StorageLocation(leased), "a", clock=clock).look()


def test_a_running_lease_is_taken_over_when_asked(leased: str, clock: Any) -> None:
    ours = RunLock(StorageLocation(leased), "a", heartbeat=False, clock=clock).acquire()
    theirs = RunLock(StorageLocation(leased), "a", heartbeat=False, clock=clock).acquire(take_over=True)
    ours.beat()
    assert not ours.held
    theirs.check()


def test_a_lease_that_cannot_be_renewed_is_kept_until_it_runs_out(
    leased: str, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = RunLock(StorageLocation(leased), "a", ttl=60, heartbeat=False, clock=clock).acquire()

    def away(*_: Any, **__: Any) -> Any:
        raise OSError("the network is away")

    for kind in (ReadBack, Conditional):
        monkeypatch.setattr(kind, "write", away)
    clock.time += 55
    ours.beat()
    ours.check()
    clock.time += 6
    ours.beat()
    with pytest.raises(RunLockedError, match=r"could not be renewed for 60 s.*network is away"):
        ours.check()


def test_a_torn_lease_is_free(leased: str, clock: Any) -> None:
    StorageLocation(leased).write("lease.json", b'{"token": "x"')
    RunLock(StorageLocation(leased), "a", heartbeat=False, clock=clock).acquire().check()


def test_of_many_that_begin_at_once_one_gets_a_conditional_lease(s3: Callable[[], str]) -> None:
    place = f"{s3()}/a"
    RunLock(StorageLocation(place), "a", ttl=0.2, heartbeat=False).acquire()  # expired when the others begin
    time.sleep(0.3)
    start, won, refused = threading.Barrier(6), [], []

    def one() -> None:
        lock = RunLock(StorageLocation(place), "a", heartbeat=False)
        start.wait(150)
        try:
            won.append(lock.acquire())
        except RunLockedError as exc:
            refused.append(exc)

    threads = [threading.Thread(target=one) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert (len(won), len(refused)) == (1, 5)


def test_a_conditional_lease_is_taken_although_the_answer_to_its_write_was_lost(
    s3: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client sends the write again, which the condition then refuses."""
    write = Conditional.write

    def twice(self: Conditional, content: dict[str, Any], version: str | None) -> str | None:
        write(self, content, version)
        return write(self, content, version)

    place = StorageLocation(f"{s3()}/a")
    with monkeypatch.context() as patch:
        patch.setattr(Conditional, "write", twice)
        lock = RunLock(place, "a", heartbeat=False).acquire()
    lock.beat()
    lock.check()
    with pytest.raises(RunLockedError, match="is being run by"):
        RunLock(place, "a", heartbeat=False).acquire()


def test_the_heartbeat_renews_by_itself(s3: Callable[[], str]) -> None:
    place = f"{s3()}/a"

    def beat() -> object:
        return json.loads(StorageLocation(place).read("lease.json"))["beat"]

    with RunLock(StorageLocation(place), "a", ttl=8.0) as lock:
        first = beat()
        deadline = time.monotonic() + 150
        while beat() == first:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        lock.check()
    assert json.loads(StorageLocation(place).read("lease.json"))["free"]


def test_a_rule_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="ttl must be > 0 s; got 0"):
        RunLock(StorageLocation(tmp_path), "a", ttl=0)
    lock = RunLock(StorageLocation(tmp_path), "a").acquire()
    with pytest.raises(RunLockedError, match="holds run 'a' already"):
        lock.acquire()
    lock.release()


def kinds(place: StorageLocation, clock: Any) -> list[LeaseFile]:
    return [ReadBack(place, "x", clock), *([] if place.local else [Conditional(place, "x")])]


def test_a_lease_file_changes_only_from_the_version_that_was_read(place: str, clock: Any) -> None:
    for i, file in enumerate(kinds(StorageLocation(f"{place}-lease"), clock)):
        content = {"token": f"t{i}", "beat": 1.0, "ttl": 5.0}
        if i:
            there = file.read()
            assert there is not None
            assert file.write(content, there[1]) is not None
        else:
            assert file.read() is None
            assert file.write(content, None) is not None
        assert file.write({**content, "token": "other"}, None) is None
        found = file.read()
        assert found is not None
        assert found[0] == content
        assert file.write({**content, "token": "new"}, "wrong") is None
        assert file.write({**content, "token": "new"}, found[1]) is not None
