"""What the messages about nodes add up to, whatever their order and however often each one comes.

``NoticeLog`` is a value with a merge that is associative, commutative and idempotent (a join semilattice: sets are
united, of the rest the latest counts), so duplicates and messages out of order change nothing. ``NoticeFile`` keeps
one on disk.
"""

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ebbflow.infra.aws.notices import events
from ebbflow.infra.aws.notices.events import Event
from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import NoticeError, StorageError
from ebbflow.infra.storage import checksums, private
from ebbflow.infra.storage.files import locked, sync_folder, write_atomic
from ebbflow.planners.model import Notice

KEEP = 3600.0
"""Seconds for which a notice counts after its deadline: a node that still runs then has been spared."""
DRAIN = 120.0
"""Seconds that a group's hook gives a node to drain, as Terraform's ``drain_seconds`` has it by default."""

_FORMAT = 1


@dataclass(frozen=True, slots=True, order=True)
class Advice:
    """A node may leave, at ``deadline`` at the earliest. Times in seconds since the Unix epoch."""

    at: float
    over: bool  # called off; last of what came at the same time
    deadline: float


@dataclass(frozen=True, slots=True, order=True)
class Failure:
    """A group could not start a node."""

    at: float
    reason: str
    zone: str = ""


@dataclass(frozen=True)
class NoticeLog:
    """All that is known from messages, by instance or group."""

    leaving: Mapping[str, frozenset[float]] = field(
        default_factory=dict
    )  # deadlines by which it will be gone
    advice: Mapping[str, Mapping[str, Advice]] = field(default_factory=dict)  # by what it is about
    ended: Mapping[str, float] = field(default_factory=dict)  # when it was first said to be gone
    failures: Mapping[str, Failure] = field(default_factory=dict)  # the latest of each group

    def merged(self, event: Event, drain: float = DRAIN) -> "NoticeLog":
        """Return the book with what ``event`` says; ``drain`` is how long a group waits for its node, seconds."""
        match event:
            case events.Interruption() | events.NodeLeaving():
                return self._with_deadline(event.instance, event.deadline)
            case events.GroupEnds():
                return self._with_deadline(event.instance, event.at + drain)
            case events.Rebalance():
                # it may be interrupted from now on, and then there are two minutes
                advice = Advice(event.at, False, event.at + events.WARNING)
                return self._with_advice([event.instance], "rebalance", advice)
            case events.Health(planned=True):
                return self._with_advice(
                    event.instances, event.id, Advice(event.at, event.over, event.starts)
                )
            case events.StateChange(ended=True):
                first = min(event.at, self.ended.get(event.instance, math.inf))
                return self._changed(ended={**self.ended, event.instance: first})
            case events.LaunchFailed():
                found = Failure(event.at, event.reason, event.zone)
                latest = max(found, self.failures.get(event.group, found))
                return self._changed(failures={**self.failures, event.group: latest})
            case _:
                return self

    def notices(self) -> tuple[Notice, ...]:
        """Return at most one notice a node, sorted by id: the earliest deadline, or the advice where there is none.

        A node that has ended has none.
        """
        found: dict[str, Notice] = {}
        for instance, told in self.advice.items():
            if deadlines := [advice.deadline for advice in told.values() if not advice.over]:
                found[instance] = Notice(instance, min(deadlines), "rebalance")
        for instance, times in self.leaving.items():
            found[instance] = Notice(instance, min(times))
        return tuple(found[name] for name in sorted(found.keys() - self.ended.keys()))

    def without_old(self, now: float) -> "NoticeLog":
        """Return the book without what is over for more than ``KEEP`` seconds at ``now``."""
        since = now - KEEP
        return NoticeLog(
            {
                name: kept
                for name, times in self.leaving.items()
                if (kept := frozenset(t for t in times if t >= since))
            },
            {
                name: current
                for name, told in self.advice.items()
                if (current := {key: a for key, a in told.items() if max(a.at, a.deadline) >= since})
            },
            {name: at for name, at in self.ended.items() if at >= since},
            {group: failure for group, failure in self.failures.items() if failure.at >= since},
        )

    def to_json(self) -> dict[str, Any]:
        """Return the book as JSON can hold it."""
        return {
            "leaving": {name: sorted(times) for name, times in sorted(self.leaving.items())},
            "advice": {
                name: {key: [a.at, a.over, a.deadline] for key, a in sorted(told.items())}
                for name, told in sorted(self.advice.items())
            },
            "ended": dict(sorted(self.ended.items())),
            "failures": {g: [f.at, f.reason, f.zone] for g, f in sorted(self.failures.items())},
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "NoticeLog":
        """Return the book that ``to_json`` wrote. Raises ``KeyError``, ``TypeError``, ``ValueError`` for another."""
        return cls(
            {name: frozenset(map(float, times)) for name, times in fields["leaving"].items()},
            {
                name: {
                    key: Advice(float(at), bool(over), float(end)) for key, (at, over, end) in told.items()
                }
                for name, told in fields["advice"].items()
            },
            {name: float(at) for name, at in fields["ended"].items()},
            {group: Failure(float(at), why, zone) for group, (at, why, zone) in fields["failures"].items()},
        )

    def _with_deadline(self, instance: str, deadline: float) -> "NoticeLog":
        known = self.leaving.get(instance, frozenset())
        return self._changed(leaving={**self.leaving, instance: known | {deadline}})

    def _with_advice(self, instances: Iterable[str], about: str, advice: Advice) -> "NoticeLog":
        changed = dict(self.advice)
        for instance in instances:
            told = changed.get(instance, {})
            changed[instance] = {**told, about: max(advice, told.get(about, advice))}
        return self._changed(advice=changed)

    def _changed(self, **parts: Any) -> "NoticeLog":
        kept = {
            "leaving": self.leaving,
            "advice": self.advice,
            "ended": self.ended,
            "failures": self.failures,
        }
        return NoticeLog(**{**kept, **parts})


class NoticeFile:
    """A book in a local file: read and replaced as a whole. One process writes it, others may read."""

    def __init__(self, path: str | Path, clock: Clock | None = None) -> None:
        self.path = Path(path)
        self._clock = clock or SystemClock()

    def read(self) -> NoticeLog:
        """Return the notices; none where there is no file.

        Raises ``NoticeError`` for a file that is damaged, and ``StorageError`` for one that cannot be read.
        """
        try:
            fields = checksums.unsealed(self.path.read_bytes())
            if fields["format"] != _FORMAT:
                raise NoticeError(f"{self.path} is of another version of Ebbflow; use that version")
            return NoticeLog.from_json(fields)
        except FileNotFoundError:
            return NoticeLog()
        except OSError as error:
            raise StorageError(f"cannot read {self.path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise NoticeError(
                f"{self.path} is no file of notices ({type(error).__name__}: {error}); delete it: what AWS sends "
                "again and what EC2 tells of its instances replaces it"
            ) from error

    def write(self, book: NoticeLog) -> None:
        """Replace the book, atomically and durably. Raises ``StorageError``."""
        data = checksums.sealed({"format": _FORMAT, **book.to_json()}, indent=1)
        try:
            write_atomic(None, "file", str(self.path), data)
            sync_folder(str(self.path.parent))
        except OSError as error:
            raise StorageError(f"cannot write {self.path}: {error.strerror}") from error

    def held(self) -> AbstractContextManager[None]:
        """Hold the file for writing, against other processes. Raises ``StorageError`` where another holds it."""
        private.make_folder(self.path.parent)
        return locked(f"{self.path}.lock", self._clock, timeout=0.0)
