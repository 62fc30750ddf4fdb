"""Norms and memory of sharded gradients, their saves, and what cannot be sharded, in worlds of real processes."""

import pytest
from torch import nn

from ebbflow.infra.training.sharded.parallel import repeated_blocks
from tests.infra.training.worlds import run_module

pytestmark = pytest.mark.processes


def test_norms_memory_saves_and_refusals_on_four_ranks() -> None:
    run_module("tests.infra.training.sharded.shard_ranks", timeout=280.0)


def test_repeated_blocks_are_gathered_one_by_one() -> None:
    layer = nn.TransformerEncoderLayer(8, 2)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 8), "body": encoder, "head": nn.Linear(8, 5)})
    assert list(repeated_blocks(model)) == list(encoder.layers)
    frozen = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2)))
    assert list(repeated_blocks(frozen)) == list(frozen)
    assert list(repeated_blocks(frozen.requires_grad_(False))) == []
    assert list(repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))) == []
