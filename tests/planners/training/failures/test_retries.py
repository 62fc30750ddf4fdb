"""Retry policies: the worked examples, and what holds for every history."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.failures.failures import Failure, FailureClass
from ebbflow.planners.training.failures.retries import (
    Attempt,
    BlindRetry,
    Requeue,
    Retry,
    RetryPolicy,
    Shape,
    Stop,
    Verdict,
    adapted,
)

POLICY = RetryPolicy()
ALONE = Shape(64)
CLASS = {
    "syntax-error": FailureClass.USER,
    "incorrect-inputs": FailureClass.DATA,
    "gpu-out-of-memory": FailureClass.RESOURCE,
    "host-out-of-memory": FailureClass.RESOURCE,
    "no-space": FailureClass.RESOURCE,
    "invalid-memory-access": FailureClass.ENGINE,
    "collective-timeout": FailureClass.COMMUNICATION,
    "gpu-ecc-error": FailureClass.INFRASTRUCTURE,
    "storage-error": FailureClass.INFRASTRUCTURE,
    "spot-revocation": FailureClass.SCHEDULER,
    "no-signature": FailureClass.UNKNOWN,
}


def attempt(reason: str, node: str = "node-1", *, signature: str = "", **values: object) -> Attempt:
    failure = Failure(reason, CLASS[reason], signature or reason, "line", 0, node, (node,))
    return Attempt(failure, frozenset({node}), **values)  # type: ignore[arg-type]


def decide(history: Sequence[Attempt], shape: Shape = ALONE, seed: int = 1) -> Verdict:
    return POLICY.decide(history, shape, np.random.default_rng(seed))


@pytest.mark.parametrize("reason", ["syntax-error", "incorrect-inputs"])
def test_user_and_data_errors_run_once(reason: str) -> None:
    assert isinstance(decide([attempt(reason)]), Stop)
    assert isinstance(decide([attempt("gpu-ecc-error", progressed=True), attempt(reason)]), Stop)


def test_a_node_is_not_to_blame_for_storage_unless_it_is_away_twice() -> None:
    away = attempt("storage-error")
    once, twice, apart = (
        decide(history)
        for history in ([away], [away, away], [away, attempt("gpu-ecc-error", "node-2"), away])
    )
    assert isinstance(once, Retry)
    assert isinstance(twice, Retry)
    assert isinstance(apart, Retry)
    assert (once.exclude, twice.exclude, apart.exclude) == (set(), {"node-1"}, {"node-2"})


def test_two_ecc_errors_then_success() -> None:
    first = decide([attempt("gpu-ecc-error")])
    second = decide([attempt("gpu-ecc-error"), attempt("gpu-ecc-error", "node-2", at=150.0)])
    assert isinstance(first, Retry)
    assert isinstance(second, Retry)
    assert 96 <= first.after <= 144
    assert 192 <= second.after <= 288
    assert first.exclude == {"node-1"}
    assert second.exclude == {"node-1", "node-2"}
    later = decide([attempt("gpu-ecc-error"), attempt("gpu-ecc-error", "node-2", at=24 * 3600.0)])
    assert isinstance(later, Retry)
    assert later.exclude == {"node-2"}


def test_the_same_segfault_on_another_node_stops() -> None:
    once = [attempt("invalid-memory-access", "node-1")]
    first = decide(once)
    assert first == Retry(first.reason, 0.0, frozenset({"node-1"}))
    assert isinstance(decide([*once, attempt("invalid-memory-access", "node-2")]), Stop)
    other = decide([*once, attempt("invalid-memory-access", "node-2", signature="another")])
    assert isinstance(other, Retry)
    assert other.after >= 0.8 * 240


def test_ten_revocations_are_eleven_runs_and_nothing_counted() -> None:
    history = [attempt("spot-revocation", gpu_seconds=1e6) for _ in range(10)]
    assert all(isinstance(decide(history[: n + 1]), Requeue) for n in range(10))
    assert isinstance(decide([*history, attempt("gpu-ecc-error")]), Retry)


def test_out_of_memory_once_with_half_the_examples_a_pass() -> None:
    first = decide([attempt("gpu-out-of-memory")])
    assert isinstance(first, Retry)
    assert first.shape == Shape(32, 1)
    assert isinstance(decide([attempt("gpu-out-of-memory")] * 2, Shape(32, 1)), Stop)
    grown = [attempt("gpu-out-of-memory"), attempt("gpu-out-of-memory", progressed=True)]
    again = decide(grown, Shape(32, 1))
    assert isinstance(again, Retry)
    assert again.shape == Shape(16, 3)


def test_more_memory_for_the_host_and_none_where_nothing_helps() -> None:
    first = decide([attempt("host-out-of-memory")])
    assert isinstance(first, Retry)
    assert first.shape == Shape(64, 0, 1.5, True)
    assert isinstance(decide([attempt("no-space")]), Stop)
    assert isinstance(decide([attempt("gpu-out-of-memory")], Shape(1)), Stop)
    assert isinstance(decide([attempt("gpu-out-of-memory")], Shape()), Stop)


def test_progress_starts_the_back_off_anew() -> None:
    lost = [attempt("gpu-ecc-error")] * 4
    assert isinstance(decide(lost), Retry)
    assert isinstance(decide([*lost, attempt("gpu-ecc-error")]), Stop)
    won = decide([*lost, attempt("gpu-ecc-error", progressed=True)])
    assert isinstance(won, Retry)
    assert won.after <= 144


def test_who_reports_a_broken_connection_is_not_to_blame() -> None:
    found = decide([attempt("collective-timeout", "node-1", suspects=frozenset({"node-3"}))])
    assert isinstance(found, Retry)
    assert (found.exclude, found.after) == ({"node-3"}, 0.0)
    unknown = decide([attempt("collective-timeout", "node-1")])
    assert isinstance(unknown, Retry)
    assert unknown.after >= 96
    again = decide([attempt("collective-timeout", suspects=frozenset({"node-3"}))] * 2)
    assert isinstance(again, Retry)
    assert again.after >= 192


def test_eight_attempts_at_most() -> None:
    history = [attempt("gpu-ecc-error", progressed=True)] * 8
    assert isinstance(decide(history[:7]), Retry)
    assert isinstance(decide(history), Stop)


def test_waste_is_capped() -> None:
    hour = attempt("gpu-ecc-error", gpu_seconds=3600.0)
    assert isinstance(decide([hour]), Retry)
    more = attempt("gpu-ecc-error", gpu_seconds=3601.0)
    assert isinstance(decide([more]), Stop)
    useful = attempt("gpu-ecc-error", gpu_seconds=9000.0, useful_gpu_seconds=3000.0)
    assert isinstance(decide([useful]), Retry)
    assert isinstance(decide([useful, attempt("gpu-ecc-error", gpu_seconds=1.0)]), Stop)


def test_blind_retries_in_the_same_shape() -> None:
    rng = np.random.default_rng(0)
    blind = BlindRetry()
    verdicts = [blind.decide([attempt("syntax-error")] * n, ALONE, rng) for n in range(1, 6)]
    assert [type(v) for v in verdicts] == [Retry, Retry, Retry, Stop, Stop]


REASONS = st.sampled_from(sorted(CLASS))
HISTORIES = st.lists(
    st.builds(
        attempt,
        REASONS,
        st.sampled_from(["node-1", "node-2", "node-3"]),
        signature=st.sampled_from(["", "a", "b"]),
        gpu_seconds=st.floats(0, 2000),
        progressed=st.booleans(),
    ),
    min_size=1,
    max_size=10,
)


@given(HISTORIES, st.integers(0, 5))
def test_every_history(history: list[Attempt], seed: int) -> None:
    found = decide(history, seed=seed)
    kind = history[-1].failure.failure_class
    counted = [a for a in history if a.failure.failure_class is not FailureClass.SCHEDULER]
    assert isinstance(found, Requeue) == (kind is FailureClass.SCHEDULER)
    if kind in (FailureClass.USER, FailureClass.DATA):
        assert isinstance(found, Stop)
    if isinstance(found, Retry):
        assert len(counted) < 8
        assert sum(a.gpu_seconds - a.useful_gpu_seconds for a in counted) <= 3600
        assert 0 <= found.after <= 1.2 * 1800
    assert found == decide(history, seed=seed)


@given(HISTORIES)
def test_revocations_change_nothing(history: list[Attempt]) -> None:
    clean = [a for a in history if a.failure.failure_class is not FailureClass.SCHEDULER]
    if clean and clean[-1] is history[-1]:
        assert decide(history) == decide(clean)


@given(st.integers(2, 10_000), st.integers(0, 64))
def test_a_smaller_shape_keeps_the_total(batch: int, accumulation: int) -> None:
    failure = attempt("gpu-out-of-memory").failure
    found = adapted(Shape(batch, accumulation), failure)
    assert found is not None
    assert found.local_batch is not None
    assert found.local_batch < batch
    before, after = batch * (accumulation + 1), found.local_batch * (found.accumulation + 1)
    assert before <= after <= before + 2 * (accumulation + 1)


@pytest.mark.parametrize(
    "values",
    [
        {"first_delay": -1.0},
        {"first_delay": 10.0, "most_delay": 5.0},
        {"jitter": 1.0},
        {"without_progress": 0},
        {"most_attempts": 0},
        {"wasted_factor": -1.0},
        {"exclusion": float("nan")},
    ],
)
def test_bad_limits(values: dict[str, float]) -> None:
    with pytest.raises(OptionError):
        RetryPolicy(**values)  # type: ignore[arg-type]


def test_bad_calls() -> None:
    with pytest.raises(OptionError, match="empty"):
        decide([])
    with pytest.raises(OptionError, match="times"):
        BlindRetry(-1)
