"""What an application writes: a driver, executors, and the parameters they share (Litz, table 4.1).

The driver decides which micro-tasks run; an executor is one partition of the input with the state that belongs to it,
and moves between worker processes as a black box; parameters are a key-value store in shards, read with ``get`` and
changed with increments. If the driver was told that A completed before it dispatched B, then B sees all increments of
A; otherwise B may see all, some or none of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ebbflow.infra.elastic.registry import register
from ebbflow.infra.errors import ElasticError

Key = Hashable  # of a parameter: its repr() must be the same in every process
Value = Any  # of a parameter: usually an array; of types that ``registry`` knows


@register
@dataclass(frozen=True, slots=True)
class MicroTask:
    """A short computation on one executor; normally below a second, since a node waits for it before it leaves."""

    number: int  # in order of dispatch
    executor: int
    args: Any
    version: int  # completions that the driver knew of


@register
@dataclass(frozen=True, slots=True)
class Completion:
    """A finished micro-task whose increments have all been applied."""

    task: MicroTask
    result: Any
    seconds: float  # computing, without waiting for parameters


class Dispatcher(Protocol):
    """What a driver may ask of the runtime."""

    @property
    def executors(self) -> int:
        """How many executors there are; fixed for the whole run."""
        ...

    def dispatch(self, executor: int, args: Any) -> None:
        """Queue a micro-task (``DispatchTask``); an executor runs its tasks in order; for ``args`` see
        ``registry``."""
        ...


class Driver(ABC):
    """Decides what runs; lives in the master. Everything it remembers must be in its ``state_dict``."""

    @abstractmethod
    def start(self, job: Dispatcher) -> None:
        """Dispatch the first micro-tasks (``DispatchInitialTasks``)."""

    @abstractmethod
    def complete(self, job: Dispatcher, completion: Completion) -> None:
        """Hear of a completion (``HandleTaskCompletion``); the run ends when none is outstanding."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state, for snapshots; of types that ``registry`` knows."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state of ``state_dict``."""


class TaskContext(Protocol):
    """What a micro-task may ask of the runtime."""

    def get(self, *keys: Key) -> "Fetch":
        """Return, once awaited, the values of ``keys`` in order (``PSGet``); perhaps cached ones. Do not modify them.

        While a value is on its way, another executor's micro-task may run.
        """
        ...

    def update(self, key: Key, increment: Value) -> None:
        """Add to a parameter (``PSUpdate``); increments to one key are combined before they are sent."""
        ...


class Fetch:
    """An awaitable request for parameters; the worker answers it."""

    __slots__ = ("keys",)

    def __init__(self, keys: tuple[Key, ...]) -> None:
        self.keys = keys

    def __await__(self) -> Generator["Fetch", list[Value], list[Value]]:
        values = yield self
        return values


class Executor(ABC):
    """One input partition and its state. One micro-task at a time runs on it."""

    @abstractmethod
    def load_input(self) -> None:
        """Load the input partition from shared storage."""

    def input_state(self) -> Any:
        """Return the loaded input, to send it to a newcomer; ``None`` if it shall load the input itself."""
        return None

    def set_input(self, data: Any) -> None:
        """Take the input that another process sent; needed by executors whose ``input_state`` is not ``None``.

        Raises ``ElasticError``.
        """
        raise ElasticError(f"{type(self).__name__} sends its input_state; define set_input to take it")

    @abstractmethod
    async def run(self, context: TaskContext, args: Any) -> Any:
        """Do one micro-task (``RunTask``); the return value is the result that the driver gets.

        It may await nothing but ``context.get``.
        """

    def state_dict(self) -> Any:
        """Return the mutable state without the input; ``None`` for a stateless executor. Types: see ``registry``."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Take a state of ``state_dict`` that is not ``None``; called after the input is there.

        Raises ``ElasticError``.
        """
        raise ElasticError(f"{type(self).__name__} has a state_dict; define load_state_dict to take it")


class Application(ABC):
    """A whole program, importable in the workers (not defined in ``__main__``).

    Workers get its attributes, not the object: they must be of types that ``registry`` knows.
    """

    executors: int  # about four for each worker that may ever be there
    shards: int = 16  # of the parameters
    isolated: bool = False
    """Whether a read hides increments of tasks that the reader cannot depend on.

    Under BSP every read then sees exactly the iterations before its own, so a run with exact (integer) arithmetic
    gives the same bits on any number of workers. Otherwise increments are visible as soon as they arrive.
    """
    tolerant: bool = False
    """Whether lost parameters may come back from an older moment than the rest (SCAR's partial recovery)."""

    @abstractmethod
    def driver(self) -> Driver:
        """Return a new driver."""

    @abstractmethod
    def executor(self, index: int) -> Executor:
        """Return executor ``index`` in its initial state, without its input."""

    @abstractmethod
    def parameters(self) -> Mapping[Key, Value]:
        """Return the initial parameters; no others can be read or updated."""

    def combine(self, key: Key, first: Value, second: Value) -> Value:
        """Return an increment that does what both do, or a value with the increment ``second``.

        Associative and commutative; by default the sum. Must not modify its arguments.
        """
        return first + second
