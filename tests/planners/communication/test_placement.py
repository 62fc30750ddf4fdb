"""What a recorded training says of placements that it was not recorded on."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.communication.costs import Choice, LinkModel, TableModel
from ebbflow.planners.communication.dag import CommOp, ComputeOp, Dependency, TrainingDag
from ebbflow.planners.communication.measured import MeasuredLinks
from ebbflow.planners.communication.placement import MAX_BYTES, CommunicationProfile, profile_of
from ebbflow.planners.communication.recorded import RecordedTraining
from ebbflow.planners.errors import OptionError
from ebbflow.planners.scheduling.locality import Level
from ebbflow.planners.scheduling.placement_cost import ClusterLinks, placement_cost
from ebbflow.planners.training.speed.throughput import ThroughputParameters, iteration_time, with_spread


def training(*sizes: float, compute: float = 0.3, ranks: int = 2) -> RecordedTraining:
    """Return a training whose buckets are ready one after the other while it computes backward."""
    each = compute / max(len(sizes), 1)
    blocks = [ComputeOp("forward", 0.1), *(ComputeOp(f"backward/{k}", each) for k in range(len(sizes)))]
    comm = tuple(CommOp(f"bucket/{k}", "all-reduce", size, ranks) for k, size in enumerate(sizes))
    after = [Dependency(f"backward/{k}", f"bucket/{k}") for k in range(len(sizes))]
    before = [Dependency(op.name, "update") for op in comm]
    return RecordedTraining(
        TrainingDag((*blocks, ComputeOp("update", 0.05)), comm, (*after, *before)), ranks, 0.5, 10
    )


def test_what_compute_hides_costs_nothing_and_the_rest_its_time() -> None:
    links = LinkModel(alpha=0.0, per_byte=1e-9, launch=0.0)
    # two processes send every byte once
    assert CommunicationProfile(training(2e8)).seconds(2, links) == pytest.approx(0.1 + 0.3 + 0.2 + 0.05)
    hidden = CommunicationProfile(training(1e8, 1e8))
    assert hidden.seconds(2, links) == pytest.approx(0.1 + 0.3 + 0.1 + 0.05), (
        "the first is under way meanwhile"
    )
    assert hidden.seconds(1, links) == pytest.approx(0.45)
    # four send 1.5 times as much, so that the first ends when the second is ready
    assert hidden.seconds(4, links) == pytest.approx(0.1 + 0.3 + 0.15 + 0.05)


def test_a_profile_is_what_was_written() -> None:
    links = MeasuredLinks(
        2, 1, TableModel({("all-reduce", 2, Choice().name): ((1e3, 0.002), (1e6, 0.012), (2e6, 0.022))})
    )
    made = profile_of(training(1e6, 2e6), 2, links)
    assert made.links is not None
    assert made.links.per_byte == pytest.approx(1e-8, rel=0.01)
    assert CommunicationProfile.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    alone = profile_of(training(1e6), 1, None)
    assert alone.links is None
    assert CommunicationProfile.from_dict(alone.to_dict()) == alone
    one_size = MeasuredLinks(2, 1, TableModel({("all-reduce", 2, Choice().name): ((1e3, 0.002),)}))
    assert profile_of(training(1e6), 1, one_size).links is None


def test_what_is_no_profile_is_refused() -> None:
    good = profile_of(training(1e6), 1, None).to_dict()
    wrong: list[object] = [
        None, [], {}, {**good, "nodes": 0}, {**good, "nodes": 3}, {**good, "nodes": "two"}, {**good, "training": 1},
        {**good, "links": {"alpha": -1.0}}, {**good, "links": {"speed": 1.0}}, {**good, "links": 3},
    ]  # fmt: skip
    for one in wrong:
        with pytest.raises(OptionError):
            CommunicationProfile.from_dict(one)
    other = MeasuredLinks(3, 1, TableModel({("all-reduce", 3, Choice().name): ((1e3, 0.002),)}))
    with pytest.raises(OptionError, match="measured among 3 ranks, the training has 2"):
        profile_of(training(1e6), 1, other)
    with pytest.raises(OptionError, match=f"must be {MAX_BYTES} bytes at most"):
        profile_of(training(*[1e6] * 1000), 1, None)


@given(
    st.lists(st.floats(0, 1e9), min_size=1, max_size=4),
    st.integers(1, 40),
    st.tuples(st.floats(1e6, 1e11), st.floats(1e6, 1e11), st.floats(1e6, 1e11)),
)
def test_wider_is_never_faster(sizes: list[float], gpus: int, rates: tuple[float, float, float]) -> None:
    cost = placement_cost(profile_of(training(*sizes), 1, None), ClusterLinks(*rates))
    assert cost is not None
    times = [cost.seconds(gpus, level) for level in Level]
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(times[1:]))
    assert times[0] == pytest.approx(0.45), "a single GPU exchanges nothing"
    factors = [cost.slowdown(gpus, level) for level in Level]
    assert factors[:2] == [1, 1]
    assert 1 <= factors[2] <= factors[3] * (1 + 1e-9)
    assert cost.slowdown(gpus, Level.CLUSTER, Level.RACK) == pytest.approx(max(times[3] / times[2], 1.0))


def test_nothing_is_predicted_where_no_link_between_nodes_is_known() -> None:
    assert placement_cost(profile_of(training(1e6), 1, None), ClusterLinks(intra_node=1e9)) is None
    for name in ("intra_node", "intra_rack", "cross_rack"):
        with pytest.raises(OptionError, match=f"{name} must be >= 0 bytes/s and finite"):
            ClusterLinks(**{name: -1.0})


@given(
    st.floats(1e-3, 1.0),
    st.floats(1e-8, 0.5),
    st.floats(1.0, 10.0),
    st.integers(0, 3),
    st.floats(1.2, 4.0),
)
def test_predicted_terms_give_the_predicted_slowdown(
    grad: float, sync: float, gamma: float, passes: int, slowdown: float
) -> None:
    fitted = ThroughputParameters(grad, 1e-8, sync, 1e-8, sync, 1e-8, gamma)
    made = with_spread(fitted, 32, passes, ((2, slowdown), (8, slowdown)))
    for gpus in (2, 8):
        near = iteration_time(fitted, 1, gpus, 32, passes)
        assert float(iteration_time(made, 2, gpus, 32, passes) / near) == pytest.approx(slowdown, rel=0.02)
        assert iteration_time(made, 1, gpus, 32, passes) == near
    assert with_spread(fitted, 32, passes, ((2, 1.0), (8, 1.0))).alpha_node >= fitted.alpha_node
