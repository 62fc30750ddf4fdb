"""What a run of a pipeline must not forget, in its folder: what was asked for, and which steps have ended.

``run.json`` holds it, ``pipeline.yaml`` the file as it was. Neither holds a secret: references to the environment
stay references.
"""

import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import PipelineRunError, RunLockedError, StorageError
from ebbflow.infra.storage import checksums, user_files
from ebbflow.infra.storage.files import home, write_atomic
from ebbflow.infra.storage.locks import RunLock
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.pipeline.checking import ReportFinding
from ebbflow.tasks.pipeline.file.kinds import nearest
from ebbflow.tasks.pipeline.file.read import parse_pipeline
from ebbflow.tasks.pipeline.file.spec import Pipeline
from ebbflow.tasks.pipeline.outcome import StepState

FORMAT = 1
_FILE, _TEXT = "run.json", "pipeline.yaml"
_ID = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,57}")


Rest = Callable[[Pipeline, ReportFinding, Collection[str]], object]
"""Checks what a pipeline needs but for steps that have finished."""


def default_folder() -> Path:
    """Return where runs of pipelines live unless asked otherwise."""
    return home() / "pipelines"


def new_run_id(name: str) -> str:
    """Return an id for a run: the pipeline's name, the time, and a few letters."""
    return f"{name}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def app_id(run: str, step: str) -> str:
    """Return the id that a step of a run has in the ledger."""
    return f"{run}.{step}"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What is known of a step across processes."""

    state: StepState = "waiting"
    reason: str = ""
    attempts: int = 0
    began: float | None = None  # s since the Unix epoch
    ended: float | None = None
    results: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(
        default_factory=dict
    )  # of its results that others read: XXH64 by address
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run."""

    id: str
    source: str  # the file as it was named
    base: str  # directory that relative paths in it are relative to
    began: float  # s since the Unix epoch
    parameters: Mapping[str, str] = field(default_factory=dict)
    steps: Mapping[str, StepRecord] = field(default_factory=dict)
    checksum_of_text: str = ""  # of the pipeline's file as it was, which lies beside this

    def with_step(self, name: str, **changes: Any) -> "RunRecord":
        """Return the record with other values of one step."""
        known = self.steps.get(name, StepRecord())
        return replace(self, steps={**self.steps, name: replace(known, **changes)})


class RunFolder:
    """The directory of one run. One process at a time holds it. Raises ``OptionError``."""

    def __init__(self, parent: Path | str, id: str) -> None:
        if not _ID.fullmatch(id):
            raise OptionError(
                f"a run's id begins with a letter and holds A-Z a-z 0-9 . _ -, 58 at most; got {id!r:.90}"
            )
        self.id = id
        self.path = Path(parent).expanduser().absolute() / id

    @property
    def exists(self) -> bool:
        """Tell whether there is such a run."""
        return (self.path / _FILE).is_file()

    def require_new(self) -> None:
        """Raise ``PipelineRunError`` for an id that is taken."""
        if self.exists:
            raise PipelineRunError(
                f"there is a run {self.id!r} already: resume it (ebbflow run --resume {self.id}), or choose "
                "another run ID"
            )

    @contextmanager
    def held(self, clock: Clock) -> Iterator[None]:
        """Keep other processes from the run. Raises ``PipelineRunError`` while one has it, which says who."""
        lock = RunLock(StorageLocation(self.path), self.id, clock=clock)
        try:
            lock.acquire()
        except RunLockedError as error:
            raise PipelineRunError(f"another process is running it: {error}") from error
        except StorageError as error:
            raise PipelineRunError(f"cannot make {self.path}: {error}") from error
        with lock:
            yield

    def begin(self, pipeline: Pipeline, parameters: Mapping[str, str], now: float) -> RunRecord:
        """Write a new run down. Raises ``PipelineRunError`` for an id that is taken, ``StorageError``."""
        self.require_new()
        record = RunRecord(
            self.id,
            pipeline.source,
            pipeline.folder,
            now,
            dict(parameters),
            {name: StepRecord() for name in pipeline.steps},
            checksums.of_bytes(pipeline.text.encode()),
        )
        self._write(_TEXT, pipeline.text.encode())
        self.save(record)
        return record

    def save(self, record: RunRecord) -> None:
        """Write the record, whole or not at all. Raises ``StorageError``."""
        self._write(_FILE, checksums.sealed({"format": FORMAT, **asdict(record)}, indent=1))

    def load(self, further: "Rest | None" = None) -> tuple[RunRecord, Pipeline]:
        """Return a run and its pipeline; ``further`` checks what is left of it.

        Raises ``PipelineRunError``, ``PipelineFileError``.
        """
        if not self.exists:
            known = known_runs(self.path.parent)
            hint = nearest(self.id, known) or (f"; the newest is {known[0]}" if known else "")
            raise PipelineRunError(f"there is no run {self.id!r} in {self.path.parent} to resume{hint}")
        try:
            content = checksums.unsealed((self.path / _FILE).read_bytes())
            text = (self.path / _TEXT).read_bytes().decode()
            if content.pop("format") != FORMAT:
                raise PipelineRunError(
                    f"the run {self.id} was started by another version of Ebbflow; resume it with that version"
                )
            steps = {name: StepRecord(**_renamed(one)) for name, one in content.pop("steps").items()}
            known_fields = {one.name for one in fields(RunRecord)}
            record = RunRecord(**{k: v for k, v in content.items() if k in known_fields}, steps=steps)
            if checksums.of_bytes(text.encode()) != record.checksum_of_text:
                raise PipelineRunError(
                    f"{self.path / _TEXT} is not what was written; restore it from a backup, or start a new run"
                )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PipelineRunError(
                f"{self.path / _FILE} or {_TEXT} beside it is damaged ({user_files.reason(error)}); start "
                "a new run"
            ) from error

        def check(pipeline: Pipeline, say: ReportFinding) -> None:
            if further is not None:
                further(pipeline, say, {name for name, one in steps.items() if one.state == "finished"})

        pipeline = parse_pipeline(text, str(self.path / _TEXT), record.base, record.parameters, check)
        return record, pipeline

    def _write(self, name: str, data: bytes) -> None:
        try:
            write_atomic(None, "file", str(self.path / name), data)
        except OSError as error:
            raise StorageError(f"cannot write {self.path / name}: {error.strerror or error}") from error


def known_runs(parent: Path) -> list[str]:
    """Return the ids of the runs in a directory, the newest first."""
    try:
        found = [(one.stat().st_mtime, one.parent.name) for one in parent.glob(f"*/{_FILE}")]
    except OSError:
        return []
    return [name for _, name in sorted(found, reverse=True)]


def _renamed(step: Mapping[str, Any]) -> dict[str, Any]:
    """Return a step as it was stored, with today's names of its results."""
    results = {"directory" if key == "folder" else key: text for key, text in step.get("results", {}).items()}
    return {**step, "results": results}
