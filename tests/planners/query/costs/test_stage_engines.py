"""Which way Spark runs a stage."""

from typing import Literal

import pytest

from ebbflow.planners.model import Measured, Work
from ebbflow.planners.query.costs.cost import NATIVE, SPARK
from ebbflow.planners.query.costs.stage_engines import StageEngines

STAGE = Work(scanned_rows=6e6, scanned_bytes=1e8, built_rows=1e6, probed_rows=6e6, tasks=8)


@pytest.mark.parametrize(("asked", "native"), [("spark", False), ("native", True)])
def test_what_was_asked_for_is_done(asked: Literal["spark", "native"], native: bool) -> None:
    choice = StageEngines(asked).choose(STAGE, 2.0)
    assert (choice.native, choice.reason) == (native, f"--stages {asked}")


def test_auto_takes_what_is_expected_to_be_sooner() -> None:
    choice = StageEngines("auto").choose(STAGE, 2.0)
    assert choice.native
    assert "expected" in choice.reason


def test_auto_learns_that_native_stages_are_slow_here() -> None:
    slow = [Measured("native", STAGE, 500.0, 250.0, 2, 2.0)] * 20
    fast = [Measured("spark", STAGE, 1.0, 0.5, 8, 2.0)] * 20
    assert not StageEngines("auto", [*slow, *fast]).choose(STAGE, 2.0).native


def test_native_stages_cost_less_than_spark_sql_for_the_same_work() -> None:
    assert NATIVE.core_seconds(STAGE) < SPARK.core_seconds(STAGE) / 3
    assert NATIVE.broadcast_limit == SPARK.broadcast_limit
