"""Samples that can only be iterated: each is used once a pass, also where a run resumes in the middle of one."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from ebbflow import SampleStream
from ebbflow.infra.errors import DatasetError
from ebbflow.infra.training import ElasticRun, RunStopped
from ebbflow.planners.errors import OptionError

X = torch.randn(44, 4, generator=torch.Generator().manual_seed(1))


class Lines(IterableDataset[Any]):
    """Numbers, or rows of ``X``, one after the other; with a state, as torchdata's and Hugging Face's have one."""

    read = 0  # samples of all of them

    def __init__(self, count: int = 44, rows: bool = False) -> None:
        self.count, self.rows, self.at = count, rows, 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.count:
            Lines.read += 1
            self.at += 1
            yield X[self.at - 1] if self.rows else self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("make", [Lines, range(44), lambda: iter(range(44))])
def test_samples_are_read_in_order_and_the_last_ones_again(make: Any) -> None:
    stream = SampleStream(make, 40, keep=8)
    assert len(stream) == 40
    order = [0, 1, 2, 9, 10, 3, 9, 30, 39, 32, 39, 0, 39, 31]
    assert [stream[number] for number in order] == order
    with pytest.raises(IndexError, match="sample 40 of 40"):
        stream[40]


def test_where_a_stream_is_continues_without_reading_what_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lines, "read", 0)
    stream, other = SampleStream(Lines, 40), SampleStream(Lines, 40)
    assert stream[20] == 20
    state = stream.state_dict()
    assert state == {"read": 21, "state": {"at": 21}}
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert (other[25], Lines.read) == (25, 21 + 5)
    assert (other[3], other[39]) == (3, 39), "a known place ahead of a sample is no way to it"
    assert other.state_dict() == {"read": 40, "state": {"at": 40}}
    plain = SampleStream(range(44), 40)
    assert plain[20] == 20
    again = SampleStream(range(44), 40)
    again.load_state_dict(plain.state_dict())
    assert again[21] == 21


def test_what_is_no_stream_of_a_pass_is_refused() -> None:
    with pytest.raises(DatasetError, match="ended after 12 samples; a pass has 20"):
        SampleStream(range(12), 20)[15]
    for wrong in ({"length": 0}, {"length": 1, "keep": 0}):
        with pytest.raises(OptionError, match="must be >= 1 samples; got 0"):
            SampleStream(range(3), **wrong)
    with pytest.raises(OptionError, match="a Lines has a state: give a function"):
        SampleStream(Lines(), 4)
    with ElasticRun.start() as run:
        run.prepare(torch.nn.Linear(4, 1), lambda p: torch.optim.SGD(p, 0.1), batch_size=4)
        for _ in run.epochs(1):
            with pytest.raises(OptionError, match="got shuffle=True, workers=0, pack=False"):
                next(run.batches(SampleStream(range(8), 8)))
            break


@pytest.mark.parametrize("kind", [lambda: Lines(rows=True), lambda: iter(X)])
def test_a_run_over_a_stream_resumes_at_the_sample_after_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Callable[[], Any]
) -> None:
    for name in [name for name in os.environ if name.startswith("EBBFLOW_")]:
        monkeypatch.delenv(name)

    def trained(folder: Path, data: Any, stop: int | None = None) -> tuple[list[list[float]], torch.Tensor]:
        torch.manual_seed(1)
        used, keep = [], {"stream": data} if isinstance(data, SampleStream) else {}
        try:
            with ElasticRun.start(directory=folder, run_id="t") as run:
                model, _ = run.prepare(
                    torch.nn.Linear(4, 1),
                    lambda p: torch.optim.SGD(p, 0.1),
                    batch_size=6,
                    max_local=4,
                    state=keep,
                )
                for _ in run.epochs(3):
                    for x in run.batches(data, shuffle=False):
                        used += x[:, 0].tolist()
                        run.backward(model(x).square().mean())
                        if run.progress.step == stop:
                            stop = None
                            os.kill(os.getpid(), signal.SIGTERM)
                        run.step()
        except RunStopped:
            pass
        return used, model.weight.detach().clone()

    wanted, weight = trained(tmp_path / "plain", X[:40])
    parts: list[Any] = []
    for stop in (3, 9, None):
        used, found = trained(tmp_path / "stream", SampleStream(kind, 40), stop)
        parts += used
    assert parts == wanted
    assert torch.equal(found, weight)
