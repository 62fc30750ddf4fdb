"""Instances of this machine, as far as nodes of trainings go: what Systems Manager is told is really done."""

import base64
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from ebbflow.infra.training.channel import keys
from ebbflow.infra.training.channel.wire import ENTRY, Entry, entry_from

NOTICE = "notice"  # file in a node's directory; see ``launcher.node``
NODE = ("-P", "-m", "ebbflow.infra.training.launcher.node")


class Hosts:
    """What ``ebbflow-torch`` does on instances, here of this machine; ``runs`` is how Python is called for a node."""

    def __init__(self, runs: Sequence[str] = NODE) -> None:
        self.processes: dict[tuple[str, str], subprocess.Popen[bytes]] = {}  # by instance and service
        self._entries: dict[str, Entry] = {}  # of the latest process on each instance
        self._leaving: set[str] = set()
        self._runs = runs
        self.folder = Path(
            tempfile.mkdtemp(prefix="ebbflow-hosts-")
        )  # for what is /run/ebbflow on a real one

    def __call__(self, node: str, parameters: dict[str, list[str]]) -> tuple[int, str]:
        (action,), (name,) = parameters["action"], parameters["name"]
        key = self.folder / node / f"{name}.key"
        process = self.processes.get((node, name))
        alive = process is not None and process.poll() is None
        if action == "start" and node in self._leaving:
            return 1, "this node is leaving\n"
        if action == "start" and not alive:
            key.parent.mkdir(exist_ok=True)
            keys.make_file(key)
            text = base64.b64decode(parameters["entry"][0]).decode()
            self._entries[node] = entry_from(text)
            self.processes[node, name] = subprocess.Popen(
                [sys.executable, *self._runs],
                env=os.environ | {ENTRY: text, keys.NODE_SECRET_FILE: str(key), "OMP_NUM_THREADS": "1"},
            )
        elif action == "stop" and process is not None:
            _end(process)
        elif action == "status":
            return 0, "active\n" if alive else "inactive\n"
        return 0, key.with_name(f"{key.name}.public").read_text() if action == "start" else ""

    def notice(self, node: str, seconds: float) -> None:
        """Tell the processes of an instance that it will be gone, as its agent does; it starts no others."""
        self._leaving.add(node)
        for (where, _), process in list(self.processes.items()):
            if where == node and process.poll() is None:
                folder = Path(self._entries[node].folder)
                (folder / NOTICE).write_text(repr(time.time() + seconds))
                process.send_signal(signal.SIGTERM)

    def take(self, node: str) -> int:
        """End all processes of an instance at once; return how many ran."""
        found = [process for (where, _), process in list(self.processes.items()) if where == node]
        running = sum(process.poll() is None for process in found)
        for process in found:
            _end(process)
        return running

    def close(self) -> None:
        for process in list(self.processes.values()):
            _end(process)
        shutil.rmtree(self.folder, ignore_errors=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all below it, as systemd does with a unit."""
    if process.poll() is None:
        below = psutil.Process(process.pid).children(recursive=True)
        for one in [psutil.Process(process.pid), *below]:
            try:
                one.kill()
            except psutil.NoSuchProcess:
                continue
        process.wait(150)
