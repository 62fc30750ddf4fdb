"""Where gradients meet: what is measured decides, and the reason has it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.aggregation.choice import SyncCosts, choose_sync
from ebbflow.planners.errors import OptionError

CALM = SyncCosts(
    parameter_bytes=50_000_000,
    sum_s=0.01,
    update_s=0.02,
    step_s=0.3,
    sync_s=0.1,
    measured_world=2,
    world=4,
    nodes=4,
    interruption_rate=0.01,
    restart_s=20.0,
)


def test_calm_nodes_all_reduce_and_nodes_that_are_lost_often_use_aggregators() -> None:
    found = choose_sync(CALM)
    # a link of 500 MB/s: 0.2 + 1.5 * 0.1; 0.2 + 4 * 2 * 0.1 + 0.06
    assert found.sync == "allreduce"
    assert found.allreduce_s == pytest.approx(0.35 * (1 + 0.04 / 3600 * 20.35))
    assert found.service_s == pytest.approx(1.06 * (1 + 0.04 / 3600 * 1.56))
    assert found.reason.startswith(
        "all-reduce: a step takes 0.35 s in an all-reduce and 1.06 s over aggregators"
    )
    often = replace(CALM, step_s=5.0, interruption_rate=60.0)  # a loss each minute on each node
    found = choose_sync(often)
    assert found.sync == "service"
    assert "with 60 losses an hour on each of 4 nodes at 25" in found.reason


def test_with_recovery_in_place_a_loss_is_cheap_in_an_all_reduce_too() -> None:
    often = replace(CALM, step_s=5.0, interruption_rate=10.0)
    assert choose_sync(often).sync == "service"
    assert choose_sync(replace(often, in_place=True)).sync == "allreduce"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"obstacle": "the model is sharded"}, "all-reduce: the model is sharded"),
        ({"world": 1}, "a single process has no other to lose"),
        ({"measured_world": 1}, "no exchange between processes was measured"),
        ({"sync_s": 0.0}, "no exchange between processes was measured"),
    ],
)
def test_what_is_not_known_or_not_possible_is_an_all_reduce(changes: dict[str, object], reason: str) -> None:
    often = replace(CALM, interruption_rate=1000.0)
    found = choose_sync(replace(often, **changes))  # type: ignore[arg-type]
    assert found.sync == "allreduce"
    assert reason in found.reason


@pytest.mark.parametrize(
    ("name", "value"), [("step_s", -1.0), ("sum_s", float("nan")), ("world", 0), ("parameter_bytes", 0)]
)
def test_costs_that_are_none_are_refused(name: str, value: float) -> None:
    with pytest.raises(OptionError, match=f"{name} must be .* not {value}"):
        replace(CALM, **{name: value})  # type: ignore[arg-type]


@given(
    st.floats(0.01, 10),
    st.floats(0.001, 1),
    st.integers(2, 64),
    st.floats(0, 20),
    st.floats(0, 100),
    st.booleans(),
)
def test_more_losses_never_turn_aggregators_into_an_all_reduce_where_a_restart_costs_more(
    step: float, share: float, world: int, rate: float, restart: float, in_place: bool
) -> None:
    base = replace(
        CALM, step_s=step, sync_s=step * share, world=world, nodes=world, restart_s=restart, in_place=in_place
    )
    first, second = (choose_sync(replace(base, interruption_rate=one)) for one in (rate, 2 * rate))
    assert second.allreduce_s >= first.allreduce_s
    assert second.service_s >= first.service_s
    assert (first.sync == "service") == (first.service_s < first.allreduce_s)
