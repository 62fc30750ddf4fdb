"""What a training process and its launcher tell each other, over the launcher's ``TCPStore``.

The launcher owns the store, so that no node's loss takes it along. A *generation* is one world: the processes between
one launch and the next. Keys carry the generation, so a process of an old world neither hears nor says anything in a
newer one.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Self

if TYPE_CHECKING:
    from torch.distributed import TCPStore

RUN_ID = "EBBFLOW_RUN_ID"
RUN_FOLDER = "EBBFLOW_RUN_FOLDER"  # a path or s3:// address that all nodes share
GENERATION = "EBBFLOW_GENERATION"
CHANNEL = "EBBFLOW_CHANNEL"  # host:port of the launcher's store
SETTINGS = "EBBFLOW_RUN_SETTINGS"  # JSON of ``RunSettings``
TIMEOUT = timedelta(seconds=20)  # of one exchange with the store

ReportKind = Literal[
    "started",
    "step",
    "checkpoint",
    "metrics",
    "stopped",
    "finished",
    "canary",
    "skipped",
    "saving",  # a save that must not fail is under way; with an error: it is tried again
    "spilled",  # the run's folder could not take a checkpoint: it is elsewhere
    "damaged",  # checkpoints that cannot serve
]


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What the launcher asks of a run; a script's own arguments to ``prepare`` go first where both speak."""

    grace: float = 30.0  # seconds from SIGTERM to SIGKILL, unless a stop request says otherwise
    checkpoint_every: float | None = (
        None  # seconds; None: Daly's interval from the measured costs and the hazard
    )
    keep: int = 2  # full checkpoints kept
    hazard: float = 0.0  # losses expected per node and hour
    adaptive: bool = True  # whether the batch may change
    collective_timeout: float = 60.0  # seconds after which a collective that hangs is an error
    max_local: int | None = None  # examples that a process gets in a pass at most: after its memory ran out
    canary_steps: int = 0  # > 0: run so many steps, save, load and stop with a "canary" report
    running_every: int = (
        0  # > 0: iterations C after which a running (partial) checkpoint has seen everything once
    )
    running_fraction: float = 0.125  # r of it saved each r*C iterations
    retune_every: float = 30.0  # seconds between two looks at the batch, where it may change
    save_within: float = 120.0  # seconds that the save of a run's end is tried again in before it is spilled
    spill: str = ""  # folder for what the run's own cannot take; "": of the node's own disk
    saved_step: int = -1  # newest step that the run's journal has as saved; -1: none
    restart: bool = False  # whether a run all of whose checkpoints are damaged begins again

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Return the launcher's settings; the defaults where there is none."""
        return cls(**json.loads(environment.get(SETTINGS, "{}")))

    def keeping(self, earlier: "RunSettings") -> "RunSettings":
        """Return these, with what a process' memory was found to hold before unless they say it anew."""
        return replace(self, max_local=self.max_local or earlier.max_local)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Save and leave: at the next step that all processes agree on, before ``deadline``."""

    reason: str  # "resize", "notice", "cancelled", ...
    deadline: float | None = None  # seconds since the Unix epoch
    save: bool = True


@dataclass(frozen=True, slots=True)
class Report:
    """What a process says; rank 0 speaks for all but where something happened to one."""

    kind: ReportKind
    rank: int
    time: float  # seconds since the Unix epoch
    step: int  # optimiser steps done in the whole run
    content: dict[str, Any] = field(default_factory=dict)


class Channel:
    """One end of the conversation; both ends may be used from several threads of one process, one call at a time."""

    def __init__(self, store: "TCPStore", run_id: str, generation: int, world: int = 1) -> None:
        """``world``: processes of the generation; for the launcher's end, which hears them all."""
        self._store = store
        self._prefix = f"ebbflow/{run_id}/{generation}"
        self._posted = 0
        self._read = [0] * world

    @classmethod
    def connect(cls, environment: Mapping[str, str] = os.environ) -> "Channel | None":
        """Return the process's end; ``None`` without a launcher. Raises ``RuntimeError`` if it cannot be reached."""
        address = environment.get(CHANNEL)
        if not address:
            return None
        from torch.distributed import TCPStore

        host, _, port = address.rpartition(":")
        store = TCPStore(host, int(port), is_master=False, timeout=TIMEOUT)
        return cls(store, environment[RUN_ID], int(environment[GENERATION]))

    def post(self, report: Report) -> None:
        """Say something. Raises ``RuntimeError`` when the launcher is gone."""
        # One count a rank: a process that dies between two exchanges must not hide what others say after it.
        self._posted += 1
        self._store.set(f"{self._prefix}/report/{report.rank}/{self._posted}", json.dumps(asdict(report)))

    def reports(self) -> list[Report]:
        """Return what was said since the last call: each rank's in order, all by time. For the launcher."""
        said = []
        for rank in range(len(self._read)):
            while self._store.check([key := f"{self._prefix}/report/{rank}/{self._read[rank] + 1}"]):
                said.append(Report(**json.loads(self._store.get(key))))
                self._store.delete_key(key)
                self._read[rank] += 1
        return sorted(said, key=lambda report: report.time)

    def request_stop(self, request: StopRequest) -> None:
        """Ask all processes of the generation to save and leave; a later request replaces an earlier one.

        Once this has returned, every process finds the request.
        """
        self._store.set(key := f"{self._prefix}/stop", json.dumps(asdict(request)))
        self._store.check([key])  # a set is not answered, a check behind it is

    def stop_request(self) -> StopRequest | None:
        """Return the latest request to stop, if there is any."""
        key = f"{self._prefix}/stop"
        return StopRequest(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def claim(self, name: str) -> bool:
        """Tell whether this process is the first of its generation to ask for ``name``."""
        return bool(self._store.add(f"{self._prefix}/claim/{name}", 1) == 1)
