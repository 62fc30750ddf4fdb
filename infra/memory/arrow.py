"""A ``MemoryTier`` as a file system of pyarrow."""

import io
import time
from contextlib import suppress
from typing import Any

from pyarrow import PythonFile
from pyarrow.fs import FileInfo, FileSelector, FileSystemHandler, PyFileSystem

from ebbflow.infra.errors import StorageError
from ebbflow.infra.memory.blocks import BlockSettings
from ebbflow.infra.memory.files import MemoryTier, TierFile
from ebbflow.infra.storage import private


class AttachedTier:
    """``StorageTier`` of a ``MemoryTier``.

    Args:
        tier: the files.
        settings: layout of their blocks.
    """

    def __init__(self, tier: MemoryTier, settings: BlockSettings) -> None:
        self.filesystem = PyFileSystem(TierHandler(tier, settings))
        self.flush = tier.flush


class TierWriter(io.RawIOBase):
    """A new file; requests of full size go to the tier as they fill up.

    Args:
        tier: the files.
        path: in the store's terms.
        settings: layout of the blocks.
    """

    def __init__(self, tier: MemoryTier, path: str, settings: BlockSettings) -> None:
        self._tier, self._file = tier, TierFile(path)
        self._most = settings.request_blocks * settings.block_bytes
        self._buffer = bytearray()
        self._room: list[int] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._buffer += view
        whole = len(self._buffer) - len(self._buffer) % self._most
        if whole:
            self._tier.append(self._file, bytes(self._buffer[:whole]), self._room)
            del self._buffer[:whole]
        return len(view)

    def tell(self) -> int:
        return self._file.size + len(self._buffer)

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        tier, file = self._tier, self._file
        try:
            if self._buffer:
                tier.append(file, bytes(self._buffer), self._room)
            tier.store.then(file, lambda: tier.finish(file))
            file.modified = time.time()
            tier.add(file)
            tier.store.settle(file)
        except BaseException:
            tier.drop(file)
            raise
        finally:
            tier.give_room(self._room)

    def abort(self) -> None:
        """Forget what was written; the store behind removes what it has of it, asynchronously."""
        if self.closed:
            return
        super().close()
        self._tier.discard(self._file)
        self._tier.give_room(self._room)


class TierReader(io.RawIOBase):
    """A file of the tier."""

    def __init__(self, tier: MemoryTier, file: TierFile) -> None:
        self._tier, self._file, self._at = tier, file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to ``offset`` bytes from the start, the position or the end, and return the position."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        self._at = max(0, origin + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        return self._file.size

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._file.size - self._at)
        found = self._tier.read(self._file, self._at, left if size is None or size < 0 else size)
        self._at += len(found)
        return found

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer`` as far as bytes are left, and return their number."""
        found = self.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)


class TierHandler(FileSystemHandler):  # type: ignore[misc]
    """The tier as a file system of pyarrow: that of the store behind, but for files that peers hold."""

    def __init__(self, tier: MemoryTier, settings: BlockSettings) -> None:
        self._tier, self._base, self._settings = tier, tier.base, settings

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TierHandler) and other._tier is self._tier

    def __hash__(self) -> int:
        return id(self._tier)

    def get_type_name(self) -> str:
        """Return the scheme."""
        return self._tier.scheme

    def normalize_path(self, path: str) -> str:
        """Return a path as the store behind writes it."""
        return str(self._base.normalize_path(path))

    def get_file_info(self, paths: list[str]) -> list[FileInfo]:
        """Return what is known of files, those of peers too."""
        pending = [
            self._pending(path) for path in paths
        ]  # first: what is stored meanwhile is in neither else
        found = self._base.get_file_info(paths)
        return [ours or info for ours, info in zip(pending, found, strict=True)]

    def get_file_info_selector(self, selector: FileSelector) -> list[FileInfo]:
        """Return what is below a directory, files of peers too."""
        folder = selector.base_dir.rstrip("/")
        pending = [one for one in self._tier.below(folder) if not one.stored]  # first, as above
        found = {one.path: one for one in self._base.get_file_info(selector)}
        for file in pending:
            if not file.dropped and (selector.recursive or file.path.rpartition("/")[0] == folder):
                found[file.path] = file.info()
        return list(found.values())

    def _pending(self, path: str) -> FileInfo | None:
        file = self._tier.find(path)
        return file.info() if file is not None and not file.stored else None

    def create_dir(self, path: str, recursive: bool) -> None:
        """Make a directory in the store behind."""
        if self._tier.behind == "file":
            private.make_folder(path)
        else:
            self._base.create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        """Delete a directory and what peers hold of it."""
        self._tier.drop_below(path)
        self._base.delete_dir(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        """Delete what is in a directory, and what peers hold of it."""
        self._tier.drop_below(path)
        self._base.delete_dir_contents(path, missing_dir_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> None:
        """Raise ``StorageError``: a store is not emptied."""
        raise StorageError("the root of a store must not be emptied")

    def delete_file(self, path: str) -> None:
        """Delete a file."""
        file = self._tier.find(path)
        self._tier.drop_below(path)
        # what peers alone had is deleted then
        with suppress(*(() if file is None or file.stored else (FileNotFoundError,))):
            self._base.delete_file(path)

    def move(self, src: str, dest: str) -> None:
        """Move a file or directory once the store behind has it; peers keep what they hold."""
        self._tier.flush(src)
        self._make_way(dest)
        self._base.move(src, dest)
        self._tier.follow_move(src, dest)

    def copy_file(self, src: str, dest: str) -> None:
        """Copy a file once the store behind has it."""
        self._tier.flush(src)
        self._make_way(dest)
        self._base.copy_file(src, dest)

    def open_input_stream(self, path: str) -> Any:
        """Open a file for reading."""
        return self.open_input_file(path)

    def open_input_file(self, path: str) -> Any:
        """Open a file for reading, on peers while they hold it."""
        file = self._tier.find(path)
        return (
            self._base.open_input_file(path)
            if file is None
            else PythonFile(TierReader(self._tier, file), "r")
        )

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        """Open a file that is written to peers and the store behind."""
        self._make_way(path)
        return PythonFile(TierWriter(self._tier, path, self._settings), "w")

    def _make_way(self, path: str) -> None:
        """Let the store behind have the file that is replaced at ``path``, before what replaces it."""
        if self._tier.find(path) is not None:
            end = time.monotonic() + self._settings.store_timeout
            with suppress(StorageError, OSError):  # what it refuses is replaced, too
                self._tier.flush(path)
            self._tier.drop_below(path, max(end - time.monotonic(), 0.0))

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        """Open a file for appending, in the store behind alone."""
        self._tier.flush(path)
        self._tier.drop_below(path)
        return self._base.open_append_stream(path)
