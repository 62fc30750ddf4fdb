"""Fault injection at set times: the grammar of a fault (``20s:kill:node-2``), and the thread that injects them."""

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, Self, TypeVar

from ebbflow.infra.clock import Clock
from ebbflow.planners.errors import EbbflowError, OptionError
from ebbflow.planners.model.numbers import is_whole, parse_duration

Verb = Literal["kill", "notice", "recommend", "pause", "resume", "leave", "outage", "add", "remove", "resize"]

RECOMMEND_S = 120.0
"""Seconds from a rebalance recommendation to the interruption that it expects, unless the fault says."""

_OPERANDS: dict[Verb, str] = {
    "kill": "NODE",
    "notice": "NODE:DURATION",
    "recommend": "NODE[:DURATION]",
    "pause": "NODE",
    "resume": "NODE",
    "leave": "NODE",
    "outage": "POOL:DURATION",
    "add": "POOL[:COUNT]",
    "remove": "POOL[:COUNT]",
    "resize": "COUNT",
}
_STEP = re.compile(r"([A-Za-z][A-Za-z0-9_-]*)\+")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault and when it is injected.

    Args:
        after: seconds after the start of the schedule, or of ``step``.
        verb: what happens.
        target: a node, or a pool; empty where the subject has neither.
        seconds: until the node terminates (``notice``, ``recommend``), or during which the pool gets
            no node (``outage``).
        count: nodes that are added or removed, or workers to resize to.
        step: step of a pipeline after whose start ``after`` counts; empty: the step that starts first.
    """

    after: float
    verb: Verb
    target: str = ""
    seconds: float = 0.0
    count: int = 1
    step: str = ""

    def describe(self, target: str = "") -> str:
        """Return a sentence that says what happens, to ``target`` where the node that is meant is known."""
        name, nodes = target or self.target, "1 node" if self.count == 1 else f"{self.count} nodes"
        match self.verb:
            case "notice":
                return f"notice to {name}: it terminates in {self.seconds:g} s"
            case "recommend":
                return f"rebalance recommended for {name}: it may terminate in {self.seconds:g} s"
            case "kill":
                return f"{name} is killed without notice"
            case "pause":
                return f"{name} is paused (SIGSTOP)"
            case "resume":
                return f"{name} is resumed (SIGCONT)"
            case "leave":
                return f"{name} leaves"
            case "outage":
                return f"simulated capacity outage: {name} gets no node for {self.seconds:g} s"
            case "resize":
                return f"resize to {self.count} {'worker' if self.count == 1 else 'workers'}"
            case "add":
                return f"add {nodes}{f' to {name}' if name else ''}"
            case "remove":
                return f"remove {nodes}{f' from {name}' if name else ''}"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The faults that a subject accepts: ``[STEP+]TIME:VERB[:TARGET][:ARGUMENT]``.

    Args:
        subject: noun phrase in errors: ``a training``.
        verbs: what the subject can do.
        example: a fault of the subject.
        max_count: upper bound of the count of ``add``, ``remove`` and ``resize``.
        pools: whether nodes are added to and removed from pools, which a fault then names.
        steps: whether a time may count from the start of a step (``STEP+TIME``).
    """

    subject: str
    verbs: tuple[Verb, ...]
    example: str
    max_count: int = 10_000
    pools: bool = False
    steps: bool = False

    @property
    def forms(self) -> str:
        """Return all verbs with what follows each, for help and errors."""
        return ", ".join(f"{verb}:{self._operands(verb)}" for verb in self.verbs)

    def parse(self, text: str) -> Fault:
        """Return the fault that ``text`` describes. Raises ``OptionError``, which lists the verbs."""
        step = _STEP.match(text.strip()) if self.steps else None
        time, *rest = text.strip()[step.end() if step else 0 :].split(":")
        verb = next((verb for verb in self.verbs if rest and verb == rest[0]), None)
        if verb is None or len(rest) < 2 or not all(rest[1:]):
            raise self._error(text)
        after, name = self._seconds(time, text), step[1] if step else ""
        match self._operands(verb), rest[1:]:
            case "NODE", [target]:
                return Fault(after, verb, target, step=name)
            case "NODE:DURATION" | "POOL:DURATION" | "NODE[:DURATION]", [target, seconds]:
                return Fault(after, verb, target, self._seconds(seconds, text), step=name)
            case "NODE[:DURATION]", [target]:
                return Fault(after, verb, target, RECOMMEND_S, step=name)
            case "POOL[:COUNT]", [target]:
                return Fault(after, verb, target, step=name)
            case "POOL[:COUNT]", [target, count] if self._counts(count):
                return Fault(after, verb, target, count=int(count), step=name)
            case "COUNT", [count] if self._counts(count):
                return Fault(after, verb, count=int(count), step=name)
        raise self._error(text)

    def _operands(self, verb: Verb) -> str:
        return "COUNT" if verb in ("add", "remove") and not self.pools else _OPERANDS[verb]

    def _error(self, text: str, why: str = "") -> OptionError:
        time = "[STEP+]TIME" if self.steps else "TIME"
        return OptionError(
            f"a fault of {self.subject} is {time}:VERB[:TARGET][:ARGUMENT], such as {self.example}; its verbs are "
            f"{self.forms}; got {text!r:.120}{f': {why}' if why else ''}"
        )

    def _seconds(self, text: str, whole: str) -> float:
        try:
            return parse_duration(text)
        except OptionError as error:
            raise self._error(whole, str(error)) from None

    def _counts(self, text: str) -> bool:
        return is_whole(text) and 0 < int(text) <= self.max_count


class Schedule:
    """A thread that waits and injects, from ``begin`` to ``end``; a context manager that ends it.

    Args:
        clock: the clock whose times ``script`` yields.
        script: yields the timestamp of ``clock`` to wait for, and acts when it is resumed.
        timeout: seconds that ``end`` waits for an injection in progress.
    """

    def __init__(self, clock: Clock, script: Iterator[float], *, timeout: float = 60.0) -> None:
        self._clock, self._script, self._timeout = clock, script, timeout
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ebbflow-faults", daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self) -> None:
        """Start the schedule; later calls do nothing."""
        if self._thread.ident is None and not self._stop.is_set():
            self._thread.start()

    def wait(self) -> None:
        """Return when all faults are injected."""
        if self._thread.ident is not None:
            self._thread.join()

    def end(self) -> None:
        """Cancel the faults that are left; waits, bounded, for an injection in progress."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(self._timeout)

    def _run(self) -> None:
        for at in self._script:
            if self._clock.wait(self._stop, at - self._clock.now()):
                return


class TimedFault(Protocol):
    """A fault with a time."""

    @property
    def after(self) -> float: ...


F = TypeVar("F", bound=TimedFault)


def scripted(
    clock: Clock, faults: Iterable[F], inject: Callable[[F], object], say: Callable[[str], object]
) -> Iterator[float]:
    """Yield the timestamps of ``faults``, which are in order of time, and ``inject`` each.

    ``say`` gets a line for each fault that cannot be injected.
    """
    start = clock.now()
    for fault in faults:
        yield start + fault.after
        try:
            inject(fault)
        except EbbflowError as error:
            say(f"fault not injected: {error}")
