"""Where GPUs are taken."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.simulation.traces.cluster import gpu_node
from ebbflow.planners.model.scheduling import App, gpus_of
from ebbflow.planners.model.skew import TENSORS, is_skewed, server_loads, tensor_skew
from ebbflow.planners.scheduling.placement import (
    FreeCapacity,
    by_skew,
    consolidated,
    fewest_nodes,
    fill_fragments,
    most_free_first,
    rack_aware,
)


def room(*free: int, racks: str = "", size: int = 4) -> FreeCapacity:
    nodes = [
        gpu_node(f"n{at}", max(size, left), rack=racks[at] if racks else "") for at, left in enumerate(free)
    ]
    made = FreeCapacity(nodes)
    made.free = list(free)
    return made


def test_most_free_first_keeps_the_order_of_taking():
    assert most_free_first(room(2, 4, 3, 4), App("x"), 10) == (("n1", 4), ("n3", 4), ("n2", 2))


def test_a_skewed_model_takes_the_fewest_machines():
    assert by_skew(room(4, 3, 2, 4), App("x", skewed=True), 6) == (("n0", 4), ("n2", 2))


def test_any_other_fills_the_most_fragmented_first():
    assert by_skew(room(4, 3, 2, 4), App("x"), 6) == (("n2", 2), ("n1", 3), ("n0", 1))
    assert by_skew(room(4, 3, 2, 4), App("x", skewed=True), 1) == (("n2", 1),)


def test_consolidation_waits_for_entirely_free_machines_of_one_rack():
    app = App("x")
    assert consolidated(room(3, 3, 3), app, 4) is None
    assert consolidated(room(4, 3, 2), app, 2) == (("n2", 2),)
    assert consolidated(room(4, 3, 4, 4, racks="aabb"), app, 8) == (("n2", 4), ("n3", 4))
    assert consolidated(room(4, 3, 4, 1, racks="aabb"), app, 8) is None
    assert consolidated(room(4, 3, 4, 2, racks="aabb"), app, 6) == (("n2", 4), ("n3", 2))


def test_rack_aware_stays_in_the_tightest_rack_that_fits():
    app = App("x")
    assert rack_aware(room(4, 4, 3, 2, racks="aabb"), app, 5) == (("n2", 3), ("n3", 2))
    assert rack_aware(room(4, 4, 3, 2, racks="aabb"), app, 9) == (("n0", 4), ("n1", 4), ("n3", 1))
    assert rack_aware(room(1, 1), app, 3) is None


PLACERS = [most_free_first, fewest_nodes, fill_fragments, by_skew, consolidated, rack_aware]


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=6),
    st.integers(1, 20),
    st.sampled_from(PLACERS),
    st.booleans(),
)
def test_a_placement_is_whole_within_what_is_free_and_taken_from_it(free, gpus, place, skewed):
    here = room(*free)
    placement = place(here, App("x", skewed=skewed), gpus)
    if placement is None:
        assert here.free == free
        assert place is consolidated or sum(free) < gpus
        return
    assert gpus_of(placement) == gpus
    taken = dict(placement)
    assert len(taken) == len(placement)
    assert min(taken.values()) > 0
    assert [left - taken.get(f"n{at}", 0) for at, left in enumerate(free)] == here.free
    assert min(here.free) >= 0


@given(st.lists(st.integers(0, 8), min_size=1, max_size=6), st.integers(1, 20))
def test_fewest_nodes_is_minimal(free, gpus):
    placement = fewest_nodes(room(*free, size=8), App("x"), gpus)
    sizes = [n for n in range(1, len(free) + 1) if any(sum(some) >= gpus for some in combinations(free, n))]
    assert (len(placement) if placement else None) == (sizes[0] if sizes else None)


@pytest.mark.parametrize("model", TENSORS)
def test_models_that_the_paper_consolidates_are_skewed(model):
    assert is_skewed(model) == (model in {"vgg19", "vgg16", "vgg11", "alexnet"})


def test_round_robin_loads():
    alexnet = (1.2, 2.5, 5.1, 3.4, 144.0, 64.0, 15.6)
    vgg16 = (1.1, 2.3, 2.3, 4.5, *[9.0] * 5, 392.0, 64.0, 15.6)
    assert server_loads(alexnet, 2) == pytest.approx([165.9, 69.9])
    assert server_loads(alexnet, 4) == pytest.approx([145.2, 66.5, 20.7, 3.4])
    assert server_loads(vgg16, 4) == pytest.approx([19.1, 403.3, 75.3, 29.1])
    assert tensor_skew(alexnet) == pytest.approx(0.611, abs=1e-3)
