"""Where an app keeps its run, and the logs of its processes in it."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import StorageError
from ebbflow.infra.logs.reading import LogFile, find_logs
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.ledger import AppSpec
from ebbflow.tasks.apps.specs import Resume

_POLL = 0.5  # s between looks


@dataclass(frozen=True, slots=True)
class RunLogs:
    """The run directory of an app, and the logs that are in it."""

    directory: str  # path or address; empty: not recorded
    files: tuple[LogFile, ...] = ()  # those of the newest generation last
    problem: str = ""  # why there are none, and where to look

    def of(self, *, generation: int | None = None, rank: int | None = None) -> tuple[LogFile, ...]:
        """Return the logs of one rank, or all, of a generation: by default of the newest, with those of nodes."""
        newest = max((one.generation for one in self.files), default=0)
        wanted = newest if generation is None else generation
        return tuple(
            one
            for one in self.files
            if (one.generation == wanted or (generation is None and rank is None and one.rank is None))
            and rank in (None, one.rank)
        )


def directory_of(spec: AppSpec) -> tuple[str, str]:
    """Return the run directory of an app; an empty one with the reason why it is not known."""
    try:
        resume = Resume.of(spec)
    except OptionError as error:
        return "", f"the run directory of {spec.id} is not known: {error}"
    if resume is None:
        return "", f"{spec.id} has recorded no run directory: its output is where it was started"
    return f"{resume.folder.rstrip('/')}/{resume.id}", ""


def logs_in(directory: str, problem: str = "") -> RunLogs:
    """Return the logs in a run directory; reads their names, no content."""
    if not directory:
        return RunLogs("", problem=problem)
    place = StorageLocation(directory)
    try:
        files = tuple(find_logs(place))
    except StorageError as error:
        return RunLogs(directory, problem=str(error))
    if files:
        return RunLogs(directory, files)
    if place.local and not place.entries():
        return RunLogs(
            directory,
            problem=f"the run directory {directory} is not on this machine: run the command where it was started",
        )
    return RunLogs(directory, problem=f"there are no logs in {directory}/logs")


def run_logs(spec: AppSpec) -> RunLogs:
    """Return the run directory and the logs of the app of ``spec``."""
    return logs_in(*directory_of(spec))


@dataclass(slots=True)
class Following:
    """Reads logs of a run, and then what is new in them; ``lines`` yields the log of each line with it.

    Args:
        directory: of the run.
        generation: of which logs are read; ``None``: the newest, later ones too.
        rank: of which logs are read; ``None``: all.
        tail: lines of each log at first.
    """

    directory: str
    generation: int | None = None
    rank: int | None = None
    tail: int = 200
    _begun: bool = False
    _offsets: dict[str, int] = field(default_factory=dict)
    _rests: dict[str, bytes] = field(default_factory=dict)

    def lines(self) -> Iterator[tuple[LogFile, str]]:
        """Yield what has come since the last call, whole lines. Raises ``StorageError``."""
        there = logs_in(self.directory)
        wanted = there.of(generation=self.generation, rank=self.rank)
        ending = [log for log in there.files if log.name in self._offsets and log not in wanted]
        for log in (*ending, *wanted):  # one that was followed is read to its end
            if not self._begun:
                found, self._offsets[log.name] = log.tail(self.tail)
            else:
                begin = self._offsets.setdefault(log.name, 0)
                content = self._rests.pop(log.name, b"") + (new := log.read(begin))
                self._offsets[log.name] += len(new)
                *found, self._rests[log.name] = content.split(b"\n")
            yield from ((log, line.decode(errors="replace")) for line in found)
        self._begun = True

    def follow(self, clock: Clock) -> Iterator[tuple[LogFile, str]]:
        """Yield lines as they come, without end. Raises ``StorageError``."""
        while True:
            yield from self.lines()
            clock.sleep(_POLL)
