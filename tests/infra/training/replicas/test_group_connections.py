"""Connections of a process group that another thread cuts, and when a listening process does that."""

import socket
import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ebbflow.infra.training.process import nccl
from ebbflow.infra.training.replicas.groups import Connections
from ebbflow.infra.training.replicas.world import ReplicaWorld
from ebbflow.planners.aggregation.membership import View


def pair(stack: ExitStack) -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection over the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = stack.enter_context(socket.create_connection(listener.getsockname()))
        other = stack.enter_context(listener.accept()[0])
    for end in (one, other):
        end.settimeout(20)
    return one, other


def test_what_was_made_meanwhile_is_cut_and_nothing_else() -> None:
    with ExitStack() as stack:
        earlier, made = pair(stack), Connections(frozenset())
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        mine = pair(stack)
        made.take()
        later = pair(stack)
        assert made.cut() == 2
        assert (mine[0].recv(1), mine[1].recv(1)) == (b"", b"")
        for one, other in (earlier, later):
            one.sendall(b"x")
            assert other.recv(1) == b"x"
        with socket.create_connection(listener.getsockname(), timeout=20):
            listener.accept()[0].close()


def test_peers_at_ports_that_are_none_of_the_group_are_spared() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        made = Connections(frozenset({listener.getsockname()[1]}))
        one = stack.enter_context(socket.create_connection(listener.getsockname()))
        stack.enter_context(listener.accept()[0])
        made.take()
        assert made.cut() == 1, "the end whose peer is another"
        assert one.recv(1) == b""


class Cut:
    """Connections that note whether they were cut."""

    count = 0

    def cut(self) -> int:
        self.count += 1
        return 1


def listening(newest: int, *, fixed: str = "") -> tuple[ReplicaWorld, Cut]:
    """Return a member of view 1 that has heard of view ``newest``."""
    channel: Any = SimpleNamespace(newest_view=newest)
    made = ReplicaWorld(channel, channel, 0, 1, torch.device("cpu"))
    made._seat.view = View(1, (0, 1))
    cut: Any = Cut()
    made._group.connections, made._group.fixed = cut, fixed
    return made, cut


@pytest.mark.parametrize(
    ("newest", "fixed", "count"), [(2, "", 1), (1, "", 0), (2, "the model is sharded", 0)]
)
def test_a_group_is_cut_once_and_only_where_it_waits_for_one_that_is_lost(
    monkeypatch: pytest.MonkeyPatch, newest: int, fixed: str, count: int
) -> None:
    made, cut = listening(newest, fixed=fixed)
    made.heard(None)
    assert cut.count == 0, "a loss that shows by itself gets the time to"
    monkeypatch.setattr(nccl, "SHOWS", 0.0)
    for _ in range(3):
        time.sleep(0.001)
        made.heard(None)
    assert cut.count == count
