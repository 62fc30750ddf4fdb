"""The queue of messages that could not be handled: how many there are, what they are, and another try.

Two kinds end there: what was received too often without being understood, and what EventBridge could not deliver.
The queues take messages from EventBridge's rules only, so a second try does not send them again: it reads them as the
feed would, and they are deleted once they are kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ebbflow.infra.aws.clients import Clients
from ebbflow.infra.aws.notices import events
from ebbflow.infra.aws.notices.events import Event
from ebbflow.infra.aws.notices.feed import of_queue
from ebbflow.infra.errors import NoticeError

_BATCH = 10  # messages in a request, SQS's limit
_ROUNDS = 500  # requests of one call at most
_HIDDEN = 30  # seconds for which letters that are looked at are hidden from others
_KNOWN = 3  # answers in a row with letters that came before, after which there are no others


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One message that could not be handled."""

    id: str
    sent: float  # seconds since the Unix epoch
    received: int  # times
    body: str
    problem: str  # why it could not be read; empty: today it can
    undelivered: str = ""  # EventBridge's code, where it was EventBridge that could not deliver it


class DeadLetters:
    """One cluster's dead letters; ``queue_url`` is ``Settings.dead_letter_queue_url``."""

    def __init__(self, clients: Clients, queue_url: str) -> None:
        self._sqs = clients.client("sqs")
        self._url = queue_url

    def count(self) -> int:
        """Return about how many there are, those included that somebody looks at. Raises ``AwsError``."""
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        with of_queue("count the dead letters", self._url):
            found = self._sqs.get_queue_attributes(QueueUrl=self._url, AttributeNames=names)["Attributes"]
        return sum(int(found.get(name, 0)) for name in names)

    def show(self, limit: int = 100) -> list[DeadLetter]:
        """Return up to ``limit`` of them, the oldest first, and leave them where they are. Raises ``AwsError``."""
        found: dict[str, tuple[DeadLetter, str]] = {}
        try:
            self._each(limit, lambda letter, receipt: found.setdefault(letter.id, (letter, receipt)))
        finally:
            self._unhide([receipt for _, receipt in found.values()])
        return sorted((letter for letter, _ in found.values()), key=lambda letter: (letter.sent, letter.id))

    def redrive(self, take: Callable[[Sequence[Event]], None], limit: int = 1000) -> tuple[int, int]:
        """Give what can be read today to ``take``, such as ``NoticeFeed.take``, and delete it once ``take`` returns.

        Returns how many were taken and how many had to be left. Raises ``AwsError``, and what ``take`` raises.
        """
        taken: list[tuple[Event, str]] = []
        left: list[str] = []

        def sort(letter: DeadLetter, receipt: str) -> None:
            if letter.problem:
                left.append(receipt)
            else:
                taken.append((events.read(letter.body), receipt))

        try:
            self._each(limit, sort)
            if taken:
                take([event for event, _ in taken])
                self._delete([receipt for _, receipt in taken])
        finally:
            self._unhide(left)
        return len(taken), len(left)

    def _each(self, limit: int, do: Callable[[DeadLetter, str], object]) -> None:
        seen: set[str] = set()
        known = 0
        for _ in range(_ROUNDS):
            if len(seen) >= limit or known >= _KNOWN:
                return
            with of_queue("look at the dead letters", self._url):
                answer = self._sqs.receive_message(
                    QueueUrl=self._url,
                    MaxNumberOfMessages=min(_BATCH, limit - len(seen)),
                    WaitTimeSeconds=1,
                    VisibilityTimeout=_HIDDEN,
                    MessageSystemAttributeNames=["SentTimestamp", "ApproximateReceiveCount"],
                    MessageAttributeNames=["ERROR_CODE"],
                )
            messages = answer.get("Messages", [])
            if not messages:  # a request that waits asks all servers of the queue
                return
            known += 1
            for message in messages:
                if message["MessageId"] not in seen:
                    known = 0
                    seen.add(message["MessageId"])
                    do(_letter(message), message["ReceiptHandle"])

    def _unhide(self, receipts: Sequence[str]) -> None:
        for batch in _batches(receipts):
            entries = [{**entry, "VisibilityTimeout": 0} for entry in batch]
            with of_queue("put the dead letters back", self._url):
                self._sqs.change_message_visibility_batch(QueueUrl=self._url, Entries=entries)

    def _delete(self, receipts: Sequence[str]) -> None:
        for batch in _batches(receipts):
            with of_queue("delete dead letters that were taken", self._url):
                self._sqs.delete_message_batch(QueueUrl=self._url, Entries=batch)


def _letter(message: dict[str, Any]) -> DeadLetter:
    problem = ""
    try:
        events.read(message["Body"])
    except NoticeError as error:
        problem = str(error)
    attributes = message.get("Attributes", {})
    code = message.get("MessageAttributes", {}).get("ERROR_CODE", {}).get("StringValue", "")
    return DeadLetter(
        message["MessageId"],
        int(attributes.get("SentTimestamp", 0)) / 1000,
        int(attributes.get("ApproximateReceiveCount", 0)),
        message["Body"],
        problem,
        code,
    )


def _batches(receipts: Sequence[str]) -> list[list[dict[str, Any]]]:
    entries: list[dict[str, Any]] = [
        {"Id": str(i % _BATCH), "ReceiptHandle": r} for i, r in enumerate(receipts)
    ]
    return [entries[first : first + _BATCH] for first in range(0, len(entries), _BATCH)]
