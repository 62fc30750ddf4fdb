"""Where tensors of a running service are to be: packed on few aggregators, off those that leave."""

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.aggregation.assignment import RECOMMENDED
from ebbflow.planners.aggregation.model import JobProfile
from ebbflow.planners.aggregation.placement import PlacementPlan, ServiceState, TensorKey, plan_placement
from tests.planners.aggregation.pools import profile, profiles

NAMES = ("a1", "a2", "a3", "a4")


def after(state: ServiceState, plan: PlacementPlan) -> dict[TensorKey, str]:
    return {**state.hosts, **plan.hosts}


def hosts_of(one: JobProfile, *names: str) -> dict[TensorKey, str]:
    """Return tensors dealt to aggregators in turn, as a training begins."""
    return {task.key: names[i % len(names)] for i, task in enumerate(one.tasks)}


def test_a_training_that_was_measured_is_packed_on_as_few_aggregators_as_it_needs() -> None:
    one = profile("j", 100, [10, 10, 10, 10], servers=2)
    state = ServiceState(NAMES, hosts=hosts_of(one, "a1", "a2"), profiles={"j": one})
    plan = plan_placement(state)
    assert set(after(state, plan).values()) == {"a1"}
    assert (plan.placed, plan.missing) == (("j",), 0)
    assert plan.reasons == ("j fits 1 aggregators under the loss limit, 1 of them idle before",)


def test_a_second_training_shares_where_the_loss_limit_allows_it() -> None:
    first, second = profile("j1", 6, [2]), profile("j2", 12, [3])  # the example of AutoPS' figure 4.6
    hosts = {**hosts_of(first, "a1"), **hosts_of(second, "a2")}
    state = ServiceState(NAMES, hosts=hosts, profiles={"j1": first, "j2": second}, placed=("j1",))
    assert set(after(state, plan_placement(state)).values()) == {"a1"}
    slower = profile("j1", 5, [1])  # it would lose 1/6 of its speed beside the second
    state = ServiceState(NAMES, hosts=hosts, profiles={"j1": slower, "j2": second}, placed=("j1",))
    assert plan_placement(state).hosts == {}


def test_a_training_that_is_not_measured_stays_where_it_began() -> None:
    one = profile("j", 100, [10, 10], servers=2)
    state = ServiceState(NAMES, hosts=hosts_of(one, "a1", "a2"))
    assert plan_placement(state) == PlacementPlan({})


def test_an_aggregator_that_leaves_is_emptied() -> None:
    one, new = profile("j", 100, [30, 30]), profile("new", 100, [5])
    hosts = {**hosts_of(one, "a1"), **hosts_of(new, "a1")}
    state = ServiceState(("a1", "a2"), ("a1",), hosts, {"j": one}, ("j",))
    assert set(after(state, plan_placement(state)).values()) == {"a2"}
    alone = ServiceState(("a1",), ("a1",), hosts, {"j": one}, ("j",))
    assert (plan_placement(alone).hosts, plan_placement(alone).missing) == ({}, 1)


def test_a_tensor_does_not_move_to_one_of_its_mirrors() -> None:
    one = profile("j", 100, [30])
    (key,) = hosts = hosts_of(one, "a1")
    for measured in ({}, {"j": one}):
        state = ServiceState(("a1", "a2", "a3"), ("a1",), hosts, measured, tuple(measured))
        assert plan_placement(state).hosts == {key: "a2"}
        assert plan_placement(replace(state, mirrors={key: {"a2"}})).hosts == {key: "a3"}
        assert plan_placement(replace(state, mirrors={key: {"a2", "a3"}})).hosts == {}
    state = ServiceState(("a1", "a2"), (), {key: "a2"}, {"j": one}, (), mirrors={key: {"a1"}})
    assert plan_placement(state).hosts == {}


def test_trainings_move_together_after_one_has_ended() -> None:
    first, second = profile("j1", 10, [4]), profile("j2", 10, [4])
    hosts = {**hosts_of(first, "a1"), **hosts_of(second, "a2")}
    both = {"j1": first, "j2": second}
    state = ServiceState(NAMES, hosts=hosts, profiles=both, placed=("j1", "j2"), exited=True)
    plan = plan_placement(state)
    assert len(set(after(state, plan).values())) == 1
    assert "is not needed after a training has ended" in plan.reasons[0]


def test_what_fits_nowhere_is_placed_all_the_same_and_said() -> None:
    first, second = profile("j1", 5, [4]), profile("j2", 12, [9], servers=2)
    hosts = {**hosts_of(first, "a1"), **hosts_of(second, "a1")}
    state = ServiceState(("a1",), hosts=hosts, profiles={"j1": first, "j2": second}, placed=("j1",))
    plan = plan_placement(state)
    assert (plan.hosts, plan.placed, plan.missing) == ({}, ("j1", "j2"), 2)
    assert plan.reasons == (
        "j2 is placed above the loss limit: 0 aggregators were idle, and it may ask for 2",
    )


@st.composite
def states(draw: st.DrawFn) -> ServiceState:
    jobs = draw(profiles())
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    hosts = {task.key: draw(st.sampled_from(NAMES)) for one in jobs for task in one.tasks}
    measured = {one.job_id: one for one in jobs if draw(st.booleans())}
    placed = [job for job in measured if draw(st.booleans())]
    leaving = draw(st.lists(st.sampled_from(names), max_size=2, unique=True))
    return ServiceState(names, leaving, hosts, measured, placed, draw(st.booleans()))


def _pressed(state: ServiceState, hosts: Mapping[TensorKey, str], name: str) -> bool:
    """Tell whether a training on an aggregator loses the limit or more."""
    jobs = [
        state.profiles[key[0]] for key, host in hosts.items() if host == name and key[0] in state.profiles
    ]
    cycle = max((one.iteration_us for one in jobs), default=0)
    limit = RECOMMENDED.loss_limit
    return any(cycle % one.iteration_us >= limit * cycle for one in jobs)


@given(states())
def test_every_tensor_is_where_an_aggregator_stays_and_all_trainings_that_were_measured_are_placed(
    state: ServiceState,
) -> None:
    staying = set(state.aggregators) - set(state.leaving)
    plan = plan_placement(state)
    ended = after(state, plan)
    assert set(plan.hosts.values()) <= staying
    if not staying:
        assert plan.hosts == {}
        return
    assert set(plan.placed) == set(state.profiles)
    assert not [key for key, host in ended.items() if host in state.leaving and host in state.aggregators]
    again = plan_placement(ServiceState(staying, (), ended, state.profiles, plan.placed, exited=False))
    assert again.hosts == {}  # nothing moves without a reason


@given(profiles(max_jobs=4), st.integers(1, 4))
def test_trainings_that_are_placed_one_after_the_other_stay_under_the_loss_limit_unless_it_is_said(
    jobs: list[JobProfile], count: int
) -> None:
    hosts: dict[TensorKey, str] = {}
    placed: tuple[str, ...] = ()
    known: dict[str, JobProfile] = {}
    missing = 0
    for one in jobs:
        known[one.job_id] = one
        hosts |= hosts_of(one, *NAMES[:count])
        state = ServiceState(NAMES[:count], (), hosts, known, placed)
        plan = plan_placement(state)
        hosts, placed, missing = after(state, plan), plan.placed, missing + plan.missing
        assert not plan.hosts.keys() - {task.key for task in one.tasks}
    if not missing:
        state = ServiceState(NAMES[:count], (), hosts, known, placed)
        assert not [name for name in NAMES[:count] if _pressed(state, hosts, name)]
