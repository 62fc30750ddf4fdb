"""Shared aggregation on spot traces: what a loss, a round and aggregators' nodes cost."""

from pathlib import Path

import pytest

from ebbflow.infra.simulation.traces.rows import SpotRow, read_spot_rows
from tests.benchmarks.spot.models import MODELS
from tests.benchmarks.spot.recovery import InPlace
from tests.benchmarks.spot.replicas import RecoveryCosts
from tests.benchmarks.spot.service import ServiceCosts, ServiceReplay, answer

MODEL = MODELS["GPT-2"]
FREE = ServiceCosts(front=0.0, worker=0.0, loss=0.5, counts=0.0)
FAST = RecoveryCosts(restart=0.0, join=0.0, link=1e9)


def nodes(count: int) -> list[SpotRow]:
    return [SpotRow(0, "add", f"n{i}") for i in range(count)]


def lost(count: int) -> list[SpotRow]:
    return [
        *nodes(30),
        *(SpotRow(3_600_000, "remove", f"n{i}") for i in range(count)),
        SpotRow(7_200_000, "remove", "n9"),
    ]


def test_losses_of_one_moment_cost_the_step_in_flight_and_a_pause() -> None:
    found = ServiceReplay(MODEL, lost(5), 1, FREE, FAST).run()
    assert found.fallback == int(MODEL.samples / MODEL.in_place[0] * 1000)
    assert found.restart == 500
    assert (found.checkpoint, found.idle) == (0, 0.0)


def test_nodes_of_aggregators_count_like_those_of_workers() -> None:
    counted = ServiceCosts(front=0.0, worker=0.0, loss=0.5)
    one, three = (ServiceReplay(MODEL, lost(0), count, counted, FAST).run() for count in (1, 3))
    assert one.idle == pytest.approx((7_200_000 - 45_000) / 30, rel=0.02)
    assert three.idle == pytest.approx(3 * one.idle, rel=0.02)
    assert three.share < one.share < ServiceReplay(MODEL, lost(0), 1, FREE, FAST).run().share


def test_a_round_takes_what_its_slowest_part_takes() -> None:
    costs = ServiceCosts(front=0.003, worker=0.003, processes=2)
    assert costs.round_s(100e6, 20, 1, 1e9) == pytest.approx(20 * 100 * 0.003 / 2)
    assert costs.round_s(100e6, 20, 4, 1e9) == pytest.approx(20 * 100 * 0.003 / 8)
    assert costs.round_s(100e6, 1, 4, 1e9) == pytest.approx(0.3), "the worker's own processor"
    assert costs.round_s(100e6, 20, 1, 1.0) == pytest.approx(2 * 20 * 0.8), "the aggregator's link"


def test_large_models_on_a_public_trace_stay_on_all_reduce_and_below_oobleck_s_column() -> None:
    rows = read_spot_rows(Path(__file__).parents[2] / "fixtures/training/oobleck/10m.csv")
    assert answer(MODEL, rows) == "allreduce"
    assert ServiceReplay(MODEL, rows, 4).run().share < InPlace(MODEL, rows).run().share
