import json
import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.aws.fleet.state import FleetState, FolderStore, GangPlan, ObservedNode, Plan
from ebbflow.infra.errors import StorageError
from ebbflow.infra.storage.checksums import sealed
from ebbflow.planners.model.capacity import Notice

ids = st.text(alphabet="abc0123456789-", min_size=1, max_size=8)
times = st.floats(0, 4e9)
plans = st.builds(
    Plan,
    nodes=st.integers(0, 100),
    on_demand=st.integers(0, 100),
    drain=st.lists(ids, max_size=3).map(tuple),
    reason=st.text(max_size=20),
    on_demand_since=times,
)
gangs = st.builds(
    GangPlan,
    pool=ids,
    size=st.integers(1, 100),
    market=st.sampled_from(["spot", "on-demand"]),
    token=ids,
    phase=st.sampled_from(["asked", "held", "ending"]),
    since=times,
    fleet=ids,
    nodes=st.lists(ids, max_size=3).map(tuple),
)
seen = st.builds(
    ObservedNode, id=ids, pool=ids, instance_type=ids, zone=ids, market=st.sampled_from(["spot", "on-demand"])
)
notices = st.builds(Notice, node_id=ids, deadline=times, kind=st.sampled_from(["interruption", "rebalance"]))
states = st.builds(
    FleetState,
    cluster=st.just("lab"),
    revision=st.integers(0, 10**9),
    plans=st.dictionaries(ids, plans, max_size=3),
    gangs=st.dictionaries(ids, gangs, max_size=3),
    seen=st.lists(seen, max_size=4).map(tuple),
    notices=st.lists(notices, max_size=3).map(tuple),
    short=st.dictionaries(ids, times, max_size=3),
)


@given(states)
def test_what_is_kept_is_read_again(tmp_path_factory, state):
    folder = tmp_path_factory.mktemp("fleet")
    assert FolderStore(folder, "lab").change(lambda _: state) == state
    assert FolderStore(folder, "lab").read() == state


def test_an_unknown_cluster_begins_empty(tmp_path):
    assert FolderStore(tmp_path / "deep" / "er", "lab").read() == FleetState("lab")


PARTS = {
    "version": 1,
    "cluster": "lab",
    "revision": 1,
    "plans": {},
    "gangs": {},
    "seen": [],
    "notices": [],
    "short": {},
}


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"[]",
        b"\xff",
        json.dumps(PARTS).encode(),
        sealed({"version": 2}),
        sealed({"version": 1, "cluster": "lab"}),
        sealed({**PARTS, "plans": {"etl": {"nodes": 1}}}),
    ],
)
def test_a_state_that_cannot_be_understood_is_an_error_not_a_new_beginning(tmp_path, data):
    (tmp_path / "lab.json").write_bytes(data)
    store = FolderStore(tmp_path, "lab")
    with pytest.raises(StorageError, match="restore it"):
        store.read()
    with pytest.raises(StorageError):
        store.change(lambda state: replace(state, revision=1))
    assert (tmp_path / "lab.json").read_bytes() == data


def test_no_flipped_byte_of_a_state_is_believed(tmp_path):
    store, path = FolderStore(tmp_path, "lab"), tmp_path / "lab.json"
    store.change(lambda state: replace(state, revision=7, plans={"gpu": Plan(3, reason="work waits")}))
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(StorageError, match="restore it"):
            store.read()


def test_a_state_of_another_cluster_is_refused(tmp_path):
    FolderStore(tmp_path, "lab").change(lambda state: replace(state, revision=1))
    (tmp_path / "lab.json").rename(tmp_path / "prod.json")
    with pytest.raises(StorageError, match="belongs to the cluster 'lab'"):
        FolderStore(tmp_path, "prod").read()


def test_no_change_is_lost_among_threads(tmp_path):
    def count(_: int) -> None:
        store = FolderStore(tmp_path, "lab")
        for _ in range(20):
            store.change(lambda state: replace(state, revision=state.revision + 1))

    threads = [threading.Thread(target=count, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert FolderStore(tmp_path, "lab").read().revision == 80


def test_nothing_secret_and_nothing_but_json_is_kept(tmp_path):
    FolderStore(tmp_path, "lab").change(lambda state: replace(state, revision=7))
    assert json.loads((tmp_path / "lab.json").read_text())["revision"] == 7
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lab.json", "lab.json.lock"]


def test_a_change_that_fails_changes_nothing(tmp_path):
    store = FolderStore(tmp_path, "lab")
    store.change(lambda state: replace(state, revision=3))

    def fail(_: FleetState) -> FleetState:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        store.change(fail)
    assert store.read().revision == 3
    assert store.change(lambda state: state).revision == 3
