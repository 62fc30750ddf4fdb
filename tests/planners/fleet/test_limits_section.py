"""Quotas as a section of the configuration file: what they are read as, and what is refused."""

from math import inf
from typing import Any

import pytest

from ebbflow.planners.errors import OptionError
from ebbflow.planners.fleet.limits import Limits, PoolLimits, Quota


def test_limits_are_read_from_a_section() -> None:
    content = {
        "dollars_per_hour": 40,
        "nodes": 60,
        "grow": 10,
        "pools": {"gpu": {"min_nodes": 1, "max_nodes": 16, "max_on_demand_nodes": 2}},
        "teams": {"vision": {"pools": ["gpu"], "gpus": 48, "dollars_per_hour": 25.5, "budget": 900}},
    }
    assert Limits.parse(content) == Limits(
        dollars_per_hour=40.0,
        nodes=60,
        grow=10,
        pools={"gpu": PoolLimits(min_nodes=1, max_nodes=16, max_on_demand_nodes=2)},
        teams={"vision": Quota(("gpu",), gpus=48, dollars_per_hour=25.5, budget=900.0)},
    )
    assert Limits.parse({}) == Limits()
    assert Limits().nodes == inf


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"dolars_per_hour": 1}, r"quotas: dolars_per_hour is not known.*did you mean dollars_per_hour\?"),
        ({"dollars_per_hour": 0}, "quotas.dollars_per_hour must be > 0 dollars; got 0"),
        ({"dollars_per_run": "5"}, "quotas.dollars_per_run must be a number; got '5'"),
        ({"dollars_per_run": float("nan")}, "must be a number; got nan"),
        ({"nodes": 1.5}, "quotas.nodes must be a whole number >= 0; got 1.5"),
        ({"nodes": True}, "quotas.nodes must be a number; got True"),
        ({"shrink": 0}, "quotas.shrink must be at least 1 node; got 0"),
        ({"pools": []}, r"quotas.pools must be a table; got \[\]"),
        (
            {"pools": {"gpu": {"min_nodes": 3, "max_nodes": 2}}},
            "quotas.pools.gpu.min_nodes must be at most max_nodes; got 3 above 2",
        ),
        (
            {"pools": {"gpu": {"min_on_demand_nodes": 3, "max_nodes": 2}}},
            "min_on_demand_nodes must be at most max_nodes",
        ),
        ({"pools": {"gpu": {"minimum": 3}}}, "quotas.pools.gpu: minimum is not known"),
        ({"teams": {"a": {"nodes": 3}}}, "quotas.teams.a.nodes are those of the team's own pools"),
        ({"teams": {"a": {"pools": "p"}}}, "quotas.teams.a.pools must be a list of names of pools; got 'p'"),
        ({"teams": {"a": {"budget": -1}}}, "quotas.teams.a.budget must be >= 0 dollars; got -1"),
        (
            {"teams": {"a": {"pools": ["p"]}, "b": {"pools": ["p"]}}},
            "a pool has one team; 'p' is of a and of b",
        ),
    ],
)
def test_limits_that_break_their_rules_are_named(content: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Limits.parse(content)
