"""Snapshots of a job: a directory each, with one file per actor, that counts once its manifest is there."""

import json
import os
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ebbflow.infra.elastic.wire import codec
from ebbflow.infra.errors import ElasticError
from ebbflow.infra.storage import private
from ebbflow.infra.storage.files import write_atomic

MANIFEST = "manifest.json"
MASTER_FILE = "master.bin"


def write(path: str, content: Any) -> None:
    """Write one actor's part. Raises ``ElasticError`` when it cannot be written."""
    try:
        write_atomic(None, "file", path, codec.pack(content))
    except OSError as error:
        raise ElasticError(f"the snapshot file {path} cannot be written: {error.strerror}") from error


def write_quickly(path: str, content: Any) -> None:
    """Write a file that survives its writer's death; should the whole machine die, readers see the damage.

    Raises ``ElasticError``.
    """
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        private.make_folder(os.path.dirname(path))
        with private.open_file(temporary, "wb") as file:
            file.write(codec.pack(content))
        os.replace(temporary, path)
    except OSError as error:
        raise ElasticError(f"the file {path} cannot be written: {error.strerror}") from error


def whole(path: str) -> bool:
    """Return whether a file is there and undamaged."""
    try:
        codec.check(Path(path).read_bytes(), path)
    except (OSError, ElasticError):
        return False
    return True


def attempt(path: str, content: Any) -> str | None:
    """Write one actor's part; return what went wrong, or ``None``: a job outlives a snapshot that fails."""
    try:
        write(path, content)
    except ElasticError as error:
        return str(error)
    return None


def read(path: str) -> Any:
    """Return one actor's part. Raises ``ElasticError`` when it cannot be read or is damaged."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ElasticError(f"the snapshot file {path} cannot be read: {error.strerror}") from error
    return codec.unpack(data, path)


def _claimed(path: str) -> str:
    """Return the digest that a file's head names. Raises ``OSError``."""
    with open(path, "rb") as file:
        return codec.claimed(file.read(codec.HEAD_SIZE), path)


def _checksum(manifest: dict[str, Any]) -> str:
    """Return the digest of a manifest without its own."""
    return blake2b(json.dumps(manifest, sort_keys=True).encode(), digest_size=16).hexdigest()


def find(files: Sequence[str], items: Collection[int]) -> dict[int, Any]:
    """Return those of ``items`` that are in any of ``files``; a later file goes before an earlier one."""
    found: dict[int, Any] = {}
    for path in files:
        content: dict[int, Any] = read(path)
        found.update({item: content[item] for item in items if item in content})
    return found


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A complete snapshot."""

    number: int
    folder: str
    executors: tuple[str, ...]  # files of workers
    shards: tuple[str, ...]  # files of servers

    def master(self) -> dict[str, Any]:
        """Return what the master wrote."""
        content: dict[str, Any] = read(os.path.join(self.folder, MASTER_FILE))
        return content


class SnapshotFolder:
    """The snapshots of one job. ``keep`` of them stay."""

    def __init__(self, folder: str, keep: int = 2) -> None:
        self._folder = folder
        self._keep = keep
        taken = [int(path.name.rpartition("-")[2]) for path in Path(folder).glob("*snapshot-*")]
        self._next = max(taken, default=-1) + 1
        self.damaged: list[str] = []  # complete ones that the last ``latest`` passed over, and why

    def begin(self) -> tuple[int, str]:
        """Return the number and directory of a new snapshot."""
        number, self._next = self._next, self._next + 1
        folder = os.path.join(self._folder, f"snapshot-{number:06}")
        private.make_folder(folder)
        return number, folder

    def commit(self, snapshot: Snapshot, master: dict[str, Any]) -> None:
        """Make a snapshot count, whose other files are there, and delete those that are not kept.

        Raises ``ElasticError``.
        """
        write(os.path.join(snapshot.folder, MASTER_FILE), master)
        names: dict[str, Any] = {
            "number": snapshot.number,
            "executors": [os.path.basename(path) for path in snapshot.executors],
            "shards": [os.path.basename(path) for path in snapshot.shards],
        }
        manifest = os.path.join(snapshot.folder, MANIFEST)
        try:
            master_file = os.path.join(snapshot.folder, MASTER_FILE)
            files = [master_file, *snapshot.executors, *snapshot.shards]
            names["digests"] = {os.path.basename(path): _claimed(path) for path in files}
            data = json.dumps({**names, "checksum": _checksum(names)}).encode()
            write_atomic(None, "file", manifest, data)
        except OSError as error:
            raise ElasticError(f"the manifest {manifest} cannot be written: {error.strerror}") from error
        complete = [folder for folder in self._folders() if (folder / MANIFEST).exists()]
        for folder in self._folders():
            if folder not in complete[: self._keep] and folder.name < os.path.basename(snapshot.folder):
                shutil.rmtree(folder, ignore_errors=True)

    def latest(self) -> Snapshot | None:
        """Return the newest snapshot all of whose files are whole; those passed over are named in ``damaged``."""
        self.damaged = []
        for folder in self._folders():
            try:
                names = json.loads((folder / MANIFEST).read_text())
                if names.pop("checksum") != _checksum(names):
                    raise ElasticError(f"{folder / MANIFEST} is damaged")
                executors, shards = (
                    tuple(str(folder / name) for name in names[kind]) for kind in ("executors", "shards")
                )
                for path in (folder / MASTER_FILE, *map(Path, (*executors, *shards))):
                    if codec.check(path.read_bytes(), str(path)) != names["digests"][path.name]:
                        raise ElasticError(f"{path} is another snapshot's")
            except FileNotFoundError as error:
                if (folder / MANIFEST).exists():  # else it was never finished
                    self.damaged.append(f"{folder} lacks {os.path.basename(error.filename)}")
                continue
            except (OSError, ValueError, KeyError, TypeError, AttributeError, ElasticError) as error:
                self.damaged.append(f"{folder}: {error}")
                continue
            return Snapshot(names["number"], str(folder), executors, shards)
        return None

    def set_aside(self) -> None:
        """Rename all snapshots, so that none of them counts or is deleted. Raises ``ElasticError``."""
        for folder in self._folders():
            try:
                folder.rename(folder.with_name(f"damaged-{folder.name}"))
            except OSError as error:
                raise ElasticError(f"{folder} cannot be set aside: {error.strerror}") from error

    def _folders(self) -> list[Path]:
        return sorted(Path(self._folder).glob("snapshot-*"), reverse=True)
