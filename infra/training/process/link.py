"""The thread by which a process hears of stops and speaks, so that training never waits for the launcher."""

import logging
import queue
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import MessageError
from ebbflow.infra.training.process.channel import Channel, Report, ReportKind, StopRequest

LISTEN_EVERY = 0.2  # seconds
SERVICE_LISTEN_EVERY = 0.1  # the same where others train on without a process that is lost
LAUNCHER_LOST = "launcher lost"
TERMINATED = "terminated"

log = logging.getLogger(__name__)


class Link:
    """One process's ear and mouth. ``stop`` is the request that holds now, from the launcher or from SIGTERM.

    Args:
        channel: to the launcher; ``None`` without one.
        rank: of this process.
        grace: seconds between SIGTERM and the end, unless a request says otherwise.
        listen_every: seconds between two questions to the launcher.
        heard: called in the listening thread after each, with ``stop``.
    """

    def __init__(
        self,
        channel: Channel | None,
        rank: int,
        grace: float,
        *,
        listen_every: float = LISTEN_EVERY,
        heard: Callable[[StopRequest | None], None] = lambda stop: None,
        clock: Clock | None = None,
    ) -> None:
        self._channel, self._rank, self._grace = channel, rank, grace
        self._every, self._heard = listen_every, heard
        self._clock = clock or SystemClock()
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._ended = False
        self._thread: threading.Thread | None = None
        self._previous: Any = None
        self._last_moment: Callable[[StopRequest], None] | None = None
        self._reserve = 1.0
        self.stop: StopRequest | None = None
        self.lost = False  # whether the launcher could not be reached any more

    @property
    def launched(self) -> bool:
        """Tell whether a launcher hears what this process says."""
        return self._channel is not None

    def open(self) -> None:
        """Begin to listen; in the main thread SIGTERM becomes a request to stop."""
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._terminated)
        self._thread = threading.Thread(target=self._run, name="ebbflow-link", daemon=True)
        self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """Report what is left to say, within ``timeout`` seconds, and stop listening. May be called twice."""
        self._ended = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout)
            self._thread = None
        if self._previous is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None

    def post(self, kind: ReportKind, step: int, content: dict[str, Any]) -> None:
        """Send a message soon."""
        if self._channel is not None and not self.lost:
            self._reports.put(Report(kind, self._rank, self._clock.now(), step, content))
            if kind != "step":
                self._wake.set()

    def send_now(self, kind: ReportKind, step: int, content: dict[str, Any]) -> None:
        """Send a message at once; only in the listening thread."""
        self.post(kind, step, content)
        with suppress(RuntimeError, OSError):
            self._exchange()

    def before_deadline(self, reserve: float, act: Callable[[StopRequest], None] | None) -> None:
        """Call ``act`` in the listening thread ``reserve`` seconds before a stop's deadline."""
        self._reserve, self._last_moment = reserve, act

    def reason(self) -> StopRequest:
        """Return why to stop; where only another process has heard, the launcher is listened to once more."""
        end = self._clock.now() + 2 * LISTEN_EVERY
        while self.stop is None and self._channel is not None and not self.lost and self._clock.now() < end:
            self._wake.set()
            self._clock.sleep(0.01)
        return self.stop or StopRequest("another process was requested to stop")

    def claim(self, name: str) -> bool:
        """Return whether this is the first process to ask for ``name``; ``True`` without a launcher."""
        if self._channel is None or self.lost:
            return True
        try:
            return self._channel.claim(name)
        except (RuntimeError, OSError):
            return True

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        if self.stop is None or self.stop.reason == LAUNCHER_LOST:
            self.stop = StopRequest(TERMINATED, self._clock.now() + self._grace)

    def _run(self) -> None:
        while True:
            ended = self._ended
            self._wake.clear()
            try:
                self._exchange()
            except (RuntimeError, OSError) as exc:
                log.warning("the launcher cannot be reached (%s): this process saves and exits", exc)
                self.lost = True
                self.stop = self.stop or StopRequest(LAUNCHER_LOST)
            try:
                self._heard(self.stop)
            except (RuntimeError, OSError):  # no fault of the launcher's
                log.warning("what the launcher has said could not be acted on", exc_info=True)
            if ended:
                return
            self._watch_deadline()
            self._clock.wait(self._wake, self._every)

    def _exchange(self) -> None:
        if self._channel is None or self.lost:
            return
        while True:
            try:
                report = self._reports.get_nowait()
            except queue.Empty:
                break
            try:
                self._channel.post(report)
            except MessageError as exc:
                log.warning("a report of the kind %s cannot be sent: %s", report.kind, exc)
        request = self._channel.stop_request()
        if request is not None:
            self.stop = request

    def _watch_deadline(self) -> None:
        stop, act = self.stop, self._last_moment
        if stop is None or stop.deadline is None or act is None:
            return
        if self._clock.now() >= stop.deadline - self._reserve:
            self._last_moment = None
            act(stop)
