"""Norms of gradients over two gloo processes, through DDP's communication hook."""

import json
import os
import subprocess
import sys

import pytest
import torch

from ebbflow.infra.training.gradients.noise import GradientMeter
from tests.infra.training import gradient_ranks
from tests.infra.training.gradient_ranks import EXAMPLES, data, flat, loss, network
from tests.infra.training.worlds import ROOT


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    started = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", gradient_ranks.__name__, str(rank), str(folder)],
            stderr=(folder / f"{rank}.log").open("w"),
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for rank in range(2)
    ]
    try:
        codes = [process.wait(timeout=150) for process in started]
    finally:
        for process in started:
            process.kill()
    assert codes == [0, 0], [(folder / f"{rank}.log").read_text()[-2000:] for rank in range(2)]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def whole():
    """Return the gradient over all examples, in one batch."""
    model = network()
    loss(model, data()).backward()
    return flat(model)


def alone(passes):
    """Measure the same examples in one process, in so many passes of these sizes."""
    model = network()
    meter = GradientMeter(model, torch.optim.SGD(model.parameters(), 0.1), EXAMPLES)
    for n, x in enumerate(data().split(passes)):
        weight = len(x) / EXAMPLES
        with meter.micro_pass(last=n == len(passes) - 1, weight=weight):
            (loss(model, x) * weight).backward()
    return meter.finish(meter.local(EXAMPLES), 1, EXAMPLES)


def test_the_hook_averages_as_ddp_does(ranks):
    for rank in ranks:
        assert max(rank["plain"]["gaps"]) < 1e-9
        for local, samples, total, _, dense in rank["plain"]["parts"]:
            assert samples == 2
            assert total == pytest.approx(dense, rel=1e-5)
            assert local / 2 > total


@pytest.mark.parametrize("case", ["even", "accumulated", "uneven", "scaled", "idle"])
def test_shares_of_any_size_make_one_big_batch(ranks, whole, case):
    for rank in ranks:
        torch.testing.assert_close(torch.tensor(rank[case]["gradient"]).double(), whole, rtol=1e-4, atol=1e-7)
        assert rank[case]["summed"][2] == pytest.approx(float(whole @ whole), rel=1e-5)
    assert ranks[0][case]["statistics"] == ranks[1][case]["statistics"]


def test_two_processes_find_what_one_finds_in_two_passes(ranks):
    for case, passes in (
        ("even", [12, 12]),
        ("accumulated", [12, 12]),
        ("scaled", [12, 12]),
        ("uneven", [6, 18]),
    ):
        assert ranks[0][case]["statistics"] == pytest.approx(alone(passes), rel=1e-4)


def test_a_rank_without_examples_is_no_sample(ranks):
    assert ranks[0]["idle"]["summed"][1] == 1
    assert ranks[0]["idle"]["statistics"] == [1.0, 0.0]


def test_adam_norms_over_ranks_are_those_of_the_dense_preconditioner(ranks):
    for step in range(9):
        totals = [rank["adam"]["steps"][step] for rank in ranks]
        for local, samples, _, _, dense_local, dense_total, *summed in totals:
            assert samples == 1
            assert local == pytest.approx(dense_local, rel=2e-4)
            assert summed[2] == pytest.approx(dense_total, rel=2e-4)
        assert sum(t[0] for t in totals) == pytest.approx(totals[0][6])
    assert ranks[0]["adam"]["steps"][5][0] > 100 * ranks[0]["adam"]["steps"][4][0]


def test_one_broken_gradient_is_known_to_all(ranks):
    assert [rank["broken"] for rank in ranks] == [{"finite": False, "same": True}] * 2


def test_waiting_for_a_late_rank_is_synchronisation(ranks):
    for (early, mean), (own, same) in zip(*(rank["late"]["steps"] for rank in ranks), strict=True):
        assert early > 0.3
        assert 0 < own < early
        assert mean == pytest.approx(same)
        assert mean == pytest.approx((early + own) / 2)


def test_a_last_pass_that_did_not_synchronise_is_refused(ranks):
    assert all("ran under no_sync()" in rank["unsynchronised"]["error"] for rank in ranks)


def test_gaussian_gradients_on_two_ranks_give_their_noise_scale(ranks):
    assert ranks[0]["noise"]["found"] == pytest.approx(ranks[0]["noise"]["true"], rel=0.1)
