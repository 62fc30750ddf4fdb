"""Changes, reports and states to JSON and back."""

import json
import math
from dataclasses import fields
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.errors import LedgerError
from ebbflow.infra.ledger.rows import codec
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Node, Notice
from ebbflow.planners.model.ledger import (
    CHANGES,
    AppEntered,
    AppMoved,
    AppPhase,
    AppReport,
    AppSpec,
    CapacityChanged,
    Change,
    Decided,
    DecisionKind,
    Ended,
    Extended,
    Granted,
    Lease,
    LoopBegan,
    Recalled,
    Saved,
)
from ebbflow.planners.model.ledger_state import State
from tests.infra.ledger.ledger_values import app, decision

words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=8)
numbers = st.floats(allow_nan=False)
whole = st.integers(-(2**63), 2**63 - 1)
plain = st.recursive(
    st.none() | st.booleans() | whole | numbers | words,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(words.filter(lambda w: w[:1] != "$"), inner, max_size=3)
    ),
    max_leaves=8,
)
mappings = st.dictionaries(words.filter(lambda w: w[:1] != "$"), plain, max_size=3)
some_numbers = st.lists(whole, max_size=4).map(tuple)
the_nodes = st.builds(
    Node, words, st.integers(0, 512), numbers, words, words, st.sampled_from(["spot", "on-demand"]), words, words,
    st.integers(0, 16), numbers,
)  # fmt: skip
notices = st.builds(Notice, words, numbers, st.sampled_from(["interruption", "rebalance"]))
specs = st.builds(
    AppSpec, words, st.sampled_from(["query", "training", "tuning"]), words, words, words, whole, whole, whole,
    numbers, st.none() | numbers, st.none() | numbers, words, mappings,
)  # fmt: skip
leases = st.builds(
    Lease, whole, words, words, whole, numbers, numbers, whole, numbers, st.none() | numbers, words
)
changes = st.one_of(
    st.builds(LoopBegan, whole, words),
    st.builds(
        CapacityChanged, whole, st.lists(the_nodes, max_size=3).map(tuple), st.lists(words, max_size=3).map(tuple),
        st.lists(notices, max_size=2).map(tuple), numbers, words,
    ),
    st.builds(AppEntered, specs),
    st.builds(AppMoved, words, st.sampled_from(get_args(AppPhase)), words),
    st.builds(Granted, st.lists(leases, max_size=3).map(tuple)),
    st.builds(Extended, some_numbers, numbers, words),
    st.builds(Recalled, some_numbers, numbers, words),
    st.builds(Ended, some_numbers, words),
    st.builds(Decided, st.sampled_from(get_args(DecisionKind)), words, words, whole, numbers, mappings, mappings),
    st.builds(Saved, words, words, whole),
)  # fmt: skip


@given(changes)
def test_a_change_comes_back_as_it_was(change: Change) -> None:
    packed = codec.pack(change)
    assert packed.change == change
    assert codec.unpack(packed.kind, codec.FORMAT, packed.body) == change
    assert packed.body.isascii()
    json.loads(packed.body, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@given(
    st.builds(
        AppReport, numbers, some_numbers, job=mappings, trials=st.lists(mappings, max_size=2).map(tuple)
    )
)
def test_a_report_comes_back_as_it_was(report: AppReport) -> None:
    assert codec.load(AppReport, codec.FORMAT, codec.dump(report)) == report


def test_every_kind_of_change_has_a_name() -> None:
    assert set(CHANGES.values()) == set(get_args(Change))
    for name, kind in CHANGES.items():
        assert codec.kind_of(kind) == codec.kind_of(name) == codec.kind_of(kind.__name__) == name


def test_the_format_of_today_is_read_for_ever() -> None:
    """These bodies are in people's databases: a change of the codec must go on reading them."""
    kept: dict[str, tuple[str, Change]] = {
        "leader-elected": ('{"token":2,"holder":"h"}', LoopBegan(2, "h")),
        "capacity-changed": (
            '{"revision":1,"nodes":[{"id":"n","cores":4,"memory":8.0,"gpus":2}],'
            '"notices":[{"node_id":"n","deadline":9.5}],"hazard":0.5}',
            CapacityChanged(1, (Node("n", 4, 8.0, gpus=2),), notices=(Notice("n", 9.5),), hazard=0.5),
        ),
        "app-registered": (
            '{"spec":{"id":"a","kind":"training","gpus":2,"resume":{"x":{"$float":"inf"}}}}',
            AppEntered(AppSpec("a", "training", gpus=2, resume={"x": math.inf})),
        ),
        "app-phase-changed": ('{"app":"a","phase":"lost"}', AppMoved("a", "lost")),
        "lease-granted": (
            '{"leases":[{"number":1,"app":"a","node":"n","slot":0,"since":1.0,"until":2.0,"revision":1}]}',
            Granted((Lease(1, "a", "n", 0, 1.0, 2.0, 1),)),
        ),
        "lease-extended": ('{"leases":[1],"until":{"$float":"inf"}}', Extended((1,), math.inf)),
        "lease-revoked": ('{"leases":[1,2],"deadline":3.0,"reason":"r"}', Recalled((1, 2), 3.0, "r")),
        "lease-ended": ('{"leases":[]}', Ended(())),
        "decided": (
            '{"kind":"guard","reason":"r","inputs":{"a":[1,null]}}',
            Decided("guard", "r", inputs={"a": [1, None]}),
        ),
        "checkpoint-saved": ('{"app":"a","uri":"u","step":3}', Saved("a", "u", 3)),
    }
    assert set(kept) == set(CHANGES)
    for kind, (body, change) in kept.items():
        assert codec.unpack(kind, codec.FORMAT, body) == change
        assert codec.unpack(kind, 1, body.replace('"revision":', '"epoch":')) == change
        assert codec.pack(change).body == body


@pytest.mark.parametrize(
    ("kind", "version", "body", "said"),
    [
        ("lease-granted", 99, "{}", "newer Ebbflow"),
        ("vanished", 1, "{}", "kind 'vanished'"),
        ("lease-ended", 1, "{", "cannot be read"),
        ("lease-ended", 1, "[]", "wants an object"),
        ("lease-ended", 1, "{}", "lacks 'leases'"),
        ("lease-ended", 1, '{"leases":[1],"why":2}', "has no 'why'"),
        ("lease-ended", 1, '{"leases":[1.5]}', "leases: wants an integer"),
        ("lease-ended", 1, '{"leases":[true]}', "leases: wants an integer"),
        ("lease-ended", 1, '{"leases":[9223372036854775808]}', "64 bits"),
        ("lease-ended", 1, '{"leases":1}', "wants a list"),
        ("lease-extended", 1, '{"leases":[1],"until":"soon"}', "until: wants a number"),
        ("lease-extended", 1, '{"leases":[1],"until":{"$float":"nan"}}', "until: wants a number"),
        ("app-phase-changed", 1, '{"app":"a","phase":"gone"}', "phase: wants one of waiting"),
        ("app-phase-changed", 1, '{"app":null,"phase":"lost"}', "app: wants a string"),
        ("decided", 1, '{"kind":"guard","reason":"","inputs":[]}', "inputs: wants an object"),
    ],
)
def test_what_cannot_be_read_is_refused(kind: str, version: int, body: str, said: str) -> None:
    with pytest.raises(LedgerError, match=said):
        codec.unpack(kind, version, body)


LOOP: dict[str, Any] = {}
LOOP["again"] = LOOP


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (AppMoved("a", "gone"), "phase: wants one of"),  # type: ignore[arg-type]
        (AppMoved(7, "lost"), "app: wants a string"),  # type: ignore[arg-type]
        (Extended((1,), math.nan), "until: wants a number"),
        (Extended((1,), True), "until: wants a number"),
        (Ended(("1",)), "leases: wants an integer"),  # type: ignore[arg-type]
        (Ended((2**63,)), "64 bits"),
        (Granted((1,)), "is not a Lease"),  # type: ignore[arg-type]
        (decision(inputs={"a": {1, 2}}), "inputs: .* is a set, not a plain JSON value"),
        (decision(inputs={"a": object()}), "not a plain JSON value"),
        (decision(inputs={(1, 2): 3}), "key .* must be a string"),
        (decision(inputs={"$float": "inf"}), "must not start with"),
        (decision(inputs=LOOP), "nested too deeply"),
        (decision(inputs={"x": "y" * (codec.LARGEST + 1)}), "characters of JSON"),
        ("lease-granted", "not a kind of change"),
    ],
)
def test_what_cannot_be_stored_is_refused(change: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        codec.pack(change)


def test_what_is_near_enough_to_json_is_stored() -> None:
    given = {
        "i": np.int64(3),
        "f": np.float64(1.5),
        "a": np.array([1.0, np.inf]),
        "t": (1, 2),
        7: "seven",
        "n": math.nan,
    }
    packed = codec.pack(decision(inputs=given))
    assert isinstance(packed.change, Decided)
    found = dict(packed.change.inputs)
    assert math.isnan(found.pop("n"))
    assert found == {"i": 3, "f": 1.5, "a": [1.0, math.inf], "t": [1, 2], "7": "seven"}
    assert codec.pack(Extended((1,), 3)).change == Extended((1,), 3.0)


def test_a_whole_state_comes_back_with_every_field() -> None:
    from ebbflow.planners.model.ledger import Event
    from ebbflow.planners.model.ledger_state import fold

    state = State()
    for number, change in enumerate(
        [
            AppEntered(AppSpec("$float", "query", resume={"a": math.inf})),
            app("b"),
            LoopBegan(3, "h"),
            CapacityChanged(4, (Node("n", 1, 2.0, gpus=2),), notices=(Notice("n", 5.0),), hazard=0.1),
            Granted((Lease(5, "b", "n", 1, 0.0, math.inf, 4),)),
        ],
        1,
    ):
        fold(state, Event(number, 7.0, change))
    state.teams, state.pipelines = {"red": 1.5}, {"p": 0.1}
    for field in fields(State):
        assert getattr(state, field.name), f"{field.name} is empty, so this test would not see it lost"
    found = codec.load(State, codec.FORMAT, codec.dump_known(state))
    assert found == state
    assert list(found.apps) == list(state.apps)
