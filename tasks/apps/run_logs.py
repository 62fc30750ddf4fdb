"""Where an app keeps its run, and the logs of its processes in it."""

from dataclasses import dataclass
from pathlib import Path

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.ledger import AppSpec
from ebbflow.tasks.apps.specs import Resume


@dataclass(frozen=True, slots=True)
class RunLogs:
    """The run directory of an app, and the log files that are in it on this machine."""

    directory: str  # path or address; empty: not recorded
    files: tuple[Path, ...] = ()  # sorted by path
    problem: str = ""  # why there are no files, and where to look


def run_logs(spec: AppSpec) -> RunLogs:
    """Return the run directory and logs of the app of ``spec``; reads names of files, no content."""
    try:
        resume = Resume.of(spec)
    except OptionError as error:
        return RunLogs("", problem=f"the run directory of {spec.id} is not known: {error}")
    if resume is None:
        return RunLogs(
            "", problem=f"{spec.id} has recorded no run directory: its output is where it was started"
        )
    directory = f"{resume.folder.rstrip('/')}/{resume.id}"
    if "://" in directory:
        return RunLogs(
            directory,
            problem=f"the run of {spec.id} is in object storage, {directory}; the logs are on its nodes",
        )
    path = Path(directory).expanduser()
    if not path.is_dir():
        return RunLogs(
            directory,
            problem=f"the run directory {directory} of {spec.id} is not on this machine: run the command "
            "where the app was started",
        )
    files = tuple(sorted(one for one in path.rglob("*.log") if one.is_file()))
    return RunLogs(directory, files, "" if files else f"there are no log files in {directory}")
