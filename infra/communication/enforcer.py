"""Launches the pieces of a plan in one order on all ranks, whatever the order in which collectives are submitted."""

import threading
import time
from dataclasses import dataclass, field
from hashlib import sha256
from queue import SimpleQueue

import torch

from ebbflow.infra.communication.channels import Channels
from ebbflow.infra.communication.payloads import Payload
from ebbflow.infra.errors import TrainingError
from ebbflow.planners.communication.order import Launch, MotifQueue
from ebbflow.planners.communication.plan import CommunicationPlan


@dataclass
class _Submission:
    """A collective on its way."""

    payload: Payload
    left: int  # pieces that are not done
    future: "torch.futures.Future[Payload]" = field(default_factory=torch.futures.Future)


class Enforcer:
    """Takes collectives of a training and runs their pieces, a thread for each channel.

    A piece is enqueued on its channel when all pieces before it in the plan are; the channels run side by side. If
    one piece fails, its collective and all that are submitted later fail with the same error.

    Args:
        plan: what is launched, and in which order.
        channels: as many as the plan needs.
        verify: compare what ranks launch before each piece; costs a small collective each.

    Raises ``TrainingError``.
    """

    def __init__(self, plan: CommunicationPlan, channels: Channels, *, verify: bool = False) -> None:
        if channels.ranks != plan.ranks or len(channels.groups) < plan.channels:
            raise TrainingError(
                f"the plan needs {plan.ranks} ranks and {plan.channels} channels; there are {channels.ranks} and "
                f"{len(channels.groups)}"
            )
        self.plan = plan
        self._channels, self._verify = channels, verify
        self._lock = threading.Lock()
        self._queue = MotifQueue(plan.order)
        self._submitted: dict[tuple[str, int], _Submission] = {}
        self._counts = {op: -1 if op in plan.order.ahead else 0 for op in plan.collectives}
        self._error: BaseException | None = None
        self._running = 0
        self._blocked_since: float | None = None
        self._blocked = 0.0
        self._work: list[SimpleQueue[Launch | None]] = [SimpleQueue() for _ in range(plan.channels)]
        self._threads = [
            threading.Thread(target=self._serve, args=(k,), name=f"ebbflow-channel-{k}", daemon=True)
            for k in range(plan.channels)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, op: str, payload: Payload) -> "torch.futures.Future[Payload]":
        """Take a collective; its future holds the payload once all pieces are done.

        Raises ``UnknownCollectiveError`` for one that the plan does not have, ``TrainingError`` after a failure.
        """
        with self._lock:
            if self._error is not None:
                raise TrainingError(f"communication has failed: {self._error}") from self._error
            launches = self._queue.submit(op)
            found = _Submission(payload, len(self.plan.pieces[op]))
            self._submitted[op, self._counts[op]] = found
            self._counts[op] += 1
            self._running += len(launches)
            for launch in launches:
                self._work[launch.channel].put(launch)
            self._measure()
        return found.future

    def waited(self) -> float:
        """Return the seconds since the last call in which pieces waited for others while all channels were idle."""
        with self._lock:
            self._measure()
            blocked, self._blocked = self._blocked, 0.0
            return blocked

    def close(self, timeout: float = 60.0) -> None:
        """Run what was enqueued, and end the threads.

        Raises ``TrainingError`` where pieces still wait for collectives that were never submitted, or a channel does
        not end within ``timeout`` seconds.
        """
        with self._lock:
            left = self._queue.pending
        for queue in self._work:
            queue.put(None)
        for thread in self._threads:
            thread.join(timeout)
        if any(thread.is_alive() for thread in self._threads):
            raise TrainingError(f"a channel did not end within {timeout:g} s")
        if left and self._error is None:
            raise TrainingError(f"{left} pieces wait for collectives that were never submitted")

    def _measure(self) -> None:
        now = time.monotonic()
        if self._blocked_since is not None:
            self._blocked += now - self._blocked_since
        self._blocked_since = now if self._queue.pending and not self._running else None

    def _serve(self, channel: int) -> None:
        while (launch := self._work[channel].get()) is not None:
            self._launch(channel, launch)

    def _launch(self, channel: int, launch: Launch) -> None:
        key = (launch.op, launch.iteration)
        with self._lock:
            found, error = self._submitted[key], self._error
        try:
            if error is None:
                if self._verify:
                    self._channels.verify(channel, _label(launch))
                self._channels.run(channel, self.plan.pieces[launch.op][launch.motif], found.payload)
        except Exception as failed:  # whatever it is, whoever waits must hear of it
            error = failed
        with self._lock:
            self._running -= 1
            if error is not None and self._error is None:
                self._error = error
            found.left -= 1
            done = found.left == 0
            if done:
                del self._submitted[key]
            self._measure()
        if error is not None and not found.future.done():
            _fail(found.future, error)
        elif done and error is None:
            found.future.set_result(found.payload)


def _fail(future: "torch.futures.Future[Payload]", error: BaseException) -> None:
    future.set_exception(error)


def _label(launch: Launch) -> int:
    text = f"{launch.op}/{launch.motif}/{launch.iteration}"
    return int.from_bytes(sha256(text.encode()).digest()[:7], "big")
