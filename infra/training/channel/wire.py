"""What the launcher and its nodes tell each other, over the encrypted channel; see ``exchange`` and ``node_line``.

None of it is secret: keys travel otherwise (``infra.training.channel.keys``).
"""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ebbflow.infra.training.channel import messages, strict_json

ENTRY = "EBBFLOW_NODE_ENTRY"  # JSON of ``Entry``, in a node's environment
SCRIPT = "EBBFLOW_SCRIPT"  # JSON of what a process runs, in its environment


@dataclass(frozen=True, slots=True)
class Entry:
    """What a node must know to report for work."""

    launcher: str  # host:port of the launcher
    server: str  # the launcher's public key
    run: str  # run id
    name: str
    key: str
    address: str  # at which other nodes reach this one
    folder: str  # the node's own scratch directory
    preload: tuple[str, ...] = ()  # modules imported once, for all generations
    beat: float = 0.5  # seconds between signs of life
    connect: float = 60.0  # seconds in which the launcher must be reached, and may be silent
    grace: float = 30.0  # seconds for the processes to save once the launcher is gone
    deserted: float = 5.0  # seconds that an agent may live on when all its processes are gone
    tunnel: bool = (
        False  # whether torch's store, on the launcher's loopback interface, is reached by a tunnel
    )
    devices: tuple[int, ...] = ()  # GPUs of the machine that it is held to, by number; none: to no certain
    prepare: bool = False  # whether it gets an order to prepare the user's code before it imports anything
    cache: str = ""  # directory of code and environments on this machine; empty: Ebbflow's own
    read: int = 0  # number of the last order that was read before it became this process
    program: str = ""  # module of ours that the node runs in place of a training's processes; empty: none
    arguments: tuple[str, ...] = ()  # of that program
    code: str = ""  # directory of the user's code that it imports, a path or URI; empty: none


@dataclass(frozen=True, slots=True)
class Order:
    """What a node is to do next."""

    do: Literal["prepare", "launch", "terminate", "kill", "end", "leave"]
    # prepare: the user's code, before the first generation; terminate: SIGTERM to the ranks; kill: SIGKILL to one
    # process; end: to all of the generation
    generation: int = 0
    rank: int = -1  # to kill
    nodes: int = 0
    slots: int = 0
    node: int = 0  # place of this one among the nodes
    first_rank: int = 0
    world: int = 0  # processes of all nodes
    store: int = 0  # port of the generation's torch store, on the launcher's loopback interface
    script: str = ""
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    code: str = ""  # to prepare: directory of the user's code in the run's own
    secrets: tuple[str, ...] = ()  # names of variables whose values no log may show
    logs: str = ""  # directory for this node's logs of this generation
    own_checkpoints: bool = False  # whether the script knows of no launcher: its output says how far it is
    step_pattern: str = ""  # of its output
    start: Literal["fork", "spawn"] = "fork"  # fork: processes start with the node's imports already done
    form: float = 60.0  # seconds in which the agents of all nodes must meet
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
class Heartbeat:
    """A node's sign of life."""

    number: int
    generation: int  # whose agent runs; 0: none
    ranks: tuple[RankState, ...] = ()
    notice: float | None = None  # seconds since the Unix epoch at which the node will be gone
    first_step: int = -1  # the first that rank 0 printed, where the script has own checkpoints; -1: none
    last_step: int = -1  # the highest
    preparing: bool = False  # whether the user's code is still being prepared: nothing can be launched yet
    problem: str = ""  # why it cannot be prepared


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
    first_step: int = -1  # as in ``Heartbeat``
    last_step: int = -1


@dataclass(frozen=True, slots=True)
class NodeHeartbeat:
    """To the launcher: a sign of life, and the number of the last order that was read."""

    beat: Heartbeat
    read: int


@dataclass(frozen=True, slots=True)
class NodeEnd:
    """To the launcher: how the agent of a generation ended. Ends of one node count up from 1."""

    number: int
    generation: int
    end: AgentEnd


@dataclass(frozen=True, slots=True)
class NodeOrder:
    """To a node: an order. Orders of one node count up from 1."""

    number: int
    order: Order


@dataclass(frozen=True, slots=True)
class HeartbeatAck:
    """To a node: the latest sign of life, and the number of the last end that was read."""

    beat: int
    read: int


FROM_NODE = messages.by_name(NodeHeartbeat, NodeEnd)
TO_NODE = messages.by_name(NodeOrder, HeartbeatAck)


def entry_from(text: str) -> Entry:
    """Return the entry that was handed to a node as JSON. Raises ``MessageError``."""
    return strict_json.loads(text, Entry)


def agent_end_from(text: str | bytes) -> AgentEnd:
    """Return how an agent ended from what ``to_json`` made of it. Raises ``MessageError``."""
    return strict_json.loads(text, AgentEnd)


def to_json(value: Any) -> str:
    """Return an entry or an end as JSON."""
    return strict_json.dumps(value)


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine as only it calls itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"
