"""Measures the channels of processes on this machine: a small gang of its own, made for the sweep and gone after it.

``python -P -m ebbflow.infra.communication.local_sweep`` is one of its processes; its task is in the environment.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from ebbflow.infra.errors import TrainingError
from ebbflow.infra.storage import private
from ebbflow.planners.communication.dag import Kind
from ebbflow.planners.communication.measured import MeasuredLinks
from ebbflow.planners.communication.planning import choices_of

TASK = "EBBFLOW_SWEEP"
START_SECONDS = 90.0  # that processes may take to start and end besides the sweep
MAX_RANKS = 64


def measure_this_machine(
    ranks: int,
    sizes: Mapping[Kind, Sequence[int]],
    *,
    channels: int = 2,
    seconds: float = 20.0,
    repeats: int = 5,
) -> MeasuredLinks:
    """Start ``ranks`` processes on loopback, and return what they measure among themselves.

    Args:
        ranks: processes, from 2 to 64.
        sizes: kind -> bytes of one rank, rising.
        channels: process groups side by side.
        seconds: bound of the sweep.
        repeats: of each size and option.

    Raises ``TrainingError`` for processes that fail or take too long, and for a number of them out of range.
    """
    if not 2 <= ranks <= MAX_RANKS:
        raise TrainingError(f"ranks must be from 2 to {MAX_RANKS}; got {ranks}")
    with tempfile.TemporaryDirectory() as folder:
        task = {
            "sizes": sizes, "channels": channels, "seconds": seconds, "repeats": repeats,
            "store": f"{folder}/store", "output": f"{folder}/links.json", "ranks": ranks,
        }  # fmt: skip
        processes = [
            subprocess.Popen(
                [sys.executable, "-P", "-m", "ebbflow.infra.communication.local_sweep"],
                env={**os.environ, TASK: json.dumps(task | {"rank": rank}), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            _wait(processes, time.monotonic() + seconds + START_SECONDS)
            return MeasuredLinks.from_json(Path(task["output"]).read_text())  # type: ignore[arg-type]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.communicate()


def _wait(processes: "Sequence[subprocess.Popen[str]]", end: float) -> None:
    while True:
        states = [process.poll() for process in processes]
        if any(state not in (None, 0) for state in states):
            failed = next(p for p, state in zip(processes, states, strict=True) if state not in (None, 0))
            said = (failed.communicate()[1].strip().splitlines() or ["no message"])[-1]
            raise TrainingError(f"a process of the sweep failed: {said:.300}")
        if all(state == 0 for state in states):
            return
        if time.monotonic() > end:
            raise TrainingError("the processes of the sweep did not end in time")
        time.sleep(0.05)


def main() -> None:
    """Be one process of the sweep."""
    import torch
    import torch.distributed as dist

    from ebbflow.infra.communication.channels import Channels
    from ebbflow.infra.communication.measuring import Sweep, measure

    task = json.loads(os.environ[TASK])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        f"file://{task['store']}",
        rank=task["rank"],
        world_size=task["ranks"],
        timeout=timedelta(seconds=START_SECONDS),
    )
    sizes = {kind: tuple(some) for kind, some in task["sizes"].items()}
    choices = {
        kind: choices_of(kind, task["ranks"], task["channels"], max(some)) for kind, some in sizes.items()
    }
    found = measure(Channels(task["channels"]), Sweep(sizes, choices, task["seconds"], task["repeats"]))
    if task["rank"] == 0:
        private.write_text(task["output"], found.to_json())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
