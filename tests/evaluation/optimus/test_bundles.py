"""Bundles of a server and a worker: fair, short first, spread and packed; MXNet's blocks; placement at scale."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from tests.evaluation.optimus.bundles import fair_bundles, place_singly, short_bundles
from tests.evaluation.optimus.optimus_tasks import PsJob, Tasks
from tests.evaluation.optimus.ps_blocks_mxnet import mxnet_blocks


def job(id_: str, remaining: float, server: float = 1.0, worker: float = 1.0) -> PsJob:
    return PsJob(id_, remaining, lambda p, w: float(w), {"units": server}, {"units": worker})


def test_fair_bundles_differ_by_one_at_most_and_use_all_room() -> None:
    granted = fair_bundles([job("a", 9), job("b", 1), job("c", 5)], {"units": 14.0})
    assert granted == {"a": Tasks(3, 3), "b": Tasks(2, 2), "c": Tasks(2, 2)}


def test_short_jobs_fill_up_first_once_everyone_has_a_bundle() -> None:
    granted = short_bundles([job("a", 9), job("b", 1), job("c", 5)], {"units": 14.0}, 4)
    assert granted == {"b": Tasks(4, 4), "c": Tasks(2, 2), "a": Tasks(1, 1)}
    with pytest.raises(OptionError, match="most"):
        short_bundles([job("a", 1)], {"units": 4.0}, 0)


def test_spread_takes_the_emptiest_machine_and_packed_the_fullest() -> None:
    granted, size = {"a": Tasks(2, 2)}, {"a": (1.0, 1.0)}
    free = {"m0": 4.0, "m1": 5.0}
    spread = place_singly(granted, free, size, pack=False)["a"]
    packed = place_singly(granted, free, size, pack=True)["a"]
    assert sum(map(sum, spread.machines.values())) == 4
    assert set(spread.machines) == {"m0", "m1"}
    assert packed.machines == {"m0": Tasks(2, 2)}


def test_a_job_without_room_for_a_pair_gives_back_what_it_took() -> None:
    granted = {"a": Tasks(1, 1), "b": Tasks(1, 1)}
    placed = place_singly(granted, {"m0": 3.0}, {"a": (2.0, 2.0), "b": (1.0, 1.0)}, pack=True)
    assert set(placed) == {"b"}


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=8),
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.booleans(),
)
def test_no_machine_holds_more_than_its_room(
    tasks: list[tuple[int, int]], rooms: list[int], pack: bool
) -> None:
    granted = {f"j{at}": Tasks(*pair) for at, pair in enumerate(tasks)}
    size = dict.fromkeys(granted, (2.0, 1.0))
    free = {f"m{at}": float(room) for at, room in enumerate(rooms)}
    placed = place_singly(granted, free, size, pack=pack)
    for machine, room in free.items():
        held = [one.machines.get(machine, Tasks(0, 0)) for one in placed.values()]
        assert sum(2 * one.servers + one.workers for one in held) <= room
    assert all(one.tasks.servers and one.tasks.workers for one in placed.values())


def test_mxnet_cuts_large_blocks_and_deals_small_ones_whole() -> None:
    loads = mxnet_blocks([3e6, 10.0, 20.0], 3, np.random.default_rng(0))
    assert sum(load.load for load in loads) == pytest.approx(3e6 + 30)
    assert sum(load.requests for load in loads) == 5
    with pytest.raises(OptionError, match="servers"):
        mxnet_blocks([1.0], 0, np.random.default_rng(0))
