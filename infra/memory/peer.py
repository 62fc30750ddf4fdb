"""``PeerLink``: a client's one connection to a daemon, for data and control, shared by all its threads."""

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ebbflow.infra.errors import MemoryTierError
from ebbflow.infra.memory import protocol
from ebbflow.infra.memory.protocol import Frame, Kind

CONNECT_TIMEOUT = 2.0  # s, the handshake included
SEND_TIMEOUT = 10.0  # s in which a peer must take a frame

Answered = Callable[[Frame | None], None]  # the answer; None: the peer is gone


class Peer(Protocol):
    """A daemon that lends slabs to this client.

    Args:
        name: of the node.
        slab_bytes: size of its slabs.
    """

    name: str
    slab_bytes: int

    def post(self, frame: Frame, answered: Answered) -> None:
        """Send a request without waiting. ``answered`` is called exactly once, possibly in another thread and before
        this returns; it must not block."""
        ...

    def tell(self, frame: Frame) -> None:
        """Send what has no answer; to a peer that is gone it goes nowhere."""
        ...

    def close(self) -> None:
        """End the connection; requests without an answer are answered with ``None``. May be called twice."""
        ...


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a daemon listens."""

    name: str  # of the node
    host: str
    port: int
    slab_bytes: int = 0  # size of its slabs; 0: not known


class PeerLink:
    """``Peer`` over TCP. Two threads at most use the socket at a time: one sends, its own one receives.

    Args:
        address: of the daemon.
        token: of the cluster.
        client: what this client calls itself, for people.
        received: called, in the link's thread, with what the daemon asks (CHECK_ACTIVITY, EVICT); must not block.
        lost: called once, in any thread, when the connection ends.

    Raises ``MemoryTierError`` where the daemon does not answer, refuses, or does not hold the token itself.
    """

    def __init__(
        self,
        address: PeerAddress,
        token: bytes,
        client: str,
        received: Callable[["PeerLink", Frame], None],
        lost: Callable[["PeerLink"], None],
    ) -> None:
        self.name, self._received, self._lost = address.name, received, lost
        self._numbers = itertools.count(1)
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        self._waiting: dict[int, Answered] | None = {}  # None: the connection has ended
        try:
            self._socket = socket.create_connection((address.host, address.port), timeout=CONNECT_TIMEOUT)
        except OSError as exc:
            raise MemoryTierError(
                f"{self.name} at {address.host}:{address.port} does not answer: {exc}"
            ) from exc
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.slab_bytes = self._greet(token, client)
            _send_within(self._socket, SEND_TIMEOUT)
        except BaseException as exc:
            self._socket.close()
            if isinstance(exc, OSError | EOFError):
                raise MemoryTierError(f"{self.name} has ended the handshake: {exc!r}") from exc
            raise
        self._thread = threading.Thread(target=self._receive, name=f"memory-{self.name}", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Tell whether the connection has ended."""
        return self._waiting is None

    # --- Peer ---------------------------------------------------------------------------------------------

    def post(self, frame: Frame, answered: Answered) -> None:
        number = next(self._numbers)
        with self._lock:
            ended = self._waiting is None
            if self._waiting is not None:
                self._waiting[number] = answered
        if ended:
            answered(None)
        else:
            self._send(replace(frame, request=number))

    def tell(self, frame: Frame) -> None:
        self._send(frame)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._end()

    # --- how ----------------------------------------------------------------------------------------------

    def _greet(self, token: bytes, client: str) -> int:
        end = time.monotonic() + CONNECT_TIMEOUT
        own = os.urandom(protocol.NONCE_BYTES)
        self._write(Frame(Kind.HELLO, payload=protocol.pack_json({"client": client, "nonce": own.hex()})))
        challenge = self._expect(Kind.CHALLENGE, end)
        theirs, theirs_proof = (
            bytes(challenge.payload[: protocol.NONCE_BYTES]),
            challenge.payload[protocol.NONCE_BYTES :],
        )
        protocol.check_proof(theirs_proof, token, "daemon", own, theirs)
        self._write(Frame(Kind.PROOF, payload=protocol.proof(token, "client", theirs, own)))
        said = protocol.unpack_json(self._expect(Kind.WELCOME, end).payload)
        size = said.get("slab_bytes")
        if type(size) is not int or size <= 0:
            raise MemoryTierError(f"{self.name} must say how large its slabs are, not {size!r}")
        return size

    def _expect(self, kind: Kind, end: float) -> Frame:
        self._socket.settimeout(max(0.001, end - time.monotonic()))
        frame = self._read(only=(kind, Kind.ERROR))
        if frame.kind == Kind.ERROR:
            raise MemoryTierError(f"{self.name} refuses: {bytes(frame.payload).decode(errors='replace')}")
        return frame

    def _receive(self) -> None:
        try:
            while True:
                self._hand_on(self._read())
        except (OSError, EOFError, MemoryTierError):
            pass
        finally:
            self._end()
            self._socket.close()

    def _hand_on(self, frame: Frame) -> None:
        if frame.kind in (Kind.CHECK_ACTIVITY, Kind.EVICT):
            self._received(self, frame)
            return
        with self._lock:
            answered = self._waiting.pop(frame.request, None) if self._waiting is not None else None
        if answered is not None:
            answered(frame)
        elif frame.kind == Kind.ERROR and not frame.request:
            raise MemoryTierError(f"{self.name} refuses: {bytes(frame.payload).decode(errors='replace')}")

    def _end(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._lost(self)
            for answered in waiting.values():
                answered(None)

    def _send(self, frame: Frame) -> None:
        try:
            with self._sending:
                self._write(frame)
        except OSError:
            self.close()

    def _write(self, frame: Frame) -> None:
        header, payload = protocol.encode(frame)
        if not payload:
            self._socket.sendall(header)
            return
        left = memoryview(payload).cast("B")
        sent = self._socket.sendmsg([header, left]) - len(header)
        if sent < 0:
            self._socket.sendall(header[sent:])
            sent = 0
        self._socket.sendall(left[sent:])

    def _read(self, *, only: tuple[Kind, ...] | None = None) -> Frame:
        header = bytes(self._exactly(protocol.HEADER_BYTES))
        return protocol.decode(header, self._exactly(protocol.payload_length(header, only=only)))

    def _exactly(self, count: int) -> bytearray:
        found = bytearray(count)
        view, done = memoryview(found), 0
        while done < count:
            got = self._socket.recv_into(view[done:])
            if not got:
                raise EOFError(f"{self.name} has closed the connection")
            done += got
        return found


def _send_within(peer: Any, seconds: float) -> None:
    """Bound sending, but not waiting for the next frame: the socket is blocking from now on."""
    peer.setblocking(True)
    whole = int(seconds)
    timeout = whole.to_bytes(8, "little") + int((seconds - whole) * 1e6).to_bytes(8, "little")
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
