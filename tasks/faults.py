"""Faults on purpose, at set times: how they are written (``20s:kill:node-2``), and the thread that does them."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, Self, TypeVar

from ebbflow.infra.clock import Clock
from ebbflow.planners.errors import EbbflowError, OptionError
from ebbflow.planners.model.numbers import is_whole, parse_duration

Rest = Literal["WHOM", "WHOM:SECONDS", "WHOM[:COUNT]", "COUNT"]
"""What follows ``WHEN:WHAT:`` in the text of a fault."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens ``after`` seconds."""

    after: float
    kind: str
    of: str = ""  # a node, or a pool
    seconds: float = 0.0  # until the node leaves, or for which the pool gets no node
    count: int = 1  # nodes that are added or taken away
    step: str = ""  # of a pipeline, after whose beginning ``after`` counts; empty: of whichever begins first

    def told(self, of: str = "") -> str:
        """Return in words what happens, to the node ``of`` where it is known which one is meant."""
        of, many = of or self.of, self.count > 1
        match self.kind:
            case "notice":
                return f"notice to {of}: it leaves in {self.seconds:g} s"
            case "advise":
                return f"advice about {of}: it may leave in {self.seconds:g} s"
            case "kill":
                return f"{of} is killed without notice"
            case "freeze":
                return f"{of} stands still"
            case "thaw":
                return f"{of} goes on"
            case "shut":
                return f"there are no {of} nodes to be had for {self.seconds:g} s"
            case "add" if of:
                return f"{self.count} more {of} {'nodes' if many else 'node'}"
            case "add":
                return f"{self.count} more nodes" if many else "one more node"
            case _:
                return f"{self.count} nodes are given back" if many else "one node is given back"


@dataclass(frozen=True, slots=True)
class Grammar:
    """How a subject's faults are written: ``WHEN:WHAT:`` and what the verb asks for.

    Args:
        form: says in errors what a fault looks like.
        verbs: what there is, and what follows it.
        most: nodes that one fault may add or take away.
    """

    form: str
    verbs: Mapping[str, Rest]
    most: int = 1

    def parse(self, text: str) -> Fault:
        """Return the fault that ``text`` describes. Raises ``OptionError``, which says what one looks like."""
        parts = text.strip().split(":")
        if len(parts) < 3:
            raise OptionError(f"{self.form}; got {text!r}")
        after, kind = self._seconds(parts[0], text), parts[1]
        match self.verbs.get(kind), parts[2:]:
            case _, ["", *_]:
                pass
            case "WHOM" | "WHOM[:COUNT]", [of]:
                return Fault(after, kind, of)
            case "WHOM:SECONDS", [of, seconds]:
                return Fault(after, kind, of, self._seconds(seconds, text))
            case "WHOM[:COUNT]", [of, count] if self._counts(count):
                return Fault(after, kind, of, count=int(count))
            case "COUNT", [count] if self._counts(count):
                return Fault(after, kind, count=int(count))
        raise OptionError(f"{self.form}; got {text!r}")

    def _seconds(self, text: str, whole: str) -> float:
        try:
            return parse_duration(text)
        except OptionError as error:
            raise OptionError(f"{self.form}; got {whole!r:.120}: {error}") from None

    def _counts(self, text: str) -> bool:
        return is_whole(text) and 0 < int(text) <= self.most


class Schedule:
    """A thread of its own that waits and acts, from ``begin`` to ``end``; a context manager that ends it.

    Args:
        script: yields the moment of ``clock`` to wait for, and acts when it is gone on with.
        patience: seconds that ``end`` waits for what is going on.
    """

    def __init__(self, clock: Clock, script: Iterator[float], *, patience: float = 60.0) -> None:
        self._clock, self._script, self._patience = clock, script, patience
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
        """Return when all has happened."""
        if self._thread.ident is not None:
            self._thread.join()

    def end(self) -> None:
        """Stop what has not happened yet; waits, bounded, for what is going on."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(self._patience)

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
    clock: Clock, faults: Iterable[F], do: Callable[[F], object], say: Callable[[str], object]
) -> Iterator[float]:
    """Yield the moments of ``faults``, which are in order of time, and ``do`` each; ``say`` hears of what fails."""
    start = clock.now()
    for fault in faults:
        yield start + fault.after
        try:
            do(fault)
        except EbbflowError as error:
            say(f"that did not work: {error}")
