"""What a training process and its launcher tell each other, over the launcher's encrypted channel.

The launcher is the server, so that no node's loss takes it along; it knows each node by its key, and takes from a
node's processes only what is theirs to say (``launcher.exchange``). A *generation* is one world: the processes
between one launch and the next. Messages carry the generation, so a process of an old world neither hears nor says
anything in a newer one.
"""

import os
import secrets
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from ebbflow.infra.errors import LauncherLostError, MessageError
from ebbflow.infra.training.channel import keys, messages
from ebbflow.infra.training.channel.messages import Answer, Question, Report, ReportKind, StopRequest
from ebbflow.planners.aggregation.membership import Agreement, View

if TYPE_CHECKING:
    from ebbflow.infra.training.channel.client import MessageClient

__all__ = ["Channel", "Report", "ReportKind", "StopRequest"]

RUN_ID = "EBBFLOW_RUN_ID"
RUN_FOLDER = "EBBFLOW_RUN_FOLDER"  # a path or s3:// address that all nodes share
GENERATION = "EBBFLOW_GENERATION"
CHANNEL = "EBBFLOW_CHANNEL"  # host:port of the launcher
TIMEOUT = 20.0  # seconds for one answer of the launcher
_ANSWERS = messages.by_name(Answer)


class Channel:
    """A process' end of the conversation. May be used from several threads, one call at a time."""

    def __init__(self, client: "MessageClient", generation: int, *, timeout: float = TIMEOUT) -> None:
        """``timeout``: seconds for one answer of the launcher."""
        self._client, self._generation, self._timeout = client, generation, timeout
        self._rank = int(os.environ.get("RANK", "-1"))
        self.newest_view = 0  # number of the newest view that an answer to ``stop_request`` has named
        self.due = False  # whether the last of these answers said that processes are about to enter or leave
        self._session = secrets.token_hex(8)
        self._number = 0
        self._lock = threading.Lock()

    @classmethod
    def connect(cls, environment: Mapping[str, str] = os.environ) -> "Channel | None":
        """Return the process's end; ``None`` without a launcher.

        Raises ``LauncherLostError`` (a ``RuntimeError``) if it cannot be reached, ``TrainingError`` without keys.
        """
        address = environment.get(CHANNEL)
        if not address:
            return None
        from ebbflow.infra.training.channel.client import MessageClient

        server, pair = keys.handed_down(environment)
        client = MessageClient(address, server, pair, timeout=TIMEOUT)
        try:
            client.await_connection()
        except BaseException:
            client.close()
            raise
        return cls(client, int(environment[GENERATION]))

    def post(self, report: Report) -> None:
        """Send a message; the launcher has it when this returns. Raises ``LauncherLostError`` when it is gone."""
        self._ask("post", report=report)

    def stop_request(self) -> StopRequest | None:
        """Return the latest request to stop, if there is any. Raises ``LauncherLostError``."""
        answer = self._ask("stop", rank=self._rank)
        self.newest_view, self.due = max(self.newest_view, answer.newest), answer.due
        return answer.stop

    def claim(self, name: str) -> bool:
        """Return whether this process is the first of its generation to ask for ``name``.

        Raises ``LauncherLostError``.
        """
        return self._ask("claim", name=name).count == 1

    def meet(self) -> int:
        """Report that this node's agent is there, and return how many are. Raises ``LauncherLostError``."""
        return self._ask("meet").count

    def enter(self) -> View:
        """Report that this process is ready to train with others, and return the view that it is a member of.

        Raises ``LauncherLostError``, also where the generation is over.
        """
        return _view(self._ask("enter", patient=True, rank=self._rank))

    def view(self) -> View:
        """Return the view that holds. Raises ``LauncherLostError``."""
        return _view(self._ask("view", rank=self._rank))

    def agree(self, view: int, index: int, value: str, *, boundary: bool = False) -> Agreement:
        """Contribute to an agreement, and return it once it is made, or the view has changed.

        Args:
            view: number of the view that this process is in.
            index: of the agreement.
            value: this process' part.
            boundary: whether a step ends with it.

        Raises ``LauncherLostError``.
        """
        part = {"rank": self._rank, "view": view, "index": index, "value": value, "boundary": boundary}
        answer = self._ask("agree", patient=True, **part)
        return Agreement(_view(answer), answer.values)

    def close(self) -> None:
        """End the connection. May be called twice."""
        with self._lock:
            self._client.close()

    def _ask(
        self,
        do: Literal["post", "stop", "claim", "meet", "enter", "agree", "view"],
        *,
        patient: bool = False,
        **fields: Any,
    ) -> Answer:
        """Ask until there is an answer: again, under the same number, when the connection was made again.

        ``patient``: the answer may take as long as others do, while the launcher can be reached.
        """
        with self._lock:
            self._number += 1
            frame = messages.encode(Question(self._session, self._number, self._generation, do, **fields))
            end, sent = time.monotonic() + self._timeout, 0
            while True:
                client = self._client
                if sent != client.connections and client.connected and client.send(frame):
                    sent = client.connections
                # a message that waits is read even when the time is over: this process may have been stopped
                found = client.receive(max(0.0, min(1.0, end - time.monotonic())))
                if found is not None:
                    answer = _answer(found)
                    if answer.number == self._number:
                        if answer.refused:
                            raise LauncherLostError(f"the launcher refused the request: {answer.refused}")
                        return answer
                elif time.monotonic() > end and not patient:
                    raise LauncherLostError(f"the launcher does not answer within {self._timeout:g} s")


def _view(answer: Answer) -> View:
    if answer.view is None:
        raise LauncherLostError("this process' generation is over")
    return answer.view


def _answer(frames: list[bytes]) -> Answer:
    if len(frames) != 1:
        raise MessageError(f"an answer has one frame; got {len(frames)}")
    found: Answer = messages.decode(frames[0], _ANSWERS)
    return found
