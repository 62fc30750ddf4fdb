"""An epoch over samples in daemons' memory; run as a module it reads what to read from a pickled file."""

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from ebbflow.infra.memory.samples.dataset import RemoteCachedDataset

COUNT = 40


class Decoded:
    """A data set that writes down in a file which of its samples are decoded, in whatever process."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> tuple[torch.Tensor, dict[str, Any]]:
        with self.log.open("a") as log:
            log.write(f"{number}\n")
        generator = torch.Generator().manual_seed(number)
        pixels = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8, generator=generator)
        return pixels, {"label": number, "box": np.full(4, number / 7, np.float32)}

    def decoded(self) -> int:
        return len(self.log.read_text().split()) if self.log.exists() else 0


def as_it_is(sample: Any) -> Any:
    return sample


def equal(one: Any, other: Any) -> bool:
    return (
        torch.equal(one[0], other[0])
        and one[1]["label"] == other[1]["label"]
        and one[1]["box"].tobytes() == other[1]["box"].tobytes()
    )


def epoch(
    cached: RemoteCachedDataset, method: str, workers: int, expected: list[Any], *, connected: bool = False
) -> None:
    """Read all samples in new workers, in random order, and compare them."""
    if connected:
        assert equal(cached[0], expected[0])
    loader = DataLoader(
        cached,  # type: ignore[arg-type]
        batch_size=None,
        shuffle=True,
        num_workers=workers,
        multiprocessing_context=method,
        collate_fn=as_it_is,
    )
    found = sorted(loader, key=lambda sample: int(sample[1]["label"]))
    assert len(found) == COUNT
    assert all(map(equal, found, expected))


if __name__ == "__main__":
    read, samples, first = pickle.loads(Path(sys.argv[1]).read_bytes())
    epoch(read, "fork", 2, samples, connected=first)
