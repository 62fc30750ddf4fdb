"""Work and finished stages as plain values."""

from dataclasses import asdict

from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.model.work import Measured, Work

AMOUNTS = st.floats(0, 1e12)
WORKS = st.builds(Work, *[AMOUNTS] * len(Work().vector()))
STAGES = st.builds(
    Measured, st.sampled_from(["spark", "duckdb"]), WORKS, AMOUNTS, AMOUNTS, st.integers(0, 1000), AMOUNTS
)


@given(STAGES)
def test_values_are_those_that_dataclasses_tell_and_make_the_same_stage(stage: Measured) -> None:
    told = stage.values()
    assert told == asdict(stage)
    assert Measured(**{**told, "work": Work(**told["work"])}) == stage


@given(STAGES)
def test_a_stage_is_as_slow_on_whole_cores_as_it_was(stage: Measured) -> None:
    assert stage.slower(1.0) is stage
    assert stage.slower(2.0).wall_seconds == 2 * stage.wall_seconds
