"""Pieces of collectives on real gloo processes: equal to the plain ones, in one order on all ranks."""

import os

import pytest
import torch
import torch.distributed as dist

from ebbflow.infra.communication.channels import Channels
from ebbflow.infra.communication.payloads import Exchanged, Summed
from ebbflow.infra.errors import TrainingError
from tests.infra.communication.ranks import CONTROLLED, PARTS
from tests.infra.training.worlds import run_module


@pytest.mark.processes
@pytest.mark.parametrize(
    "ranks", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
def test_planned_communication_is_the_plain_one(ranks: int) -> None:
    assert run_module("tests.infra.communication.ranks", str(ranks), *PARTS) == "done\n"


@pytest.mark.processes
def test_every_option_among_eight_ranks() -> None:
    assert run_module("tests.infra.communication.ranks", "8", "every_option") == "done\n"


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_training_gets_its_plan_or_plain_collectives_with_a_reason(ranks: int) -> None:
    assert run_module("tests.infra.communication.ranks", str(ranks), *CONTROLLED) == "done\n"


def test_payloads_that_are_none_are_refused() -> None:
    with pytest.raises(TrainingError, match="must be contiguous"):
        Summed(torch.ones(3, 4).t())
    with pytest.raises(TrainingError, match=r"elements sent must be >= 0 and add up to 3; got \[1, 1\]"):
        Exchanged(torch.ones(3), torch.ones(2), [1, 1], [1, 1])
    with pytest.raises(TrainingError, match="rows must keep their type"):
        Exchanged(torch.ones(2), torch.ones(2, dtype=torch.float64), [1, 1], [1, 1])


def test_channels_are_made_on_interfaces_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "new_group", lambda **_: seen.append(os.environ["GLOO_SOCKET_IFNAME"]))
    Channels(2, interfaces=("lo", "eth1"))
    Channels(1)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0,eth1")
    Channels(3)
    assert seen == ["lo", "eth1", "eth0", "eth0", "eth1", "eth0"]
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0,eth1"
