"""Starts training processes for tests: one warm interpreter that has imported torch, and forks for each.

Lines of JSON in: ``{"id", "script", "environment", "log"}``. Lines out: ``{"id", "pid"}``, then ``{"id", "exit"}``.
"""

import gc
import itertools
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Rank:
    """A process that was started."""

    id: int
    log: Path
    pid: int = 0
    exit: int | None = None

    @property
    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""  # it has not begun


class RankServer:
    """The test's end."""

    def __init__(self, process: "subprocess.Popen[str]", folder: Path) -> None:
        self._process, self._folder = process, folder
        self._ids = itertools.count(1)
        self._ranks: dict[int, Rank] = {}
        self._unread = ""

    def start(self, script: Path, world: int, environment: Mapping[str, str]) -> list[Rank]:
        """Start a world of processes as torchrun would on one node."""
        from tests.free_ports import free_port  # not for who runs this file

        port = str(free_port())
        ranks = []
        for rank in range(world):
            number = next(self._ids)
            given = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            given |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            found = self._ranks[number] = Rank(number, self._folder / f"{number}.log")
            order = {"id": number, "script": str(script), "environment": given | dict(environment)}
            assert self._process.stdin
            self._process.stdin.write(json.dumps(order | {"log": str(found.log)}) + "\n")
            self._process.stdin.flush()
            ranks.append(found)
        return ranks

    def look(self) -> None:
        assert self._process.stdout
        pipe = self._process.stdout.fileno()
        while select.select([pipe], [], [], 0)[0]:
            piece = os.read(pipe, 1 << 16).decode()
            assert piece, "the server of test processes has ended"
            self._unread += piece
        *lines, self._unread = self._unread.split("\n")
        for line in lines:
            said = json.loads(line)
            rank = self._ranks[said.pop("id")]
            for name, value in said.items():
                setattr(rank, name, value)

    def wait(self, ranks: list[Rank], timeout: float = 200) -> list[int | None]:
        """Return the exit codes, negative for signals."""
        deadline = time.monotonic() + timeout
        while any(rank.exit is None for rank in ranks):
            self.look()
            if time.monotonic() > deadline:
                raise TimeoutError("\n".join(rank.said for rank in ranks))
            time.sleep(0.02)
        return [rank.exit for rank in ranks]

    def end(self, timeout: float = 60) -> None:
        """Kill what still runs, and see that it is gone."""
        deadline = time.monotonic() + timeout
        while left := [rank for rank in self._ranks.values() if rank.exit is None]:
            assert time.monotonic() < deadline, f"{left} do not end"
            for rank in left:
                if rank.pid:  # else the server has not said yet that it runs
                    with suppress(ProcessLookupError):
                        os.kill(rank.pid, signal.SIGKILL)
            time.sleep(0.01)
            self.look()


@contextmanager
def rank_server(folder: Path) -> Iterator[RankServer]:
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        yield RankServer(process, folder)
    finally:
        process.kill()  # its children follow when their parent is gone
        process.wait(150)
        process.stdin.close()  # type: ignore[union-attr]
        process.stdout.close()  # type: ignore[union-attr]


def _serve() -> None:
    import ctypes

    import torch._dynamo  # takes a second, and the first optimizer of a process imports it
    import torch.distributed.fsdp  # noqa: F401

    import ebbflow.infra.training.run  # noqa: F401

    gc.freeze()  # else ranks look through, and so copy, all of it
    runpy.run_path(str(Path(__file__).parents[2] / "large_pages.py"))["use_large_pages"]()

    children: dict[int, int] = {}
    unread = ""
    while True:
        ready, _, _ = select.select([0], [], [], 0.02)
        if ready:
            piece = os.read(0, 1 << 16).decode()
            if not piece:
                return
            *lines, unread = (unread + piece).split("\n")
            for line in lines:
                order = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # SIGKILL when the server is gone
                    _become(order)
                children[pid] = order["id"]
                print(json.dumps({"id": order["id"], "pid": pid}), flush=True)
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            said = {"id": children.pop(pid), "exit": os.waitstatus_to_exitcode(status)}
            print(json.dumps(said), flush=True)


def _become(order: dict[str, Any]) -> None:
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(order["environment"])
    sys.argv = [order["script"]]
    status = 1
    try:
        runpy.run_path(order["script"], run_name="__main__")
        status = 0
    except SystemExit as leave:
        status = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
