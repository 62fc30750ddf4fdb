"""Processes of a job on several machines: who may speak, what arrives, what a broken connection means."""

import time
from collections.abc import Callable, Iterator

import pytest
from zmq.sugar.context import Context

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.elastic.wire.heartbeats import GO, HEART
from ebbflow.infra.elastic.wire.messages import MASTER, Join
from ebbflow.infra.elastic.wire.network import Inbox, MasterInbox, NetworkTransport, connect_heart
from ebbflow.infra.elastic.wire.transport import Envelope
from ebbflow.infra.elastic.worker.remote import RemoteHeartbeat
from ebbflow.infra.machine.encrypted_router import CurveKeys

LONG = 150.0  # s: a bound for a busy machine


class Ends:
    """Keeps the status that a process would end with."""

    def __init__(self) -> None:
        self.status: list[int] = []

    def __call__(self, status: int) -> None:
        self.status.append(status)


def until(reached: Callable[[], object], what: str) -> None:
    end = time.monotonic() + LONG
    while not reached():
        assert time.monotonic() < end, f"no {what} within {LONG:g} s"
        time.sleep(0.01)


@pytest.fixture
def master() -> Iterator[MasterInbox]:
    inbox = MasterInbox("127.0.0.1", SystemClock())
    yield inbox
    inbox.close()


@pytest.fixture
def joined(master: MasterInbox) -> Iterator[tuple[RemoteHeartbeat, Inbox]]:
    """Return a node that the master has let in, although it learned of its key late."""
    pair = CurveKeys.make()
    pulse = RemoteHeartbeat(master.address, master.public, pair, "n1", SystemClock(), LONG, Ends())
    time.sleep(0.3)  # a few beats that are refused
    master.admit(pair.public)
    job = pulse.job()
    assert job == master.job
    inbox = Inbox("127.0.0.1", job, pair=job)
    pulse.listen(inbox.address)
    yield pulse, inbox
    pulse.close()
    inbox.close()


def test_messages_arrive_in_order_both_ways(
    master: MasterInbox, joined: tuple[RemoteHeartbeat, Inbox]
) -> None:
    pulse, inbox = joined
    broken: list[str] = []
    here = NetworkTransport(MASTER, master, master.route, broken.append)
    there = NetworkTransport("n1/worker", inbox, pulse.route, broken.append)
    for number in range(50):
        here.send("n1/worker", Envelope(MASTER, number, Join("n1")))
        there.send(MASTER, Envelope("n1/worker", number, Join("n1")))
    for transport in (here, there):
        found: list[Envelope] = []
        end = time.monotonic() + LONG
        while len(found) < 50 and time.monotonic() < end:
            found += transport.receive(1.0)
        assert [envelope.revision for envelope in found] == list(range(50))
    here.close()
    there.close()
    assert broken == []


def test_a_broken_connection_counts_its_other_end_as_lost(
    master: MasterInbox, joined: tuple[RemoteHeartbeat, Inbox]
) -> None:
    _, inbox = joined
    master.liveness.expect("n1")
    here = NetworkTransport(MASTER, master, master.route, master.liveness.record_broken)
    here.send("n1/worker", Envelope(MASTER, 0, Join("n1")))
    assert inbox.queue_of("n1/worker").get(timeout=LONG).revision == 0
    inbox.close()  # as when its process is gone
    until(lambda: here.receive(0.0) or master.liveness.lost(), "loss")
    assert master.liveness.lost() == {"n1": "lost a connection to another worker"}
    here.close()


def test_a_node_that_was_given_up_is_told_to_go(master: MasterInbox) -> None:
    pair, ends = CurveKeys.make(), Ends()
    master.admit(pair.public)
    master.liveness.give_up("n2")
    pulse = RemoteHeartbeat(master.address, master.public, pair, "n2", SystemClock(), LONG, ends)
    until(lambda: ends.status, "end")
    assert set(ends.status) == {3}
    pulse.close()


def test_a_stranger_hears_nothing_and_its_messages_go_nowhere(master: MasterInbox) -> None:
    context = Context()
    stranger = connect_heart(context, master.address, master.public, CurveKeys.make())
    known = CurveKeys.make()
    master.admit(known.public)
    friend = connect_heart(context, master.address, master.public, known)
    beat = b'{"node": "n1", "address": "", "version": -1, "broken": []}'
    until(lambda: friend.poll(0, 2), "connection")  # POLLOUT: it was let in
    friend.send_multipart([HEART.encode(), beat])
    assert friend.poll(LONG * 1000)
    answer = friend.recv()
    assert answer != GO
    assert master.job.secret.encode() in answer
    assert not stranger.poll(0, 2), "it has no connection to send on"
    for socket in (stranger, friend):
        socket.close(linger=0)
    context.term()


def test_a_message_that_makes_no_sense_ends_nothing(
    master: MasterInbox, joined: tuple[RemoteHeartbeat, Inbox]
) -> None:
    pulse, _ = joined
    context = Context()
    friend = connect_heart(context, master.address, master.public, master.job)
    until(lambda: friend.poll(0, 2), "connection")
    friend.send_multipart([b"master", b"\xff\xfe"])
    friend.send_multipart([HEART.encode(), b"{"])
    friend.send_multipart([HEART.encode(), b'{"node": "n1", "address": "", "version": -1, "broken": []}'])
    assert friend.poll(LONG * 1000)
    until(lambda: pulse.route("n1") is not None, "route")
    friend.close(linger=0)
    context.term()
