"""What a training's launcher asks of its processes."""

import json
from dataclasses import asdict, dataclass, replace
from typing import Literal, Self

PreflightChoice = Literal["auto", "always", "never"]  # whether a short trial comes first
CommunicationChoice = Literal["ddp", "planned"]  # who orders and cuts the exchange of gradients
SyncChoice = Literal["allreduce", "service"]  # where gradients meet: among processes, or at aggregators
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
    collective_timeout: float = 60.0  # seconds after which a collective that hangs is an error
    max_local: int | None = None  # examples that a process gets in a pass at most: after its memory ran out
    preflight_steps: int = 0  # > 0: run so many steps, save, load and stop with a "preflight" report
    partial_checkpoint_interval: int = (
        0  # > 0: iterations C after which a running (partial) checkpoint has seen everything once
    )
    partial_checkpoint_fraction: float = 0.125  # r of it saved each r*C iterations
    retune_every: float = 30.0  # seconds between two checks of the batch, where it may change
    final_save_timeout: float = (
        120.0  # seconds that the save of a run's end is tried again in before it is spilled
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
    restart: bool = False  # whether a run all of whose checkpoints are damaged begins again

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
