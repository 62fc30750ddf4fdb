"""What is known of nodes' starts and ends stays known, in whatever order and however often it is looked at."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.aws.clients import Clients
from ebbflow.infra.aws.fleet.usage import KEEP, NodeUsage, UsageLog, UsageStore, _stay
from ebbflow.infra.errors import StorageError
from tests.aws.emulator import PoolShape

NOW = 1_795_255_200.0


def stay(name, start=NOW - 100, **more):
    return NodeUsage(name, "etl", "m5.large", "us-east-1a", True, start, **more)


def test_an_end_is_that_which_was_told_first():
    book = UsageLog(NOW).merged([stay("a"), stay("b")], NOW)
    book = book.merged([stay("a", end=NOW + 5), stay("b")], NOW + 10)
    book = book.merged([stay("a", end=NOW + 20), stay("b")], NOW + 20)
    assert [(s.id, s.end, s.exact) for s in book.stays] == [("a", NOW + 5, True), ("b", None, True)]


def test_a_node_that_is_told_of_no_more_has_ended_before_the_look():
    book = UsageLog(NOW).merged([stay("a")], NOW).merged([], NOW + 5000)
    assert [(s.end, s.exact) for s in book.stays] == [(NOW + 5000, False)]
    assert book.merged([], NOW + 9000) == book


def test_a_node_that_one_look_left_out_goes_on_and_its_true_end_counts():
    book = UsageLog(NOW).merged([stay("a"), stay("b")], NOW).merged([], NOW + 10)
    assert {s.end for s in book.stays} == {NOW + 10}
    book = book.merged([stay("a"), stay("b", end=NOW + 4, interrupted=True)], NOW + 20)
    assert [(s.id, s.end, s.exact) for s in book.stays] == [("a", None, True), ("b", NOW + 4, True)]
    assert book.stays[1].interrupted


def test_what_ended_long_ago_is_forgotten_and_the_book_says_since_when_it_is_whole():
    book = UsageLog(NOW).merged([stay("a", end=NOW)], NOW)
    assert book.begin == NOW - 100
    later = NOW + KEEP + 50
    assert book.merged([], later) == UsageLog(later - KEEP)


lives = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=1, max_size=6)


@given(lives, st.lists(st.integers(0, 120), min_size=1, max_size=12))
def test_looking_often_loses_nothing(spans, moments):
    """EC2 is asked at any times, tells of ended nodes for 30 s, and the book never shows a shorter stay than was."""
    book = UsageLog(0.0)
    seen = set()
    for now in sorted(moments):
        told = [
            stay(f"n{i}", float(a), end=float(a + long) if a + long <= now else None)
            for i, (a, long) in enumerate(spans)
            if a <= now < a + long + 30
        ]
        seen |= {s.id for s in told}
        book = book.merged(told, float(now))
    assert {s.id for s in book.stays} == seen
    for found in book.stays:
        start, long = spans[int(found.id[1:])]
        ended = start + long <= max(moments)
        assert found.start == start
        assert (found.end is not None) == ended
        if found.end is not None:
            assert found.end == start + long if found.exact else found.end >= start + long


@pytest.mark.parametrize(
    ("reason", "end", "exact"),
    [
        ("User initiated (2026-11-21 22:00:00 GMT)", 1_795_298_400.0, True),
        ("Server.SpotInstanceTermination (2026-11-21 22:00:00 UTC)", 1_795_298_400.0, True),
        ("", 1_795_300_000.0, False),
    ],
)
def test_the_end_is_read_from_ec2s_words(reason, end, exact):
    from datetime import UTC, datetime

    one = {
        "InstanceId": "i-1",
        "InstanceType": "m5.large",
        "LaunchTime": datetime(2026, 11, 21, 20, tzinfo=UTC),
        "State": {"Name": "terminated"},
        "StateTransitionReason": reason,
        "StateReason": {"Code": "Server.SpotInstanceTermination"},
        "InstanceLifecycle": "spot",
    }
    found = _stay(one, 1_795_300_000.0)
    assert (found.end, found.exact, found.interrupted) == (end, exact, True)


def test_a_file_that_is_no_record_says_what_to_do(tmp_path):
    path = tmp_path / "lab.stays.json"
    stays = UsageStore(None, None, path)
    for text in ("{", "[]", '{"format": 2}', '{"format": 1, "since": 1, "stays": [{}]}'):
        path.write_text(text)
        with pytest.raises(StorageError, match=r"is no record of instance usage .*delete it"):
            stays.read(NOW)


def test_stays_of_an_emulated_cluster_and_of_no_other(aws_account, tmp_path):
    cluster = aws_account.cluster("lab", PoolShape("etl", size=3, on_demand_base=1))
    other = aws_account.cluster("prod", PoolShape("etl", size=2))
    aws_account.strangers(1)
    clients = Clients(cluster.settings.region)
    stays = UsageStore(clients, cluster.names, tmp_path / "lab.stays.json")
    book = stays.look()
    ids = {node["id"] for node in cluster.nodes("etl")}
    assert {s.id for s in book.stays} == ids
    assert sorted(s.spot for s in book.stays) == [False, True, True]
    assert {s.pool for s in book.stays} == {"etl"}
    gone = sorted(s.id for s in book.stays if s.spot)[0]
    aws_account.take([gone])
    book = stays.look()
    ended = {s.id: s for s in book.stays}[gone]
    assert ended.end is not None
    assert ended.interrupted
    assert stays.read(0.0) == book
    assert len(book.stays) == 4  # the group has replaced it
    assert not {node["id"] for node in other.nodes("etl")} & {s.id for s in book.stays}
    assert replace(ended, end=None).node.market == "spot"
