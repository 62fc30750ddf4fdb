"""What a training's launcher asks of its processes."""

import json
from dataclasses import asdict, dataclass, replace
from typing import Literal, Self

PreflightChoice = Literal["auto", "always", "never"]  # whether a short trial comes first
CommunicationChoice = Literal["ddp", "planned"]  # who orders and cuts the exchange of gradients
SyncChoice = Literal["allreduce", "service"]  # where gradients meet: among processes, or at aggregators
SyncRequest = Literal[
    "allreduce", "service", "auto"
]  # the same, or by the costs that a preflight run measures
RecoveryChoice = Literal["auto", "in-place", "restart"]  # what becomes of survivors when nodes come and go
RetryChoice = Literal["by-class", "blind"]  # of a failure, or three whatever it was


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What the launcher asks of a run; a script's own arguments to ``prepare`` go first where both speak."""

    termination_grace: float = 30.0  # seconds from SIGTERM to SIGKILL, unless a stop request says otherwise
    checkpoint_interval: float | None = (
        None  # seconds; None: Daly's interval from the measured costs and the hazard
    )
    keep_checkpoints: int = 2  # full checkpoints kept
    interruption_rate: float = 0.0  # losses expected per node and hour
    adaptive: bool = True  # whether the batch may change
    script_hyperparameters: bool = False  # of the optimizer, instead of the checkpoint's
    collective_timeout: float = 60.0  # seconds after which a collective that hangs is an error
    max_local: int | None = None  # examples that a process gets in a pass at most: after its memory ran out
    preflight_steps: int = 0  # > 0: run so many steps, save, load and stop with a "preflight" report
    partial_checkpoint_interval: int = (
        0  # > 0: iterations C after which a running (partial) checkpoint has seen everything once
    )
    partial_checkpoint_fraction: float = 0.125  # r of it saved each r*C iterations
    partial_checkpoint_memory: bool = False  # whether these go to memory that nodes lend first
    retune_every: float = 30.0  # seconds between two checks of the batch, where it may change
    final_save_timeout: float = (
        120.0  # seconds in which a run's last save, and reading at its start, are retried
    )
    spill_dir: str = ""  # directory for what the run's own cannot take; "": of the node's own disk
    saved_step: int = -1  # newest step that the run's journal has as saved; -1: none
    communication: CommunicationChoice = "ddp"  # unless the script says otherwise
    own_checkpoints: bool = False  # whether the script knows of no launcher, and saves and restores by itself
    step_pattern: str = (
        ""  # regular expression whose first group is the step in what it prints; "": common ones
    )
    sync: SyncChoice = "allreduce"
    aggregators: int = 1  # processes of the aggregation service
    mirrors: int = 0  # further aggregators that hold each tensor
    mirror_every: int = 1  # rounds after which they are brought up to date; 1: with each
    aggregation_cluster: str = ""  # whose shared aggregators are used; "": aggregators of the run's own
    recovery: RecoveryChoice = "auto"
    weighs_sync: bool = False  # whether a preflight run measures what aggregators would cost
    restart: bool = False  # whether a run all of whose checkpoints are damaged begins again

    @property
    def restarts(self) -> str:
        """Return why a change of nodes is a new generation; empty: the others train on, if the script allows it."""
        reasons = {
            "recovery=restart is asked for": self.recovery == "restart",
            "the script has checkpoints of its own": self.own_checkpoints,
            "it is a preflight run": self.preflight_steps > 0,
            "communication is planned for the processes that are there": self.communication == "planned",
            "running checkpoints are of the processes that are there": self.partial_checkpoint_interval > 0,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    @property
    def in_place(self) -> bool:
        """Tell whether processes of an all-reduce may come and go while the others train on."""
        return self.sync == "allreduce" and not self.restarts

    def keeping(self, earlier: "RunSettings") -> "RunSettings":
        """Return these, with what a process' memory was found to hold before unless they say it anew."""
        return replace(self, max_local=self.max_local or earlier.max_local)

    def to_json(self) -> str:
        """Return the settings as a JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return what ``to_json`` wrote; settings that it does not name are the defaults."""
        return cls(**json.loads(text))
