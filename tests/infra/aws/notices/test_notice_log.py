"""Whatever the order of messages, and however often each comes, the same is known in the end."""

import json
from functools import reduce

import pytest
from hypothesis import given

from ebbflow.infra.aws.notices import events
from ebbflow.infra.aws.notices.store import KEEP, Failure, NoticeFile, NoticeLog
from ebbflow.infra.errors import NoticeError, StorageError
from ebbflow.infra.storage.checksums import sealed
from ebbflow.planners.model import Notice
from tests.infra.aws.notice_samples import START, event, stream


def book(*heard, drain=120.0):
    return reduce(lambda known, one: known.merged(one, drain), heard, NoticeLog())


def warning(node="i-a", at=START):
    return events.Interruption(node, at, at + 120, "terminate")


@given(stream())
def test_order_and_duplicates_change_nothing(pair):
    happened, delivered = pair
    assert book(*happened) == book(*delivered)


@given(stream())
def test_no_notice_is_lost_and_none_made_up(pair):
    _, delivered = pair
    ended = {e.instance for e in delivered if isinstance(e, events.StateChange) and e.ended}
    firm: dict[str, float] = {}
    for e in delivered:
        if isinstance(e, events.Interruption | events.NodeLeaving):
            firm[e.instance] = min(e.deadline, firm.get(e.instance, e.deadline))
        elif isinstance(e, events.GroupEnds):
            firm[e.instance] = min(e.at + 60, firm.get(e.instance, e.at + 60))
    found = book(*delivered, drain=60.0).notices()
    assert {n.node_id: n.deadline for n in found if n.kind == "interruption"} == {
        node: deadline for node, deadline in firm.items() if node not in ended
    }
    advised = {e.instance for e in delivered if isinstance(e, events.Rebalance)} - ended - firm.keys()
    weak = {n.node_id for n in found if n.kind == "rebalance"}
    planned = {n for e in delivered if isinstance(e, events.Health) and e.planned for n in e.instances}
    assert advised <= weak <= advised | planned
    assert [n.node_id for n in found] == sorted({n.node_id for n in found})


@given(stream(), event())
def test_a_book_survives_being_written(pair, later):
    known = book(*pair[0])
    again = NoticeLog.from_json(json.loads(json.dumps(known.to_json())))
    assert again == known
    assert again.merged(later) == known.merged(later)


def test_a_firm_notice_counts_before_advice():
    assert book(events.Rebalance("i-a", START)).notices() == (Notice("i-a", START + 120, "rebalance"),)
    assert book(warning(), events.Rebalance("i-a", START - 100)).notices() == (Notice("i-a", START + 120),)


def test_a_node_that_has_ended_has_no_notice_however_late_its_warning_comes():
    ended = events.StateChange("i-a", START + 100, "shutting-down")
    assert book(warning(), ended).notices() == book(ended, warning()).notices() == ()
    assert book(ended).ended == {"i-a": START + 100}


def test_a_group_gives_the_node_its_hooks_time():
    assert book(events.GroupEnds("i-a", START, "g"), drain=300).notices() == (Notice("i-a", START + 300),)


def test_a_planned_change_is_advice_until_it_is_called_off():
    def planned(at, over):
        return events.Health("arn:1", at, ("i-a",), "AWS_EC2_REBOOT", True, START + 9000, over)

    on, off = planned(START, False), planned(START + 60, True)
    assert book(on).notices() == (Notice("i-a", START + 9000, "rebalance"),)
    assert book(on, off).notices() == book(off, on).notices() == ()


def test_trouble_that_is_there_already_is_no_notice():
    assert book(events.Health("arn:1", START, ("i-a",), "AWS_EC2_X", False, START)).notices() == ()


def test_the_latest_failure_of_a_group_is_kept():
    early = events.LaunchFailed("g", START, "full", "us-east-1a")
    late = events.LaunchFailed("g", START + 5, "dear")
    assert book(late, early).failures == {"g": Failure(START + 5, "dear")}


def test_what_is_long_over_is_forgotten_and_nothing_else():
    known = book(
        warning("i-a", START),
        warning("i-b", START + 500),
        events.Rebalance("i-a", START),
        events.StateChange("i-c", START, "terminated"),
        events.LaunchFailed("g", START, "full"),
    )
    assert known.without_old(START + KEEP) == known
    assert known.without_old(START + KEEP + 121) == book(warning("i-b", START + 500))
    assert known.without_old(START + KEEP + 621) == NoticeLog()


def test_a_file_holds_a_book(tmp_path):
    file = NoticeFile(tmp_path / "lab" / "notices.json")
    assert file.read() == NoticeLog()
    file.write(book(warning()))
    assert NoticeFile(file.path).read() == book(warning())
    assert [p.name for p in file.path.parent.iterdir()] == ["notices.json"]


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b'{"format": 1}', sealed({"format": 1}), sealed({"format": 1, "leaving": {"i": 3}}), b"\0"],
)
def test_a_damaged_file_is_no_empty_book(tmp_path, data):
    (tmp_path / "notices.json").write_bytes(data)
    with pytest.raises(NoticeError, match="is no file of notices"):
        NoticeFile(tmp_path / "notices.json").read()


def test_no_flipped_byte_of_a_file_is_believed(tmp_path):
    file = NoticeFile(tmp_path / "notices.json")
    file.write(book(warning()))
    whole = file.path.read_bytes()
    for at in range(len(whole)):
        file.path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(NoticeError, match="is no file of notices"):
            file.read()


def test_a_file_of_another_version_is_refused(tmp_path):
    (tmp_path / "notices.json").write_bytes(sealed({"format": 99}))
    with pytest.raises(NoticeError, match="of another version"):
        NoticeFile(tmp_path / "notices.json").read()


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "lab").write_text("a file")
    with pytest.raises(StorageError, match="cannot write"):
        NoticeFile(tmp_path / "lab" / "notices.json").write(NoticeLog())


def test_one_process_holds_a_file(tmp_path):
    file = NoticeFile(tmp_path / "notices.json")
    with (
        file.held(),
        pytest.raises(StorageError, match=r"cannot lock .*: process \d+ on .* held it"),
        NoticeFile(file.path).held(),
    ):
        pass
    with NoticeFile(file.path).held():
        pass
