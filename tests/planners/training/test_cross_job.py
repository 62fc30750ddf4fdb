"""Quarantine and hold: from the failures of many jobs."""

from dataclasses import replace

import pytest

from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.cross_job import FailedJob, nodes_to_blame, versions_to_hold

ONE = FailedJob("j1", "ann", "v1", "n1", "ecc", 1000.0)
THREE = [ONE, replace(ONE, job="j2", user="bob"), replace(ONE, job="j3", user="eve", at=4000.0)]


def test_three_users_on_one_node_within_an_hour() -> None:
    assert nodes_to_blame(THREE, now=4500.0) == {"n1"}
    assert not nodes_to_blame(THREE, now=5000.0)  # the first is over an hour old
    assert not nodes_to_blame(THREE[:2], now=4500.0)
    assert not nodes_to_blame([*THREE[:2], replace(THREE[2], node="n2")], now=4500.0)
    assert not nodes_to_blame([*THREE[:2], replace(THREE[2], signature="other")], now=4500.0)
    assert not nodes_to_blame([*THREE[:2], replace(THREE[2], user="bob")], now=4500.0)


def test_three_jobs_of_one_version() -> None:
    mine = [replace(ONE, job=f"j{n}", node=f"n{n}") for n in range(3)]
    assert versions_to_hold(mine) == {("ann", "v1")}
    assert not versions_to_hold(mine[:2])
    assert not versions_to_hold([*mine[:2], replace(mine[2], code="v2")])
    assert not versions_to_hold([mine[0]] * 3)  # one job, three attempts


def test_bad_limits() -> None:
    with pytest.raises(OptionError):
        nodes_to_blame([], 0.0, users=0)
    with pytest.raises(OptionError):
        nodes_to_blame([], 0.0, window=0.0)
    with pytest.raises(OptionError):
        versions_to_hold([], jobs=0)
