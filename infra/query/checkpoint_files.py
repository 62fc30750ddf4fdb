"""The files of a checkpoint store: manifests, verified checkpoints, notes of use."""

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import StorageError
from ebbflow.infra.protocols import Checkpoint, Relation
from ebbflow.infra.storage import checksums, files, private
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.manifest import (
    FINGERPRINT,
    DamagedError,
    Manifest,
    OtherVersionError,
    StaleError,
    UnusableError,
    decode,
)
from ebbflow.infra.storage.places import StorageLocation

_USED_EVERY = 3_600.0  # seconds between two notes of use on S3, where each is a request
_KNOWN = frozenset({"data", "manifests", "cache", "apps", "damaged"})


class StoreFiles:
    """Reads and writes a store's layout; ``ParquetCheckpointStore`` decides what to do with it."""

    def __init__(self, place: StorageLocation, clock: Clock) -> None:
        self.place = place.behind
        self._data = place  # of checkpoints' files; peers' memory may be before the store
        self._clock = clock
        self.hash: Callable[[str, Sequence[FileEntry]], list[str]] = checksums.of_files
        self._verified: dict[str, FileEntry] = {}  # by path: files as they were when their checksum was right
        self._used: dict[str, float] = {}

    def publish(self, manifest: Manifest) -> Checkpoint | None:
        """Write the manifest unless a valid one is there; return the checkpoint that was first, if any."""
        name, data = _manifest(manifest.fingerprint), manifest.encode()
        if not self.place.local:
            self._write(name, data)
            return None
        with self._exclusive():
            if files.write_once(self.place.path(name), data):
                return None
            existing = self.current(manifest.fingerprint, manifest.sources)
            if existing is None:
                self._write(name, data)
            return existing

    def _write(self, name: str, data: bytes) -> None:
        files.write_atomic(self.place.fs(), self.place.scheme, self.place.path(name), data)

    def _exclusive(self) -> Any:
        if not self.place.local:
            return nullcontext()
        private.make_folder(self.place.path("manifests"))
        return files.locked(self.place.path("manifests/.lock"), self._clock)

    def current(self, fingerprint: str, sources: Mapping[str, str]) -> Checkpoint | None:
        """Return the checkpoint if it is valid for ``sources``, else ``None``."""
        try:
            return self.load(fingerprint, sources)
        except UnusableError:
            return None

    def load(
        self, fingerprint: str, sources: Mapping[str, str] | None, *, verified: bool = True
    ) -> Checkpoint | None:
        """Return the checkpoint, ``None`` if there is no manifest; without ``verified`` its files are not hashed.

        Raises ``StaleError``, ``OtherVersionError``, ``DamagedError`` (all of them ``UnusableError``).
        """
        attempt = ""
        try:
            with translated(f"read the checkpoint store {self.place.uri}"):
                content = self._content(fingerprint)
                if content is None:
                    return None
                manifest = decode(content, fingerprint)
                attempt = manifest.attempt
                if sources is not None and dict(sources) != manifest.sources:
                    raise StaleError(_stale(manifest.sources, sources))
                return self.checkpoint(manifest, verified=verified)
        except (StaleError, OtherVersionError):
            raise
        except UnusableError as exc:
            raise DamagedError(str(exc), attempt) from exc

    def _content(self, fingerprint: str) -> bytes | None:
        try:
            return self.place.read(_manifest(fingerprint))
        except FileNotFoundError:
            return None

    def checkpoint(self, manifest: Manifest, *, verified: bool = True) -> Checkpoint:
        """Return the checkpoint after comparing its files with the manifest. Raises ``UnusableError``."""
        uri = self.place.uri_of(manifest.data)
        with translated(f"read the checkpoint {uri}"):
            there = {info.base_name: info for info in self._data.entries(manifest.data) if info.is_file}
            entries = []
            for part in manifest.parts:
                info = there.get(part.name)
                if info is None:
                    raise UnusableError(f"lacks its file {part.name}")
                if info.size != part.size:
                    raise UnusableError(f"has {part.name} with {info.size} bytes, not {part.size}")
                entries.append(replace(files.entry(info), xxh64=part.xxh64))
            if verified:
                self.verify(entries)
        name = f"ckpt_{manifest.fingerprint}"
        return Checkpoint(
            manifest.fingerprint,
            uri,
            Relation(name, self._data.scheme, tuple(entries), manifest.columns),
            manifest.rows,
            manifest.size,
            manifest.seconds,
            manifest.created,
            dict(manifest.sources),
        )

    def hashed(self, entries: Sequence[FileEntry]) -> list[FileEntry]:
        """Return the files just written with their checksums, which count as verified."""
        found = [
            replace(entry, xxh64=xxh64)
            for entry, xxh64 in zip(entries, self.hash(self._data.scheme, entries), strict=True)
        ]
        self._verified.update({entry.path: entry for entry in found})
        return found

    def verify(self, entries: Sequence[FileEntry], *, anew: bool = False) -> None:
        """Compare files with their checksums. What was compared before, and has kept its size and time, is only
        compared ``anew`` on request. Raises ``UnusableError``."""
        todo = [entry for entry in entries if anew or self._verified.get(entry.path) != entry]
        try:
            found = self.hash(self._data.scheme, todo)
        except OSError as exc:
            # gone, or on a part of a disk that cannot be read any more: the same as damaged
            if isinstance(exc, FileNotFoundError) or exc.errno == errno.EIO:
                raise UnusableError(f"has a file that cannot be read ({exc})") from exc
            raise
        for entry, xxh64 in zip(todo, found, strict=True):
            if xxh64 != entry.xxh64:
                self._verified.pop(entry.path, None)
                raise UnusableError(
                    f"has {entry.path.rsplit('/', 1)[1]} with the checksum {xxh64}, not {entry.xxh64}"
                )
        self._verified.update({entry.path: entry for entry in todo})

    def set_aside(self, fingerprint: str, attempt: str) -> str | None:
        """Move the manifest that names ``attempt``, or that cannot be read, into the directory ``damaged``.

        Return its new path within the store. ``None``: another has taken its place, or the store cannot be written.

        Its files stay where they are, since other processes may be reading them, until ``collect`` takes them.
        """
        name = f"damaged/{fingerprint}-{int(self._clock.now() * 1000):013d}.json"
        try:
            with translated(f"set aside the checkpoint {fingerprint} of {self.place.uri}"), self._exclusive():
                content = self._content(fingerprint)
                if content is None:
                    return None
                try:
                    if decode(content, fingerprint).attempt != attempt:
                        return None
                except OtherVersionError:
                    return None
                except UnusableError:
                    pass
                self._write(name, content)
                self._remove(fingerprint)
        except StorageError:
            return None
        return name

    def last_used(self) -> dict[str, float]:
        """Return when each manifest was last used: its own time or its note's, whichever is later."""
        used: dict[str, float] = {}
        with translated(f"list the checkpoint store {self.place.uri}"):
            for info in self.place.entries("manifests"):
                fingerprint, _, kind = info.base_name.partition(".")
                if kind in ("json", "used"):
                    used[fingerprint] = max(used.get(fingerprint, 0.0), files.entry(info).modified)
        return used

    def touch(self, fingerprint: str) -> None:
        """Note the use; a store that may only be read goes without."""
        now = self._clock.now()
        name = _manifest(fingerprint)
        with suppress(OSError):
            if self.place.local:
                os.utime(self.place.path(name), (now, now))
            elif now - self._used.get(fingerprint, 0.0) >= _USED_EVERY:
                self._used[fingerprint] = now
                self._write(name.removesuffix("json") + "used", b"")

    def forget(self, fingerprint: str) -> None:
        """Delete a manifest: the checkpoint no longer exists."""
        with translated(f"delete the checkpoint {fingerprint} of {self.place.uri}"), self._exclusive():
            self._remove(fingerprint)

    def _remove(self, fingerprint: str) -> None:
        name = _manifest(fingerprint)
        self.place.remove(name)
        self.place.remove(name.removesuffix("json") + "used")

    def delete(self, folder: str) -> None:
        """Delete a directory, by its name in the store, and all in it; a missing one is no error."""
        with translated(f"delete {self.place.uri_of(folder)}"):
            self._data.remove_folder(folder)

    def manifests(self) -> list[str]:
        """Return the fingerprints that have a manifest, valid or not, sorted."""
        with translated(f"list the checkpoint store {self.place.uri}"):
            found = self.place.entries("manifests")
        return [i.base_name.removesuffix(".json") for i in found if i.is_file and _is_manifest(i.base_name)]

    def strangers(self) -> list[str]:
        """Return the URIs of visible files and directories that no store has."""
        with translated(f"list the checkpoint store {self.place.uri}"):
            top = [i for i in self.place.entries() if i.base_name not in _KNOWN]
            inner = [
                i
                for i in self.place.entries("manifests")
                if not _is_manifest(i.base_name.removesuffix(".used").removesuffix(".json") + ".json")
            ]
        return [
            self.place.uri_of(i.path.removeprefix(f"{self.place.root}/"))
            for i in top + inner
            if not files.hidden(i.base_name)
        ]


def _manifest(fingerprint: str) -> str:
    """Return the manifest's name in the store."""
    return f"manifests/{fingerprint}.json"


def _is_manifest(name: str) -> bool:
    return name.endswith(".json") and FINGERPRINT.fullmatch(name.removesuffix(".json")) is not None


def _stale(had: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    changed = sorted(n for n in had.keys() | wanted.keys() if had.get(n) != wanted.get(n))
    return f"was computed from other versions of {', '.join(changed)}"
