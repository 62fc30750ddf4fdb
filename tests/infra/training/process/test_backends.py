"""What carries the tensors of a process."""

import pytest
import torch

from ebbflow.infra.errors import TrainingError
from ebbflow.infra.training.process.world import BACKEND, backends


def test_nccl_carries_tensors_of_gpus_unless_gloo_is_asked_for() -> None:
    gpu = torch.device("cuda", 0)
    assert backends(torch.device("cpu"), {BACKEND: "nccl"}) == "gloo"
    assert backends(gpu, {}) == "cpu:gloo,cuda:nccl"
    assert backends(gpu, {BACKEND: "GLOO"}) == "cpu:gloo,cuda:gloo"
    with pytest.raises(TrainingError, match="EBBFLOW_BACKEND must be nccl or gloo; got 'mpi'"):
        backends(gpu, {BACKEND: "mpi"})
