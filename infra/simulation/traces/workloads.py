"""Training jobs to simulate, and the files that they are read from."""

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

from ebbflow.infra.errors import WorkloadError
from ebbflow.infra.simulation.traces.rows import (
    LATEST,
    count,
    instant,
    not_negative,
    positive,
    read_rows,
    span,
    text,
)
from ebbflow.planners.model.skew import is_skewed


@dataclass(frozen=True, slots=True)
class Job:
    """One training job as its user submits it."""

    id: str
    arrival: float  # s
    gpus: int
    duration: float | None = None  # s on `gpus` well-placed GPUs; None: a profile says
    model: str = ""
    batch: int | None = None  # total, examples
    team: str = ""
    weight: float = 1.0
    min_gpus: int | None = None  # None: as `gpus`
    max_gpus: int | None = None
    skewed: bool = False  # suffers from being spread


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs in the order of their file."""

    name: str
    jobs: tuple[Job, ...]

    def __post_init__(self) -> None:
        if not self.jobs:
            raise WorkloadError(f"{self.name}: has no jobs")
        twice = [id_ for id_, times in Counter(job.id for job in self.jobs).items() if times > 1]
        if twice:
            raise WorkloadError(f"{self.name}: job names must differ; {twice[0]} comes twice")
        for job in self.jobs:
            if job.duration is not None and not 0 < job.duration <= LATEST:
                raise WorkloadError(
                    f"{self.name}: job {job.id}: duration must be > 0 s and at most {LATEST:g} s;"
                    f" got {job.duration:g}"
                )
            if job.gpus < 1:
                raise WorkloadError(f"{self.name}: job {job.id}: GPUs must be >= 1; got {job.gpus}")
            if not 0 <= job.arrival <= LATEST:
                raise WorkloadError(
                    f"{self.name}: job {job.id}: arrival must be >= 0 s and at most {LATEST:g} s;"
                    f" got {job.arrival:g}"
                )

    def first(self, jobs: int) -> "Workload":
        """Return the workload of the first ``jobs`` rows."""
        return Workload(f"{self.name}[:{jobs}]", self.jobs[:jobs])


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the most similar of ``known``, the first in alphabetical order among equals."""
    return max(sorted(known), key=lambda other: SequenceMatcher(None, name.lower(), other.lower()).ratio())


def read_adaptdl(
    path: Path,
    applications: Iterable[str],
    *,
    use_nearest: bool = False,
    batches: Callable[[str], tuple[int, int]] | None = None,
) -> Workload:
    """Read ``name,time,application,num_replicas,batch_size`` rows (AdaptDL's simulator).

    ``batches`` gives the smallest and largest total batch measured of an application; without, any will do.

    Raises:
        WorkloadError: malformed row, a batch beyond those measured, or an application without profile;
            ``use_nearest`` replaces it by the one of most similar name instead.
    """
    known = sorted(applications)
    jobs: list[Job] = []
    columns = {
        "name": text,
        "time": instant,
        "application": text,
        "num_replicas": count,
        "batch_size": count,
    }
    lines: dict[str, int] = {}
    for line, (name, time, wanted, gpus, batch) in read_rows(path, columns):
        application = wanted
        if application not in known:
            close = nearest(application, known)
            if not use_nearest:
                raise WorkloadError(
                    f"{path}, line {line}: no profile of application {application!r}; the nearest is {close!r}"
                )
            application = close
        low, high = batches(application) if batches else (batch, batch)
        if not low <= batch <= high:
            raise WorkloadError(
                f"{path}, line {line}: total batch {batch} of {application} was not measured;"
                f" sizes are {low} to {high}"
            )
        _once(path, line, name, lines)
        jobs.append(Job(name, time, gpus, model=application, batch=batch))
    return _workload(path, jobs)


def read_tiresias(path: Path) -> Workload:
    """Read ``job_id,num_gpu,submit_time,iterations,model_name,duration,interval`` rows (Tiresias' simulator).

    ``iterations`` and ``interval`` are checked and not used: duration and submission say the same.
    """
    columns = {
        "job_id": text,
        "num_gpu": count,
        "submit_time": instant,
        "model_name": text,
        "duration": span,
    }
    jobs: list[Job] = []
    lines: dict[str, int] = {}
    optional = {"iterations": count, "interval": not_negative}
    for line, (name, gpus, submit, model, duration, _, _) in read_rows(path, columns, optional):
        _once(path, line, name, lines)
        jobs.append(Job(name, submit, gpus, duration, model, skewed=is_skewed(model)))
    return _workload(path, jobs)


_OWN = {"id": text, "arrival_s": instant, "gpus": count, "duration_s": span}
_OWN_OPTIONAL = {
    "model": text,
    "team": text,
    "weight": positive,
    "min_gpus": count,
    "max_gpus": count,
}


def read_jobs(path: Path) -> Workload:
    """Read our own format: ``id,arrival_s,gpus,duration_s`` and optional ``model,team,weight,min_gpus,max_gpus``.

    ``duration_s`` is the time on ``gpus`` well-placed GPUs. Columns may come in any order, rows too.

    Raises ``WorkloadError``.
    """
    jobs: list[Job] = []
    lines: dict[str, int] = {}
    for line, values in read_rows(path, _OWN, _OWN_OPTIONAL):
        name, arrival, gpus, duration, model, team, weight, low, high = values
        _once(path, line, name, lines)
        if not (low or gpus) <= gpus <= (high or gpus):
            raise WorkloadError(
                f"{path}, line {line}: min_gpus <= gpus <= max_gpus must hold; got {low}, {gpus}, {high}"
            )
        jobs.append(
            Job(
                name,
                arrival,
                gpus,
                duration,
                model or "",
                team=team or "",
                weight=1.0 if weight is None else weight,
                min_gpus=low,
                max_gpus=high,
                skewed=is_skewed(model or ""),
            )
        )
    return _workload(path, jobs)


def jobs_csv(jobs: Sequence[Job]) -> str:
    """Return ``jobs`` in our own format; ``read_jobs`` gives them back.

    Raises:
        WorkloadError: a job without duration.
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*_OWN, *_OWN_OPTIONAL])
    for job in jobs:
        if job.duration is None:
            raise WorkloadError(f"job {job.id} has no duration; the format needs one")
        optional = (job.min_gpus, job.max_gpus)
        writer.writerow(
            [
                job.id,
                repr(job.arrival),
                job.gpus,
                repr(job.duration),
                job.model,
                job.team,
                repr(job.weight),
                *optional,
            ]
        )
    return file.getvalue()


def _once(path: Path, line: int, name: str, lines: dict[str, int]) -> None:
    before = lines.setdefault(name, line)
    if before != line:
        raise WorkloadError(f"{path}, line {line}: job {name!r} is already in line {before}")


def _workload(path: Path, jobs: Sequence[Job]) -> Workload:
    if not jobs:
        raise WorkloadError(f"{path}: has no jobs")
    return Workload(path.stem, tuple(jobs))
