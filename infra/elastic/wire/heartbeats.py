"""Failure detection: each worker process reports that it lives, and hears that the master does."""

import os
import threading
from collections.abc import Callable
from typing import Any

from zmq.constants import DEALER, IDENTITY, LINGER, NOBLOCK, ROUTER
from zmq.error import Again
from zmq.sugar.context import Context

from ebbflow.infra.clock import Clock
from ebbflow.infra.elastic.wire.zeromq import endpoint

HEART = "heart"  # the socket's name
BEAT = 0.25  # seconds between two heartbeats
JOINING = 120.0  # seconds after which a worker of another machine ends whose master has never answered it
SILENCE = 10.0  # seconds without one after which the other side counts as dead
GO = b"go"  # the answer to a node that was given up


class LivenessTracker:
    """When each node was last heard of. Safe for several threads."""

    def __init__(self, clock: Clock, silence: float = SILENCE) -> None:
        self._clock = clock
        self._silence = silence
        self._seen: dict[str, float] = {}
        self._beats: dict[str, float] = {}  # last ones, also of nodes that have not joined
        self._broken: set[str] = set()
        self._given_up: set[str] = set()
        self._lock = threading.Lock()

    def expect(self, node: str) -> None:
        """Start to watch a node."""
        with self._lock:
            self._seen[node] = self._clock.now()

    def give_up(self, node: str) -> None:
        """Watch a node no longer; should it still live, it is told to go."""
        with self._lock:
            self._seen.pop(node, None)
            self._beats.pop(node, None)
            self._broken.discard(node)
            self._given_up.add(node)

    def watched(self) -> frozenset[str]:
        """Return the nodes that are watched: those that have joined and were not given up."""
        with self._lock:
            return frozenset(self._seen)

    def record(self, node: str) -> bool:
        """Take note of a heartbeat; return whether the node was given up."""
        with self._lock:
            self._beats[node] = self._clock.now()
            if node in self._seen:
                self._seen[node] = self._beats[node]
            return node in self._given_up

    def last_beat(self, node: str) -> float | None:
        """Return when the last heartbeat of a node came, whether it has joined or not; ``None``: none has come."""
        with self._lock:
            return self._beats.get(node)

    def record_broken(self, node: str) -> None:
        """Take note that a connection to a node is broken, and what was on its way perhaps lost."""
        with self._lock:
            if node in self._seen:
                self._broken.add(node)

    def lost(self) -> dict[str, str]:
        """Return the nodes that count as dead, with the reason."""
        now = self._clock.now()
        with self._lock:
            found = dict.fromkeys(self._broken, "lost a connection to another worker")
            silent = [node for node, seen in self._seen.items() if now - seen > self._silence]
            return found | dict.fromkeys(silent, f"missed heartbeats for {self._silence:g} s")

    def close(self) -> None:
        """Watch no longer."""


class Monitor(LivenessTracker):
    """The master's side of workers on its machine. A thread of its own, so that no driver delays it."""

    def __init__(self, folder: str, context: Context, clock: Clock, silence: float = SILENCE) -> None:
        super().__init__(clock, silence)
        self._stop = threading.Event()
        self._socket: Any = context.socket(ROUTER)
        self._socket.set(LINGER, 0)
        self._socket.bind(endpoint(folder, HEART))
        self._thread = threading.Thread(target=self._listen, name="ebbflow-elastic-heart", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(timeout=5.0)

    def _listen(self) -> None:
        while not self._stop.is_set():
            if not self._socket.poll(100):
                continue
            name, _ = self._socket.recv_multipart()
            self._socket.send_multipart([name, GO if self.record(name.decode()) else b""])
        self._socket.close()


class HeartbeatSender:
    """A node's side: beats, and ends the process when the master is silent, gone, or has given the node up."""

    def __init__(
        self,
        folder: str,
        node: str,
        context: Context,
        clock: Clock,
        silence: float = SILENCE,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._folder = folder
        self._node = node
        self._context = context
        self._clock = clock
        self._silence = silence
        self._end = end
        self._parent = os.getppid()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="ebbflow-elastic-pulse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(timeout=5.0)

    def _beat(self) -> None:
        socket: Any = self._context.socket(DEALER)
        socket.set(LINGER, 0)
        socket.set(IDENTITY, self._node.encode())
        socket.connect(endpoint(self._folder, HEART))
        heard = self._clock.now()
        while not self._stop.is_set():
            socket.send(b"", NOBLOCK)
            self._clock.wait(self._stop, BEAT)
            try:
                while True:
                    if socket.recv(NOBLOCK) == GO:
                        self._end(3)
                    heard = self._clock.now()
            except Again:
                pass
            # a child whose parent ends is adopted by another process
            if self._clock.now() - heard > self._silence or os.getppid() != self._parent:
                self._end(4)
        socket.close()
