"""What checksums and the rest of what guards against damage cost while nothing is damaged, against an older
checkout.

Run from the repository root: ``python -m tests.benchmarks.undisturbed_cost --before CHECKOUT --out DIR [--pairs
60]``. ``CHECKOUT`` is a folder with an older state of this repository (``git worktree add``); both are run by
this Python environment. One process of each does the same work by turns, and which goes first changes from pair
to pair: a query on DuckDB over TPC-H of scale factor 0.1 whose stages are stored, the same from its stored
result, a full checkpoint of 12 million parameters, and 100 events in a ledger. A kind of work ends early once
its median ratio is known well enough to tell on which side of the bound it is. Writes
``undisturbed_cost.json``. A quarter of an hour on two quiet cores.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ebbflow.infra.storage.files import write_text

KINDS = ("query", "again", "save", "ledger")
BOUND = 1.02
LEAST = 15  # pairs
CONFIDENCE = 0.95
_RESAMPLES = 2000
_PATIENCE = 300.0  # s for one piece of work


class Worker:
    """A process that works with the code of one checkout; see ``cost_worker``."""

    def __init__(self, checkout: Path, tables: str) -> None:
        script = str(Path(__file__).with_name("cost_worker.py"))
        self._process = subprocess.Popen(
            [sys.executable, script, str(checkout), tables],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def time(self, work: str) -> Mapping[str, float]:
        """Return the seconds of one piece of ``work``, by the wall and of the processor."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"work": work}) + "\n")
        self._process.stdin.flush()
        impatient = threading.Timer(_PATIENCE, self._process.kill)
        impatient.start()
        try:
            for line in self._process.stdout:
                if line.startswith('{"seconds"'):
                    found: Mapping[str, float] = json.loads(line)
                    return found
        finally:
            impatient.cancel()
        raise RuntimeError(f"the worker ended with status {self._process.wait(60)} in {work!r}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate(timeout=60)


def interval(ratios: Sequence[float], rng: random.Random) -> tuple[float, float]:
    """Return a bootstrap interval of the median."""
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    outside = (1 - CONFIDENCE) / 2
    return medians[int(outside * _RESAMPLES)], medians[int((1 - outside) * _RESAMPLES) - 1]


def compare(
    kind: str, before: Worker, after: Worker, most: int, show: Callable[[str], None]
) -> dict[str, Any]:
    """Let both work by turns, until the median ratio is known well enough or for ``most`` pairs."""
    rng = random.Random(1)
    for worker in (before, after):
        worker.time(kind)  # imports, compiled code, files in memory
    found: dict[str, list[tuple[float, float]]] = {"seconds": [], "cpu": []}
    low, high = 0.0, float("inf")
    for number in range(most):
        order = (before, after) if number % 2 else (after, before)
        times = {worker: worker.time(kind) for worker in order}
        for clock, pairs in found.items():
            pairs.append((times[before][clock], times[after][clock]))
        if number + 1 >= LEAST:
            low, high = interval([b / a for a, b in found["seconds"]], rng)
            if high < BOUND or low > BOUND:
                break
    ratios = {clock: statistics.median(b / a for a, b in pairs) for clock, pairs in found.items()}
    told = {
        "work": kind,
        "pairs": len(found["seconds"]),
        "ratio": ratios["seconds"],
        "low": low,
        "high": high,
        "cpu_ratio": ratios["cpu"],
        "before_s": statistics.median(a for a, _ in found["seconds"]),
        "after_s": statistics.median(b for _, b in found["seconds"]),
    }
    show(
        f"{kind:7} {told['pairs']:3} pairs  {told['before_s']:.3f} s -> {told['after_s']:.3f} s  "
        f"x {told['ratio']:.4f} ({low:.4f} to {high:.4f})  processor x {told['cpu_ratio']:.4f}"
    )
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, help="folder of the older checkout")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=60, help="at most, of each kind of work")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--scale", default="0.1", help="TPC-H scale factor")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    here = Path(__file__).parents[2]
    revision = ["git", "-C", str(given.before), "rev-parse", "--short", "HEAD"]
    with tempfile.TemporaryDirectory(prefix="ebbflow-tpch-") as tables:
        generate = [str(Path(sys.executable).with_name("tpchgen-cli")), "parquet", "-s", given.scale]
        subprocess.run([*generate, "--output-dir", tables], check=True, capture_output=True, timeout=300)
        rows = []
        for kind in given.kinds.split(","):
            with Worker(given.before.resolve(), tables) as before, Worker(here, tables) as after:
                rows.append(compare(kind, before, after, given.pairs, lambda text: print(text, flush=True)))
    found = {
        "before": subprocess.run(
            revision, check=True, capture_output=True, text=True, timeout=60
        ).stdout.strip(),
        "bound": BOUND,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "load": os.getloadavg()[0],
        "scale": given.scale,
        "rows": rows,
    }
    write_text(given.out / "undisturbed_cost.json", json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
