"""A worker process on another node than its master's, and the heartbeat by which it learns of the others."""

import contextlib
import json
import os
import threading
from collections.abc import Callable
from typing import Any

from zmq.constants import NOBLOCK
from zmq.error import Again
from zmq.sugar.context import Context

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.elastic.wire.heartbeats import BEAT, GO, HEART, JOINING
from ebbflow.infra.elastic.wire.messages import MASTER
from ebbflow.infra.elastic.wire.network import Inbox, NetworkTransport, connect_heart
from ebbflow.infra.elastic.worker.node import prepare, run
from ebbflow.infra.machine.encrypted_router import CurveKeys

_AGAIN = 2.0  # seconds without an answer after which the connection is made again, as a refused key needs


class RemoteHeartbeat:
    """A remote node's side: beats, and ends the process when the master is silent, or has given the node up.

    Args:
        master: host:port of the master.
        server: its public key.
        pair: this node's keys.
        node: the worker's name.
        silence: seconds without an answer after which the master counts as gone.
        end: ends the process with a status.
    """

    def __init__(
        self,
        master: str,
        server: str,
        pair: CurveKeys,
        node: str,
        clock: Clock,
        silence: float,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._master, self._server, self._pair, self._node = master, server, pair, node
        self._clock, self._silence, self._end = clock, silence, end
        self._lock = threading.Lock()
        self._addresses: dict[str, str] = {}
        self._version = -1
        self._broken: set[str] = set()
        self._address = ""
        self._job: CurveKeys | None = None
        self._news = threading.Condition(self._lock)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="ebbflow-elastic-pulse", daemon=True)
        self._thread.start()

    def job(self) -> CurveKeys:
        """Wait for the job's keys and return them; without an answer the process ends."""
        with self._news:
            while self._job is None:
                self._news.wait(1.0)
            return self._job

    def listen(self, address: str) -> None:
        """Tell the master where this process listens, and return once it knows."""
        with self._news:
            self._address = address
            while self._node not in self._addresses:
                self._news.wait(1.0)

    def route(self, node: str) -> tuple[str, str] | None:
        """See ``network.Route``."""
        if node == MASTER:
            return self._master, self._server
        with self._lock:
            address = self._addresses.get(node)
            return None if address is None or self._job is None else (address, self._job.public)

    def record_broken(self, node: str) -> None:
        """Tell the master of a broken connection; without one to the master itself, this process ends."""
        if node == MASTER:
            self._end(4)
        with self._lock:
            self._broken.add(node)

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(timeout=5.0)

    # --- how ----------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        context = Context()
        socket: Any = None
        heard = opened = self._clock.now()
        answered = False
        while not self._stop.is_set():
            if socket is None:
                socket = connect_heart(context, self._master, self._server, self._pair)
                opened = self._clock.now()
            with contextlib.suppress(Again):  # without a connection
                socket.send_multipart([HEART.encode(), self._message()], NOBLOCK)
            self._clock.wait(self._stop, BEAT)
            now = self._clock.now()
            try:
                while True:
                    self._take(socket.recv(NOBLOCK))
                    heard = opened = now
                    answered = True
            except Again:
                pass
            if now - heard > (self._silence if answered else JOINING):
                self._end(4)
            if now - opened > _AGAIN:
                socket.close(linger=0)
                socket = None
        if socket is not None:
            socket.close(linger=0)
        context.term()

    def _message(self) -> bytes:
        with self._lock:
            said = {
                "node": self._node,
                "address": self._address,
                "version": self._version,
                "broken": sorted(self._broken),
            }
        return json.dumps(said).encode()

    def _take(self, answer: bytes) -> None:
        if answer == GO:
            self._end(3)
            return
        said = json.loads(answer)
        with self._news:
            if "secret" in said and self._job is None:
                self._job = CurveKeys(said["public"], said["secret"])
            if "addresses" in said:
                self._addresses, self._version = said["addresses"], said["version"]
                self._broken &= self._addresses.keys()
            self._news.notify_all()


def serve(
    master: str,
    server: str,
    pair: CurveKeys,
    host: str,
    name: str,
    silence: str,
    application: str,
    *variables: str,
    fetch: Callable[[], None] | None = None,
) -> None:
    """Serve as the worker ``name`` until the master says to go.

    Args:
        master: host:port of the master; ``server``: its public key.
        pair: keys of this node, of which the master knows the public one, or will.
        host: address at which other nodes reach this one.
        silence: seconds of silence after which the other side counts as dead.
        application: ``MODULE:CLASS`` of the application.
        variables: of the environment, ``NAME=VALUE``.
        fetch: makes the application importable, where it is the user's.
    """
    os.environ.update(dict(text.split("=", 1) for text in variables))
    clock = SystemClock()
    # before the application is imported: if that fails, its heartbeats end, by which the master knows
    pulse = RemoteHeartbeat(master, server, pair, name, clock, float(silence))
    if fetch is not None:
        fetch()
    prepare(application)
    job = pulse.job()
    inbox = Inbox(host, job, pair=job)
    pulse.listen(inbox.address)
    transports = [
        NetworkTransport(f"{name}/{actor}", inbox, pulse.route, pulse.record_broken)
        for actor in ("worker", "server")
    ]
    run(name, clock, transports[0], transports[1])
    pulse.close()
    inbox.close()
