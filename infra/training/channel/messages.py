"""What processes of a training and its launcher say to each other, and how that travels: as JSON of declared forms.

A message is one frame, ``{"kind": ..., "body": {...}}``. Nothing that arrives is interpreted beyond that: a kind that
is not expected, a field that is not declared, a value of another type and a frame that is too long are errors.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ebbflow.infra.errors import MessageError
from ebbflow.infra.training.channel import strict_json
from ebbflow.planners.aggregation.membership import View

MAX_FRAME = 4 << 20  # bytes of a message that is read; ZeroMQ itself ends a connection at twice as many

ReportKind = Literal[
    "started",
    "step",
    "checkpoint",
    "metrics",
    "stopped",
    "finished",
    "preflight",
    "skipped",
    "saving",  # a save that must not fail is under way; with an error: it is tried again, or "reading" is
    "spilled",  # the run's directory could not take a checkpoint: it is elsewhere
    "damaged",  # checkpoints that cannot serve
    "communication",  # what became of planned communication
    "members",  # whether processes may come and go from now on
    "moments",  # by how many rounds the optimizer's moments were older, of tensors of a lost aggregator
]


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Save and leave: at the next step that all processes agree on, before ``deadline``."""

    reason: str  # "resize", "notice", "cancelled", ...
    deadline: float | None = None  # seconds since the Unix epoch
    save: bool = True
    lost: bool = False  # whether processes are lost without which the others cannot continue


@dataclass(frozen=True, slots=True)
class Report:
    """What a process reports; rank 0 speaks for all but where something happened to one."""

    kind: ReportKind
    rank: int
    time: float  # seconds since the Unix epoch
    step: int  # optimizer steps done in the whole run
    content: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Question:
    """A question of a process to the launcher, asked again under its number until it is answered."""

    session: str  # of the process; random
    number: int  # from 1 on in its session
    generation: int
    do: Literal["post", "stop", "claim", "meet", "enter", "agree", "view"]
    # post: take note of ``report``; stop: is there a request? claim: am I the first to ask for ``name``?
    # meet: this node's agent is there; how many are? enter: take ``rank`` in as a worker of the aggregation service,
    # and answer once it is one; agree: its part of an agreement, answered once that is made; view: who are members?
    report: Report | None = None
    name: str = ""
    rank: int = -1  # of the process; -1: an agent's
    view: int = 0  # number of the one that an agreement belongs to
    index: int = 0  # of the agreement
    value: str = ""  # its part
    boundary: bool = False  # whether a step ends with it


@dataclass(frozen=True, slots=True)
class Answer:
    """The launcher's answer."""

    number: int
    count: int = 0  # meet: agents that are there; claim: 1 for the first
    stop: StopRequest | None = None
    view: View | None = None  # enter, agree, view: the one that holds
    newest: int = 0  # stop: number of the view that holds
    due: bool = False  # stop: whether workers wait for the end of a step to enter or leave
    values: tuple[str, ...] | None = None  # agree: of all members; None: the view has changed
    refused: str = ""  # why nothing was done


def encode(message: Any) -> bytes:
    """Return a message as one frame. Raises ``MessageError`` for one that is too long or is no JSON."""
    try:
        frame = json.dumps({"kind": type(message).__name__, "body": asdict(message)}).encode()
    except (TypeError, ValueError) as exc:
        raise MessageError(f"a message of the kind {type(message).__name__} must be JSON: {exc}") from exc
    if len(frame) > MAX_FRAME:
        raise MessageError(f"a message may have {MAX_FRAME} bytes; {type(message).__name__} has {len(frame)}")
    return frame


def decode(frame: bytes, kinds: Mapping[str, type]) -> Any:
    """Return the message in a frame, which is of one of ``kinds`` (by name). Raises ``MessageError``."""
    if len(frame) > MAX_FRAME:
        raise MessageError(f"a message may have {MAX_FRAME} bytes; got {len(frame)}")
    fields = strict_json.parse(frame)
    kind = fields.get("kind")
    if set(fields) != {"kind", "body"} or not isinstance(kind, str) or kind not in kinds:
        raise MessageError(f"a message must be of a kind in {sorted(kinds)}; got {str(kind)[:40]!r}")
    return strict_json.build(fields["body"], kinds[kind])


def by_name(*kinds: type) -> dict[str, type]:
    """Return message types by the names that they travel under."""
    return {kind.__name__: kind for kind in kinds}
