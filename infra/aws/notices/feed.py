"""``NoticeFeed``: what EventBridge says about nodes, read from the cluster's queue in a thread of its own.

A message is deleted only when what it says is in the notice file. Until then SQS gives it again: whatever fails, or
is killed, in between costs a duplicate, and duplicates change nothing (``notice_book``). What cannot be read is left
alone, and the queue's own ``maxReceiveCount`` moves it to the dead letters.
"""

import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ebbflow.infra.aws.clients import Clients, calling
from ebbflow.infra.aws.notices import events
from ebbflow.infra.aws.notices.events import Event
from ebbflow.infra.aws.notices.store import DRAIN, NoticeFile, NoticeLog
from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import AwsError, AwsUnavailableError, NoticeError, StorageError
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import Notice

POLL = 20.0
"""Seconds for which one request waits for messages, the most that SQS allows; a message ends the wait at once."""
_BATCH = 10  # messages in a request, SQS's limit
_FIRST_DELAY = 0.5  # seconds before the second attempt
_MOST_DELAY = 15.0  # seconds between attempts at most
_REMEMBERED = 1000  # unreadable messages that are not logged again
_MISSING = ("AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist", "InvalidAddress")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FeedStatus:
    """How a feed does, for people."""

    received: int = 0  # messages, duplicates included
    unreadable: int = 0  # of them; each time that one came
    last: float | None = None  # seconds since the Unix epoch: the last answer of the queue
    failing_since: float | None = None  # no answer since then; None: it works
    error: str = ""  # what is wrong


class NoticeFeed:
    """Reads one cluster's notice queue. Safe for several threads.

    One feed reads a queue: a second one would take messages that the first must hear of. On one machine the notice
    file keeps them apart. With ``start`` a thread reads; without, whoever calls ``poll``.

    Args:
        clients: of the cluster's account and region.
        queue_url: ``Settings.notice_queue_url``.
        file: where notices are kept, so that a restart loses none.
        drain: seconds that a group's hook gives a node, as the pools' ``drain_seconds`` has it.
        wait: seconds for which one request waits for messages, 0 to 20.
        rng: of the jitter of delays.

    Raises ``OptionError`` for a ``wait`` beyond its bounds.
    """

    def __init__(
        self,
        clients: Clients,
        queue_url: str,
        file: NoticeFile,
        *,
        drain: float = DRAIN,
        wait: float = POLL,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        if not 0 <= wait <= POLL:
            raise OptionError(f"wait must be 0 to {POLL:g} s, as SQS has it; got {wait}")
        self._sqs = clients.client("sqs")
        self._url, self._file, self._drain, self._wait = queue_url, file, drain, wait
        self._clock = clock or SystemClock()
        self._rng = rng or random.Random()  # noqa: S311 - jitter
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._held = ExitStack()
        self._notice_log: NoticeLog | None = None
        self._saved: NoticeLog | None = None  # what is on disk
        self._status = FeedStatus()
        self._failure: type[Exception] | None = None  # the last kind
        self._listeners: list[Callable[[Sequence[Event]], None]] = []
        self._unsaved: list[str] = []  # receipt handles of messages whose content is not on disk yet
        self._known: dict[str, None] = {}  # unreadable messages
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # --- what it knows ------------------------------------------------------------------------------------

    def notices(self) -> tuple[Notice, ...]:
        """Return the notices of all instances that have not ended, also of those nobody has observed yet.

        Instances of others are among them: whoever asks looks for his own.
        """
        return self._current().notices()

    def ended(self) -> frozenset[str]:
        """Return the instances of which EC2 has said that they shut down or are terminated."""
        return frozenset(self._current().ended)

    def notice_log(self) -> NoticeLog:
        """Return all that is known now."""
        return self._current()

    def status(self) -> FeedStatus:
        """Return how the feed does."""
        with self._lock:
            return self._status

    def listen(self, on_events: Callable[[Sequence[Event]], None]) -> None:
        """Call ``on_events`` in the feed's thread with what each batch said, once ``notices`` tells of it."""
        with self._lock:
            self._listeners.append(on_events)

    # --- reading ------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Take up the notices of an earlier feed and see that the queue can be used; may be called twice.

        Raises ``NoticeError`` for a queue that does not exist or a file that another process holds,
        ``CredentialsError`` for one that may not be read, ``AwsUnavailableError`` where AWS does not answer, and
        ``StorageError``.
        """
        with self._lock:
            if self._notice_log is not None:
                return
            try:
                self._held.enter_context(self._file.held())
            except StorageError as error:
                raise NoticeError(
                    f"another process reads the notices of {self._url}; two would miss half of them each. End it, or "
                    f"read {self._file.path}, which it keeps"
                ) from error
            try:
                self._saved = self._file.read()
                self._notice_log = self._saved.without_old(self._clock.now())
            except BaseException:
                self._held.close()
                raise
        try:
            with of_queue("look at the notice queue", self._url):
                self._sqs.get_queue_attributes(QueueUrl=self._url, AttributeNames=["QueueArn"])
        except AwsUnavailableError as error:
            self._failed(error)  # the thread tries again; notices on disk count already
        except BaseException:
            self._forget()
            raise

    def start(self) -> None:
        """Read from now on in a thread of its own. Raises what ``open`` raises."""
        self.open()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ebbflow-notices", daemon=True)
            self._thread.start()

    def poll(self, wait: float | None = None) -> int:
        """Wait once for messages and take them in; return how many came. One caller at a time.

        Raises ``AwsError`` when the queue cannot be read, and ``StorageError`` when notices cannot be kept; then
        ``notices`` tells of them nevertheless, and the next call begins by keeping them.
        """
        self.open()
        self._keep()
        with of_queue("receive notices", self._url):
            answer = self._sqs.receive_message(
                QueueUrl=self._url,
                MaxNumberOfMessages=_BATCH,
                WaitTimeSeconds=int(self._wait if wait is None else wait),
                MessageSystemAttributeNames=["ApproximateReceiveCount"],
            )
        messages = answer.get("Messages", [])
        self._answered(len(messages))
        events = [event for message in messages if (event := self._read(message)) is not None]
        if events:
            self._merge(events)
        if messages:
            self._keep()
        return len(messages)

    def take(self, events: Sequence[Event]) -> None:
        """Take in events that came another way, such as dead letters, and return once they are kept.

        Raises what ``open`` raises, and ``StorageError``.
        """
        self.open()
        self._merge(events)
        self._write()

    def close(self, timeout: float = POLL + 5.0) -> None:
        """Stop reading, within ``timeout`` seconds: the request under way is waited for. May be called twice."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return  # the thread lets go of the file when its request ends
        self._held.close()

    def __enter__(self) -> "NoticeFeed":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- how ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        delay = _FIRST_DELAY
        try:
            while not self._stop.is_set():
                try:
                    self.poll()
                    delay = _FIRST_DELAY
                except (AwsError, StorageError) as error:
                    self._failed(error)
                    # full jitter would hammer now and then: half of the delay is certain
                    self._clock.wait(self._stop, delay * self._rng.uniform(0.5, 1.0))
                    delay = min(2 * delay, _MOST_DELAY)
        except Exception as error:  # whoever looks at the status must hear of it
            self._failed(error)
            raise
        finally:
            self._held.close()

    def _read(self, message: dict[str, Any]) -> Event | None:
        """Return what a message says, and keep its receipt; ``None`` for one that is left to the dead letters."""
        try:
            event = events.read(message["Body"])
        except NoticeError as error:
            self._unreadable(message, error)
            return None
        self._unsaved.append(message["ReceiptHandle"])
        return event

    def _unreadable(self, message: dict[str, Any], error: NoticeError) -> None:
        with self._lock:
            self._status = replace(self._status, unreadable=self._status.unreadable + 1)
        if message["MessageId"] not in self._known:
            count = message.get("Attributes", {}).get("ApproximateReceiveCount", "?")
            log.warning(
                "message %s is left to the dead letters (receive %s): %s", message["MessageId"], count, error
            )
            self._known[message["MessageId"]] = None
            while len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]

    def _merge(self, events: Sequence[Event]) -> None:
        with self._lock:
            assert self._notice_log is not None
            notice_log = self._notice_log
            for event in events:
                notice_log = notice_log.merged(event, self._drain)
            self._notice_log = notice_log.without_old(self._clock.now())
            listeners = list(self._listeners)
        for listener in listeners:
            try:
                listener(events)
            except Exception:
                log.exception("a listener of notices failed")

    def _keep(self) -> None:
        """Write the book, then delete the messages that it holds."""
        if not self._unsaved:
            return
        self._write()
        # whether SQS hears of it or not: they are kept, and those that come again change nothing
        receipts, self._unsaved = self._unsaved, []
        for first in range(0, len(receipts), _BATCH):
            batch = [
                {"Id": str(at), "ReceiptHandle": receipt}
                for at, receipt in enumerate(receipts[first : first + _BATCH])
            ]
            with of_queue("delete notices that were taken", self._url):
                answer = self._sqs.delete_message_batch(QueueUrl=self._url, Entries=batch)
            for failure in answer.get("Failed", []):
                log.warning("duplicate notice: %s", failure.get("Code"))

    def _write(self) -> None:
        with self._writing:
            if (notice_log := self._current()) != self._saved:
                self._file.write(notice_log)
                self._saved = notice_log

    def _current(self) -> NoticeLog:
        with self._lock:
            return (self._notice_log or NoticeLog()).without_old(self._clock.now())

    def _answered(self, count: int) -> None:
        now = self._clock.now()
        with self._lock:
            since = self._status.failing_since
            self._status = replace(
                self._status,
                received=self._status.received + count,
                last=now,
                failing_since=None,
                error="",
            )
        if since is not None:
            log.warning("the notice queue is available again after %.0f s", now - since)

    def _failed(self, error: Exception) -> None:
        with self._lock:
            first = self._status.failing_since is None
            since = self._clock.now() if first else self._status.failing_since
            other = type(error) is not self._failure
            self._failure = type(error)
            self._status = replace(self._status, failing_since=since, error=str(error))
        if first or other:
            log.warning("notices cannot be read; nodes may terminate without notice: %s", error)

    def _forget(self) -> None:
        with self._lock:
            self._notice_log = None
            self._held.close()


@contextmanager
def of_queue(what: str, url: str) -> Iterator[None]:
    """As ``calling``; it also says what to do about a queue that does not exist (``NoticeError``)."""
    try:
        with calling(what):
            yield
    except AwsError as error:
        if error.code not in _MISSING:
            raise
        raise NoticeError(
            f"cannot {what}: there is no queue {url}; run terraform apply, and write the settings again "
            "(terraform output -json > ebbflow.json)",
            error.code,
        ) from None
