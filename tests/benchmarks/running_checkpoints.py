"""Running checkpoints to a slow store, and to nodes' memory with that store behind it.

``python -m tests.benchmarks.running_checkpoints`` starts two daemons, and trains a model whose steps take a fixed
time with Adam, a save of an eighth of all blocks coming due every other step. The store takes 20 ms for a request and
50 MB/s. Told is, for each way: for how long a save holds a step up (mean, most), saves that were skipped since one
was under way, how many steps the newest save that a new process could read is behind at the end, and how long reading
it takes.

With ``waits`` a step waits until its save counts (``asynchronous=False``); the other ways are as trainings run.
"""

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ebbflow.infra.memory.registry import MemoryRegistry
from ebbflow.infra.storage.files import write_text
from ebbflow.infra.training.running.checkpoint import RunningCheckpoint
from ebbflow.infra.training.running.memory import NodeMemory
from tests.benchmarks.slow_store import SlowLocation
from tests.infra.memory.lenders import Lender

PERIOD, FRACTION = 16, 1 / 8
SLAB = 16 << 20


@dataclass(frozen=True)
class Row:
    """What was measured of one way; times in s."""

    way: str
    saves: int
    skipped: int
    held_mean: float
    held_most: float
    behind: int  # steps
    recovery: float
    step: float  # mean of all steps, saves included


def trained(
    way: str, folder: Path, registry: MemoryRegistry | None, megabytes: float, steps: int, pace: float
) -> Row:
    """Train, and recover in the end as a new process would. ``pace``: seconds of a step without a save."""
    torch.manual_seed(0)
    rows = max(1, int(megabytes * 1e6 / 4 / 1024))
    model = torch.nn.Linear(1024, rows, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    memory = None if registry is None else NodeMemory(registry)
    place = SlowLocation(folder)
    made = RunningCheckpoint(
        place,
        model,
        optimizer,
        period=PERIOD,
        fraction=FRACTION,
        memory=memory,
        asynchronous="waits" not in way,
    )
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    made.initialize({"step": 0})
    held, begun = [], time.monotonic()
    for step in range(1, steps + 1):
        ended = time.monotonic() + pace
        optimizer.step()
        time.sleep(max(0.0, ended - time.monotonic()))
        at = time.monotonic()
        due = made.due(step)
        made.step(step, {"step": step})
        if due:
            held.append(time.monotonic() - at)
    took = (time.monotonic() - begun) / steps
    other = torch.nn.Linear(1024, rows, bias=False)
    again = RunningCheckpoint(
        SlowLocation(folder),
        other,
        torch.optim.Adam(other.parameters()),
        period=PERIOD,
        fraction=FRACTION,
        memory=None if registry is None else NodeMemory(registry),
    )
    found = again.recover_all()  # at this moment, the first one being killed, so to speak
    row = Row(
        way,
        made.saves,
        made.skipped,
        sum(held) / len(held),
        max(held),
        steps - found.iteration,
        found.seconds,
        took,
    )
    made.close(600)
    return row


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--megabytes", type=float, default=32.0, help="of the parameters; Adam has twice as much"
    )
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--pace", type=float, default=0.1, help="seconds of a step")
    parser.add_argument("--out", type=Path, help="folder for a file of the results")
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        registry = MemoryRegistry(folder / "memory")
        registry.token(create=True)
        lent = int(options.megabytes * 1e6 * 3 * 4)
        lenders = [
            Lender(registry, f"node-{n}", slab_bytes=SLAB, max_bytes=max(lent, 4 * SLAB), period=0.2)
            for n in (1, 2)
        ]
        try:
            time.sleep(2.0)  # in which they allocate
            for way in ("store", "memory", "store, waits", "memory, waits"):
                row = trained(
                    way,
                    folder / way.replace(", ", "-"),
                    registry if way.startswith("memory") else None,
                    options.megabytes,
                    options.steps,
                    options.pace,
                )
                found.append(row)
                print(
                    f"{row.way:14} {row.saves:4} saves, {row.skipped:3} skipped, held {1e3 * row.held_mean:7.1f} ms, "
                    f"most {1e3 * row.held_most:7.1f} ms, {row.behind:3} steps behind, read in {row.recovery:.2f} s, "
                    f"step {1e3 * row.step:.0f} ms",
                    flush=True,
                )
        finally:
            for lender in lenders:
                lender.close()
    if options.out:
        write_text(
            options.out / "running-checkpoints.json", json.dumps([asdict(row) for row in found]) + "\n"
        )


if __name__ == "__main__":
    main()
