"""``NodeLine``: a node's end of its conversation with the launcher; the other end is ``exchange``."""

import collections
import time
from dataclasses import replace

from ebbflow.infra.errors import LauncherLostError, MessageError
from ebbflow.infra.training.channel import messages
from ebbflow.infra.training.channel.client import MessageClient
from ebbflow.infra.training.channel.wire import (
    TO_NODE,
    AgentEnd,
    Heartbeat,
    HeartbeatAck,
    NodeEnd,
    NodeHeartbeat,
    NodeOrder,
    Order,
)

_AGAIN = 1.0  # seconds after which an end that is not acknowledged is sent again
_STEP = (
    1.0  # seconds that count as silence at most between two looks: this process may itself have been stopped
)
_KEPT = 4_000  # characters of a log that are kept where an end is too long


class NodeLine:
    """Orders come once each and in order, ends of agents arrive once each, however often the connection breaks.

    Args:
        client: the connection, which is made already.
        silence: seconds without a report from the launcher after which it counts as lost.
        read: number of the last order that an earlier process of the node has read.
    """

    def __init__(self, client: MessageClient, silence: float, read: int = 0) -> None:
        self._client, self._silence = client, silence
        self._orders: collections.deque[Order] = collections.deque()
        self._read = read  # number of the last order
        self._beat: Heartbeat | None = None
        self._ends: collections.deque[NodeEnd] = collections.deque()  # not acknowledged yet
        self._ended = 0
        self._sent = 0.0  # when the ends were sent
        self._silent = 0.0  # seconds
        self._looked = time.monotonic()
        self._connections = client.connections

    def wait(self, seconds: float) -> None:
        """Listen until there is something to do, for ``seconds`` at most. Raises ``LauncherLostError``."""
        end = time.monotonic() + seconds
        while True:
            found = self._client.receive(max(0.0, end - time.monotonic()))
            self._count_silence(found is not None)
            if self._client.connections != self._connections:
                self._connections = self._client.connections
                self._sent = 0.0
                if self._beat is not None:
                    self.show(self._beat)
            if found is not None:
                self._hear(found)
            if self._ends and time.monotonic() - self._sent > _AGAIN:
                self._send_ends()
            if self._orders or time.monotonic() >= end:
                return

    @property
    def read(self) -> int:
        """Return the number of the last order that was read."""
        return self._read

    def next_order(self) -> Order | None:
        """Return the next order, if there is one."""
        return self._orders.popleft() if self._orders else None

    def show(self, beat: Heartbeat) -> None:
        """Send a sign of life."""
        self._beat = beat
        self._client.send(messages.encode(NodeHeartbeat(beat, self._read)))

    def report(self, generation: int, end: AgentEnd) -> None:
        """Report how the agent of ``generation`` ended."""
        self._ended += 1
        self._ends.append(_bounded(NodeEnd(self._ended, generation, end)))
        self._send_ends()

    # --- how ----------------------------------------------------------------------------------------------

    def _send_ends(self) -> None:
        self._sent = time.monotonic()
        for end in self._ends:
            if not self._client.send(messages.encode(end)):
                return

    def _hear(self, frames: list[bytes]) -> None:
        if len(frames) != 1:
            raise MessageError(f"a message has one frame; got {len(frames)}")
        message = messages.decode(frames[0], TO_NODE)
        if isinstance(message, HeartbeatAck):
            while self._ends and self._ends[0].number <= message.read:
                self._ends.popleft()
        elif isinstance(message, NodeOrder):
            if message.number == self._read + 1:  # else it was lost on the way before, or is known
                self._read += 1
                self._orders.append(message.order)
            if self._beat is not None:
                self.show(self._beat)  # the launcher sees what was read

    def _count_silence(self, responded: bool) -> None:
        now = time.monotonic()
        self._silent = 0.0 if responded else self._silent + min(_STEP, now - self._looked)
        self._looked = now
        if self._silent > self._silence:
            raise LauncherLostError(f"no message from the launcher for {self._silence:g} s")


def _bounded(end: NodeEnd) -> NodeEnd:
    """Return an end that can be sent: of very many failures, logs and errors are shortened."""
    try:
        messages.encode(end)
    except MessageError:
        failures = tuple(
            replace(failure, log=failure.log[-_KEPT:], error=failure.error[-_KEPT:])
            for failure in end.end.failures
        )
        return replace(end, end=replace(end.end, failures=failures, error=end.end.error[-_KEPT:]))
    return end
