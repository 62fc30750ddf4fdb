"""Reading the job traces and throughput tables of Gavel (OSDI 2020) and Shockwave (NSDI 2023)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal, get_args

from ebbflow.infra.errors import WorkloadError
from ebbflow.infra.simulation.traces.rows import Convert, count, instant, positive, text
from ebbflow.infra.storage import user_files

Mode = Literal["static", "accordion", "gns"]

_BATCH = re.compile(r"\(batch size (\d+)\)$")
_UNNAMED = {"A3C": 4, "CycleGAN": 1}
_PAIR = re.compile(r"\('(?P<job>[^']+)', (?P<gpus>\d+)\)$")


@dataclass(frozen=True, slots=True)
class TraceJob:
    """One row of a trace."""

    number: int  # line number from 0
    type: str  # such as `ResNet-18 (batch size 32)`
    steps: int  # of the batch size in `type`
    gpus: int
    arrival: float  # s
    mode: Mode = "static"
    weight: float = 1.0

    @property
    def model(self) -> str:
        return self.type.split(" ", 1)[0]

    @property
    def batch(self) -> int:
        """Return the total batch size; that of the public scripts for job types that name none."""
        found = _BATCH.search(self.type)
        return int(found[1]) if found else _UNNAMED.get(self.model, 1)


@dataclass(frozen=True, slots=True)
class Throughputs:
    """Steps per second of jobs that share their GPUs with nobody, by GPU type, job type and gang size."""

    alone: Mapping[str, Mapping[tuple[str, int], float]]
    path: str = ""

    def of(self, gpu: str, job_type: str, gpus: int) -> float:
        """Return steps/s; 0 means that the job cannot run there. Raises ``WorkloadError`` if not measured."""
        try:
            return self.alone[gpu][job_type, gpus]
        except KeyError:
            raise WorkloadError(
                f"{self.path or 'throughputs'}: nothing measured for {job_type} on {gpus} × {gpu}"
            ) from None

    def knows(self, gpu: str, job_type: str, gpus: int) -> bool:
        return (job_type, gpus) in self.alone.get(gpu, {})


def read_trace(path: Path) -> list[TraceJob]:
    """Return the jobs of a tab-separated trace without header, in the order of the file.

    Rows of 12 columns are Shockwave's, rows of 10 Gavel's (without batch-size mode and duration). Raises
    ``WorkloadError`` with file, line and reason for anything that is not such a row.
    """
    lines = user_files.read_text(path, max_bytes=user_files.MAX_TEXT_BYTES, error=WorkloadError).splitlines()
    jobs: list[TraceJob] = []
    for number, line in enumerate(lines):
        try:
            job = _row(number, line.split("\t"))
            if jobs and job.arrival < jobs[-1].arrival:
                raise ValueError(f"arrives at {job.arrival:g}, before the row above ({jobs[-1].arrival:g})")
        except ValueError as error:
            raise WorkloadError(f"{path}, line {number + 1}: {error}") from None
        jobs.append(job)
    if not jobs:
        raise WorkloadError(f"{path}: no jobs")
    return jobs


def _row(number: int, cells: list[str]) -> TraceJob:
    if len(cells) not in (10, 12):
        raise ValueError(
            f"must have 12 columns (Shockwave) or 10 (Gavel), separated by tabs; has {len(cells)}"
        )
    shockwave = len(cells) == 12
    return TraceJob(
        number=number,
        type=_field("job type", cells[0], text),
        steps=_field("total steps", cells[5], count),
        gpus=_field("GPUs", cells[6], count),
        mode=_field("batch-size mode", cells[7], _mode) if shockwave else "static",
        weight=_field("priority weight", cells[8 if shockwave else 7], positive),
        arrival=_field("arrival", cells[11 if shockwave else 9], instant),
    )


def _mode(field: str) -> str:
    if field not in get_args(Mode):
        raise ValueError(f"must be one of {', '.join(get_args(Mode))}; got {field!r}")
    return field


def _field(name: str, field: str, convert: Convert) -> Any:
    try:
        return convert(field)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None


def read_throughputs(path: Path) -> Throughputs:
    """Return what the table measured for jobs running alone (its ``null`` partner).

    Pairs that share GPUs are not read. Raises ``WorkloadError`` with file, entry and reason.
    """
    raw = user_files.read_json(path, error=WorkloadError)
    if not isinstance(raw, dict) or not raw:
        raise WorkloadError(f"{path}: must be an object of GPU types")
    alone: dict[str, dict[tuple[str, int], float]] = {}
    for gpu, entries in raw.items():
        if not isinstance(entries, dict):
            raise WorkloadError(f"{path}, {gpu}: must be an object of job types")
        alone[gpu] = {}
        for key, partners in entries.items():
            found = _PAIR.match(key)
            speed = partners.get("null") if isinstance(partners, dict) else None
            if not found:
                raise WorkloadError(f"{path}, {gpu}, {key}: must be ('job type', GPUs)")
            if not isinstance(speed, int | float) or not isfinite(speed) or speed < 0:
                raise WorkloadError(
                    f"{path}, {gpu}, {key}: null must be steps per second >= 0; got {speed!r}"
                )
            alone[gpu][found["job"], int(found["gpus"])] = float(speed)
    return Throughputs(alone, str(path))
