"""Failures and recovery: what is restored, what is not, and what it costs."""

import numpy as np
import pytest

from ebbflow.planners.training.saving.partial import CheckpointSchedule
from tests.evaluation.scar.factorisation import RANK, ROWS, Factorisation
from tests.evaluation.scar.failures import (
    Failure,
    Record,
    Saved,
    after_failure,
    crossing,
    failures,
    iterations_until,
    patience,
    record,
)
from tests.evaluation.scar.metrics import Trials
from tests.evaluation.scar.mlr import Regression
from tests.evaluation.scar.plan import PARTIAL, STRATEGIES, TOTAL, TRADITIONAL
from tests.evaluation.scar.problems import block_of
from tests.evaluation.scar.runs import measured


@pytest.fixture(scope="module")
def kept() -> Record:
    return record(Factorisation(), 30)


@pytest.fixture(scope="module")
def results() -> Trials:
    ways = (*PARTIAL, *((strategy, 8, 0.5) for strategy in STRATEGIES), *TOTAL)
    return Trials("mlr-8", [measured("mlr", 60, 8, ways, runs=2, trials=30)])


def test_the_criterion_is_met_between_two_iterations() -> None:
    assert crossing(3.0, 1.0, 1.5, 10) == 9.75
    assert crossing(3.0, 1.0, 1.5, 10, last=6) == 9.0
    assert crossing(3.0, 1.0, 1.0, 10) == 10.0


def test_failures_come_before_the_end_and_lose_more_of_the_same(kept: Record) -> None:
    made = failures(kept, 200, 0)
    assert all(1 <= failure.iteration < 30 for failure in made)
    # Geometric with a mean of 15, cut at 30: about 10.7.
    assert np.mean([failure.iteration for failure in made]) == pytest.approx(10.7, abs=1.6)
    assert len({tuple(failure.order) for failure in made}) == 200
    for failure in made[:5]:
        quarter, half = set(failure.lost(0.25).tolist()), set(failure.lost(0.5).tolist())
        assert quarter < half
        assert len(half) == 175
    again = failures(kept, 200, 0)
    assert [f.iteration for f in again] == [f.iteration for f in made]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_survivors_stay_and_the_lost_are_as_saved(kept: Record, strategy: str) -> None:
    saved = Saved(kept, CheckpointSchedule(8, 1 / 8), strategy)  # type: ignore[arg-type]
    blocks = block_of(kept.problem)
    for failure in failures(kept, 5, 1):
        ages = saved.after(failure)
        state = after_failure(kept, failure, ages, 0.5)
        lost = np.isin(blocks, failure.lost(0.5))
        np.testing.assert_array_equal(state[~lost], kept.states[failure.iteration][0][~lost])
        for block in failure.lost(0.5):
            mine = blocks == block
            np.testing.assert_array_equal(state[mine], kept.states[ages[block]][0][mine])
        assert (ages <= failure.iteration).all()


def test_whole_checkpoints_restored_whole_are_a_state_of_the_clean_run(kept: Record) -> None:
    saved = Saved(kept, CheckpointSchedule(8, 1.0))
    for failure in failures(kept, 10, 2):
        state = after_failure(kept, failure, saved.after(failure), 1.0)
        np.testing.assert_array_equal(state, kept.states[failure.iteration // 8 * 8][0])


def test_a_whole_checkpoint_costs_its_age(kept: Record) -> None:
    # Nothing in the factorisation depends on chance, so what is repeated is exactly what was lost.
    saved, made = Saved(kept, CheckpointSchedule(8, 1.0)), failures(kept, 30, 3)
    starts = [after_failure(kept, failure, saved.after(failure), 1.0) for failure in made]
    ends = iterations_until(kept.problem, starts, made, kept.criterion, patience(kept))
    # At the flat end of the curve the last digit of the loss decides where between two iterations it is met.
    np.testing.assert_allclose(ends - 30, [failure.iteration % 8 for failure in made], atol=1e-4)


def test_a_loss_of_what_the_next_step_computes_costs_nothing(kept: Record) -> None:
    rows = Failure(12, np.arange(ROWS), 0, 0)
    state = kept.states[12][0].copy()
    state[: ROWS * RANK] = 0.0
    ends = iterations_until(kept.problem, [state], [rows], kept.criterion, patience(kept))
    assert ends[0] == pytest.approx(30, abs=1e-4)


def test_a_run_that_never_gets_there_is_given_up(kept: Record) -> None:
    failure = Failure(5, np.arange(3), 0, 0)
    ends = iterations_until(kept.problem, [kept.states[5][0]], [failure], 0.0, 40)
    assert ends[0] == 40


def test_looking_seldom_changes_little() -> None:
    class Seldom(Regression):
        look_every = 4

    often, seldom = record(Regression(), 60), record(Seldom(), 60)
    made = failures(often, 15, 4)
    saved = Saved(often, CheckpointSchedule(8, 1.0))
    starts = [after_failure(often, failure, saved.after(failure), 0.5) for failure in made]
    ends = [iterations_until(k.problem, starts, made, k.criterion, 180) for k in (often, seldom)]
    np.testing.assert_allclose(ends[0], ends[1], atol=0.05)


def test_rework_falls_with_what_is_lost(results: Trials) -> None:
    means = [results.cost(way).mean for way in (*PARTIAL[1:], TRADITIONAL)]
    assert means == sorted(means)
    assert results.less(("full", 1, 0.25), ("full", 1, 0.75)) is True
    assert results.less(("full", 1, 0.75), TRADITIONAL) is True


def test_priority_is_best_and_chance_is_worst(results: Trials) -> None:
    for lost in (0.5, 1.0):
        priority, turns, chance = [(strategy, 8, lost) for strategy in STRATEGIES]
        assert results.less(priority, turns) is True
        assert results.less(turns, chance) is True
    assert results.less(("priority", 8, 0.5), ("full", 1, 0.5)) is True
    assert results.less(("random", 8, 1.0), TRADITIONAL) is False


def test_priority_at_eight_times_saves_well_over_half(results: Trials) -> None:
    assert results.saved(("priority", 8, 0.5)).mean > 60
    assert results.saved(("priority", 8, 1.0)).low > 0
