"""The state of a local fleet: it is whole whatever cuts a writing off, and ids and revisions only grow."""

import builtins
import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import ClusterError, StorageError
from ebbflow.infra.local_fleet.fleet import newest_beyond
from ebbflow.infra.local_fleet.state import changes, store
from ebbflow.infra.local_fleet.state.fleet_state import (
    Identity,
    LocalFleetState,
    LocalNode,
    PoolPlan,
    SparkPart,
    TerminatedNode,
)
from ebbflow.infra.local_fleet.state.pools import LocalPool, check, shared
from ebbflow.infra.local_fleet.state.store import LocalFleetStateFile, decoded, encoded
from ebbflow.infra.local_fleet.view import NodeView
from ebbflow.infra.storage import files
from ebbflow.infra.storage.checksums import sealed, unsealed
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Notice
from ebbflow.planners.model.fleet import Target

GPU = LocalPool("gpu", "gpu", cores=2, slots=2, min_nodes=1, max_nodes=4, price=0.5, on_demand_price=1.5)
SQL = LocalPool("sql", "spark", cores=1, memory=0.5, max_nodes=3, price=0.1)
reals = st.floats(0, 1e10, allow_nan=False)
texts = st.text(max_size=20)


def state_of(*pools, **changed):
    plans = {pool.name: PoolPlan(pool.start) for pool in pools}
    return replace(LocalFleetState("lab", "u1", revision=3, pools=pools, plans=plans), **changed)


@st.composite
def states(draw):
    pools = draw(st.sampled_from([(GPU,), (GPU, SQL)]))
    plan = st.builds(
        PoolPlan,
        st.integers(0, 4),
        st.integers(0, 4),
        st.lists(texts, max_size=2).map(tuple),
        texts,
        reals,
        st.none() | reals,
        reals,
        texts,
    )
    node = st.builds(
        LocalNode,
        texts,
        st.sampled_from([pool.name for pool in pools]),
        st.sampled_from(["starting", "up"]),
        reals,
        st.sampled_from(["spot", "on-demand"]),
        reals,
        texts,
        st.lists(texts, max_size=2).map(tuple),
        st.none() | st.builds(Identity, st.integers(1, 9), st.integers(0, 9)),
        st.none() | reals,
        texts,
    )
    return LocalFleetState(
        draw(texts),
        draw(texts),
        draw(reals),
        draw(st.booleans()),
        draw(st.none() | st.builds(Identity, st.integers(1, 9), st.integers(0, 9))),
        None,
        draw(st.integers(0, 99)),
        pools,
        {pool.name: draw(plan) for pool in pools},
        draw(st.dictionaries(texts, st.integers(0, 99), max_size=2)),
        tuple(draw(st.lists(node, max_size=3))),
        tuple(draw(st.lists(st.builds(Notice, texts, reals), max_size=2))),
        tuple(draw(st.lists(st.builds(TerminatedNode, texts, reals, reals, texts), max_size=2))),
        tuple(draw(st.lists(texts, max_size=2))),
        draw(st.none() | st.builds(SparkPart, texts, texts, texts)),
    )


@given(states())
def test_what_is_written_is_what_is_read(state):
    assert decoded(encoded(state)) == state


@given(states())
def test_former_keys_of_the_file_are_read(state):
    former = {"supervisor": "keeper", "revision": "epoch", "reported": "heard", "terminated": "gone"}
    row = {former.get(key, key): value for key, value in unsealed(encoded(state)).items()}
    assert decoded(sealed(row)) == state


@pytest.mark.parametrize(
    "spoil",
    [
        lambda row: row.pop("revision"),
        lambda row: row.update(format=99),
        lambda row: row.update(more=1),
        lambda row: row["plans"].clear(),
        lambda row: row["pools"][0].update(slots=0),
        lambda row: row["nodes"].append({"id": "gpu-1"}),
    ],
)
def test_a_state_of_another_form_is_an_error_that_names_the_file(tmp_path, spoil):
    row = unsealed(encoded(state_of(GPU)))
    spoil(row)
    file = LocalFleetStateFile(tmp_path)
    file.path.write_bytes(sealed(row))
    with pytest.raises(StorageError, match=r"fleet\.json cannot be understood"):
        file.read()


def test_no_flipped_byte_of_a_state_is_believed(tmp_path):
    file, whole = LocalFleetStateFile(tmp_path), encoded(state_of(GPU, SQL))
    for at in range(len(whole)):
        file.path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(StorageError, match=r"fleet\.json cannot be understood"):
            file.read()


class Crash(BaseException):
    """The process ends here: nothing more of it is carried out."""


class Machine:
    """Counts what is asked of the operating system and ends the process at the n-th; the kernel then closes files."""

    def __init__(self, steps):
        self.left = steps

    def step(self):
        if self.left == 0:
            raise Crash
        self.left -= 1

    def wrapped(self, function):
        def call(*args, **kwargs):
            self.step()
            return function(*args, **kwargs)

        return call

    def __getattr__(self, name):  # in the place of the module ``os``
        found = (lambda _: None) if name == "fsync" else getattr(os, name)  # it takes its time
        return self.wrapped(found) if name in ("replace", "fsync", "unlink", "makedirs") else found

    def opened(self, *args, **kwargs):
        self.step()
        file = builtins.open(*args, **kwargs)  # noqa: SIM115 - ``_Written`` closes it
        whole = file.write

        def write(data):
            if self.left == 0:
                whole(data[: len(data) // 2])  # a part may have reached the disk
                file.flush()
            self.step()
            return whole(data)

        return _Written(file, write)


class _Written:
    def __init__(self, file, write):
        self._file, self.write = file, write

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()


@given(st.integers(0, 12), st.sampled_from(["", "short", "x" * 100_000]))
def test_a_writing_that_is_cut_off_leaves_the_old_state_or_the_new(steps, reason):
    before = state_of(GPU)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        file = LocalFleetStateFile(Path(folder))
        file.write(before)
        machine = Machine(steps)
        patch.setattr(files, "os", machine)
        patch.setattr(files, "open", machine.opened, raising=False)
        after = replace(before.planned("gpu", reason=reason), revision=before.revision + 1)
        try:
            file.write(after)
            cut_off = False
        except Crash:
            cut_off = True
        patch.undo()
        again = LocalFleetStateFile(Path(folder))
        assert again.read() in ((before, after) if cut_off else (after,))
        last = again.change(before.uid, lambda state: replace(state, gpus=("7",)))
        assert LocalFleetStateFile(Path(folder)).read() == last


def test_steps_of_a_writing_do_reach_its_end(tmp_path):
    """The crash points above are all there are: a writing takes fewer steps than the most of them."""
    file, machine = LocalFleetStateFile(tmp_path), Machine(12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "os", machine)
        patch.setattr(files, "open", machine.opened, raising=False)
        file.write(state_of(GPU))
    assert 0 < machine.left < 8


def test_a_change_of_another_life_is_refused(tmp_path):
    file = LocalFleetStateFile(tmp_path)
    file.write(state_of(GPU))
    with pytest.raises(ClusterError, match="taken down"):
        file.change("u2", lambda state: state)
    assert file.read() == state_of(GPU)


# --- what changes ---------------------------------------------------------------------------------------------


class Clocked:
    """Draws a history of a state: what users, the supervisor and the machines do to it."""

    def __init__(self, draw):
        self.state, self.now, self.draw = state_of(GPU, SQL), 1000.0, draw
        self.ids = []

    def act(self):
        draw, state, now = self.draw, self.state, self.now
        nodes = [node.id for node in state.nodes]
        pool = draw(st.sampled_from(["gpu", "sql"]))
        kind = draw(st.sampled_from(["plan", "give", "take", "lose", "end", "hear", "notice", "wait"]))
        if kind == "plan":
            target = Target(pool, draw(st.integers(0, 6)), state.revision, "test", drain=tuple(nodes[:1]))
            return changes.plan(state, target, now)[0]
        if kind == "give":
            return changes.give(state, pool, 4, now)
        if kind == "wait" or not nodes:
            self.now += 10.0
            return state.short(self.now)
        node = draw(st.sampled_from(nodes))
        if kind == "take":
            return changes.take(state, node, "127.0.0.1", None, now)
        if kind == "lose":
            return state.without(node, "lost", now, lost=True)
        if kind == "end":
            return changes.end(state, [node], "asked")[0]
        if kind == "hear":
            told = Notice(
                node, now + draw(st.integers(1, 3)), draw(st.sampled_from(["interruption", "rebalance"]))
            )
            return changes.record_notices(state, [told])
        return (
            state.noted(node, deadline=now + draw(st.integers(1, 2))) if state.node(node).visible else state
        )

    def visible(self):
        seen = [
            (n.id, n.host, n.market, n.price)
            for n in sorted(self.state.nodes, key=lambda n: n.id)
            if n.visible
        ]
        return seen, self.state.pending_notices()


@given(st.data())
def test_revisions_grow_exactly_at_what_is_seen_and_ids_are_never_used_twice(data):
    history = Clocked(data.draw)
    ever = set()
    for _ in range(data.draw(st.integers(1, 25))):
        seen, revision, before = (
            history.visible(),
            history.state.revision,
            {n.id for n in history.state.nodes},
        )
        history.state = history.state.after(history.act())
        assert history.state.revision == revision + (history.visible() != seen)
        new = {n.id for n in history.state.nodes} - before
        assert not new & ever
        ever |= new
        for pool in (GPU, SQL):
            plan = history.state.plans[pool.name]
            lasting = [
                n for n in history.state.nodes if n.pool == pool.name and n.lasting and n.phase == "starting"
            ]
            assert len(lasting) <= max(plan.nodes, pool.min_nodes)
            assert pool.min_nodes <= plan.nodes <= pool.max_nodes or plan.nodes == pool.start


def test_ids_go_on_where_the_fleets_last_life_ended():
    state = state_of(GPU, numbers={"gpu": 7}, revision=40)
    assert [node.id for node in changes.give(state, "gpu", 4, 0.0).nodes] == ["gpu-8"]


def test_gpus_of_the_machine_are_shared_out_and_what_is_short_of_them_says_so():
    pool = replace(GPU, initial=3)
    state = changes.give(state_of(pool, gpus=("0", "1", "4", "5", "7")), "gpu", 4, 0.0)
    assert [node.gpus for node in state.nodes] == [("0", "1"), ("4", "5")]
    state = state.short(0.0)
    assert state.pool_state(pool, 0.0).short_why == "a node needs 2 GPUs, and 1 of 5 are free"
    state = changes.give(state.without("gpu-1", "lost", 1.0, lost=True), "gpu", 4, 1.0)
    assert [(node.id, node.gpus) for node in state.nodes] == [("gpu-2", ("4", "5")), ("gpu-3", ("0", "1"))]


def test_gpus_are_used_where_they_are_enough_for_the_first_nodes():
    pools = [replace(GPU, initial=2), SQL]
    assert shared(pools, ("0", "1", "2", "3", "4"), None) == ("0", "1", "2", "3", "4")
    assert shared(pools, ("0", "1", "2"), None) == ()
    assert shared(pools, ("0",), ()) == ()
    assert shared(pools, (), ("4", "5", "6", "7")) == ("4", "5", "6", "7")
    with pytest.raises(OptionError, match="need 4 GPUs, and 1 are given"):
        shared(pools, ("0", "1", "2", "3"), ("0",))


def test_a_pool_starts_as_many_on_demand_nodes_as_are_planned_at_their_price():
    state = state_of(replace(GPU, initial=3))
    state = changes.plan(state, Target("gpu", 3, 3, "test", on_demand=2), 0.0)[0]
    nodes = changes.give(state, "gpu", 4, 0.0).nodes
    assert [(node.market, node.price) for node in nodes] == [
        ("on-demand", 1.5),
        ("on-demand", 1.5),
        ("spot", 0.5),
    ]


def test_money_is_counted_from_the_grant_to_the_end():
    state = changes.give(state_of(replace(GPU, initial=2)), "gpu", 4, 0.0)
    state = changes.take(state, "gpu-1", "h", None, 600.0).without("gpu-1", "lost", 3600.0, lost=True)
    assert state.dollars(7200.0) == pytest.approx(0.5 * 1 + 0.5 * 2)
    assert state.experience(7200.0) == (1, 3600.0)
    assert state.ended("gpu-1") == "lost"


def test_of_several_notices_the_firmest_and_then_the_earliest_counts():
    state = changes.take(changes.give(state_of(GPU), "gpu", 1, 0.0), "gpu-1", "h", None, 1.0)
    state = changes.record_notices(state, [Notice("gpu-1", 50.0, "rebalance"), Notice("gpu-9", 40.0)])
    assert state.pending_notices() == (Notice("gpu-1", 50.0, "rebalance"),)
    state = state.noted("gpu-1", deadline=90.0)
    assert state.pending_notices() == (Notice("gpu-1", 90.0),)
    assert changes.record_notices(state, [Notice("gpu-1", 70.0)]).pending_notices() == (
        Notice("gpu-1", 70.0),
    )
    assert state.short(40.0).reported
    assert {n.node_id for n in state.short(345.0).reported} == {"gpu-1"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "GPU"}, "lower-case letters"),
        ({"name": "gpu-1"}, "lower-case letters"),
        ({"kind": "tpu"}, "'spark', 'gpu' or 'cpu'; got 'tpu'"),
        ({"market": "free"}, "got 'free'"),
        ({"cores": 0}, "cores and slots"),
        ({"memory": 0.0}, "memory > 0"),
        ({"slots": 1.5}, "slots of pool gpu must be a whole number; got 1.5"),
        ({"min_nodes": 3, "max_nodes": 2}, "min_nodes <= initial <= max_nodes"),
        ({"initial": 9}, "initial 9, max_nodes 8"),
        ({"price": -1.0}, "price of pool gpu must be >= 0"),
        ({"provision_time": float("nan")}, "provision_time of pool gpu"),
        ({"cpus_per_slot": 0.0}, "cpus_per_slot of pool gpu must be > 0"),
    ],
)
def test_a_pool_outside_its_rules_is_refused_with_the_value_and_the_rule(options, said):
    with pytest.raises(OptionError, match=said):
        LocalPool(**{"name": "gpu", "kind": "gpu", **options})


def test_pools_that_cannot_be_together_are_refused():
    with pytest.raises(OptionError, match="at least one pool"):
        check([])
    with pytest.raises(OptionError, match="'gpu' twice"):
        check([GPU, GPU])
    with pytest.raises(OptionError, match=r"1 cores with 0\.5 GiB and 2 cores"):
        check([SQL, replace(SQL, name="more", cores=2)])
    assert [pool.name for pool in check([SQL, GPU])] == ["gpu", "sql"]
    with pytest.raises(OptionError, match="no setting 'colour'"):
        LocalPool.from_dict("gpu", {"kind": "gpu", "colour": "red"})
    assert LocalPool.from_dict("gpu", {"kind": "gpu", "slots": 2}) == LocalPool("gpu", "gpu", slots=2)


def test_a_reading_follows_changes_however_quickly_they_come(tmp_path):
    file, other = LocalFleetStateFile(tmp_path, SystemClock()), LocalFleetStateFile(tmp_path, SystemClock())
    file.write(state_of(GPU))
    for number in range(50):
        other.change("u1", lambda state, n=number: state.planned("gpu", reason=f"{n:03d}"))
        assert file.read().plans["gpu"].reason == f"{number:03d}"


def test_a_change_within_one_tick_of_the_file_systems_clock_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_TICK", 60 * 10**9)  # however long a busy machine takes until it reads
    file = LocalFleetStateFile(tmp_path)
    file.write(state_of(GPU, revision=4))
    was = file.path.stat()
    assert file.read().revision == 4
    with file.path.open("r+b") as content:  # the same inode, size and time
        content.write(encoded(state_of(GPU, revision=5)))
    os.utime(file.path, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert file.read().revision == 5


@pytest.mark.parametrize(
    ("there", "before", "planned", "ends"),
    [
        ("abc", 3, 1, "bc"),
        ("abc", 5, 1, "bc"),  # two were to come: they do not
        ("ab", 5, 4, ""),
        ("abc", 2, 1, "c"),  # one more than planned, which the supervisor sees to
        ("a", 1, 1, ""),
        ("", 2, 0, ""),
    ],
)
def test_the_newest_nodes_end_and_those_that_are_to_come_do_not(there, before, planned, ends):
    nodes = [
        NodeView(name, "gpu", "gpu", "alive", float(number), 0.0, "spot", 1, 1.0, 1)
        for number, name in enumerate(there)
    ]
    assert newest_beyond(nodes[::-1], before, planned) == tuple(ends)
