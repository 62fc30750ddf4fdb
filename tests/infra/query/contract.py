"""Engines under contract, stages for them to run, and what these have written."""

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ebbflow.infra.protocols import Relation, SqlEngine, StageJob, StageProgress, StageResult
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.places import StorageLocation


def connected(folder: Path) -> Iterator[SqlEngine]:
    """Run a server of Spark Connect, and an engine on it."""
    from ebbflow.infra.spark.connect.engine import ConnectEngine
    from ebbflow.infra.spark.connect.session import end_session, open_session
    from tests.connect.conftest import ConnectServer

    server = ConnectServer(folder)
    server.start()
    try:
        session = open_session(server.url, {})
        engine = ConnectEngine(session)
        yield engine
        engine.close()
        end_session(session)
    finally:
        server.stop()


class NativeEngine:
    """Spark, whose stages may all be native."""

    def __init__(self, inner: SqlEngine) -> None:
        self.inner = inner

    def run(self, job: StageJob, on_progress: Callable[[StageProgress], None] | None = None) -> StageResult:
        return self.inner.run(replace(job, native=True), on_progress)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def relation(
    folder: Path, name: str, tables: list[pa.Table], columns: tuple[tuple[str, str], ...]
) -> Relation:
    """Write each table as a Parquet file of a relation."""
    entries = []
    for number, table in enumerate(tables):
        path = folder / f"{name}-{number}.parquet"
        pq.write_table(table, path)
        entries.append(FileEntry(str(path), path.stat().st_size, path.stat().st_mtime))
    return Relation(name, "file", tuple(entries), columns)


def make_job(sql: str, *relations: Relation, out: Path, partitions: int = 0) -> StageJob:
    folder = out / uuid.uuid4().hex
    folder.mkdir(parents=True)
    return StageJob(
        uuid.uuid4().hex, "the stage", sql, relations, StorageLocation(folder.as_uri()), partitions
    )


def output(job: StageJob) -> pa.Table:
    """Read a job's output, file after file in the order of their names."""
    folder = Path(job.output.root)
    return pa.concat_tables([pq.read_table(path) for path in sorted(folder.glob("*.parquet"))])


def rows(job: StageJob) -> list[tuple[object, ...]]:
    return sorted(tuple(row.values()) for row in output(job).to_pylist())


def wait_until(condition: Callable[[], bool], seconds: float = 150.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that in time"
        threading.Event().wait(0.01)


def collect(
    engine: SqlEngine,
    job: StageJob,
    errors: list[BaseException],
    on_progress: Callable[[StageProgress], None] | None,
) -> None:
    try:
        engine.run(job, on_progress)
    except Exception as error:
        errors.append(error)
    finally:
        with suppress(Exception):
            engine.cancel(job.id)
