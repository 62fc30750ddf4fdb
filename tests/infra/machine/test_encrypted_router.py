"""What the thread of an encrypted port knows of its own listening."""

import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from ebbflow.infra.errors import TrainingError
from ebbflow.infra.machine.encrypted_router import CurveKeys, EncryptedRouter

LONG = 150.0  # seconds: a bound for a busy machine, not an expectation


class Port(EncryptedRouter):
    """A port that only an admitted key may speak on."""

    def __init__(self, admitted: str = "") -> None:
        self._admitted = admitted
        self.heard: list[tuple[bytes, Any]] = []
        super().__init__(
            "127.0.0.1", 0, domain=b"test", max_message=1 << 10, owner="a test", failure=TrainingError
        )

    def is_admitted(self, public: str) -> bool:
        return public == self._admitted

    def on_message(self, connection: bytes, parts: Sequence[Any], first: Any) -> None:
        self.heard.append((connection, first))


def speak(port: Port, keys: CurveKeys) -> "zmq.Socket[bytes]":
    """Return a socket whose first message has been heard."""
    one = zmq.Context.instance().socket(zmq.DEALER)
    one.curve_serverkey = bytes.fromhex(port.public)
    one.curve_publickey, one.curve_secretkey = bytes.fromhex(keys.public), bytes.fromhex(keys.secret)
    one.linger, one.reconnect_ivl, one.rcvtimeo = 0, -1, int(LONG * 1000)
    one.connect(f"tcp://{port.address}")
    before = len(port.heard)
    one.send(b"here")
    until(lambda: len(port.heard) > before)
    return one


def until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_time_in_which_nobody_could_be_heard_is_not_listened() -> None:
    port = Port()
    try:
        until(lambda: port.listened > 0)  # though nobody speaks
        before = time.monotonic(), port.listened
        assert port.complete(lambda: time.sleep(1.5), LONG)
        held = port.listened
        until(lambda: port.listened > held)
        assert port.listened - before[1] < time.monotonic() - before[0] - 0.5
    finally:
        port.close()


def test_a_connection_that_is_gone_ends_no_other_one() -> None:
    """The number of its socket may be another connection's when its last message is refused."""
    keys = CurveKeys.make()
    port = Port(keys.public)
    alive = speak(port, keys)
    try:
        (connection, first) = port.heard[0]
        monitor = alive.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        assert port.complete(lambda: port.end(b"another that is gone", first, [b"gone"]), LONG)
        assert port.complete(lambda: port.send(connection, b"still here") or None, LONG)
        assert alive.recv() == b"still here"
        assert port.complete(lambda: port.end(connection, first, [b"the last"]), LONG)
        assert monitor.poll(int(LONG * 1000))
        alive.disable_monitor()
        monitor.close(linger=0)
    finally:
        alive.close()
        port.close()


class Frame:
    """A frame of a connection whose socket had this number."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def get(self, name: str) -> str:
        return str(self._descriptor)


def test_a_number_that_is_no_connections_by_now_ends_nothing_and_leaves_nothing_open() -> None:
    keys = CurveKeys.make()
    port = Port(keys.public)
    alive = speak(port, keys)
    ((connection, _),) = port.heard
    one, other = socket.socketpair()
    reading, writing = os.pipe()
    free = os.open("/dev/null", os.O_RDONLY)
    os.close(free)  # the number that is free next
    problems: list[str] = []

    def end(descriptor: int) -> None:
        try:
            port.end(connection, Frame(descriptor), [b"the last"])
        except Exception as exc:  # would end the port
            problems.append(repr(exc))

    try:
        for descriptor in (one.fileno(), reading, free):
            assert port.complete(lambda number=descriptor: end(number), LONG)  # type: ignore[misc]
        assert problems == []
        one.send(b"still here")
        assert other.recv(16) == b"still here"
        pipe = _target(str(reading))
        found = {name for name in os.listdir("/proc/self/fd") if _target(name) == pipe}
        assert found == {str(reading), str(writing)}
        assert [alive.recv() for _ in range(3)] == [b"the last"] * 3
    finally:
        for descriptor in (reading, writing):
            os.close(descriptor)
        one.close()
        other.close()
        alive.close()
        port.close()


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # of the listing itself
        return ""
