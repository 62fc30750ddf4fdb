"""What only a GPU can show: NCCL's group, replayed graphs, shards and saves of CUDA tensors. One GPU is enough."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.benchmarks.ranks import together
from tests.infra.training import gpu_work

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


def found(work: Any) -> Any:
    return together(work, 1, "cuda")


def test_an_elastic_run_trains_as_a_plain_loop_does() -> None:
    assert found(gpu_work.elastic) == pytest.approx(found(gpu_work.plain), rel=1e-5)


def test_replayed_graphs_train_the_same() -> None:
    graphs = together(gpu_work.elastic, 1, "cuda", True)
    assert graphs == pytest.approx(found(gpu_work.plain), rel=1e-3)


def test_shards_over_nccl_train_the_same_and_come_back_whole() -> None:
    seen = found(gpu_work.sharded)
    assert "cuda:nccl" in seen["backend"]
    assert seen["losses"] == pytest.approx(found(gpu_work.plain), rel=1e-5)
    assert (seen["step"], seen["same"]) == (gpu_work.STEPS, True)


def test_the_hook_averages_over_nccl_and_measures_norm_and_time() -> None:
    seen = found(gpu_work.hooked)
    assert seen["averages"]
    assert seen["total"] == pytest.approx(seen["square"], rel=1e-4)
    assert 0 < seen["seconds"] < 60


def test_a_group_that_is_made_anew_leaves_nothing_on_the_gpu() -> None:
    seen = found(gpu_work.remade)
    assert seen["same"]
    # of the whole GPU, of which others may take some meanwhile: what a group left would be taken again and again
    grown = sum(later > earlier for earlier, later in pairwise(seen["memory"][2:]))
    assert grown <= 3, seen
    print(f"a group made anew and used: {seen['seconds']:.3f} s, the first {seen['first']:.3f} s")


def test_a_large_model_is_saved_beside_its_training() -> None:
    seen = found(gpu_work.saved)
    assert seen["same"]
    assert seen["saves"] >= 3
    assert seen["beside"] >= 2, "steps go on while a save is written"
    print({name: value for name, value in seen.items() if math.isfinite(value)})
