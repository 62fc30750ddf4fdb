"""The systems whose pauses ``training_pauses`` measures: each trains on members that are killed, leave and come."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import psutil

from ebbflow.infra.protocols import TrainingJob
from ebbflow.infra.training.launcher.trainer import TorchTrainer
from ebbflow.infra.training.local_nodes import LocalNodes
from ebbflow.infra.training.process.world import BACKEND
from ebbflow.planners.model.trainings import RecoveryChoice, RunSettings

SCRIPT = Path(__file__).with_name("pause_script.py")
NOTICE = 30.0  # seconds
TORCHFT = ("torchft==0.2.0",)
TORCHFT_NEEDS = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http", "typing_extensions")
INSTALL = 300.0  # seconds
LONG = 180.0  # seconds after which what does not come is an error


class System(Protocol):
    """A training of two members. Members are named in the order in which they came."""

    def start(self, folder: Path, notes: Path, width: int) -> None: ...
    def pids(self) -> dict[str, int]:
        """Return the processes that train, by member, where they are there."""
        ...

    def kill(self, member: str) -> None:
        """Kill a member's process; another takes its place."""
        ...

    def notice(self, member: str) -> None: ...
    def shrink(self, member: str) -> None: ...
    def grow(self) -> None: ...
    def close(self) -> None: ...


class Ours:
    """A launcher's run."""

    def __init__(self, recovery: RecoveryChoice) -> None:
        self._recovery: RecoveryChoice = recovery
        self._came = 2

    def start(self, folder: Path, notes: Path, width: int) -> None:
        self._notes = notes
        # a GPU is shared by all, which NCCL refuses
        self._nodes = LocalNodes(folder / "nodes", gpus=(), environment={BACKEND: "gloo"})
        self._trainer = TorchTrainer(self._nodes, replace=False, stragglers=False)
        settings = RunSettings(checkpoint_interval=30.0, adaptive=False, recovery=self._recovery)
        job = TrainingJob(
            "pauses", str(SCRIPT), ("elastic", str(notes), str(width)), str(folder / "run"), settings
        )
        self._trainer.launch(job, {"node-1": 1, "node-2": 1})

    def pids(self) -> dict[str, int]:
        noting = {int(path.name) for path in self._notes.iterdir()}
        found = {}
        for name in self._trainer.status().placement:
            if self._nodes.lost(name):
                continue
            if mine := noting & set(self._nodes.pids(name)):
                found[name] = max(mine)
        return found

    def kill(self, member: str) -> None:
        os.kill(self.pids()[member], signal.SIGKILL)

    def notice(self, member: str) -> None:
        self._nodes.notice(member, NOTICE)

    def shrink(self, member: str) -> None:
        placement = self._trainer.status().placement
        self._trainer.resize({name: slots for name, slots in placement.items() if name != member})

    def grow(self) -> None:
        self._came += 1
        self._trainer.resize({**self._trainer.status().placement, f"node-{self._came}": 1})

    def close(self) -> None:
        self._trainer.close()


class Processes:
    """Members that are processes of this one, each with all that it starts."""

    def __init__(self) -> None:
        self._members: dict[str, subprocess.Popen[bytes]] = {}
        self._came = 0

    def add(self, command: list[str], environment: Mapping[str, str], folder: Path) -> None:
        self._came += 1
        name = f"member-{self._came}"
        with (folder / f"{name}.log").open("wb") as log:
            self._members[name] = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _path(os.getcwd()), **environment},
            )

    def end(self, member: str, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self._members[member].send_signal(number)

    def close(self) -> None:
        for one in self._members.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(one.pid, signal.SIGKILL)
            for child in _below(one.pid):
                with suppress(psutil.Error):
                    child.kill()
            one.kill()
            one.wait(20)
        self._members = {}

    @property
    def running(self) -> dict[str, int]:
        return {name: one.pid for name, one in self._members.items() if one.poll() is None}


class Torchrun(Processes):
    """Plain torchrun: an agent for each member, which start all processes again at every change."""

    def start(self, folder: Path, notes: Path, width: int) -> None:
        from torch.distributed import TCPStore

        self._folder, self._notes, self._width = folder, notes, width
        self._port = _free_port()
        self._store = TCPStore("127.0.0.1", self._port, is_master=True, wait_for_workers=False)
        for _ in range(2):
            self.grow()

    def pids(self) -> dict[str, int]:
        noting = {int(path.name) for path in self._notes.iterdir()}
        found = {}
        for name, pid in self.running.items():
            if mine := noting & {child.pid for child in _below(pid)}:
                found[name] = max(mine)
        return found

    def kill(self, member: str) -> None:
        os.kill(self.pids()[member], signal.SIGKILL)

    def notice(self, member: str) -> None:
        self.end(member, signal.SIGTERM)

    shrink = notice

    def grow(self) -> None:
        options = ["--nnodes=1:3", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=pauses"]
        options += [f"--rdzv-endpoint=127.0.0.1:{self._port}", "--rdzv-conf=is_host=0,last_call_timeout=1"]
        options += ["--max-restarts=1000", "--local-addr=127.0.0.1"]
        script = [str(SCRIPT), "torchrun", str(self._notes), str(self._width)]
        # else who joins waits in vain for what the first agent has said to those before (torch 2.13)
        alone = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.add([sys.executable, "-m", "torch.distributed.run", *options, *script], alone, self._folder)


class Torchft(Processes):
    """Replicas of torchft, with a lighthouse in a process of its own.

    Args:
        packages: folder with torchft and what it needs.
        heartbeat: milliseconds after which a replica counts as dead; ``None``: its default.
    """

    def __init__(self, packages: Path, heartbeat: int | None) -> None:
        super().__init__()
        self._packages, self._heartbeat = packages, heartbeat

    def start(self, folder: Path, notes: Path, width: int) -> None:
        self._folder, self._notes, self._width = folder, notes, width
        port = _free_port()
        self._environment = {
            "PYTHONPATH": _path(self._packages, os.getcwd()),
            "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}",
        }
        bound = "" if self._heartbeat is None else f", heartbeat_timeout_ms={self._heartbeat}"
        made = f'LighthouseServer(bind="127.0.0.1:{port}", min_replicas=1, join_timeout_ms=1000{bound})'
        text = f"import time\nfrom torchft.coordination import LighthouseServer\nserver = {made}\ntime.sleep(1e6)"
        self.add([sys.executable, "-c", text], self._environment, folder)
        (self._lighthouse,) = self._members
        until(lambda: _answers(port), "lighthouse")
        for _ in range(2):
            self.grow()

    def pids(self) -> dict[str, int]:
        noting = {int(path.name) for path in self._notes.iterdir()}
        return {name: pid for name, pid in self.running.items() if name != self._lighthouse and pid in noting}

    def kill(self, member: str) -> None:
        self.end(member, signal.SIGKILL)
        self.grow()

    def notice(self, member: str) -> None:
        self.end(member, signal.SIGTERM)

    shrink = notice

    def grow(self) -> None:
        script = [str(SCRIPT), "torchft", str(self._notes), str(self._width)]
        self.add([sys.executable, *script], self._environment, self._folder)


def install_torchft(folder: Path) -> str:
    """Install torchft beside this environment, unless it is there; return why that was not possible, else empty."""
    if not _import_error(folder):
        return ""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
    for options in (("--no-deps", *TORCHFT), TORCHFT_NEEDS):  # its dependency, torch, is here
        try:
            done = subprocess.run(
                [*pip, *options], capture_output=True, text=True, timeout=INSTALL, check=False
            )
        except subprocess.TimeoutExpired:
            return f"installing {options[-1]} took over {INSTALL:g} s"
        if done.returncode:
            return f"{options[-1]} cannot be installed: {done.stderr.strip().splitlines()[-1][:200]}"
    return f"torchft cannot be imported: {why}" if (why := _import_error(folder)) else ""


def _import_error(folder: Path) -> str:
    tried = subprocess.run(
        [sys.executable, "-c", "import torchft"],
        capture_output=True, text=True, timeout=INSTALL, check=False,
        env={**os.environ, "PYTHONPATH": _path(folder)},
    )  # fmt: skip
    return "" if tried.returncode == 0 else tried.stderr.strip().splitlines()[-1]


def _path(*folders: Path | str) -> str:
    """Return where Python looks: first in these folders, then where this process does."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def until(reached: Callable[[], Any], what: str) -> None:
    """Wait for something. Raises ``TimeoutError``."""
    end = time.monotonic() + LONG
    while not reached():
        if time.monotonic() > end:
            raise TimeoutError(f"no {what} within {LONG:g} s")
        time.sleep(0.02)


def lives(pid: int) -> bool:
    with suppress(psutil.Error):
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def _below(pid: int) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
