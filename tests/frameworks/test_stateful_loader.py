"""torchdata's loader as a stream of samples: it resumes where it was, with and without processes that read ahead."""

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ebbflow import SampleStream


class Lines(IterableDataset[Any]):
    """Numbers one after the other, with a state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 44:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Lines, lambda: list(range(44))])
def test_a_stateful_loader_continues_at_the_sample_after_the_last(kind: Any, workers: int) -> None:
    if kind is Lines and workers > 1:
        workers = 1  # each of several would read all

    def loader() -> StatefulDataLoader[Any]:
        return StatefulDataLoader(kind(), batch_size=None, num_workers=workers)

    stream = SampleStream(loader, 40)
    assert [int(stream[number]) for number in range(21)] == list(range(21))
    other = SampleStream(loader, 40)
    other.load_state_dict(stream.state_dict())
    assert [int(other[number]) for number in (21, 22, 39, 0, 5, 39)] == [21, 22, 39, 0, 5, 39]
    third = SampleStream(loader, 40)
    third.load_state_dict(other.state_dict())
    assert [int(third[number]) for number in (0, 3)] == [0, 3], "the next pass"
