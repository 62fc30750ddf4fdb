"""A node's conversation with its launcher: over a network that breaks, with one that stops, goes, or learns late."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ebbflow.infra.errors import LauncherLostError, TrainingError
from ebbflow.infra.training.channel import keys
from ebbflow.infra.training.channel.client import MessageClient
from ebbflow.infra.training.channel.exchange import Exchange, Wire
from ebbflow.infra.training.channel.keys import KeyPair
from ebbflow.infra.training.channel.messages import MAX_FRAME
from ebbflow.infra.training.channel.node_line import NodeLine
from ebbflow.infra.training.channel.wire import AgentEnd, Failure, Heartbeat, Order
from ebbflow.infra.training.process.channel import Channel, Report
from tests.infra.training.exchanges import Speakers

LONG = 150.0  # seconds: a bound for a busy machine, not an expectation


class Network:
    """A way to an address that can be cut, and be silent."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        self.made = 0
        self.flows = threading.Event()
        self.flows.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self.made += 1
                self._ends += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                self.flows.wait()
                other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    @property
    def carries(self) -> bool:
        """Tell whether there is a connection to break."""
        return bool(self._ends)

    def cut(self) -> None:
        """Break all connections; new ones can be made."""
        ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # a thread waits in it
        self._listener.close()
        self.cut()


class Ends:
    """Both ends of a conversation, with a network between them."""

    def __init__(self, *, silence: float = LONG, patience: float = LONG) -> None:
        self.exchange = Exchange("127.0.0.1", 0)
        self.network = Network(self.exchange.address)
        self.wire: Wire = self.exchange.wire("n")
        pair = KeyPair.make()
        self.wire.admit(pair.public)
        self.client = MessageClient(self.network.address, self.exchange.public, pair, timeout=patience)
        self.client.await_connection()
        self.line = NodeLine(self.client, silence)
        self.orders: list[Order] = []
        self.beats = 0

    def live(self, until: Callable[[], object]) -> None:
        """Live as a node does, until something is so."""
        end = time.monotonic() + LONG
        while not until():
            assert time.monotonic() < end, "it did not come true"
            self.beats += 1
            self.line.show(Heartbeat(self.beats, 0))
            self.line.wait(0.05)
            while (order := self.line.next_order()) is not None:
                self.orders.append(order)

    def close(self) -> None:
        self.client.close()
        self.exchange.close()
        self.network.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    found = Ends()
    yield found
    found.close()


def test_orders_and_ends_come_once_each_and_in_order_over_a_network_that_breaks(ends: Ends) -> None:
    ends.exchange.open(10**6, {}, 1)
    ends.live(lambda: ends.wire.beat() is not None)
    sent = [Order("launch", number, arguments=("x" * 50_000,)) for number in range(40)]
    for number, order in enumerate(sent):
        ends.wire.send(order)
        ends.line.report(number, AgentEnd("ended", error=str(number)))
        if number % 8 == 3:
            ends.live(lambda: ends.network.carries)
            ends.network.cut()
        ends.line.wait(0.01)
        while (found := ends.line.next_order()) is not None:
            ends.orders.append(found)
    ends.live(lambda: len(ends.orders) >= 40 and ends.wire.agent_end(39) is not None)
    assert ends.orders == sent
    assert [end.error for n in range(40) if (end := ends.wire.agent_end(n))] == [str(n) for n in range(40)]
    assert ends.network.made > 2, "the network did break"
    made = ends.exchange._nodes["n"]
    ends.live(lambda: not made.orders)
    assert made.ends_read == 40


def test_a_question_is_answered_once_over_a_network_that_breaks() -> None:
    speakers = Speakers()
    network = Network(speakers.exchange.address)
    launcher = speakers.open(1)
    server, pair = keys.handed_down(speakers.environment(1))
    client = MessageClient(network.address, server, pair, timeout=LONG)
    client.await_connection()
    process = Channel(client, 1, timeout=LONG)
    reports = [Report("step", 0, float(number), number) for number in range(30)]
    for number, report in enumerate(reports):
        if number % 5 == 2:
            network.cut()
        process.post(report)
    assert launcher.reports() == reports
    assert process.claim("once")
    assert network.made > 2
    process.close()
    speakers.close()
    network.close()


def test_a_launcher_that_is_gone_is_noticed_at_once(ends: Ends) -> None:
    ends.live(lambda: ends.wire.beat() is not None)
    ends.network.close()
    with pytest.raises(LauncherLostError, match="is gone: nothing listens there"):
        ends.live(lambda: False)


def test_a_launcher_that_only_stops_for_a_while_is_not_given_up() -> None:
    ends = Ends(silence=LONG, patience=LONG)
    ends.live(lambda: ends.wire.beat() is not None)
    ends.network.flows.clear()
    before = ends.beats
    ends.live(lambda: ends.beats > before + 20)
    ends.wire.send(Order("leave"))
    ends.network.flows.set()
    ends.live(lambda: ends.orders)
    assert ends.orders == [Order("leave")]
    ends.close()


def test_a_launcher_that_says_nothing_for_too_long_is_given_up() -> None:
    ends = Ends(silence=0.5)
    ends.live(lambda: ends.wire.beat() is not None)
    ends.network.flows.clear()
    with pytest.raises(LauncherLostError, match="no message from the launcher"):
        ends.live(lambda: False)
    ends.network.flows.set()
    ends.close()


def test_a_node_whose_key_the_launcher_has_yet_to_learn_tries_again() -> None:
    exchange = Exchange("127.0.0.1", 0)
    wire, pair = exchange.wire("n"), KeyPair.make()
    client = MessageClient(exchange.address, exchange.public, pair, timeout=LONG)
    end = time.monotonic() + LONG
    while exchange.refusals.total < 2:
        assert time.monotonic() < end
        client.receive(0.1)
    assert not client.connected
    wire.admit(pair.public)
    client.await_connection()
    client.close()
    other = MessageClient(exchange.address, exchange.public, KeyPair.make(), timeout=3.0)
    with pytest.raises(LauncherLostError, match="refuses this node's key"):
        other.await_connection()
    other.close()
    exchange.close()


def test_who_proves_its_key_and_ends_without_a_word_is_not_refused_and_a_stranger_beside_it_is() -> None:
    exchange = Exchange("127.0.0.1", 0)
    wire, pair = exchange.wire("n"), KeyPair.make()
    wire.admit(pair.public)
    router = exchange._router
    for _ in range(5):
        client = MessageClient(exchange.address, exchange.public, pair, timeout=LONG)
        client.await_connection()
        client.close()
    end = time.monotonic() + LONG
    while router._peers or router._silent:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert exchange.refusals.total == 0
    host, _, port = exchange.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=LONG) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n" + b"x" * 64)
        with contextlib.suppress(OSError):  # refused already, and disconnected
            stranger.shutdown(socket.SHUT_WR)
        while exchange.refusals.total == 0:
            assert time.monotonic() < end
            time.sleep(0.01)
    exchange.close()


def test_a_launcher_with_another_key_is_not_spoken_to() -> None:
    exchange = Exchange("127.0.0.1", 0)
    client = MessageClient(exchange.address, KeyPair.make().public, KeyPair.make(), timeout=0.7)
    with pytest.raises(LauncherLostError, match="cannot be reached"):
        client.await_connection()
    client.close()
    exchange.close()


def test_an_end_with_very_much_log_is_shortened_to_what_can_be_sent(ends: Ends) -> None:
    ends.exchange.open(1, {"n": range(64)}, 1)
    failures = tuple(Failure(rank, 1, "", "e" * 10_000, "l" * (MAX_FRAME // 40), 1.0) for rank in range(64))
    ends.line.report(1, AgentEnd("failed", failures))
    ends.live(lambda: ends.wire.agent_end(1) is not None)
    found = ends.wire.agent_end(1)
    assert found is not None
    assert [failure.rank for failure in found.failures] == list(range(64))


def test_keys_show_in_no_text_and_files_with_them_are_the_users_alone(tmp_path: Path) -> None:
    pair = KeyPair.make()
    assert pair.secret not in repr(pair) + str(pair)
    assert KeyPair.of(pair.secret) == pair
    path = tmp_path / "key"
    path.write_text("left over")
    path.chmod(0o644)
    public = keys.make_file(path)
    assert path.stat().st_mode & 0o777 == 0o600
    environment = {keys.NODE_SECRET_FILE: str(path)}
    assert keys.own(environment).public == public
    assert environment[keys.NODE_SECRET] == path.read_text()
    for wrong in ("", "f" * 63, "F" * 64, f"{pair.secret}\n", "g" * 64):
        with pytest.raises(TrainingError, match="64 hexadecimal digits"):
            keys.raw(wrong)
    with pytest.raises(TrainingError, match="is not set"):
        keys.handed_down({keys.SERVER_KEY: pair.public})
    with pytest.raises(TrainingError, match="are not set"):
        keys.own({})
    assert keys.announced(f"noise\n{keys.announcement(public)}more\n") == public
    assert keys.announced("public-key 12") == ""
