"""Launches the pieces of a plan in one order on all ranks, whatever the order in which collectives are submitted."""

import threading
import time
from dataclasses import dataclass, field
from hashlib import sha256
from queue import Empty, SimpleQueue

import torch

from ebbflow.infra.communication.channels import Channels
from ebbflow.infra.communication.payloads import Payload
from ebbflow.infra.errors import TrainingError
from ebbflow.planners.communication.order import Launch, MotifQueue
from ebbflow.planners.communication.plan import CommunicationPlan

LOOK_EVERY = 1.0  # s between two looks of an idle channel's thread at how long pieces have waited


@dataclass
class _Submission:
    """A collective on its way."""

    payload: Payload
    left: int  # pieces that are not done
    future: "torch.futures.Future[Payload]" = field(default_factory=torch.futures.Future)


class Enforcer:
    """Takes collectives of a training and runs their pieces, a thread for each channel.

    A piece is enqueued on its channel when all pieces before it in the plan are; the channels run side by side. If
    one piece fails, all collectives that are not done, and all that are submitted later, fail with the same error, as
    soon as no channel runs a piece any more: whoever waits may use the tensors then.

    Args:
        plan: what is launched, and in which order.
        channels: as many as the plan needs.
        verify: compare what ranks launch before each piece; costs a small collective each.
        stall_timeout: s that pieces may wait, with all channels idle, for collectives before theirs; then it fails.

    Raises ``TrainingError``.
    """

    def __init__(
        self,
        plan: CommunicationPlan,
        channels: Channels,
        *,
        verify: bool = False,
        stall_timeout: float = 60.0,
    ) -> None:
        if channels.ranks != plan.ranks or len(channels.groups) < plan.channels:
            raise TrainingError(
                f"the plan needs {plan.ranks} ranks and {plan.channels} channels; there are {channels.ranks} and "
                f"{len(channels.groups)}"
            )
        self.plan = plan
        self._channels, self._verify, self._stall_timeout = channels, verify, stall_timeout
        self._lock = threading.Condition()
        self._queue = MotifQueue(plan.order)
        self._submitted: dict[tuple[str, int], _Submission] = {}
        self._counts = {op: -1 if op in plan.order.ahead else 0 for op in plan.collectives}
        self._error: BaseException | None = None
        self._running = 0  # pieces that are enqueued or under way
        self._under_way = 0  # of them, on a channel now
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
            self._enqueue(launches)
            self._measure()
        return found.future

    def waited(self) -> float:
        """Return the seconds since the last call in which pieces waited for others while all channels were idle."""
        with self._lock:
            self._measure()
            blocked, self._blocked = self._blocked, 0.0
            return blocked

    def fail(self, error: BaseException) -> None:
        """Let all collectives fail that are not done, once no channel runs a piece."""
        with self._lock:
            self._error = self._error or error
        self._fail_all()

    def drain(self, timeout: float = 60.0) -> None:
        """Run what waits in the planned order, whatever is missing before it; before another plan takes over.

        All ranks must have submitted the same collectives. Raises ``TrainingError`` after ``timeout`` seconds.
        """
        with self._lock:
            self._enqueue(self._queue.flush())
            if not self._lock.wait_for(lambda: not self._running, timeout):
                raise TrainingError(f"{self._running} pieces were not done within {timeout:g} s")

    def close(self, timeout: float = 60.0) -> None:
        """Run what was enqueued, and end the threads.

        Raises ``TrainingError`` where pieces still wait for collectives that were never submitted, or a channel does
        not end within ``timeout`` seconds.
        """
        with self._lock:
            left = self._queue.pending
        for queue in self._work:
            queue.put(None)
        end = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0.0))
        if any(thread.is_alive() for thread in self._threads):
            raise TrainingError(f"a channel did not end within {timeout:g} s")
        if left and self._error is None:
            raise TrainingError(f"{left} pieces wait for collectives that were never submitted")

    def _enqueue(self, launches: list[Launch]) -> None:
        self._running += len(launches)
        for launch in launches:
            self._work[launch.channel].put(launch)

    def _measure(self) -> None:
        now = time.monotonic()
        if self._blocked_since is not None:
            self._blocked += now - self._blocked_since
        self._blocked_since = now if self._queue.pending and not self._running else None

    def _serve(self, channel: int) -> None:
        stalled_since: float | None = None
        while True:
            try:
                launch = self._work[channel].get(timeout=LOOK_EVERY)
            except Empty:
                stalled_since = self._watch(stalled_since)
                continue
            stalled_since = None
            if launch is None:
                return
            self._launch(channel, launch)

    def _watch(self, since: float | None) -> float | None:
        """Fail where pieces have waited for too long, with nothing under way; return since when they wait."""
        with self._lock:
            if not self._queue.pending or self._running or self._error is not None:
                return None
            iteration, number = self._queue.next
        now = time.monotonic()
        since = since if since is not None else now
        if now - since > self._stall_timeout:
            missing = sorted({op for (op, _), n in self.plan.order.numbers.items() if n == number})
            self.fail(
                TrainingError(
                    f"{', '.join(missing)} of the plan's iteration {iteration} was not submitted within "
                    f"{self._stall_timeout:g} s"
                )
            )
        return since

    def _launch(self, channel: int, launch: Launch) -> None:
        key = (launch.op, launch.iteration)
        with self._lock:
            found = self._submitted.get(key)
            error = self._error
            self._under_way += 1
        try:
            if error is None and found is not None:
                if self._verify:
                    self._channels.verify(channel, _label(launch))
                self._channels.run(channel, self.plan.pieces[launch.op][launch.motif], found.payload)
        except Exception as failed:  # whatever it is, whoever waits must hear of it
            error = failed
        with self._lock:
            self._running -= 1
            self._under_way -= 1
            if error is not None and self._error is None:
                self._error = error
            done = False
            if found is not None and self._error is None:
                found.left -= 1
                if done := found.left == 0:
                    del self._submitted[key]
            self._measure()
            self._lock.notify_all()
        if done and found is not None:
            found.future.set_result(found.payload)
        elif self._error is not None:
            self._fail_all()

    def _fail_all(self) -> None:
        """Fail what is not done, unless a channel still works on a tensor: its thread comes here afterwards."""
        with self._lock:
            if self._under_way or self._error is None:
                return
            failed, self._submitted = list(self._submitted.values()), {}
            error = self._error
            self._queue.flush()
        for one in failed:
            one.future.set_exception(error)


def _label(launch: Launch) -> int:
    text = f"{launch.op}/{launch.motif}/{launch.iteration}"
    return int.from_bytes(sha256(text.encode()).digest()[:7], "big")
