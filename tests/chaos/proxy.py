"""A network that can fail: TCP connections to a server that are cut, refused, silent or slow."""

import contextlib
import selectors
import socket
import struct
import threading
from pathlib import Path
from typing import Literal, Self

State = Literal["open", "cut", "silent", "slow"]
_CHUNK = 1 << 16
_DELAY = 0.02  # s that a slow network takes for some pieces, which it makes small
_PIECE = 16_384  # bytes of such a piece
_LOOK = 0.05  # s
_RESET = struct.pack("ii", 1, 0)  # linger for no time: what is closed is reset


class Proxy:
    """Forwards connections to 127.0.0.1 to a Unix socket or to a port of this machine; a context manager."""

    def __init__(self, target: Path | int, host: str = "127.0.0.1") -> None:
        self._target, self._host = target, host
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.state: State = "open"
        self.cuts = 0  # connections that were cut or refused
        self.held = 0  # pieces that were held back
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=f"proxy-{work.__name__}", daemon=True)
            for work in (self._accept, self._forward)
        ]

    def set(self, state: State) -> None:
        """Change what the network does from now on."""
        with self._lock:
            self.state = state
            if state == "cut":
                for end in list(self._pairs):
                    self._drop(end)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(150)
        self._listener.close()
        with self._lock:
            for end in list(self._pairs):
                self._drop(end)

    def _accept(self) -> None:
        self._listener.settimeout(_LOOK)
        while not self._stop.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            with self._lock:
                if self.state == "cut":
                    self.cuts += 1
                    _reset(client)
                    continue
                try:
                    server = self._connected()
                except OSError:
                    _reset(client)
                    continue
                self._pairs[client], self._pairs[server] = server, client

    def _connected(self) -> socket.socket:
        if isinstance(self._target, int):
            return socket.create_connection((self._host, self._target), 5.0)
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(str(self._target))
        except OSError:
            server.close()
            raise
        return server

    def _forward(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                ends = list(self._pairs)
            if not ends or self.state == "silent":
                self.held += self.state == "silent" and bool(ends)
                self._stop.wait(_LOOK)
                continue
            with selectors.DefaultSelector() as selector:
                for end in ends:
                    with contextlib.suppress(ValueError):  # it was closed since
                        selector.register(end, selectors.EVENT_READ)
                ready = [key.fileobj for key, _ in selector.select(_LOOK)]
            if ready and self.state == "slow":
                self._stop.wait(_DELAY)
            for end in ready:
                assert isinstance(end, socket.socket)
                self._pass_on(end)

    def _pass_on(self, end: socket.socket) -> None:
        with self._lock:
            other = self._pairs.get(end)
            if other is None or self.state == "silent":
                return
            try:
                data = end.recv(_PIECE if self.state == "slow" else _CHUNK)
                if data:
                    other.sendall(data)
                    return
            except OSError:
                pass
            self._drop(end, counted=False)

    def _drop(self, end: socket.socket, *, counted: bool = True) -> None:
        other = self._pairs.pop(end, None)
        if other is None:
            return
        self._pairs.pop(other, None)
        self.cuts += counted
        for one in (end, other):
            if counted:
                _reset(one)
            else:  # an ordinary end: what was sent before arrives
                one.close()


def _reset(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        if end.family == socket.AF_INET:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    end.close()
