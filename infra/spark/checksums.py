"""Checksums of stages' files, by the executors that read and write them where that is sooner."""

import logging
import threading
import uuid
from collections.abc import Sequence
from typing import Any

from ebbflow.infra.spark.failures import first_line
from ebbflow.infra.spark.relations import location
from ebbflow.infra.storage import checksums
from ebbflow.infra.storage.files import FileEntry

LARGEST = 64 << 20  # bytes of a file that executors hash: Spark takes it into memory as a whole
_STARTING = 0.3  # seconds that a Spark job takes beside its work
_CORE = 0.1 * 2**30  # bytes/s that a core of an executor reads and hashes
_DRIVER = (
    0.5 * 2**30
)  # bytes/s that this process reads over a network and hashes; from its own disk eight times that
_LEAST_WAIT = 60.0  # seconds for executors that are about to come
_log = logging.getLogger(__name__)


def by_executors(entries: Sequence[FileEntry], cores: int, *, near: bool) -> bool:
    """Tell whether ``cores`` of executors hash the files sooner than this process does.

    ``near`` says that the executors are on this machine: then it is never worth a job.
    """
    size = sum(entry.size for entry in entries)
    return not near and _STARTING + size / (_CORE * max(cores, 1)) < size / _DRIVER


def of_files(session: Any, scheme: str, entries: Sequence[FileEntry]) -> list[str]:
    """Return what ``infra.storage.checksums.of_files`` does, computed by executors but for files over ``LARGEST``.

    When they fail, or take ten times as long as this process would, it is computed here. Raises ``OSError``.
    """
    small = [entry for entry in entries if entry.size <= LARGEST]
    limit = max(_LEAST_WAIT, 10 * sum(entry.size for entry in small) / _DRIVER)
    try:
        found = _collected(session, scheme, small, limit) if small else {}
    except Exception as error:
        _log.warning("executors cannot hash %d files; the driver does: %s", len(small), first_line(error))
        found = {}
    rest = [entry for entry in entries if entry.path not in found]
    found |= {entry.path: xxh64 for entry, xxh64 in zip(rest, checksums.of_files(scheme, rest), strict=True)}
    return [found[entry.path] for entry in entries]


def _collected(session: Any, scheme: str, entries: Sequence[FileEntry], limit: float) -> dict[str, str]:
    """Return checksums by path. Spark's ``xxhash64`` is XXH64 with the seed of ``infra.storage.checksums``."""
    from pyspark.sql import functions as f

    context, group = session.sparkContext, f"checksums-{uuid.uuid4().hex[:8]}"
    wanted = {_bare(location(scheme, entry.path)): entry.path for entry in entries}
    impatient = threading.Timer(limit, context.cancelJobGroup, (group,))
    impatient.daemon = True
    context.setJobGroup(group, f"checksums of {len(entries)} files", interruptOnCancel=True)
    impatient.start()
    try:
        rows = (
            session.newSession()
            .read.format("binaryFile")
            .option("__globPaths__", "false")
            .load([location(scheme, entry.path) for entry in entries])
            .select("path", f.xxhash64("content").alias("xxh64"))
            .collect()
        )
    finally:
        impatient.cancel()
        for key in ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel"):
            context.setLocalProperty(key, None)
    return {wanted[_bare(row["path"])]: f"{row['xxh64'] % 2**64:016x}" for row in rows}


def _bare(uri: str) -> str:
    """Return a URI's path: Hadoop writes ``file:/a`` for ``file:///a``."""
    return uri.partition(":")[2].lstrip("/")
