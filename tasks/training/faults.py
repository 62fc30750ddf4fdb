"""Faults that happen to nodes at set times, for demonstrations and tests: ``20s:kill:node-2``."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, Self, TypeVar

from ebbflow.infra.clock import Clock
from ebbflow.planners.errors import EbbflowError, OptionError
from ebbflow.planners.model.numbers import is_whole, parse_seconds

FaultKind = Literal["kill", "notice", "freeze", "thaw", "add", "remove"]

_FORM = (
    "a scripted fault looks like 20s:kill:node-2, 35s:notice:node-1:10s, 40s:freeze:node-1, 45s:thaw:node-1, "
    "50s:add:1 or 60s:remove:1"
)
_MAX_NODES = 10_000


@dataclass(frozen=True, slots=True)
class ScriptedFault:
    """What happens ``after`` seconds of running."""

    after: float
    kind: FaultKind
    node: str = ""
    count: int = 0  # nodes that are added or taken away
    notice: float = 0.0  # s that a noticed node has left

    @classmethod
    def parse(cls, text: str) -> "ScriptedFault":
        """Return the fault that ``text`` describes. Raises ``OptionError``."""
        parts = text.strip().split(":")
        if len(parts) < 3:
            raise OptionError(f"{_FORM}; got {text!r}")
        after, kind, rest = seconds(parts[0], text), parts[1], parts[2:]
        if kind in ("kill", "freeze", "thaw") and len(rest) == 1 and rest[0]:
            return cls(after, kind, rest[0])
        if kind == "notice" and len(rest) == 2 and rest[0]:
            return cls(after, "notice", rest[0], notice=seconds(rest[1], text))
        if (
            kind in ("add", "remove")
            and len(rest) == 1
            and is_whole(rest[0])
            and 0 < int(rest[0]) <= _MAX_NODES
        ):
            return cls(after, kind, count=int(rest[0]))
        raise OptionError(f"{_FORM}; got {text!r}")

    def __str__(self) -> str:
        match self.kind:
            case "notice":
                return f"notice to {self.node}: it leaves in {self.notice:g} s"
            case "kill":
                return f"{self.node} is killed without notice"
            case "freeze":
                return f"{self.node} stands still"
            case "thaw":
                return f"{self.node} goes on"
            case "add":
                return f"{self.count} more nodes" if self.count > 1 else "one more node"
            case _:
                return f"{self.count} nodes are given back" if self.count > 1 else "one node is given back"


def seconds(text: str, whole: str, form: str = _FORM) -> float:
    """Return a time such as 20s or 2.5. Raises ``OptionError`` with the ``form`` that the ``whole`` must have."""
    try:
        return parse_seconds(text, "a time")
    except OptionError as error:
        raise OptionError(f"{form}; got {whole!r:.120}: {error}") from None


class Faulty(Protocol):
    """Nodes that things can happen to."""

    def kill(self, name: str) -> None: ...
    def notice(self, name: str, seconds: float) -> float: ...
    def freeze(self, name: str) -> None: ...
    def thaw(self, name: str) -> None: ...


class Timed(Protocol):
    """A fault with a time."""

    @property
    def after(self) -> float: ...


F = TypeVar("F", bound=Timed)


class FaultSchedule(Generic[F]):
    """Carries out faults in a thread of its own, from ``begin`` on; a context manager that ends it.

    ``add`` and ``remove`` change how many nodes there are; ``say`` hears of everything.
    """

    def __init__(
        self,
        faults: Sequence[F],
        nodes: Faulty,
        add: Callable[[int], object],
        remove: Callable[[int], object],
        say: Callable[[str], None],
        clock: Clock,
    ) -> None:
        self._faults = faults
        self._nodes = nodes
        self._add, self._remove = add, remove
        self._say = say
        self._clock = clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ebbflow-faults", daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self) -> None:
        """Start the schedule; later calls do nothing."""
        if self._faults and self._thread.ident is None and not self._stop.is_set():
            self._thread.start()

    def wait(self) -> None:
        """Return when all has happened."""
        if self._thread.ident is not None:
            self._thread.join()

    def end(self) -> None:
        """Stop what has not happened yet; waits for what is going on."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(60.0)

    def _run(self) -> None:
        start = self._clock.now()
        for fault in self._faults:
            if self._clock.wait(self._stop, start + fault.after - self._clock.now()):
                return
            self._announce(fault)
            try:
                self._carry_out(fault)
            except EbbflowError as error:
                self._say(f"scripted: that did not work: {error}")

    def _announce(self, fault: F) -> None:
        self._say(f"scripted: {fault}")

    def _carry_out(self, fault: F) -> None:
        assert isinstance(fault, ScriptedFault)
        match fault.kind:
            case "kill":
                self._nodes.kill(fault.node)
            case "notice":
                self._nodes.notice(fault.node, fault.notice)
            case "freeze":
                self._nodes.freeze(fault.node)
            case "thaw":
                self._nodes.thaw(fault.node)
            case "add":
                self._add(fault.count)
            case "remove":
                self._remove(fault.count)
