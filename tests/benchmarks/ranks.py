"""Runs a function in one or two processes that train together, and returns what the first of them found."""

import json
import os
import platform
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

Work = Callable[..., Any]  # of (world size, device, *arguments), returns what JSON holds


def together(work: Work, world: int, device: str, *arguments: Any) -> Any:
    """Call ``work(world, device, *arguments)`` in ``world`` processes of one thread each, as torchrun would.

    ``work`` must be importable. On a processor the processes speak gloo, on a GPU there is one.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        out = Path(folder) / "found.json"
        mp.spawn(_call, (world, device, port, str(out), work, arguments), nprocs=world)
        return json.loads(out.read_text())


def device_name(device: str) -> str:
    """Return what the device is called in a report."""
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(device))
    return f"{os.cpu_count()} CPU cores, one thread a process"


def machine() -> str:
    """Return what this machine is called in a report, its GPU first where processes share that."""
    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    return f"{gpu}{len(os.sched_getaffinity(0))} processors, {platform.machine()}, {platform.system()}"


def _call(
    rank: int, world: int, device: str, port: int, out: str, work: Work, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        GROUP_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    found = work(world, device, *arguments)
    if rank == 0:
        Path(out).write_text(json.dumps(found))
