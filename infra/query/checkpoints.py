"""Checkpoints in a directory, local or on S3.

Layout::

    <store>/data/<fingerprint>/<attempt>/*.parquet    written by an engine
    <store>/manifests/<fingerprint>.json              written last and atomically: from then on it exists
    <store>/damaged/<fingerprint>-<time>.json         manifests of what was found damaged, kept for a day
    <store>/cache/...                                 what can be computed again, see ``JsonStore``
"""

import os
import shutil
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, Literal

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import StorageError, StorageFullError
from ebbflow.infra.protocols import Attempt, Checkpoint
from ebbflow.infra.query.checkpoint_files import StoreFiles
from ebbflow.infra.storage import files, private
from ebbflow.infra.storage.checksums import ChecksumEngine
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.jsonstore import JsonStore
from ebbflow.infra.storage.manifest import (
    ATTEMPT,
    FINGERPRINT,
    DamagedError,
    Manifest,
    OtherVersionError,
    Part,
    UnusableError,
)
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables.datatypes import arrow_schema
from ebbflow.planners.memory.tiers import Tier

__all__ = ["JsonStore", "ParquetCheckpointStore"]

Durability = Literal["before-commit", "behind"]
SMALLEST_FREE = 1 << 20  # bytes; with less a local store counts as full
ABANDONED_AFTER = 86_400.0  # seconds
TIDY_EVERY = 3_600.0  # seconds after which a store is tidied again...
TIDY_PART = 0.05  # ...or as soon as this part of its budget has been written


class ParquetCheckpointStore:
    """``CheckpointStore`` on ``pyarrow.fs``. Safe for several threads and processes.

    Locally the first committer of a fingerprint wins. On S3 two commits within the same moment both succeed:
    the manifest is then the later one's, and the earlier one's files, equal in content, stay for a day.

    Args:
        place: the store; with peers' memory before it, the data of checkpoints is written there first.
        clock: of attempts and notes of use.
        durable: whether a checkpoint is committed when the store behind has its data, or before. Of one that was
            committed before, what memory loses is found missing when it is looked for, and computed again.
    """

    def __init__(
        self, place: StorageLocation, clock: Clock | None = None, *, durable: Durability = "before-commit"
    ) -> None:
        self._clock = clock or SystemClock()
        self._files = StoreFiles(place, self._clock)
        self.place = place.behind  # where all but the data of checkpoints is
        self._data = place
        self._durable = durable
        self.tier: Callable[[], Tier | None] = lambda: None
        """Waits until it is known where outputs are kept first, as measured; nothing: engines' rates hold it."""
        self._lock = threading.Lock()
        self._noted: set[str] = set()
        self._problems: list[str] = []

    def hash_with(self, engine: object) -> None:
        """Let ``engine`` hash files, if it can, where it reads and writes them."""
        if isinstance(engine, ChecksumEngine):
            self._files.hash = engine.checksums

    def cache(self, name: str) -> JsonStore:
        """Return a JSON cache that lies beside the checkpoints."""
        return JsonStore(self.place.under(f"cache/{name}"))

    # --- writing ------------------------------------------------------------------------------------------

    def begin(self, fingerprint: str) -> Attempt:
        """Make a new, empty directory to write into. Raises ``StorageError`` or ``StorageFullError``."""
        _check_fingerprint(fingerprint)
        name = f"{int(self._clock.now() * 1000):013d}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        place = self._data.under(f"data/{fingerprint}/{name}")
        with translated(f"write to the checkpoint store {self.place.uri}"):
            if place.behind.local:
                self._make_local(place.root)
            else:
                place.fs().create_dir(place.root, recursive=True)
        return Attempt(fingerprint, name, place)

    def commit(
        self,
        attempt: Attempt,
        *,
        rows: int,
        columns: Sequence[tuple[str, str]],
        seconds: float,
        sources: Mapping[str, str],
    ) -> Checkpoint:
        """Make the attempt's files a checkpoint; see ``CheckpointStore.commit``.

        Raises ``StorageError`` when the files are not the ``rows`` rows of ``columns`` that they should be.
        """
        self._check(attempt)
        existing = self._files.current(attempt.fingerprint, sources)
        if existing:
            self.discard(attempt)
            return existing
        with translated(f"commit the checkpoint {attempt.place.uri}"):
            if self._durable == "before-commit":
                attempt.place.flush()
            parts = self._parts(attempt, rows, columns)
            manifest = Manifest(
                attempt.fingerprint,
                attempt.id,
                parts,
                tuple((name, dtype) for name, dtype in columns),
                float(seconds),
                self._clock.now(),
                dict(sources),
            )
            winner = self._files.publish(manifest)
        if winner:
            self.discard(attempt)
            return winner
        return self._files.checkpoint(manifest)

    def discard(self, attempt: Attempt) -> None:
        """Drop an attempt's files. Missing ones are no error, nor are those that cannot be deleted now, as
        while a task of a cancelled statement still writes: ``collect`` takes them later.
        """
        name = self._check(attempt)
        with suppress(StorageError):  # often called for another error, which is the one to tell
            self._files.delete(name)

    # --- reading ------------------------------------------------------------------------------------------

    def find(
        self, fingerprint: str, sources: Mapping[str, str] | None = None, *, verified: bool = True
    ) -> Checkpoint | None:
        """Return the checkpoint if it is whole and of these source versions, else ``None``; see
        ``CheckpointStore.find``."""
        _check_fingerprint(fingerprint)
        try:
            found = self._files.load(fingerprint, sources, verified=verified)
        except DamagedError as exc:
            self._set_aside(fingerprint, exc.attempt, str(exc))
            return None
        except UnusableError as exc:
            self._ignore(fingerprint, exc)
            return None
        if found:
            self._files.touch(fingerprint)
        return found

    def verify(self, checkpoint: Checkpoint, *, anew: bool = False) -> bool:
        """Tell whether the checkpoint's files are what was written; see ``CheckpointStore.verify``."""
        whole = True
        # one that is made of slices has files of several checkpoints: only the damaged ones go
        for folder, entries in groupby(checkpoint.relation.files, lambda file: file.path.rpartition("/")[0]):
            fingerprint, attempt = folder.split("/")[-2:]
            try:
                with translated(f"read the checkpoint {self.place.uri_of(self._name_of(folder))}"):
                    self._files.verify(list(entries), anew=anew)
            except UnusableError as exc:
                self._set_aside(fingerprint, attempt, str(exc))
                whole = False
        return whole

    def problems(self) -> list[str]:
        """Return and forget what had to be ignored, each problem once in the store object's life."""
        with self._lock:
            found, self._problems = self._problems, []
        return found

    def checkpoints(self) -> list[Checkpoint]:
        """Return every checkpoint whose files are there, by fingerprint; the rest is noted in ``problems``.

        Their contents are not read: ``verify`` does.
        """
        for stranger in self._files.strangers():
            self._note(f"{stranger} is not part of a checkpoint store; it is ignored")

        def load(fingerprint: str) -> Checkpoint | None:
            try:
                return self._files.load(fingerprint, None, verified=False)
            except UnusableError as exc:
                self._ignore(fingerprint, exc)
                return None

        return [one for one in files.in_parallel(load, self._files.manifests()) if one is not None]

    def tidy(self, budget: int, written: int, keep: frozenset[str] = frozenset()) -> None:
        """``collect`` if that is due, now that ``written`` bytes more are there: it looks at every checkpoint."""
        notes, key, now = self.cache("housekeeping"), str(budget), self._clock.now()
        match notes.get(key):
            case [float(at), int(before)] if at <= now:
                written += before
            case _:
                at = 0.0
        if now - at >= TIDY_EVERY or written >= TIDY_PART * budget:
            self.collect(budget, keep)
            at, written = now, 0
        notes.put(key, [at, written])

    def collect(self, budget: int, keep: frozenset[str] = frozenset()) -> int:
        """Delete least recently used checkpoints beyond ``budget`` bytes, never ``keep``; return bytes freed.

        Attempts and damaged checkpoints older than a day go too. What another version of Ebbflow wrote stays.
        """
        used = self._files.last_used()
        valid = {checkpoint.fingerprint: checkpoint for checkpoint in self.checkpoints()}
        total = sum(checkpoint.bytes for checkpoint in valid.values())
        freed = 0
        for fingerprint in sorted(valid, key=lambda f: (used.get(f, 0.0), f)):
            if total <= budget:
                break
            if fingerprint in keep:
                continue
            checkpoint = valid[fingerprint]
            self._files.forget(fingerprint)
            self._files.delete(checkpoint.uri.removeprefix(f"{self.place.uri}/"))
            total -= checkpoint.bytes
            freed += checkpoint.bytes
        return freed + self._collect_abandoned(used)

    # --- commit, step by step -----------------------------------------------------------------------------

    def _make_local(self, folder: str) -> None:
        for attempt in range(3):
            try:
                private.make_folder(folder, exist_ok=False)
                break
            except FileNotFoundError:  # a collector removed the empty parent in between
                if attempt == 2:
                    raise
        if shutil.disk_usage(folder).free < SMALLEST_FREE:
            with suppress(OSError):
                os.rmdir(folder)
            raise StorageFullError(
                f"cannot write to the checkpoint store {self.place.uri}: less than {SMALLEST_FREE >> 20} MiB free; "
                f"free some space or choose another place, finished checkpoints are kept"
            )

    def _check(self, attempt: Attempt) -> str:
        """Return the name of the attempt's directory in the store. Raises ``StorageError`` for one of another."""
        _check_fingerprint(attempt.fingerprint)
        name = f"data/{attempt.fingerprint}/{attempt.id}"
        if not ATTEMPT.fullmatch(attempt.id) or attempt.place != self._data.under(name):
            raise StorageError(
                f"attempt {attempt.id!r} at {attempt.place.uri} was not begun in {self.place.uri}"
            )
        return name

    def _parts(self, attempt: Attempt, rows: int, columns: Sequence[tuple[str, str]]) -> tuple[Part, ...]:
        entries = _data_files(attempt.place)
        if not entries and rows == 0:
            _write_empty(attempt.place, columns)
            entries = _data_files(attempt.place)
        wanted = [name.lower() for name, _ in columns]

        def measure(found: FileEntry) -> Part:
            count, names = _footer(attempt.place.fs(), found.path)
            if names != wanted:
                raise StorageError(f"{found.path} has the columns {names}, the stage should write {wanted}")
            return Part(found.path.rsplit("/", 1)[1], found.size, count, found.xxh64)

        # hashed before anything else is read of them: what is damaged from here on is found
        parts = tuple(files.in_parallel(measure, self._files.hashed(entries)))
        if sum(part.rows for part in parts) != rows:
            raise StorageError(
                f"checkpoint {attempt.place.uri} should have {rows} rows, its {len(parts)} files have "
                f"{sum(part.rows for part in parts)}; it is not committed"
            )
        return parts

    # --- housekeeping -------------------------------------------------------------------------------------

    def _collect_abandoned(self, manifests: Mapping[str, float]) -> int:
        now = self._clock.now()

        def collect(info: Any) -> int:
            if info.is_file or not FINGERPRINT.fullmatch(info.base_name):
                return 0
            in_use = self._attempt_in_use(info.base_name, now - manifests.get(info.base_name, now))
            return 0 if in_use is None else self._collect_attempts(info.path, in_use, now)

        with translated(f"tidy the checkpoint store {self.place.uri}"):
            freed = sum(files.in_parallel(collect, self.place.entries("data")))
            for folder in ("manifests", "damaged"):
                for info in self.place.entries(folder):
                    old = now - (info.mtime_ns or 0) / 1e9 > ABANDONED_AFTER
                    torn = info.base_name.startswith(".") and info.base_name.endswith(".tmp")
                    if old and info.is_file and (torn or folder == "damaged"):
                        with suppress(FileNotFoundError):
                            self.place.fs().delete_file(info.path)
        return freed

    def _attempt_in_use(self, fingerprint: str, unused: float) -> str | None:
        """Return the attempt that the manifest names, "" for none; ``None``: leave all attempts alone."""
        try:
            found = self._files.load(fingerprint, None, verified=False)
        except OtherVersionError:
            return None
        except UnusableError:
            if unused <= ABANDONED_AFTER:
                return None
            self._files.forget(fingerprint)
            return ""
        return found.uri.rsplit("/", 1)[1] if found else ""

    def _collect_attempts(self, folder: str, in_use: str, now: float) -> int:
        freed = 0
        for info in files.listing(self.place.fs(), folder):
            match = ATTEMPT.fullmatch(info.base_name)
            if info.is_file or not match or info.base_name == in_use:
                continue
            inside = [i for i in files.listing(self.place.fs(), info.path, recursive=True) if i.is_file]
            latest = max([int(match.group(1)) / 1000, *(files.entry(i).modified for i in inside)])
            if now - latest > ABANDONED_AFTER:
                freed += sum(i.size for i in inside)
                self._files.delete(self._name_of(info.path))
        if self.place.local:
            with suppress(OSError):  # only an empty directory goes
                os.rmdir(folder)
        return freed

    def _name_of(self, path: str) -> str:
        """Return the name in the store of what is at ``path``, in pyarrow's terms."""
        return path.removeprefix(f"{self.place.root}/")

    def _set_aside(self, fingerprint: str, attempt: str, why: str) -> None:
        moved = self._files.set_aside(fingerprint, attempt)
        self._note(
            f"checkpoint {fingerprint[:16]} in {self.place.uri} {why}; it is not used"
            + (f", its manifest was set aside as {moved}" if moved else "")
        )

    def _ignore(self, fingerprint: str, why: UnusableError) -> None:
        self._note(f"checkpoint {fingerprint[:16]} in {self.place.uri} {why}; it is ignored")

    def _note(self, problem: str) -> None:
        with self._lock:
            if problem not in self._noted:
                self._noted.add(problem)
                self._problems.append(problem)


def _check_fingerprint(fingerprint: str) -> None:
    if not FINGERPRINT.fullmatch(fingerprint):
        raise StorageError(f"a fingerprint must be 1 to 128 hex digits in lower case; got {fingerprint!r}")


def _footer(fs: Any, path: str) -> tuple[int, list[str]]:
    """Return a Parquet file's rows and lower-case column names. Raises ``StorageError``."""
    import pyarrow.parquet as pq

    with translated(f"read the Parquet footer of {path}"), fs.open_input_file(path) as file:
        found = pq.ParquetFile(file)
        return found.metadata.num_rows, [name.lower() for name in found.schema_arrow.names]


def _data_files(folder: StorageLocation) -> list[FileEntry]:
    visible = [info for info in folder.entries() if info.is_file and not files.hidden(info.base_name)]
    return sorted((files.entry(info) for info in visible), key=lambda f: files.natural(f.path))


def _write_empty(folder: StorageLocation, columns: Sequence[tuple[str, str]]) -> None:
    import pyarrow.parquet as pq

    try:
        schema = arrow_schema(columns)
    except ValueError as exc:
        raise StorageError(f"cannot write an empty checkpoint: {exc}") from exc
    with private.output_stream(folder.fs(), folder.scheme, folder.path("part-00000.parquet")) as out:
        pq.write_table(schema.empty_table(), out)
