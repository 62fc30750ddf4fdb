"""Epochs over decoded samples: from the data set, from nodes' memory, and from files of a local disk.

``python -m tests.benchmarks.cached_samples`` starts two daemons, and reads one data set in a ``DataLoader`` with two
forked workers: first each sample is decoded and kept, then it comes from memory. Files of a local disk, each of them
in the page cache, are what a cache on the node itself would be. Medians of the rounds are printed, in samples/s.
"""

import argparse
import os
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from ebbflow.infra.memory.registry import MemoryRegistry
from ebbflow.infra.memory.samples.dataset import RemoteCachedDataset
from ebbflow.infra.memory.samples.encoding import decode, encode
from tests.infra.memory.lenders import Lender

SIDE, SHOWN = 512, 224  # pixels of a picture as it is stored, and as it is trained on


class Pictures:
    """Pictures that are inflated, and made smaller by taking means."""

    def __init__(self, count: int) -> None:
        rng = np.random.default_rng(0)
        smooth = rng.integers(0, 256, (16, 32, 32, 3), np.uint8).repeat(16, 1).repeat(16, 2)
        noise = rng.integers(0, 8, smooth.shape, np.uint8)
        self._stored = [
            zlib.compress((one // 2 + two).tobytes(), 6) for one, two in zip(smooth, noise, strict=True)
        ]
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        raw = np.frombuffer(zlib.decompress(self._stored[number % len(self._stored)]), np.uint8)
        pixels = torch.from_numpy(raw.reshape(1, SIDE, SIDE, 3).copy()).permute(0, 3, 1, 2).float()
        small = torch.nn.functional.interpolate(pixels, (SHOWN, SHOWN), mode="area")
        return small[0].round().to(torch.uint8), number


class Files:
    """The same samples, from files."""

    def __init__(self, folder: Path, data: Pictures) -> None:
        self._folder, self._data = folder, data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, number: int) -> Any:
        path = self._folder / str(number)
        if path.exists():
            return decode(path.read_bytes())
        sample = self._data[number]
        path.write_bytes(encode(sample))
        return sample


def epoch(data: Any, workers: int) -> float:
    """Return samples/s."""
    loader: DataLoader[Any] = DataLoader(data, 32, shuffle=True, num_workers=workers)
    began = time.perf_counter()
    seen = sum(len(labels) for _, labels in loader)
    assert seen == len(data)
    return seen / (time.perf_counter() - began)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    read = parser.parse_args()
    torch.set_num_threads(1)
    data = Pictures(read.samples)
    size = len(encode(data[0]))
    with tempfile.TemporaryDirectory() as folder:
        registry = MemoryRegistry(Path(folder) / "memory")
        lenders = [
            Lender(registry, f"node-{n}", slab_bytes=16 << 20, max_bytes=1 << 30, headroom=0.125, period=1.0)
            for n in range(2)
        ]
        seen: dict[str, list[float]] = {}
        try:
            for number in range(read.rounds):
                files = Path(folder) / f"files-{number}"
                files.mkdir()
                cached = RemoteCachedDataset(
                    data, f"pictures-{number}", registry=registry.folder, use="always"
                )
                steps: dict[str, Callable[[], float]] = {
                    "data set itself": lambda: epoch(data, read.workers),
                    "first epoch, kept": lambda cached=cached: epoch(cached, read.workers),  # type: ignore[misc]
                    "second epoch, from memory": lambda cached=cached: epoch(cached, read.workers),  # type: ignore[misc]
                    "local files, first": lambda files=files: epoch(Files(files, data), read.workers),  # type: ignore[misc]
                    "local files, second": lambda files=files: epoch(Files(files, data), read.workers),  # type: ignore[misc]
                }
                for name, step in steps.items():
                    seen.setdefault(name, []).append(step())
        finally:
            for one in lenders:
                one.close()
    print(f"{read.samples} samples of {size / 1024:.0f} KiB, {read.workers} workers, {read.rounds} rounds")
    for name, rates in seen.items():
        print(f"{name:28} {statistics.median(rates):7.0f} samples/s  ({min(rates):.0f} to {max(rates):.0f})")
    print(f"load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
