"""Rows of packed documents: what attention sees, what a run reads of them, and through which changes."""

import math
import os
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from ebbflow.infra.errors import DatasetError
from ebbflow.infra.training import ElasticRun
from ebbflow.infra.training.data.packed import IGNORED, PackedBatch, packed_samples
from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.saving.data_order import DataOrder, DataPosition, shares

LENGTH = 16
SIZES = np.random.default_rng(3).integers(1, 21, 60)  # some are longer than a row
TOKENS = [torch.arange(1, size + 1) + 100 * number for number, size in enumerate(SIZES.tolist())]


@pytest.fixture(autouse=True)
def _plain_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("EBBFLOW_") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)


def pieces_of(batch: PackedBatch) -> Iterator[torch.Tensor]:
    """Yield the tokens of each document of a batch, by its document numbers."""
    for tokens, documents in zip(batch.tokens, batch.documents, strict=True):
        for number in range(int(documents.max()) + 1):
            yield tokens[documents == number]


def expected() -> Counter[tuple[int, ...]]:
    return Counter(tuple(piece.tolist()) for one in TOKENS for piece in one.split(LENGTH))


def test_attention_of_a_row_is_that_of_each_document_alone() -> None:
    samples = packed_samples(TOKENS, LENGTH, 1, True, 0)
    batch: PackedBatch = samples.read(np.arange(3))
    torch.manual_seed(0)
    embed = nn.Embedding(6100, 8)
    places = nn.Embedding(LENGTH, 8)

    def attend(tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        x = (embed(tokens) + places(positions))[:, None]
        return scaled_dot_product_attention(x, x, x, attn_mask=mask, is_causal=mask is None)[:, 0]

    together = attend(batch.tokens, batch.positions, batch.mask())
    flat_tokens, flat = batch.tokens.flatten(), together.flatten(0, 1)
    starts = batch.cu_seqlens.tolist()
    assert starts[-1] == batch.tokens.numel()
    assert batch.max_seqlen == max(b - a for a, b in pairwise(starts)) <= LENGTH
    for begin, end in pairwise(starts):  # as varlen attention reads it
        alone = attend(flat_tokens[None, begin:end], torch.arange(end - begin)[None], None)[0]
        torch.testing.assert_close(flat[begin:end], alone)
        labels = batch.labels.flatten()[begin:end]
        if batch.documents.flatten()[begin] >= 0:
            number, last = divmod(int(flat_tokens[end - 1]), 100)
            after = IGNORED if last == SIZES[number] else 100 * number + last + 1  # beyond a cut, too
            assert labels.tolist() == [*flat_tokens[begin + 1 : end].tolist(), after]
        else:
            assert set(labels.tolist()) == {IGNORED}

    from torch.nn.attention.flex_attention import create_block_mask, create_mask

    rows, length = batch.tokens.shape
    mask = create_mask(batch.mask_mod(), rows, 1, length, length, device="cpu")
    assert torch.equal(mask, batch.mask())
    blocks = create_block_mask(batch.mask_mod(), rows, 1, length, length, device="cpu", BLOCK_SIZE=4)
    assert blocks.sparsity() > 0, "pairs of other documents are not computed"
    assert torch.equal(batch.mask(causal=False), batch.mask() | batch.mask().transpose(2, 3))


def test_no_document_is_lost_or_doubled_while_the_world_changes() -> None:
    samples = packed_samples(TOKENS, LENGTH, 5, True, 0)
    order = DataOrder(samples.length, 5)
    cursor, seen, step = DataPosition(), Counter[tuple[int, ...]](), 0
    while cursor.turn < 2:
        world = (1, 3, 2, 4)[step % 4]
        count = min(7, order.left(cursor))
        for row in shares(cursor.position, count, world, 1):
            for share in row:
                if share.weight:
                    again = packed_samples(TOKENS, LENGTH, 5, True, 0)  # as a process that was started again
                    batch = again.read(order.indices(cursor.turn, share.start, share.stop))
                    seen.update(tuple(piece.tolist()) for piece in pieces_of(batch))
        cursor, step = order.after(cursor, count), step + 1
    assert seen == Counter({piece: 2 * times for piece, times in expected().items()})


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_trains_on_rows_and_continues_with_the_next(tmp_path: Path, workers: int) -> None:
    seen: Counter[tuple[int, ...]] = Counter()
    documents = [one.tolist() for one in TOKENS] if workers else TOKENS

    def train(steps: int) -> float:
        with ElasticRun.start(directory=tmp_path, run_id="r", seed=2) as run:
            model, _ = run.prepare(
                nn.Sequential(nn.Embedding(6100, 4), nn.Linear(4, 6100)),
                lambda parameters: torch.optim.SGD(parameters, lr=0.1),
                batch_size=6,
            )
            for _ in run.epochs(1):
                for batch in run.batches(documents, tokens=LENGTH, pack=True, workers=workers):
                    seen.update(tuple(piece.tolist()) for piece in pieces_of(batch))
                    loss = cross_entropy(model(batch.tokens).transpose(1, 2), batch.labels, reduction="sum")
                    run.backward(loss / batch.tokens.numel())
                    run.step()
                    if run.progress.step == steps:
                        return run.statistics.tokens
            return math.nan

    tokens = train(4)
    assert 0 < tokens <= LENGTH, "padding is no token"
    before = sum(seen.values())
    train(0)
    assert 0 < before < sum(seen.values())
    assert seen == expected(), "each once, on both sides of the restart"


class Stored:
    """Documents that know their lengths, and are not read to be measured."""

    def __init__(self) -> None:
        self.lengths = [3, 2, 4]
        self.read: list[int] = []

    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> Any:
        self.read.append(number)
        return np.arange(self.lengths[number])


def test_documents_that_know_their_lengths_are_read_when_they_are_needed() -> None:
    stored = Stored()
    samples = packed_samples(stored, 5, 0, False, 0)
    assert (samples.length, stored.read) == (2, [])
    assert samples.read(np.array([0])).tokens.tolist() == [[0, 1, 2, 3, 0]], "the longest goes first"
    assert stored.read == [2]
    stored.lengths = [3]
    with pytest.raises(DatasetError, match="lengths must be the tokens of 3 documents"):
        packed_samples(stored, 5, 0, False, 0)


def test_a_document_without_tokens_is_in_no_row() -> None:
    samples = packed_samples([[], [7, 8, 9], np.array([]), [1]], 2, 0, False, 0)
    batch = samples.read(np.arange(samples.length))
    assert batch.tokens.tolist() == [[7, 8], [9, 1]]
    assert batch.labels.tolist() == [[8, 9], [IGNORED, IGNORED]], "the cut loses no label"


@pytest.mark.parametrize(
    ("documents", "tokens", "error", "why"),
    [
        (TOKENS, None, OptionError, "tokens must be a whole number >= 1; got None"),
        (TOKENS, len, OptionError, "pack=True takes the tokens of a row"),
        (TOKENS, True, OptionError, "got True"),
        (iter(TOKENS), 8, DatasetError, "has no length"),
        ([torch.zeros(2, 2)], 8, DatasetError, r"document 0 has the shape \(2, 2\)"),
        ([torch.zeros(3)], 8, DatasetError, "whole numbers"),
        ([{"input_ids": [1, 2]}], 8, DatasetError, "whole numbers; document 0 is of dict"),
        (["some text"], 8, DatasetError, "document 0 is of str"),
    ],
)
def test_what_cannot_be_packed_is_told(documents: Any, tokens: Any, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        packed_samples(documents, tokens, 0, True, 0)
