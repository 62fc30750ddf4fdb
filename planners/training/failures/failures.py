"""Why a training run failed: the reason, and the class that decides whether it is tried again.

The taxonomy is that of Jeon et al., "Analysis of Large-Scale Multi-Tenant GPU Clusters for DNN Training Workloads",
ATC 2019, section 4. Ordered rules (``FailureTable``) look at the first error of the rank that failed first, since
the others mostly report that a peer is gone; what the scheduler or the hardware said goes before any text.
"""

import hashlib
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, Self, get_args

from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.failures.text import LoggedError, errors, normalized, tail


class FailureClass(StrEnum):
    """Whose matter a failure is; ``retries.RetryPolicy`` has one rule for each."""

    USER = "user"  # the program or its settings: would fail again
    DATA = "data"  # an input that is missing or broken
    RESOURCE = "resource"  # too little memory or space for this shape
    ENGINE = "engine"  # CUDA, a library, a crash: the program's or the node's fault
    COMMUNICATION = "communication"  # between processes
    INFRASTRUCTURE = "infrastructure"  # nodes, storage
    SCHEDULER = "scheduler"  # capacity was taken away: no failure of the run
    UNKNOWN = "unknown"


class FailureReason(StrEnum):
    """The reasons of the built-in table; a user's table may add others."""

    SPOT_REVOCATION = "spot-revocation"
    PREEMPTED = "preempted"
    NODE_LOST = "node-lost"
    CANCELLED = "cancelled"
    GPU_ECC_ERROR = "gpu-ecc-error"
    HOST_OUT_OF_MEMORY = "host-out-of-memory"
    GPU_OUT_OF_MEMORY = "gpu-out-of-memory"
    NO_SPACE = "no-space"
    CHECKPOINTS_LOST = "checkpoints-lost"
    RUN_LOCKED = "run-locked"
    SYNTAX_ERROR = "syntax-error"
    CANNOT_LOAD_LIBRARIES = "cannot-load-libraries"
    IMPORT_ERROR = "import-error"
    CUDA_VERSION_MISMATCH = "cuda-version-mismatch"
    CUDA_INIT_FAILED = "cuda-init-failed"
    COLLECTIVE_TIMEOUT = "collective-timeout"
    COMMUNICATION_ERROR = "communication-error"
    MODEL_DIVERGED = "model-diverged"
    MODEL_MISMATCH = "model-mismatch"
    CHECKPOINT_ERROR = "checkpoint-error"
    STORAGE_ERROR = "storage-error"
    PERMISSION_ERROR = "permission-error"
    INCORRECT_INPUTS = "incorrect-inputs"
    INVALID_MEMORY_ACCESS = "invalid-memory-access"
    CUDA_FAILURE = "cuda-failure"
    OUTPUT_NODE_ERROR = "output-node-error"
    SEMANTIC_ERROR = "semantic-error"
    CORE_DUMP = "core-dump"
    TRACEBACK = "traceback"
    NO_SIGNATURE = "no-signature"


EventKind = Literal[
    "spot-notice", "node-lost", "preempted", "cancelled", "ecc", "host-out-of-memory", "hang", "unformed"
]
EVENT_KINDS: tuple[EventKind, ...] = get_args(EventKind)


@dataclass(frozen=True, slots=True)
class FailureEvent:
    """What the scheduler, the launcher or the hardware said about the run."""

    kind: EventKind
    node: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one process ended. ``exit_code`` is negative for a signal, as in ``subprocess``."""

    rank: int
    exit_code: int
    log: str = ""  # its output, or the end of it
    node: str = ""
    at: float = 0.0  # s; only differences count

    @property
    def signal(self) -> str:
        """Return the name of the signal that ended it, also where a shell reports 128 + n; ``""`` for none."""
        number = -self.exit_code if self.exit_code < 0 else self.exit_code - 128
        try:
            return signal.Signals(number).name if number > 0 else ""
        except ValueError:
            return ""


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table; whichever of its conditions is given and holds is enough."""

    reason: str
    failure_class: FailureClass
    events: frozenset[str] = frozenset()
    signals: frozenset[str] = frozenset()  # that say more than any text: the process survived what it printed
    weak_signals: frozenset[str] = frozenset()  # that count where no text does
    exit_codes: frozenset[int] = frozenset()  # count where no text does
    patterns: tuple[re.Pattern[str], ...] = ()  # anywhere in an error
    tracebacks: tuple[re.Pattern[str], ...] = ()  # in a traceback's exception only
    within: tuple[re.Pattern[str], ...] = ()  # and one of its frames is one of these; empty: any
    advice: str = ""  # what to do, for the reader

    def says(self, error: LoggedError) -> bool:
        """Return whether the rule knows ``error``."""
        if self.within and not any(p.search(frame) for p in self.within for frame in error.frames):
            return False
        if any(pattern.search(error.text) for pattern in self.patterns):
            return True
        return error.traceback and any(pattern.search(error.text) for pattern in self.tracebacks)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a run failed. ``signature`` is equal for failures that are the same but for numbers, paths and times."""

    reason: str
    failure_class: FailureClass
    signature: str
    line: str = ""  # what the process said, or the event
    rank: int | None = None
    node: str = ""
    nodes: tuple[str, ...] = ()  # implicated: where it happened
    advice: str = ""  # what to do, for the reader

    def __str__(self) -> str:
        where = f" on rank {self.rank}" if self.rank is not None else ""
        where += f" of {self.node}" if self.node else ""
        return f"{self.reason} ({self.failure_class}){where}" + (f": {self.line}" if self.line else "")


_KEYS = {
    "reason", "class", "events", "signals", "weak-signals", "exit-codes", "patterns", "tracebacks", "within", "says",
}  # fmt: skip
_SECONDARY = (FailureClass.COMMUNICATION, FailureClass.UNKNOWN)


@dataclass(frozen=True, slots=True)
class FailureTable:
    """Ordered rules; the first that holds wins. ``ignored`` are errors that only repeat those of other processes."""

    rules: tuple[Rule, ...]
    ignored: tuple[re.Pattern[str], ...] = ()

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Self:
        """Return the table of a TOML or YAML document: ``rule = [{reason, class, ...}]``, ``ignored = [...]``.

        Raises ``OptionError`` for an unknown key, class, event or signal, and for a pattern that is none.
        """
        if not isinstance(data, Mapping) or set(data) - {"rule", "ignored"}:
            raise OptionError(f"a failure table has the keys rule and ignored; got {_keys(data)}")
        rows = data.get("rule", [])
        if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
            raise OptionError(f"rule must be a list of tables; got {rows!r:.80}")
        ignored = tuple(_pattern(text, "ignored") for text in _texts(data.get("ignored", []), "ignored"))
        return cls(tuple(_rule(row) for row in rows), ignored)

    def extended(self, first: "FailureTable") -> "FailureTable":
        """Return this table with the rules of ``first`` before its own."""
        return FailureTable(first.rules + self.rules, first.ignored + self.ignored)


def classify(
    ends: Sequence[RankEnd],
    table: FailureTable,
    events: Iterable[FailureEvent] = (),
    slack: float = 5.0,
) -> Failure:
    """Return why the run failed; ``no-signature`` where nothing is known.

    Args:
        ends: how its processes ended; those with exit code 0 do not count.
        table: the rules.
        events: what the scheduler, the launcher or the hardware said; goes before any text.
        slack: s after the first failure within which another rank's own error goes before a broken connection,
            since a process that raises an error takes a while to end, and its peers notice at once.
    """
    for rule in table.rules:
        for event in events:
            if event.kind in rule.events:
                nodes = (event.node,) if event.node else ()
                said = ": ".join(part for part in (event.kind, event.detail) if part)
                mark = _signature(rule.reason, event.kind)
                return Failure(
                    rule.reason, rule.failure_class, mark, said, None, event.node, nodes, rule.advice
                )
    failed = sorted((end for end in ends if end.exit_code != 0), key=lambda end: (end.at, end.rank))
    if not failed:
        return _unknown("no process failed, and none finished", None)
    found = [_of_rank(end, table) for end in failed if end.at <= failed[0].at + slack]
    own = next((f for f in found if f.failure_class not in _SECONDARY), found[0])
    return own if found[0].failure_class is FailureClass.COMMUNICATION else found[0]


def _of_rank(end: RankEnd, table: FailureTable) -> Failure:
    for rule in table.rules:
        if end.signal in rule.signals:
            ended = LoggedError("", f"ended by {end.signal}")
            native = (e for e in errors(tail(end.log)) if not e.traceback and rule.says(e))
            return _failure(rule, next(native, ended), end)
    for error in errors(tail(end.log)):
        if any(pattern.search(error.text) for pattern in table.ignored):
            continue
        for rule in table.rules:
            if rule.says(error):
                return _failure(rule, error, end)
    said = f"ended by {end.signal}" if end.signal else f"exit code {end.exit_code}"
    for rule in table.rules:
        if end.signal in rule.weak_signals or end.exit_code in rule.exit_codes:
            return _failure(rule, LoggedError("", said), end)
    return _unknown(f"{said}, no known error in its log", end)


def _failure(rule: Rule, error: LoggedError, end: RankEnd) -> Failure:
    if error.traceback:
        top = " ".join((error.line.partition(":")[0], error.own, error.frame))
    else:
        top = f"{error.frame} {normalized(error.line)}"
    nodes = (end.node,) if end.node else ()
    mark = _signature(rule.reason, top)
    return Failure(rule.reason, rule.failure_class, mark, error.line, end.rank, end.node, nodes, rule.advice)


def _unknown(line: str, end: RankEnd | None) -> Failure:
    reason = FailureReason.NO_SIGNATURE
    mark = _signature(reason, normalized(line) if end is None else f"{end.signal or end.exit_code}")
    rank, node = (None, "") if end is None else (end.rank, end.node)
    return Failure(reason, FailureClass.UNKNOWN, mark, line, rank, node, (node,) if node else ())


def _signature(reason: str, top: str) -> str:
    return hashlib.sha256(f"{reason}\n{top.strip()}".encode()).hexdigest()[:12]


def _rule(row: Mapping[str, Any]) -> Rule:
    if set(row) - _KEYS or not {"reason", "class"} <= set(row):
        raise OptionError(
            f"a rule has reason and class, and any of {', '.join(sorted(_KEYS))}; got {_keys(row)}"
        )
    reason = row["reason"]
    if not isinstance(reason, str) or not reason.strip():
        raise OptionError(f"a reason must be a text; got {reason!r:.80}")
    if row["class"] not in set(FailureClass):
        raise OptionError(f"class of {reason} must be one of {', '.join(FailureClass)}; got {row['class']!r}")

    def of(key: str) -> list[str]:
        return _texts(row.get(key, []), f"{key} of {reason}")

    names = set(signal.Signals.__members__)
    signals, weak = frozenset(of("signals")), frozenset(of("weak-signals"))
    if wrong := (signals | weak) - names:
        raise OptionError(
            f"signals of {reason} must be names such as SIGSEGV; got {', '.join(sorted(wrong))}"
        )
    events = frozenset(of("events"))
    if wrong := events - set(EVENT_KINDS):
        raise OptionError(f"events of {reason} must be of {', '.join(EVENT_KINDS)}; got {', '.join(wrong)}")
    codes = row.get("exit-codes", [])
    if not isinstance(codes, list) or not all(type(code) is int and code != 0 for code in codes):
        raise OptionError(f"exit-codes of {reason} must be whole numbers, not 0; got {codes!r:.80}")
    patterns = tuple(_pattern(text, reason) for text in of("patterns"))
    tracebacks = tuple(_pattern(text, reason) for text in of("tracebacks"))
    if not (events or signals or weak or codes or patterns or tracebacks):
        raise OptionError(f"the rule for {reason} has no condition, such as patterns")
    within = tuple(_pattern(text, reason) for text in of("within"))
    advice = row.get("says", "")
    if not isinstance(advice, str):
        raise OptionError(f"says of {reason} must be a text; got {advice!r:.80}")
    class_ = FailureClass(row["class"])
    return Rule(reason, class_, events, signals, weak, frozenset(codes), patterns, tracebacks, within, advice)


def _texts(value: Any, what: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise OptionError(f"{what} must be a list of texts; got {value!r:.80}")
    return value


def _pattern(text: str, what: str) -> re.Pattern[str]:
    try:
        return re.compile(text, re.MULTILINE)
    except re.error as error:
        raise OptionError(f"a pattern of {what} is no regular expression: {error}: {text!r}") from error


def _keys(data: Any) -> str:
    return ", ".join(map(str, data)) if isinstance(data, Mapping) else repr(data)[:80]
