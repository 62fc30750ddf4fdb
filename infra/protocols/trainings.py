"""Trainings on nodes that come and go."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ebbflow.planners.model.trainings import RunSettings

PACKED = "code://"
"""Begins the name of a script that is a file of a job's packed code."""
SETTINGS = "EBBFLOW_RUN_SETTINGS"  # JSON of ``RunSettings``
NODES_MEMORY = "nodes' memory"  # reason of a report that partial checkpoints cannot be kept there


def launcher_settings(environment: Mapping[str, str] = os.environ) -> RunSettings:
    """Return the settings that the launcher has put into ``environment``; the defaults where there are none."""
    return RunSettings.from_json(environment.get(SETTINGS, "{}"))


TrainingState = Literal["starting", "running", "stopping", "waiting", "finished", "stopped", "failed"]
GenerationKind = Literal[
    "finished",  # the script came to its end
    "stopped",  # all processes saved and left on request
    "preflight",  # the trial steps passed
    "lost",  # a node is gone
    "failed",  # a process ended with an error
    "hung",  # nothing moved any more, although all processes lived
    "unformed",  # the processes never met: rendezvous or node failures before the script ran
    "unprepared",  # a node could not prepare the user's code: its requirements or setup command failed
    "silent",  # all processes ended well without a word: a script without ElasticRun
]


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """One training, however often its processes are started again."""

    id: str  # letters, digits, dashes, dots and underscores
    script: str  # path or s3:// address of a Python file that every node can read, or PACKED and its path in the code
    arguments: tuple[str, ...] = ()
    folder: str = ""  # the run's own directory, a path or s3:// address that all nodes share
    settings: RunSettings | None = None  # what the launcher asks of the run; None: the defaults
    environment: Mapping[str, str] = field(default_factory=dict)  # on top of the nodes' own
    code: str = (
        ""  # directory with code that each node prepares first, relative to ``folder``; empty: there is none
    )


@dataclass(frozen=True, slots=True)
class TrainingEvent:
    """Something that happened to a run."""

    number: int  # counts up from 1 over the run's whole life
    time: float  # seconds since the Unix epoch
    kind: str
    generation: int
    content: Mapping[str, object] = field(default_factory=dict)


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
    slot_seconds: float = 0.0  # that its nodes spent in it, those included that left it before it ended
    idle: int = 0  # generations in a row, this one included, in which no step was won
    events: tuple[TrainingEvent, ...] = ()  # of it, and of those before it that nobody was asked about
    aggregators: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # its own, and what they held


@dataclass(frozen=True, slots=True)
class Continue:
    """Start the next generation on ``placement``, after ``delay`` seconds, with other settings where given."""

    placement: Mapping[str, int]
    reason: str = ""
    delay: float = 0.0
    then: Mapping[str, int] | None = None  # placement to move to as soon as its nodes are ready
    settings: RunSettings | None = None
    environment: Mapping[str, str] = field(default_factory=dict)  # additions


@dataclass(frozen=True, slots=True)
class Halt:
    """Start no further generation by oneself."""

    state: Literal["finished", "stopped", "failed", "waiting"]  # waiting: for ``resize`` to bring nodes
    reason: str = ""


Decide = Callable[[GenerationEnd], Continue | Halt]


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

    def resume(self, folder: str, placement: Mapping[str, int], settings: RunSettings) -> None:
        """Resume the run in ``folder``, whose launcher is gone, from its newest checkpoint with these settings.

        Raises ``TrainingError`` where there is none to continue with, and ``RunLockedError`` when its launcher lives.
        """
        ...

    def resize(self, placement: Mapping[str, int], deadline: float | None = None) -> None:
        """Grow, shrink or move: new nodes are made ready, the run saves, and continues on ``placement``.

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
