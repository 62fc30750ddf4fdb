"""Trainings on nodes that come and go."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    pass
import json
import os
from dataclasses import asdict, replace
from typing import Self

SETTINGS = "EBBFLOW_RUN_SETTINGS"  # JSON of ``RunSettings``


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


TrainingState = Literal["starting", "running", "stopping", "waiting", "finished", "stopped", "failed"]
GenerationKind = Literal[
    "finished",  # the script came to its end
    "stopped",  # all processes saved and left on request
    "canary",  # the trial steps passed
    "lost",  # a node is gone
    "failed",  # a process ended with an error
    "hung",  # nothing moved any more, although all processes lived
    "unformed",  # the processes never met: rendezvous or node failures before the script ran
    "silent",  # all processes ended well without a word: a script without ElasticRun
]


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """One training, however often its processes are started again."""

    id: str  # letters, digits, dashes, dots and underscores
    script: str  # path or s3:// address of a Python file that every node can read
    arguments: tuple[str, ...] = ()
    folder: str = ""  # the run's own folder, a path or s3:// address that all nodes share
    settings: "RunSettings | None" = None  # what the launcher asks of the run; None: the defaults
    environment: Mapping[str, str] = field(default_factory=dict)  # on top of the nodes' own


@dataclass(frozen=True, slots=True)
class RankFailure:
    """How one process ended badly."""

    rank: int | None  # None: the node's agent itself
    node: str
    exit_code: int | None  # None: not known
    signal: str  # such as "SIGKILL"; empty: ended by itself
    error: str  # its first error, with traceback where there is one
    log: str  # the last lines of what it wrote
    time: float  # seconds since the Unix epoch


@dataclass(frozen=True, slots=True)
class GenerationEnd:
    """How one world of processes ended: what a retry policy decides from."""

    generation: int
    kind: GenerationKind
    reason: str  # a sentence for people
    placement: Mapping[str, int]  # node -> slots it ran on
    left: Mapping[str, int]  # nodes of it that can be used again
    failures: tuple[RankFailure, ...]  # the first that failed first
    suspects: tuple[str, ...]  # nodes to blame, where that is known
    started: float  # seconds since the Unix epoch
    ended: float
    first_step: int  # optimiser steps of the whole run before it; -1: it never said
    last_step: int  # the last that it reported or saved
    saved_step: int  # of the newest checkpoint that it reported; -1: none
    idle: int = 0  # generations in a row, this one included, in which no step was won


@dataclass(frozen=True, slots=True)
class Continue:
    """Start the next generation on ``placement``, after ``delay`` seconds, with other settings where given."""

    placement: Mapping[str, int]
    reason: str = ""
    delay: float = 0.0
    then: Mapping[str, int] | None = None  # placement to move to as soon as its nodes are ready
    settings: "RunSettings | None" = None
    environment: Mapping[str, str] = field(default_factory=dict)  # additions


@dataclass(frozen=True, slots=True)
class Halt:
    """Start no further generation by oneself."""

    state: Literal["finished", "stopped", "failed", "waiting"]  # waiting: for ``resize`` to bring nodes
    reason: str = ""


Decide = Callable[[GenerationEnd], Continue | Halt]


@dataclass(frozen=True, slots=True)
class TrainingEvent:
    """Something that happened to a run."""

    number: int  # counts up from 1 over the run's whole life
    time: float  # seconds since the Unix epoch
    kind: str
    generation: int
    content: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainingStatus:
    """Where a run stands."""

    state: TrainingState
    generation: int
    placement: Mapping[str, int]  # of the present generation, or the one to come
    step: int  # optimiser steps done in the whole run, as last reported
    reason: str = ""  # why it stands where it stands
    end: GenerationEnd | None = None  # of the last generation that ended


class Trainer(Protocol):
    """Runs one elastic training on nodes. A *placement* says how many slots (GPUs) of which nodes are used.

    Calls return at once; ``events`` and ``status`` tell what came of them. Safe for several threads.
    """

    def launch(self, job: TrainingJob, placement: Mapping[str, int]) -> None:
        """Start the run. Raises ``OptionError`` or ``TrainingError``."""
        ...

    def resize(self, placement: Mapping[str, int], deadline: float | None = None) -> None:
        """Grow, shrink or move: new nodes are made ready, the run saves, and goes on on ``placement``.

        Before ``deadline`` (seconds since the Unix epoch) nothing of the run is left on other nodes, whether the new
        ones are ready or not. A later call replaces one that is not carried out yet. Raises ``TrainingError`` once
        the run has ended.
        """
        ...

    def end_generation(self, number: int, reason: str) -> None:
        """Have this generation save and leave, and let it be decided what follows; no other generation is touched."""
        ...

    def stop(self, deadline: float | None = None) -> None:
        """Save and leave before ``deadline`` (seconds since the Unix epoch); what is left then is ended."""
        ...

    def status(self) -> TrainingStatus:
        """Return where the run stands."""
        ...

    def events(self, after: int = 0) -> Sequence[TrainingEvent]:
        """Return the events with numbers above ``after``, in order."""
        ...

    def wait(self, timeout: float) -> TrainingStatus:
        """Return when the run has ended, or after ``timeout`` seconds, with where it stands then."""
        ...

    def close(self) -> None:
        """End everything at once, without saving; may be called twice."""
        ...
