"""Are the checks of chaotic runs checks? Each is fed with what it must find, and with what it must not."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ebbflow.infra.ledger import Ledger
from ebbflow.infra.local_fleet import Occupant
from ebbflow.infra.local_fleet.state.labels import own
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.ledger import (
    AppEntered,
    AppMoved,
    AppSpec,
    CapacityChanged,
    Change,
    Ended,
    Event,
    Granted,
    Lease,
    LoopBegan,
    Slot,
)
from ebbflow.planners.model.ledger_state import State
from tests.chaos import invariants
from tests.chaos.faults import NAMED, Script
from tests.chaos.injecting import Done
from tests.chaos.invariants import Findings
from tests.chaos.keeping import Kept
from tests.chaos.proxy import Proxy
from tests.chaos.samples import Account, account, read, wrong
from tests.chaos.scene import MARK, Work
from tests.chaos.watching import of_others, twice

WORK = Work("shop", {}, {"q": "SELECT 1"})


def lease(number: int, app: str, node: str = "n1", slot: int = 0) -> Lease:
    return Lease(number, app, node, slot, 0.0, 60.0, 1)


def numbered(*changes: Change) -> list[Event]:
    return [Event(number, 100.0 + number, change) for number, change in enumerate(changes, 1)]


# --- the ledger ---------------------------------------------------------------------------------------------


def test_a_gpu_that_two_leases_have_is_found_at_any_moment() -> None:
    right = numbered(Granted((lease(1, "a"),)), Ended((1,)), Granted((lease(2, "b"), lease(3, "b", slot=1))))
    assert invariants.double_bookings(right) == []
    wrong_order = numbered(Granted((lease(1, "a"),)), Granted((lease(2, "b"),)), Ended((1,)))
    (said,) = invariants.double_bookings(wrong_order)
    assert said == "after event 2 GPU 0 of n1 has lease 1 of a and lease 2 of b"
    within = numbered(Granted((lease(1, "a"), lease(2, "b"))))
    assert len(invariants.double_bookings(within)) == 1
    # the end of the first must not free what the second has
    later = numbered(
        Granted((lease(1, "a"),)), Granted((lease(2, "b"),)), Ended((1,)), Granted((lease(3, "c"),))
    )
    assert len(invariants.double_bookings(later)) == 2


def test_leases_without_an_end_and_apps_that_have_not_finished_are_found(tmp_path: Path) -> None:
    with Ledger.open(str(tmp_path / "ledger.db")) as ledger:
        node = Node("n1", 4, 8.0, gpus=1)
        ledger.write([AppEntered(AppSpec("shop.q", "query"))])
        lead = ledger.lead("loop")
        lead.write([CapacityChanged(1, (node,)), Granted((lease(1, "shop.q"),))])
        found = Findings()
        invariants.check_ledger(ledger, [WORK], found)
        assert found.violations == [
            "lease: lease 1 of shop.q on n1 has not ended",
            "app: shop.q is waiting: ",
        ]
        lead.write([Ended((1,)), AppMoved("shop.q", "finished")])
        found = Findings()
        invariants.check_ledger(ledger, [WORK], found)
        assert found.violations == []
        assert found.seen["leases"] == 1
        found = Findings()
        invariants.check_ledger(ledger, [Work("labs", {}, {"pairs": ""})], found)
        assert found.violations == ["app: labs.pairs is never entered: "]


def test_what_was_done_to_the_system_must_show() -> None:
    came = CapacityChanged(1, (Node("gpu-1", 1, 1.0, gpus=1),))
    killed = Done("kill-gpu", 3.0, "gpu-1", "SIGKILL", number=1)
    dead = Done("kill-loop", 4.0, "loop", "SIGKILL", number=2, led=True)
    left = numbered(LoopBegan(1, "loop"), came, CapacityChanged(2, left=("gpu-1",)), LoopBegan(2, "loop"))
    found = Findings()
    invariants.check_faults([killed, dead], left, found)
    assert found.violations == []
    found = Findings()
    invariants.check_faults([killed, dead], left[:2], found)
    assert [one.partition(":")[0] for one in found.violations] == ["kill-gpu", "kill-loop"]
    found = Findings()
    invariants.check_faults([Done("twin-app", 1.0, "shop", why_not="WRONG: two")], left, found)
    assert len(found.violations) == 1


# --- who uses which GPU -------------------------------------------------------------------------------------


def occupant(app: str, pool: str, slots: tuple[int, ...] = (0,), pid: int = 0) -> Occupant:
    return Occupant("n1", app, pool, "1", slots, (pid or own().pid,))


def test_a_gpu_that_two_launchers_use_is_found_if_both_live() -> None:
    assert twice((occupant("a", "p1"), occupant("b", "p2", (1,)))) == []
    (said,) = twice((occupant("a", "p1"), occupant("a", "p2")))
    assert said.startswith("GPU 0 of n1 is used by n1/a/p1/1 and n1/a/p2/1")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert twice((occupant("a", "p1"), occupant("b", "p2", pid=gone.pid))) == []


def test_what_runs_on_a_gpu_of_another_app_is_found() -> None:
    state = State(leases={7: lease(7, "b")}, booked={Slot("n1", 0): 7})
    assert of_others((occupant("b", "p"),), state) == []
    assert of_others((occupant("a", "p", (1,)),), state) == []  # nobody has that one
    assert of_others((occupant("a", "p"),), state) == ["a runs on GPU 0 of n1, which lease 7 gives to b"]


# --- samples ------------------------------------------------------------------------------------------------

Lines = list[dict[str, Any]]
ORDER = [[0, 1], [2, 3], [2, 1], [3, 0]]  # of two passes over four samples


def stretch(begins: int, steps: int, at: float = 0.0, generation: int = 1, end: str = "") -> Lines:
    """Return what a process that did ``steps`` steps writes down."""
    lines: Lines = [{"at": at, "begins": begins, "launch": "x", "generation": generation}]
    for step in range(begins, begins + steps):
        lines += [
            {"at": at, "step": step, "turn": step // 2, "seen": ORDER[step]},
            {"at": at + step + 1, "done": step},
        ]
    return lines + ([{"at": at, "end": 4, "weights": end}] if end else [])


def judged(*processes: Lines, weights: str = "") -> list[str]:
    return wrong(account(list(processes)), 4, 2, 2, ORDER, weights)


def test_steps_that_are_done_again_after_a_checkpoint_count_once() -> None:
    first, second = stretch(0, 3), stretch(2, 2, 50.0, 2, "abc")
    assert judged(first, second, weights="abc") == []
    found = account([first, second])
    assert (found.stretches, found.repeated, len(found.steps)) == (2, 1, 4)
    halves = [
        [{**line, "seen": line["seen"][n::2]} if "seen" in line else line for line in stretch(0, 4)]
        for n in (0, 1)
    ]
    halves[0].append({"at": 9.0, "end": 4, "weights": "x"})
    assert judged(*halves) == []  # two processes share each batch


def _lost(lines: Lines) -> None:
    lines[3]["seen"] = [2, 2]


def _order(lines: Lines) -> None:
    lines[1]["seen"], lines[3]["seen"] = lines[3]["seen"], lines[1]["seen"]


def _missing(lines: Lines) -> None:
    del lines[3:5]


def _ended(lines: Lines) -> None:
    del lines[-1]


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (_lost, r"pass 0 used 1 samples twice \(\[2\]\) and 1 never \(\[3\]\)"),
        (_order, "step 0 used other samples"),
        (_missing, "did step 2 after 1 steps"),
        (_ended, "never came to its end"),
    ],
)
def test_lost_repeated_and_reordered_samples_are_found(break_it: Callable[[Lines], None], said: str) -> None:
    lines = stretch(0, 4, end="abc")
    assert judged(lines) == []
    break_it(lines)
    assert any(re.search(said, one) for one in judged(lines)), judged(lines)


def test_other_weights_two_selves_and_a_gap_are_found() -> None:
    assert any("not those of a training" in one for one in judged(stretch(0, 4, end="abc"), weights="abd"))
    both = judged(stretch(0, 4), stretch(2, 2, 0.5, 2, "abc"))
    assert any("trained at the same time" in one for one in both)
    assert any(
        "begins at step 3, after 2" in one for one in judged(stretch(0, 2), stretch(3, 1, 9.0, 2, "abc"))
    )


def test_a_last_line_that_sigkill_cut_off_is_left_out(tmp_path: Path) -> None:
    text = "".join(json.dumps(line) + "\n" for line in stretch(0, 2))
    (tmp_path / "1-2-0.jsonl").write_text(text + '{"at": 3, "do')
    assert read(tmp_path) == [stretch(0, 2)]
    assert account([]) == Account()


# --- files, processes, network ------------------------------------------------------------------------------


def test_half_written_files_are_found(tmp_path: Path) -> None:
    found = Findings()
    invariants.check_files(tmp_path, found)
    assert found.violations == []
    folder = tmp_path / "runs" / "shop" / "results" / "q"
    folder.mkdir(parents=True)
    (folder / "q.parquet").write_bytes(b"PAR1 and no more")
    (tmp_path / "runs" / "shop" / "run.json").write_text('{"steps": ')
    (tmp_path / "store" / "shop" / "manifests").mkdir(parents=True)
    (tmp_path / "store" / "shop" / "manifests" / f"{'a' * 64}.json").write_text("{")
    checkpoint = tmp_path / "runs" / "r" / "checkpoints" / "step-000000000001-0000000000001-00000000"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    invariants.check_files(tmp_path, found)
    assert {one.partition(":")[0] for one in found.violations} == {"result", "file", "store", "checkpoint"}


@pytest.mark.processes
def test_a_process_that_is_left_is_found_with_what_it_started() -> None:
    uid = f"left-{os.getpid()}"
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, MARK: uid}, stdin=subprocess.PIPE
    ) as process:
        for _ in range(600):
            if len(invariants.leftovers(uid)) == 2:
                break
            threading.Event().wait(0.1)
        assert len(invariants.leftovers(uid)) == 2
        assert process.stdin is not None
        process.stdin.write(b"\n")
    assert invariants.leftovers(uid) == []


@pytest.mark.processes
def test_ends_that_no_fault_excuses_are_found(tmp_path: Path) -> None:
    def kept(script: str) -> Kept:
        one = Kept(
            f"one{len(list(tmp_path.iterdir()))}",
            lambda: [sys.executable, "-c", script],
            tmp_path,
            os.environ,
        )
        one.start()
        assert one.process is not None
        return one

    def ended(one: Kept) -> list[str]:
        assert one.process is not None
        one.process.wait(150)
        one.tend(back=60.0)
        return one.problems()

    assert ended(kept("")) == []
    assert ended(kept("import sys; sys.exit('error: No space left on device')")) == []
    assert len(ended(kept("import sys; sys.exit('error: something else')"))) == 1
    assert len(ended(kept("1 / 0"))) == 2  # its status, and the traceback
    waits = kept("import time; time.sleep(600)")
    waits.kill(group=True, back=60.0)
    assert ended(waits) == []
    murdered = kept("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert ended(murdered) == [f"{murdered.name} was killed 1 times by somebody else"]


def test_the_network_can_be_cut_and_fall_silent(tmp_path: Path) -> None:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "socket"))
    server.listen()
    with server, Proxy(tmp_path / "socket") as proxy:

        def connected() -> tuple[socket.socket, socket.socket]:
            client = socket.create_connection(("127.0.0.1", proxy.port), 30.0)
            other, _ = server.accept()
            other.settimeout(30.0)
            return client, other

        client, other = connected()
        client.sendall(b"there")
        assert other.recv(10) == b"there"
        proxy.set("silent")
        client.sendall(b"held")
        other.settimeout(0.3)
        with pytest.raises(TimeoutError):
            other.recv(10)
        other.settimeout(30.0)
        proxy.set("open")
        assert other.recv(10) == b"held"
        proxy.set("cut")
        with pytest.raises(ConnectionResetError):
            client.recv(10)
        assert proxy.cuts == 1
        client.close()
        other.close()
        with (
            pytest.raises(ConnectionResetError),  # while it connects, or after
            socket.create_connection(("127.0.0.1", proxy.port), 30.0) as refused,
        ):
            refused.recv(10)
        proxy.set("open")
        client, other = connected()
        client.close()
        other.close()


# --- scripts ------------------------------------------------------------------------------------------------


def test_a_seed_decides_a_run_and_every_run_has_every_fault_that_is_named() -> None:
    for seed in range(40):
        script = Script.of(seed)
        assert script == Script.of(seed)
        assert set(NAMED) <= {one.kind for one in script.faults}
        assert [one.at for one in script.faults] == sorted(one.at for one in script.faults)
        assert script.end < 100
    assert len({Script.of(seed).faults for seed in range(40)}) == 40
    assert {Script.of(seed).postgres for seed in range(20)} == {True, False}


@pytest.mark.processes
def test_the_wall_clock_of_processes_can_jump(tmp_path: Path) -> None:
    wall = tmp_path / "wall"
    wall.write_text("3600")
    script = "import time\nprint(time.time(), time.time_ns() / 1e9, time.monotonic())"
    environment = {
        **os.environ,
        "EBBFLOW_TEST_WALL": str(wall),
        "PYTHONPATH": str(Path(__file__).parent / "wall"),
    }
    before = time.time(), time.time(), time.monotonic() - 3600
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    for shown, machine in zip(map(float, done.stdout.split()), before, strict=True):
        assert 3600 <= shown - machine < 3600 + 300
