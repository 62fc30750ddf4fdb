"""What a look at the capacity changes in the ledger."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from loopcases import node

from ebbflow.planners.model.capacity import Capacity, Notice
from ebbflow.planners.model.ledger import CapacityChanged, Event
from ebbflow.planners.model.ledger_state import State, fold
from ebbflow.tasks.capacity.observation import change, known

NAMES = st.sampled_from([f"n{i}" for i in range(6)])
NODES = st.dictionaries(
    NAMES, st.builds(lambda gpus, price: (gpus, price), st.integers(0, 4), st.floats(0.01, 9)), max_size=6
)
NOTICES = st.dictionaries(NAMES, st.tuples(st.floats(0, 1e4), st.sampled_from(["interruption", "rebalance"])))


def seen(there, notices=None, hazard=0.0, revision=1):
    found = tuple(replace(node(name, gpus), price=price) for name, (gpus, price) in sorted(there.items()))
    told = tuple(Notice(name, at, kind) for name, (at, kind) in sorted((notices or {}).items()))
    return Capacity(revision, found, told, 5.0, hazard)


def written(state, capacity):
    found = change(state, capacity)
    if found is not None:
        fold(state, Event(state.number + 1, 1.0, found))
    return found


def test_the_first_look_brings_all_nodes():
    found = written(state := State(), seen({"n0": (2, 1.0), "n1": (1, 1.0)}))
    assert isinstance(found, CapacityChanged)
    assert [one.id for one in found.nodes] == ["n0", "n1"]
    assert found.revision == state.revision == 1
    assert "arrived: n0, n1" in found.reason


def test_the_same_again_is_no_news():
    state = State()
    written(state, seen({"n0": (2, 1.0)}))
    assert change(state, seen({"n0": (2, 1.0)}, revision=77)) is None  # a source counts revisions of its own


def test_only_what_differs_is_written():
    state = State()
    written(state, seen({"n0": (2, 1.0), "n1": (2, 1.0), "n2": (2, 1.0)}))
    found = written(state, seen({"n0": (4, 1.0), "n2": (2, 1.0), "n3": (1, 1.0)}))
    assert found is not None
    assert ([one.id for one in found.nodes], found.left) == (["n0", "n3"], ("n1",))


def test_a_price_that_barely_moves_is_no_news_but_one_that_jumps_is():
    state = State()
    written(state, seen({"n0": (2, 1.0)}))
    assert change(state, seen({"n0": (2, 1.02)})) is None
    assert change(state, seen({"n0": (2, 1.3)})) is not None


def test_a_notice_is_news_and_its_estimated_deadline_is_not():
    state = State()
    written(state, seen({"n0": (2, 1.0)}))
    assert written(state, seen({"n0": (2, 1.0)}, {"n0": (120.4, "interruption")})) is not None
    assert change(state, seen({"n0": (2, 1.0)}, {"n0": (120.6, "interruption")})) is None
    assert change(state, seen({"n0": (2, 1.0)}, {"n0": (60.0, "interruption")})) is not None
    assert change(state, seen({"n0": (2, 1.0)})) is not None  # it was withdrawn


def test_of_several_notices_for_one_node_the_firmest_and_earliest_is_written_once():
    state, capacity = State(), seen({"n0": (2, 1.0), "n1": (2, 1.0)})
    told = (
        Notice("n0", 300.0),
        Notice("n0", 50.0, "rebalance"),
        Notice("n0", 120.0),
        Notice("n1", 90.0, "rebalance"),
        Notice("n1", 80.0, "rebalance"),
    )
    found = written(state, replace(capacity, notices=told))
    assert found is not None
    assert found.notices == (Notice("n0", 120.0), Notice("n1", 80.0, "rebalance"))
    assert change(state, replace(capacity, notices=told)) is None
    assert change(state, replace(capacity, notices=told[::-1])) is None


def test_a_notice_of_a_node_that_is_not_there_waits_for_it():
    state = State()
    assert written(state, seen({}, {"n0": (120.0, "interruption")})) is None
    found = written(state, seen({"n0": (1, 1.0)}, {"n0": (120.0, "interruption")}))
    assert found is not None
    assert [one.node_id for one in found.notices] == ["n0"]


def test_a_hazard_that_doubles_is_news():
    state = State()
    written(state, seen({"n0": (2, 1.0)}, hazard=0.1))
    assert change(state, seen({"n0": (2, 1.0)}, hazard=0.12)) is None
    assert change(state, seen({"n0": (2, 1.0)}, hazard=0.3)) is not None


@given(st.lists(st.tuples(NODES, NOTICES, st.floats(0, 2)), min_size=1, max_size=8))
def test_written_changes_lead_to_what_was_seen(looks):
    state = State()
    for there, notices, hazard in looks:
        capacity = seen(there, notices, hazard)
        before = state.revision
        found = written(state, capacity)
        assert state.revision == before + (found is not None)
        assert change(state, capacity) is None  # nothing is left to say
        ledgers, usable = known(state), {one.id for one in capacity.usable}
        assert {one.id for one in ledgers.nodes} == set(there)
        assert {one.id for one in ledgers.usable} == usable
        assert all(state.nodes[one.id].gpus == one.gpus for one in capacity.nodes)
