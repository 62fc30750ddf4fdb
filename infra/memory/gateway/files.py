"""``GatewayFiles``: what WebHDFS asks of files, below one root of a store, with HDFS' rules.

A file that is written lies below ``.ebbflow-gateway/`` until it is whole and the store has it, and is moved then: its
name has the old file or the new one. Memory keeps what was written through here and follows moves; before a file is
read from there, size and time of the store's are compared, so that files replaced by others are the store's.
"""

import errno
import os
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ebbflow.infra.errors import StorageError
from ebbflow.infra.memory.arrow import TierReader, TierWriter
from ebbflow.infra.memory.files import MemoryTier, TierFile
from ebbflow.infra.memory.gateway.messages import FileStatus, RefusedError
from ebbflow.infra.memory.gateway.moves import StoreMoves, origin_of
from ebbflow.infra.storage import files, private
from ebbflow.infra.storage.places import StorageLocation

PARTS = ".ebbflow-gateway"
"""Directory below the root for files that are not whole."""
_ABANDONED = 86400.0  # s after its last write for which a file that never became whole is kept
_FRESH = 2.0  # s for which the store is not asked again whether its file is the one in memory
_FIRST, _MOST = 128 << 10, 4 << 20  # bytes of the first and of later reads


class Opened:
    """A file that is read.

    Args:
        size: bytes.
        source: of its bytes.
        same: tells, after each piece, whether the store still has the file that was opened.
    """

    def __init__(self, size: int, source: Any, same: Callable[[], bool] = lambda: True) -> None:
        self.size = size
        self._source, self._same = source, same

    def pieces(self, offset: int, length: int) -> Generator[bytes, None, None]:
        """Yield ``length`` bytes from ``offset`` on, small pieces first: clients often need few of them.

        Raises ``OSError`` or ``InfraError``.
        """
        with self._source as source:
            source.seek(offset)
            size = _FIRST
            while length:
                piece = bytes(source.read(min(size, length)))
                if not piece or not self._same():
                    raise OSError("the file was replaced or cut while it was read")
                yield piece
                length -= len(piece)
                size = min(2 * size, _MOST)

    def close(self) -> None:
        """Release it; for one whose pieces were not asked for."""
        self._source.close()


class GatewayFiles:
    """Files below a root. Safe for several threads. Paths are those of ``Request``.

    Args:
        place: the root, in the store itself.
        tier: nodes' memory before the store.

    Methods raise ``RefusedError`` for what a rule of HDFS refuses, ``OSError`` and ``InfraError`` for what the
    store does.
    """

    def __init__(self, place: StorageLocation, tier: MemoryTier | None = None) -> None:
        self.place = place
        self._fs, self._tier = place.fs(), tier
        self._real = os.path.realpath(place.root) if place.local else ""
        self._moves = StoreMoves(place, tier)

    # --- looks --------------------------------------------------------------------------------------------

    def find(self, path: str) -> FileStatus | None:
        """Return what is at a path, if anything."""
        if not path:
            return FileStatus("", True)
        info = self._info(path)
        return _status(info) if info.is_file or _is_folder(info) else None

    def status(self, path: str) -> FileStatus:
        """Return what is at a path."""
        found = self.find(path)
        if found is None:
            raise RefusedError("FileNotFoundException", f"File does not exist: /{path}")
        return found

    def listing(self, path: str) -> list[FileStatus]:
        """Return what is in a directory, sorted by name; a file itself, without a name."""
        found = self.status(path)
        if not found.directory:
            return [FileStatus("", False, found.size, found.modified)]
        inside = files.listing(self._fs, self._at(path))
        known = [_status(info) for info in inside if info.is_file or _is_folder(info)]
        return sorted((one for one in known if one.name != PARTS), key=lambda one: one.name)

    def summary(self, path: str) -> tuple[int, int, int]:
        """Return directories, files and bytes at a path and below it."""
        found = self.status(path)
        if not found.directory:
            return 0, 1, found.size
        hidden = self.place.path(PARTS) + "/"
        inside = [
            info
            for info in files.listing(self._fs, self._at(path), recursive=True)
            if not f"{info.path}/".startswith(hidden)
        ]
        sizes = [int(info.size or 0) for info in inside if info.is_file]
        return 1 + len(inside) - len(sizes), len(sizes), sum(sizes)

    def check_file(self, path: str) -> None:
        """Raise ``RefusedError`` where there is no file to read."""
        if self._held(self._at(path)) is None and self.status(path).directory:
            raise RefusedError("FileNotFoundException", f"Path is not a file: /{path}")

    def open(self, path: str) -> Opened:
        """Open a file for reading, from memory where that has what the store has."""
        self.check_file(path)
        at = self._at(path)
        file = self._held(at)
        if self._tier is None or file is None:
            source = self._fs.open_input_file(at)
            return Opened(int(source.size()), source)

        seen = file.store_reads

        def same() -> bool:  # what memory has not any more comes from the store, by its name
            nonlocal seen
            if not file.dropped and file.store_reads == seen:
                return True
            seen = file.store_reads
            return origin_of(self._fs.get_file_info(file.path)) == file.origin

        return Opened(file.size, TierReader(self._tier, file), same)

    def _held(self, at: str) -> TierFile | None:
        """Return the file of which memory has blocks, compared with the store's a moment ago or now."""
        file = self._tier.find(at) if self._tier is not None else None
        if self._tier is None or file is None:
            return None
        now = time.monotonic()
        if file.origin is None or now - file.compared >= _FRESH:
            if file.origin != origin_of(self._fs.get_file_info(at)):
                self._tier.drop(file)  # another process has replaced it
                return None
            file.compared = now
        if not self._tier.holds(file):  # the store's own stream is faster than pieces of it
            self._tier.drop(file)
            return None
        return file

    # --- changes ------------------------------------------------------------------------------------------

    def check_create(self, path: str, *, overwrite: bool, parents: bool = True) -> None:
        """Raise ``RefusedError`` where a file must not be made.

        Args:
            path: of the file.
            overwrite: an existing one is replaced.
            parents: missing directories are made.
        """
        found = self.find(path)
        if found is not None and (found.directory or not overwrite):
            what = "a directory" if found.directory else "a file"
            raise RefusedError("FileAlreadyExistsException", f"/{path} already exists as {what}")
        folder = path.rpartition("/")[0]
        if not parents and self.find(folder) is None:
            raise RefusedError("FileNotFoundException", f"Parent directory doesn't exist: /{folder}")
        self._check_parents(path)

    @contextmanager
    def create(self, path: str, *, overwrite: bool) -> Iterator[Any]:
        """Write a file within the block; after it the store has it. After an error there is what was there before.

        Args:
            path: of the file.
            overwrite: an existing one is replaced.
        """
        part = self.place.path(f"{PARTS}/{uuid.uuid4().hex}")
        out = self._writer(part)
        try:
            yield out
        except BaseException:
            self._abort(out, part)
            raise
        try:
            size = out.tell()
            self._finish(out, part)
            if (found := self._fs.get_file_info(part).size) != size:
                raise StorageError(f"the store has {found} bytes of {size} of /{path}")
            self._publish(part, path, overwrite)
        except BaseException:
            if self._tier is not None:
                self._tier.drop_below(part)
            with suppress(OSError):
                self._fs.delete_file(part)
            raise

    def make_folders(self, path: str) -> bool:
        """Make a directory and its parents; tell whether it is there."""
        self._check_parents(path)
        found = self.find(path)
        if found is not None and not found.directory:
            raise RefusedError("FileAlreadyExistsException", f"Path is not a directory: /{path}")
        if found is None:
            self._make(self._at(path))
        return True

    def delete(self, path: str, *, recursive: bool) -> bool:
        """Delete what is at a path; tell whether anything was. The root stays."""
        found = self.find(path)
        if found is None or not path:
            return False
        at = self._at(path)
        if found.directory and not recursive and self.listing(path):
            raise _not_empty(path)
        with self._moves.moving(at):
            if found.directory and not recursive and self.place.local:
                _remove_empty(path, at)
            elif found.directory:  # on S3 also what came after the listing: it has no other way
                self.place.remove_folder(path)
            else:
                self.place.remove(path)
            if self._tier is not None:
                self._tier.drop_below(at)
        return True

    def rename(self, source: str, target: str, overwrite: bool | None = None) -> bool:
        """Move a file or directory; tell whether it was.

        Args:
            source: what is moved.
            target: its new path; a directory that is there takes it in, but with ``overwrite``.
            overwrite: not ``None``: rules of ``Options.Rename``, where what refuses is an error.
        """
        strict = overwrite is not None
        found = self.find(source)
        if found is None or not source:
            return _no("FileNotFoundException", f"rename source /{source} is not found", strict)
        there = self.find(target)
        if there is not None and there.directory and not strict:
            target = f"{target}/{found.name}".lstrip("/")
            there = self.find(target)
        if source == target and not strict:
            return True
        if f"{target}/".startswith(f"{source}/"):
            return _no("IOException", f"/{target} is /{source} or inside it", strict)
        if there is not None:
            if not overwrite:
                return _no(
                    "FileAlreadyExistsException", f"rename destination /{target} already exists", strict
                )
            if there.directory != found.directory or (there.directory and self.listing(target)):
                raise RefusedError(
                    "IOException", f"rename destination /{target} is of another kind or not empty"
                )
        parent = self.find(target.rpartition("/")[0])
        if parent is None or not parent.directory:
            kind = "FileNotFoundException" if parent is None else "ParentNotDirectoryException"
            return _no(kind, f"rename destination parent of /{target} is no directory", strict)
        self._moves.move(
            self._at(source), self._at(target), directory=found.directory, overwrite=bool(overwrite)
        )
        return True

    def remove_abandoned(self) -> None:
        """Delete what processes that were killed have left unfinished long ago."""
        for info in self.place.entries(PARTS):
            if info.is_file and time.time() - (info.mtime_ns or 0) / 1e9 > _ABANDONED:
                with suppress(OSError):
                    self._fs.delete_file(info.path)

    # --- the store ----------------------------------------------------------------------------------------

    def _at(self, path: str) -> str:
        """Return a path in the store's terms. Raises ``RefusedError`` for one that leaves the root by a link."""
        if path.partition("/")[0] == PARTS:
            raise RefusedError("AccessControlException", f"/{PARTS} is the gateway's own")
        found = self.place.path(path)
        if self.place.local:
            real = os.path.realpath(found)
            if real != self._real and not real.startswith(self._real.rstrip("/") + "/"):
                raise RefusedError(
                    "AccessControlException", f"/{path} is a link to outside of what is served"
                )
        return found

    def _info(self, path: str) -> Any:
        return self._fs.get_file_info(self._at(path))

    def _check_parents(self, path: str) -> None:
        """Raise ``RefusedError`` where a file is in the way of a directory."""
        folder = path.rpartition("/")[0]
        while folder:
            found = self.find(folder)
            if found is not None:
                if not found.directory:
                    raise RefusedError("ParentNotDirectoryException", f"/{folder} is not a directory")
                return
            folder = folder.rpartition("/")[0]

    def _make(self, folder: str) -> None:
        private.folder_maker(self._fs, self.place.scheme)(folder)

    def _writer(self, part: str) -> Any:
        if self.place.local:
            private.make_folder(os.path.dirname(part))
        if self._tier is not None:
            return TierWriter(self._tier, part, self._tier.settings)
        if self.place.local:
            return private.open_file(part, "xb")
        return self._fs.open_output_stream(part)

    def _finish(self, out: Any, part: str) -> None:
        """Let the store have a file."""
        if self._tier is None and self.place.local:
            out.flush()
            os.fsync(out.fileno())
        out.close()
        if self._tier is not None:
            self._tier.flush(part)

    def _abort(self, out: Any, part: str) -> None:
        if isinstance(out, TierWriter):
            out.abort()
            return
        with suppress(Exception):  # what is closed here is removed
            out.close()
        with suppress(OSError):
            self._fs.delete_file(part)

    def _publish(self, part: str, path: str, overwrite: bool) -> None:
        self.check_create(path, overwrite=overwrite)  # it may be long since the client has asked
        target = self._at(path)
        if self.place.local:
            private.make_folder(os.path.dirname(target))
        self._moves.move(part, target, directory=False, overwrite=overwrite)


def _not_empty(path: str) -> RefusedError:
    return RefusedError("PathIsNotEmptyDirectoryException", f"/{path} is non empty: Directory is not empty")


def _remove_empty(path: str, at: str) -> None:
    """Delete a local directory unless something has come into it since it was listed."""
    try:
        os.rmdir(at)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise _not_empty(path) from error
        raise


def _is_folder(info: Any) -> bool:
    from pyarrow.fs import FileType

    return bool(info.type == FileType.Directory)


def _status(info: Any) -> FileStatus:
    folder = not info.is_file
    modified = (info.mtime_ns or 0) // 1_000_000
    return FileStatus(Path(info.path).name, folder, 0 if folder else int(info.size or 0), modified)


def _no(kind: str, message: str, strict: bool) -> bool:
    if strict:
        raise RefusedError(kind, message)
    return False
