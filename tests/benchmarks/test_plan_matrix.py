"""The arithmetic of the plans x capacities matrix."""

import math

import pytest

from ebbflow.planners.model import Catalogue, ColumnStatistics, Table, TableStatistics
from tests.benchmarks.plans import Matrix, Setting, scaled, summary

SETTINGS = (Setting(1, 2500, 0.0), Setting(6, 2500, 100.0))


def test_regret_is_the_time_of_the_plan_chosen_elsewhere_over_the_best() -> None:
    found = Matrix(SETTINGS, {"a": "A", "b": "B"}, {"a": [10.0, 8.0], "b": [12.0, 4.0]})
    assert found.regrets() == {(0, 1): 2.0, (1, 0): 1.2}
    told = summary(found)
    assert told["best"] == ["a", "b"]
    assert (told["regret"]["worst"], told["regret"]["worst at"]) == (2.0, "6 x 2500 MiB, 100 Mbit/s")
    assert told["regret"]["share above 1.15"] == 1.0


def test_a_plan_that_cannot_run_elsewhere_is_counted_and_has_no_seconds() -> None:
    found = Matrix(SETTINGS, {"a": "A", "b": "B"}, {"a": [10.0, math.inf], "b": [12.0, 4.0]})
    told = summary(found)
    assert told["seconds"]["a"] == [10.0, None]
    assert told["regret"]["cannot run"] == 1
    assert told["regret"]["worst"] == 1.2


def test_a_setting_is_a_share_with_the_executors_memory() -> None:
    share = SETTINGS[1].share
    assert (share.nodes, share.total.cores, share.link) == (6, 6, 12.5)
    assert 0.5 < share.largest.memory < 1.5


def test_statistics_of_another_scale() -> None:
    columns = {"key": ColumnStatistics(distinct=1e6), "flag": ColumnStatistics(distinct=3.0)}
    tables = {
        "big": Table("big", (("key", "bigint"),), "1", TableStatistics(1e6, 1e8, columns)),
        "nation": Table("nation", (("key", "bigint"),), "1", TableStatistics(25, 2e3, {})),
    }
    found = scaled(Catalogue(tables), 20.0).tables
    big = found["big"].statistics
    assert big is not None
    assert (big.rows, big.bytes) == (pytest.approx(2e7), pytest.approx(2e9))
    assert (big.columns["key"].distinct, big.columns["flag"].distinct) == (2e7, 3.0)
    assert found["nation"] == tables["nation"]
