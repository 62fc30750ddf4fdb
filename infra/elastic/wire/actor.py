"""What master, workers and servers have in common: a state machine that is told of messages and sends some."""

import traceback
from collections.abc import Callable
from typing import Any

from ebbflow.infra.elastic.wire.messages import MASTER, ActorFailure, Address, Directory, Place
from ebbflow.infra.elastic.wire.transport import Envelope, Transport

Send = Callable[[Address, Envelope], None]
Now = Callable[[], float]


class Actor:
    """Handles one message at a time; it neither waits nor reads a clock by itself."""

    def __init__(self, address: Address, send: Send, now: Now) -> None:
        self.address = address
        self.revision = 0
        self.done = False
        self._send = send
        self._now = now
        self._early: list[Envelope] = []
        self._handlers: dict[type, Callable[[Address, Any], None]] = {}

    def send(self, to: Address, message: Any) -> None:
        """Send in the present revision."""
        self._send(to, Envelope(self.address, self.revision, message))

    def receive(self, envelope: Envelope) -> None:
        """Handle a message; one of an older revision is ignored, one of a newer kept until the master speaks."""
        if envelope.sender == MASTER and envelope.revision > self.revision:
            self.revision = envelope.revision
            self._handle(envelope)
            early, self._early = self._early, []
            for waiting in early:
                self.receive(waiting)
        elif envelope.revision > self.revision:
            self._early.append(envelope)
        elif envelope.revision == self.revision:
            self._handle(envelope)

    def _handle(self, envelope: Envelope) -> None:
        self._handlers[type(envelope.message)](envelope.sender, envelope.message)

    def work(self) -> bool:
        """Do one piece of what can be done without a message; return whether there was any."""
        return False

    def wait(self) -> float:
        """Return the seconds until ``work`` may have something to do again, if no message comes."""
        return 1.0


class RoutingActor(Actor):
    """An actor that knows where shards are, or were."""

    def __init__(self, address: Address, send: Send, now: Now) -> None:
        super().__init__(address, send, now)
        self.directory: Directory = {}

    def learn(self, shard: int, place: Place) -> None:
        """Take a place for true unless a later one is known."""
        known = self.directory.get(shard)
        if known is None or place.moves > known.moves:
            self.directory[shard] = place

    def learn_all(self, directory: Directory) -> None:
        """Learn many places."""
        for shard, place in directory.items():
            self.learn(shard, place)


def serve(actor: Actor, transport: Transport) -> None:
    """Run a worker or server until it is done; an error of our own or the application's is reported to the master."""
    try:
        busy = False
        while not actor.done:
            for envelope in transport.receive(0.0 if busy else actor.wait()):
                actor.receive(envelope)
            busy = actor.work()
    except Exception:
        actor.send(MASTER, ActorFailure(traceback.format_exc(), application=False))
    finally:
        transport.close()
