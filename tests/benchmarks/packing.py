"""How much of a batch is padding, packed and not: functions of Python's standard library, a byte a token.

Run from the repository root: ``python -m tests.benchmarks.packing --out DIR`` (seconds). Documents alone in rows
of one length, padded to the longest of each batch of 16 instead, and packed by first-fit decreasing; those that are
longer than a row are cut into pieces everywhere. Writes ``packing.json``.
"""

import argparse
import ast
import json
import platform
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ebbflow.infra.storage.files import write_text
from ebbflow.planners.training.packing import pack

ROWS = (1024, 2048, 8192)
BATCH = 16


def functions() -> Iterator[int]:
    """Yield the length of each function of the standard library, in bytes of its lines."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_bytes()
        ends = np.cumsum([0, *(len(line) for line in text.splitlines(keepends=True))])
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
                yield int(ends[node.end_lineno] - ends[node.lineno - 1])


def alone(lengths: NDArray[np.int64], row: int) -> tuple[float, float]:
    """Return the share of padding of documents alone in rows, and of batches padded to their longest document."""
    packing = pack(lengths, row, window=1)
    pieces = packing.stops - packing.starts
    order = np.random.default_rng(0).permutation(len(pieces))
    batches = np.array_split(pieces[order], max(1, len(pieces) // BATCH))
    longest = sum(int(batch.max()) * len(batch) for batch in batches)
    return packing.padding, 1 - packing.tokens / longest


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    lengths = np.array(list(functions()))
    order = np.random.default_rng(0).permutation(len(lengths))
    figures = []
    for row in ROWS:
        begun = time.perf_counter()
        packing = pack(lengths, row, order)
        took = time.perf_counter() - begun
        whole, longest = alone(lengths, row)
        one = {"alone": whole, "longest": longest, "packed": packing.padding}
        figures.append({"row": row, **one, "rows": len(packing), "seconds": round(took, 3)})
        print(figures[-1])
    found = {
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "median": int(np.median(lengths)),
        "longest": int(lengths.max()),
        "python": platform.python_version(),
        "figures": figures,
    }
    write_text(given.out / "packing.json", json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
