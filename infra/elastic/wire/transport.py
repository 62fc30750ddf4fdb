"""How actors reach each other: a small protocol, and the deterministic transport of tests.

Messages from one actor to another arrive once and in order; between different pairs there is no order.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from ebbflow.infra.elastic.registry import register
from ebbflow.infra.elastic.wire import codec
from ebbflow.infra.elastic.wire.messages import Address


@register
class Envelope(NamedTuple):
    """A message on its way. Actors of a newer revision, after a recovery, ignore what was sent in an older one."""

    sender: Address
    revision: int
    message: Any


class Transport(Protocol):
    """One actor's end."""

    def send(self, to: Address, envelope: Envelope) -> None:
        """Send without waiting; to an actor that is gone it goes nowhere."""
        ...

    def receive(self, timeout: float) -> list[Envelope]:
        """Return what has arrived, in order, waiting at most ``timeout`` seconds for the first."""
        ...

    def forget(self, address: Address) -> None:
        """Drop what was not yet delivered to an actor that is gone."""
        ...

    def close(self) -> None:
        """Deliver what was sent, for a few seconds at most, and close."""
        ...


class Member(Protocol):
    """What the in-process network needs of an actor."""

    address: Address
    done: bool

    def receive(self, envelope: Envelope) -> None: ...

    def work(self) -> bool: ...


class InProcessNetwork:
    """All actors in one thread. Which channel delivers next, or who works next, is drawn from ``rng``.

    Messages are encoded and decoded, so that no two actors share memory. Time is a counter that a step moves on.
    """

    def __init__(self, rng: np.random.Generator, step: float = 1e-3) -> None:
        self._rng = rng
        self._step = step
        self._channels: dict[tuple[Address, Address], deque[list[bytes]]] = {}
        self.actors: dict[Address, Member] = {}
        self.time = 0.0

    def now(self) -> float:
        """Return the seconds that steps have taken."""
        return self.time

    def sender(self, address: Address) -> Callable[[Address, Envelope], None]:
        """Return the way for actor ``address`` to send."""

        def send(to: Address, envelope: Envelope) -> None:
            frames = [bytes(frame) for frame in codec.encode(envelope)]
            self._channels.setdefault((address, to), deque()).append(frames)

        return send

    def add(self, actor: Member) -> None:
        """Add an actor to the network."""
        self.actors[actor.address] = actor

    def kill(self, address: Address) -> None:
        """Remove an actor at once, with what was on its way to it; what it had sent still arrives."""
        self.actors.pop(address, None)
        for channel in [c for c in self._channels if c[1] == address]:
            del self._channels[channel]

    def step(self) -> bool:
        """Deliver one message or let one actor do one piece of work; return whether anything was left to do."""
        self.time += self._step
        self._channels = {c: q for c, q in self._channels.items() if q and c[1] in self.actors}
        choices: list[Any] = [*self._channels, *self.actors]
        while choices:
            place = int(self._rng.integers(len(choices)))
            choices[place], choices[-1] = choices[-1], choices[place]
            choice = choices.pop()
            if isinstance(choice, tuple):
                self.actors[choice[1]].receive(codec.decode(self._channels[choice].popleft()))
            elif not self.actors[choice].work():
                continue
            for address in [a for a, actor in self.actors.items() if actor.done]:
                del self.actors[address]
            return True
        return False
