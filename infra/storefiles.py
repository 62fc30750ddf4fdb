"""The files of a checkpoint store: manifests, verified checkpoints, notes of use."""

import os
import shutil
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import Any

from ebbflow.infra import files
from ebbflow.infra.clock import Clock
from ebbflow.infra.filesystems import filesystem, split, to_uri, translated
from ebbflow.infra.manifest import FINGERPRINT, Manifest, UnusableError, decode
from ebbflow.infra.protocols import Checkpoint, FileEntry, Relation

_USED_EVERY = 3_600.0  # seconds between two notes of use on S3, where each is a request
_KNOWN = frozenset({"data", "manifests", "cache", "apps"})


class StoreFiles:
    """Reads and writes a store's layout; ``ParquetCheckpointStore`` decides what to do with it."""

    def __init__(self, uri: str, clock: Clock) -> None:
        self.scheme, self.root = split(uri)
        self.uri = to_uri(self.root, self.scheme)
        self._clock = clock
        self._verified: dict[str, tuple[int, float]] = {}
        self._used: dict[str, float] = {}

    def fs(self) -> Any:
        """Return the ``pyarrow.fs.FileSystem``."""
        return filesystem(self.scheme)

    def publish(self, manifest: Manifest) -> Checkpoint | None:
        """Write the manifest unless a valid one is there; return the checkpoint that was first, if any."""
        path, data = self._manifest_path(manifest.fingerprint), manifest.encode()
        if self.scheme != "file":
            files.write_atomic(self.fs(), self.scheme, path, data)
            return None
        with self._exclusive():
            if files.write_once(path, data):
                return None
            existing = self.current(manifest.fingerprint, manifest.sources)
            if existing is None:
                files.write_atomic(self.fs(), self.scheme, path, data)
            return existing

    def _exclusive(self) -> Any:
        if self.scheme != "file":
            return nullcontext()
        os.makedirs(f"{self.root}/manifests", exist_ok=True)
        return files.locked(f"{self.root}/manifests/.lock", self._clock)

    def current(self, fingerprint: str, sources: Mapping[str, str]) -> Checkpoint | None:
        """Return the checkpoint if it is valid for ``sources``, else ``None``."""
        try:
            return self.load(fingerprint, sources)
        except UnusableError:
            return None

    def load(self, fingerprint: str, sources: Mapping[str, str] | None) -> Checkpoint | None:
        """Return the verified checkpoint, ``None`` if there is no manifest. Raises ``UnusableError``."""
        with translated(f"read the checkpoint store {self.uri}"):
            try:
                with self.fs().open_input_file(self._manifest_path(fingerprint)) as file:
                    content = file.read()
            except FileNotFoundError:
                return None
            manifest = decode(content, fingerprint)
            if sources is not None and dict(sources) != manifest.sources:
                raise UnusableError(_stale(manifest.sources, sources))
            return self.checkpoint(manifest)

    def checkpoint(self, manifest: Manifest) -> Checkpoint:
        """Return the checkpoint after comparing its files with the manifest. Raises ``UnusableError``."""
        folder = f"{self.root}/{manifest.data}"
        with translated(f"read the checkpoint {to_uri(folder, self.scheme)}"):
            there = {info.base_name: info for info in files.listing(self.fs(), folder) if info.is_file}
            entries = []
            for part in manifest.parts:
                info = there.get(part.name)
                if info is None:
                    raise UnusableError(f"lacks its file {part.name}")
                if info.size != part.size:
                    raise UnusableError(f"has {part.name} with {info.size} bytes, not {part.size}")
                entries.append(files.entry(info))
            files.in_parallel(self._verify, entries)
        name = f"ckpt_{manifest.fingerprint}"
        return Checkpoint(
            manifest.fingerprint,
            to_uri(folder, self.scheme),
            Relation(name, self.scheme, tuple(entries), manifest.columns),
            manifest.rows,
            manifest.size,
            manifest.seconds,
            manifest.created,
            dict(manifest.sources),
        )

    def _verify(self, found: FileEntry) -> None:
        state = (found.size, found.modified)
        if self._verified.get(found.path) == state:
            return
        if not files.looks_like_parquet(self.fs(), found.path, found.size):
            raise UnusableError(f"has {found.path.rsplit('/', 1)[1]}, which is not a Parquet file")
        self._verified[found.path] = state

    def last_used(self) -> dict[str, float]:
        """Return when each manifest was last used: its own time or its note's, whichever is later."""
        used: dict[str, float] = {}
        with translated(f"list the checkpoint store {self.uri}"):
            for info in files.listing(self.fs(), f"{self.root}/manifests"):
                fingerprint, _, kind = info.base_name.partition(".")
                if kind in ("json", "used"):
                    used[fingerprint] = max(used.get(fingerprint, 0.0), files.entry(info).modified)
        return used

    def touch(self, fingerprint: str) -> None:
        """Note the use; a store that may only be read goes without."""
        now = self._clock.now()
        path = self._manifest_path(fingerprint)
        with suppress(OSError):
            if self.scheme == "file":
                os.utime(path, (now, now))
            elif now - self._used.get(fingerprint, 0.0) >= _USED_EVERY:
                self._used[fingerprint] = now
                files.write_atomic(self.fs(), self.scheme, path.removesuffix("json") + "used", b"")

    def forget(self, fingerprint: str) -> None:
        """Delete a manifest: the checkpoint no longer exists."""
        path = self._manifest_path(fingerprint)
        with translated(f"delete the checkpoint {fingerprint} of {self.uri}"), self._exclusive():
            for name in (path, path.removesuffix("json") + "used"):
                with suppress(FileNotFoundError):
                    self.fs().delete_file(name)

    def delete(self, folder: str) -> None:
        """Delete a folder and all in it; a missing one is no error."""
        with translated(f"delete {to_uri(folder, self.scheme)}"):
            if self.scheme == "file":
                with suppress(FileNotFoundError):
                    shutil.rmtree(folder)
                return
            with suppress(FileNotFoundError):
                self.fs().delete_dir(folder)

    def manifests(self) -> list[str]:
        """Return the fingerprints that have a manifest, valid or not, sorted."""
        with translated(f"list the checkpoint store {self.uri}"):
            found = files.listing(self.fs(), f"{self.root}/manifests")
        return [i.base_name.removesuffix(".json") for i in found if i.is_file and _is_manifest(i.base_name)]

    def strangers(self) -> list[str]:
        """Return the URIs of visible files and folders that no store has."""
        with translated(f"list the checkpoint store {self.uri}"):
            top = [i for i in files.listing(self.fs(), self.root) if i.base_name not in _KNOWN]
            inner = [
                i
                for i in files.listing(self.fs(), f"{self.root}/manifests")
                if not _is_manifest(i.base_name.removesuffix(".used").removesuffix(".json") + ".json")
            ]
        return [to_uri(i.path, self.scheme) for i in top + inner if not files.hidden(i.base_name)]

    def _manifest_path(self, fingerprint: str) -> str:
        return f"{self.root}/manifests/{fingerprint}.json"


def _is_manifest(name: str) -> bool:
    return name.endswith(".json") and FINGERPRINT.fullmatch(name.removesuffix(".json")) is not None


def _stale(had: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    changed = sorted(n for n in had.keys() | wanted.keys() if had.get(n) != wanted.get(n))
    return f"was computed from other versions of {', '.join(changed)}"
