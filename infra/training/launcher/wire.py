"""What the launcher and its nodes tell each other, over the launcher's ``TCPStore``.

A node is addressed by its *key*, which is new whenever a node of that name is started, so that nothing that was
meant for a lost node reaches its successor.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch.distributed import TCPStore

ENTRY = "EBBFLOW_NODE_ENTRY"  # JSON of ``Entry``, in a node's environment
SCRIPT = "EBBFLOW_SCRIPT"  # JSON of what a process runs, in its environment


@dataclass(frozen=True, slots=True)
class Entry:
    """What a node must know to report for work."""

    store: str  # host:port of the launcher's store
    run: str  # run id
    name: str
    key: str
    address: str  # at which other nodes reach this one
    folder: str  # the node's own scratch folder
    preload: tuple[str, ...] = ()  # modules imported once, for all generations
    beat: float = 0.5  # seconds between signs of life
    connect: float = 60.0  # seconds in which the store must be reached
    grace: float = 30.0  # seconds for the processes to save once the launcher is gone
    deserted: float = 5.0  # seconds that an agent may live on when all its processes are gone
    devices: tuple[int, ...] = ()  # GPUs of the machine that it is held to, by number; none: to no certain


@dataclass(frozen=True, slots=True)
class Order:
    """What a node is to do next."""

    do: Literal[
        "launch", "kill", "end", "leave"
    ]  # kill: SIGKILL to one process; end: to all of the generation
    generation: int = 0
    rank: int = -1  # to kill
    nodes: int = 0
    slots: int = 0
    script: str = ""
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    logs: str = ""  # folder for this node's logs of this generation
    start: Literal["fork", "spawn"] = "fork"  # fork: processes start with the node's imports already done
    form: float = 60.0  # seconds in which all nodes must meet
    grace: float = 30.0  # seconds from SIGTERM to SIGKILL when a process of the same node has failed


@dataclass(frozen=True, slots=True)
class RankState:
    """One process as its node sees it."""

    rank: int
    pid: int
    state: str  # the kernel's letter: R, S, D, T, Z; "X" when it is gone
    cpu: float  # seconds of processor time so far
    started: float  # seconds since the Unix epoch


@dataclass(frozen=True, slots=True)
class Beat:
    """A node's sign of life."""

    number: int
    generation: int  # whose agent runs; 0: none
    ranks: tuple[RankState, ...] = ()
    notice: float | None = None  # seconds since the Unix epoch at which the node will be gone


@dataclass(frozen=True, slots=True)
class Failure:
    """A process that ended badly, as its agent saw it."""

    rank: int
    exit_code: int
    signal: str
    error: str
    log: str
    time: float


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """How a node's agent ended."""

    state: Literal["succeeded", "failed", "unformed", "ended", "broken"]
    # ended: on the launcher's order; broken: the agent itself failed
    failures: tuple[Failure, ...] = ()
    error: str = ""  # the agent's own
    time: float = 0.0


class Wire:
    """One end of the conversation between the launcher and one node."""

    def __init__(self, store: "TCPStore", run: str, key: str) -> None:
        self._store = store
        self._prefix = f"ebbflow/{run}/node/{key}"
        self._sent = 0
        self._read = 0

    # --- the launcher's side ------------------------------------------------------------------------------

    def send(self, order: Order) -> None:
        self._sent += 1
        self._store.set(f"{self._prefix}/order/{self._sent}", json.dumps(asdict(order)))

    def beat(self) -> Beat | None:
        """Return the node's latest sign of life; ``None`` before the first."""
        fields = self._get("beat")
        if fields is None:
            return None
        ranks = tuple(RankState(**rank) for rank in fields.pop("ranks"))
        return Beat(ranks=ranks, **fields)

    def agent_end(self, generation: int) -> AgentEnd | None:
        """Return how the agent of ``generation`` ended; ``None`` while it has not."""
        key = f"{self._prefix}/agent/{generation}"
        return agent_end_from(self._store.get(key)) if self._store.check([key]) else None

    # --- the node's side ----------------------------------------------------------------------------------

    def next_order(self) -> Order | None:
        """Return the next order, if there is one. Raises ``RuntimeError`` when the launcher is gone."""
        fields = self._get(f"order/{self._read + 1}")
        if fields is None:
            return None
        self._read += 1
        return Order(**{**fields, "arguments": tuple(fields["arguments"])})

    def show(self, beat: Beat) -> None:
        self._store.set(f"{self._prefix}/beat", json.dumps(asdict(beat)))

    def report(self, generation: int, end: AgentEnd) -> None:
        """Say how the agent of ``generation`` ended."""
        self._store.set(f"{self._prefix}/agent/{generation}", json.dumps(asdict(end)))

    def _get(self, name: str) -> dict[str, Any] | None:
        key = f"{self._prefix}/{name}"
        if not self._store.check([key]):
            return None
        fields: dict[str, Any] = json.loads(self._store.get(key))
        return fields


def entry_from(text: str) -> Entry:
    """Return the entry that was handed to a node as JSON."""
    fields = json.loads(text)
    return Entry(**{**fields, "preload": tuple(fields["preload"]), "devices": tuple(fields["devices"])})


def agent_end_from(text: str | bytes) -> AgentEnd:
    """Return how an agent ended from what ``to_json`` made of it."""
    fields = json.loads(text)
    return AgentEnd(**{**fields, "failures": tuple(Failure(**failure) for failure in fields["failures"])})


def to_json(value: Any) -> str:
    return json.dumps(asdict(value))
