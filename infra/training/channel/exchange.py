"""``Exchange``: what a launcher and its nodes tell each other, whichever thread speaks.

A node is addressed by its *key name*, which is new whenever a node of that name is started, so that nothing that was
meant for a lost node reaches its successor. A message counts only where its sender may say it: a node its own signs
of life and ends, its processes what concerns their own ranks. Orders and ends carry numbers and are sent again until
they are acknowledged; each is acted on once, in order, however often the connection breaks.
"""

import collections
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ebbflow.infra.errors import MessageError
from ebbflow.infra.training.channel import messages
from ebbflow.infra.training.channel.meeting import Meeting
from ebbflow.infra.training.channel.messages import Answer, Question, Report, StopRequest
from ebbflow.infra.training.channel.router import SecureRouter
from ebbflow.infra.training.channel.streams import Streams
from ebbflow.infra.training.channel.wire import (
    FROM_NODE,
    AgentEnd,
    Heartbeat,
    HeartbeatAck,
    NodeEnd,
    NodeHeartbeat,
    NodeOrder,
    Order,
)

if TYPE_CHECKING:
    from ebbflow.infra.training.channel.refusals import Refusals

_AGAIN = 1.0  # seconds after which an order that is not acknowledged is sent again
_KINDS = {**FROM_NODE, **messages.by_name(Question)}


@dataclass(slots=True)
class _Node:
    connection: bytes | None = None  # by which its last sign of life came
    beat: Heartbeat | None = None
    ends: dict[int, AgentEnd] = field(default_factory=dict)  # by generation
    ends_read: int = 0
    orders: collections.deque[NodeOrder] = field(default_factory=collections.deque)  # not acknowledged yet
    ordered: int = 0
    sent: float = 0.0


@dataclass(slots=True)
class _Generation:
    ranks: dict[str, range]  # by node
    port: int  # of its store, on this machine's loopback interface
    stop: StopRequest | None = None
    reports: list[Report] = field(default_factory=list)
    claims: dict[str, tuple[str, str, int]] = field(default_factory=dict)
    met: set[str] = field(default_factory=set)
    posted: dict[tuple[str, str], int] = field(default_factory=dict)  # last post of each session
    meeting: Meeting | None = None  # of workers that come and go


class Exchange:
    """The launcher's end of all conversations of one run. Safe for several threads.

    Raises ``TrainingError`` when the port cannot be had.
    """

    def __init__(self, host: str, port: int) -> None:
        self._lock = threading.Lock()
        self._nodes: dict[str, _Node] = {}
        self._generations: dict[int, _Generation] = {}
        self._newest = 0
        self._router = SecureRouter(host, port, self._receive)
        self._streams = Streams(self._router)
        self.address, self.public = self._router.address, self._router.public

    @property
    def refusals(self) -> "Refusals":
        return self._router.refusals

    @property
    def listened(self) -> float:
        """Return for how many seconds nodes could be heard: what is silent so long is so itself."""
        return self._router.listened

    def wire(self, node: str) -> "Wire":
        """Return the conversation with a node that is about to start."""
        with self._lock:
            self._nodes[node] = _Node()
        return Wire(self, node)

    def open(
        self, generation: int, ranks: Mapping[str, range], port: int, meeting: Meeting | None = None
    ) -> "GenerationChannel":
        """Begin a generation whose nodes run these ranks, and whose store listens on ``port`` of this machine.

        ``meeting`` is where its processes agree, if they are workers of the aggregation service.
        """
        with self._lock:
            self._generations[generation] = _Generation(dict(ranks), port, meeting=meeting)
            self._newest = max(self._newest, generation)
        return GenerationChannel(self, generation)

    def close(self) -> None:
        """End all conversations. May be called twice."""
        self._router.close()

    # --- what nodes say: in the router's thread -----------------------------------------------------------

    def _receive(self, node: str, connection: bytes, frames: list[bytes]) -> None:
        if self._streams.takes(frames):
            self._streams.receive(node, connection, frames, self._port_for)
            return
        if len(frames) != 1:
            raise MessageError(f"a message has one frame; got {len(frames)}")
        message = messages.decode(frames[0], _KINDS)
        if isinstance(message, Question):
            try:
                answers = self._answers(node, connection, message)
            except MessageError as exc:
                self._router.send(connection, messages.encode(Answer(message.number, refused=str(exc))))
                raise
            for to, answer in answers:
                self._router.send(to, messages.encode(answer))
            return
        with self._lock:
            found = self._nodes.get(node)
            if found is None:
                return  # it was ended meanwhile
            if isinstance(message, NodeHeartbeat):
                self._hear(node, found, connection, message)
            else:
                self._take_end(node, found, message)
            heard = HeartbeatAck(found.beat.number if found.beat else 0, found.ends_read)
        self._router.send(connection, messages.encode(heard))

    def _hear(self, name: str, node: _Node, connection: bytes, message: NodeHeartbeat) -> None:
        self._check_ranks(name, message.beat.generation, [rank.rank for rank in message.beat.ranks])
        fresh = node.connection != connection
        node.connection = connection
        if node.beat is None or message.beat.number > node.beat.number:
            node.beat = message.beat
        while node.orders and node.orders[0].number <= message.read:
            node.orders.popleft()
        if node.orders and (fresh or time.monotonic() - node.sent > _AGAIN):
            self._send_orders(node)

    def _take_end(self, name: str, node: _Node, message: NodeEnd) -> None:
        self._check_ranks(name, message.generation, [failure.rank for failure in message.end.failures])
        if message.number == node.ends_read + 1:
            node.ends_read += 1
            node.ends[message.generation] = message.end

    def _check_ranks(self, node: str, generation: int, ranks: list[int]) -> None:
        """Raise ``MessageError`` where a node speaks of ranks that are not its own, or of what has not begun."""
        if generation > self._newest:
            raise MessageError(f"there is no generation {generation}")
        found = self._generations.get(generation)
        own = found.ranks.get(node, range(0)) if found is not None else range(0)
        if found is not None and (foreign := [rank for rank in ranks if rank not in own]):
            raise MessageError(f"rank {foreign[0]} of generation {generation} is not one of its own")

    def _answers(self, node: str, connection: bytes, ask: Question) -> list[tuple[bytes, Answer]]:
        """Return the answers that a question gives rise to, with their connections: to it, or to those that wait.

        Raises ``MessageError`` for what the node may not say.
        """
        with self._lock:
            found = self._generations.get(ask.generation)
            if found is None or found.meeting is None or node not in found.ranks:
                return [(connection, self._answer(node, ask))]
            if ask.rank >= 0 and ask.rank not in found.ranks[node]:
                raise MessageError(f"rank {ask.rank} of generation {ask.generation} is not one of its own")
            found.meeting.hear(ask.rank, self._router.listened)
            if ask.do in ("enter", "agree", "view"):
                return found.meeting.take(node, connection, ask)
            return [(connection, self._answer(node, ask))]

    def _answer(self, node: str, ask: Question) -> Answer:
        """Return the answer to one question; the lock is held. Raises ``MessageError`` for what may not be said."""
        found = self._generations.get(ask.generation)
        if found is None:
            if ask.generation > self._newest:
                raise MessageError(f"there is no generation {ask.generation}")
            return Answer(ask.number)  # an old one: its sender does not wait any more
        if node not in found.ranks:
            raise MessageError(f"it has no rank in generation {ask.generation}")
        if ask.do in ("enter", "agree", "view"):
            raise MessageError(f"generation {ask.generation} has no workers that come and go")
        if ask.do == "stop":
            if found.meeting is None:
                return Answer(ask.number, stop=found.stop)
            membership = found.meeting.membership
            return Answer(ask.number, stop=found.stop, newest=membership.view.number, due=membership.due)
        if ask.do == "meet":
            found.met.add(node)
            return Answer(ask.number, len(found.met))
        asker = node, ask.session, ask.number
        if ask.do == "claim":
            return Answer(ask.number, int(found.claims.setdefault(ask.name, asker) == asker))
        report = ask.report
        if report is None or report.rank not in found.ranks[node]:
            said = "no report" if report is None else f"a report of rank {report.rank}"
            raise MessageError(f"{said} in generation {ask.generation}, whose ranks there are others")
        if found.posted.get((node, ask.session), 0) < ask.number:
            found.posted[node, ask.session] = ask.number
            found.reports.append(report)
        return Answer(ask.number)

    def _port_for(self, node: str, generation: int) -> int:
        """Return the port of a generation's store. Raises ``MessageError`` for a node that is none of it."""
        with self._lock:
            found = self._generations.get(generation)
            if found is None or node not in found.ranks:
                raise MessageError(f"it asks for the store of generation {generation}, and has no rank in it")
            return found.port

    # --- what the launcher reports ---------------------------------------------------------------------------

    def _send_orders(self, node: _Node) -> None:
        """Send what is not acknowledged; in the router's thread."""
        node.sent = time.monotonic()
        for order in node.orders:
            if node.connection is not None and not self._router.send(node.connection, messages.encode(order)):
                return

    def send(self, name: str, order: Order) -> None:
        """Send an order to a node; see ``Wire.send``."""
        with self._lock:
            node = self._nodes[name]
            node.ordered += 1
            node.orders.append(NodeOrder(node.ordered, order))

        def act() -> None:
            with self._lock:
                self._send_orders(node)

        self._router.call(act)

    def look(self, name: str) -> tuple[Heartbeat | None, Mapping[int, AgentEnd]]:
        """Return what a node has said of itself, and how its agents ended, by generation."""
        with self._lock:
            node = self._nodes[name]
            return node.beat, dict(node.ends)

    def forget_end(self, name: str, generation: int) -> None:
        """Forget how a node's agent of ``generation`` ended."""
        with self._lock:
            self._nodes[name].ends.pop(generation, None)

    def admit(self, name: str, public: str) -> None:
        """Allow the holder of a public key speak as a node. Raises ``TrainingError`` for what is no key."""
        with self._lock:
            if name not in self._nodes:
                return  # it was ended meanwhile
            self._router.admit(name, public)

    def forget(self, name: str) -> None:
        """Take nothing more from a node."""
        with self._lock:
            self._nodes.pop(name, None)
            self._router.dismiss(name)

    def meet(self, generation: int, act: Callable[[Meeting], None]) -> None:
        """Do something with a generation's meeting, and answer those that wait for it."""

        def serve() -> None:
            with self._lock:
                found = self._generations.get(generation)
                if found is None or found.meeting is None:
                    return
                act(found.meeting)
                answers = found.meeting.answers()
            for to, answer in answers:
                self._router.send(to, messages.encode(answer))

        self._router.call(serve)

    def public_of(self, name: str) -> str:
        """Return the public key of a node that was admitted; empty for another."""
        return self._router.public_of(name)

    def of(self, generation: int, act: Callable[[_Generation], None]) -> None:
        """Do something with a generation while no other process does."""
        with self._lock:
            act(self._generations[generation])

    def end(self, generation: int) -> None:
        """Forget a generation that is over."""
        with self._lock:
            self._generations.pop(generation, None)
        self._router.call(lambda: self._streams.end(generation))


class Wire:
    """The launcher's end of the conversation with one node."""

    def __init__(self, exchange: Exchange, node: str) -> None:
        self._exchange, self._node = exchange, node

    def send(self, order: Order) -> None:
        """Send an order: the node gets it once, after those before it."""
        self._exchange.send(self._node, order)

    def beat(self) -> Heartbeat | None:
        """Return the node's latest sign of life; ``None`` before the first."""
        return self._exchange.look(self._node)[0]

    def agent_end(self, generation: int) -> AgentEnd | None:
        """Return how the agent of ``generation`` ended; ``None`` while it has not."""
        return self._exchange.look(self._node)[1].get(generation)

    def forget_end(self, generation: int) -> None:
        """Forget how an agent of ``generation`` ended: another one is about to start."""
        self._exchange.forget_end(self._node, generation)

    def admit(self, public: str) -> None:
        """Allow the holder of a public key speak as this node. Raises ``TrainingError`` for what is no key."""
        self._exchange.admit(self._node, public)

    def close(self) -> None:
        """Take nothing more from this node. It may be asked for its last words no more."""
        self._exchange.forget(self._node)


class GenerationChannel:
    """The launcher's end of the conversation with the processes of one generation."""

    def __init__(self, exchange: Exchange, number: int) -> None:
        self._exchange, self._number = exchange, number

    def reports(self) -> list[Report]:
        """Return what was said since the last call: each rank's in order, all by time."""
        found: list[Report] = []

        def take(generation: _Generation) -> None:
            found.extend(generation.reports)
            generation.reports.clear()

        self._exchange.of(self._number, take)
        return sorted(found, key=lambda report: report.time)

    def request_stop(self, request: StopRequest) -> None:
        """Ask all processes of the generation to save and leave; a later request replaces an earlier one.

        Every process that asks after this has returned finds the request.
        """

        def put(generation: _Generation) -> None:
            generation.stop = request

        self._exchange.of(self._number, put)

    def extend(self, node: str, ranks: range) -> None:
        """Let another node run ranks of the generation."""
        self._exchange.of(self._number, lambda generation: generation.ranks.update({node: ranks}))

    def meet(self, act: Callable[[Meeting], None]) -> None:
        """Do something with the meeting of its workers, and answer those that wait for it."""
        self._exchange.meet(self._number, act)

    def close(self) -> None:
        """Forget the generation; what its processes still say is not taken."""
        self._exchange.end(self._number)
