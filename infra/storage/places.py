"""A directory or file, local or on S3: where it is, and durable files, small atomic ones, and renames in it."""

import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from typing import Any

from ebbflow.infra.storage import files, filesystems, private
from ebbflow.infra.storage.filesystems import MEMORY, filesystem, split, to_uri

_PIECE = 8 << 20  # bytes read at a time
_READS = 5  # of a file that changes meanwhile
_PAUSE = 0.02  # seconds before the second, and as much more before each later one


class Sink:
    """A file that is being written: counts and hashes what passes, and keeps the first error for the end.

    The libraries that write into it close their archive even after an error, some of them in a destructor where a
    second one would end the process. So nothing is raised until ``StorageLocation.writing`` ends.
    """

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._hash = hashlib.sha256()
        self.error: Exception | None = None
        self.size = 0  # bytes

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self.error is None:
            try:
                self._raw.write(view)
                self._hash.update(view)
            except Exception as exc:
                self.error = exc
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        """Do nothing; ``StorageLocation.writing`` makes the file durable."""

    def tell(self) -> int:
        return self.size

    @property
    def digest(self) -> str:
        """Return the SHA-256 of what was written, in hex."""
        return self._hash.hexdigest()


class StorageLocation:
    """Names below a root. Errors are those of the system: wrap calls in ``filesystems.translated``.

    It is made once, where a request or a command names a path or URI, and handed down; what is below it needs no
    reading again (``under``). As a text it is what it was named by, for people; ``uri`` is for machines. Raises
    ``OptionError`` for what is no place.
    """

    def __init__(self, uri: str | os.PathLike[str]) -> None:
        self.scheme, self.root = split(uri)
        self.uri = to_uri(self.root, self.scheme)
        self._named = os.fspath(uri)

    def __str__(self) -> str:
        return self._named

    def __repr__(self) -> str:
        return f"StorageLocation({self._named!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorageLocation) and self.uri == other.uri

    def __hash__(self) -> int:
        return hash(self.uri)

    def under(self, name: str) -> "StorageLocation":
        """Return the place of ``name`` in this directory; of the directory itself for an empty one."""
        if not name:
            return self
        found = copy(self)
        found.root, found.uri = self.path(name), self.uri_of(name)
        found._named = f"{self._named.rstrip('/')}/{name}"
        return found

    @property
    def local(self) -> bool:
        return self.scheme == "file"

    @property
    def tiered(self) -> bool:
        """Tell whether peers' memory is before the store."""
        return self.scheme.startswith(MEMORY)

    @property
    def behind(self) -> "StorageLocation":
        """Return the same place in the store behind peers' memory; itself where there is none before it."""
        if not self.tiered:
            return self
        found = copy(self)
        found.scheme = self.scheme.removeprefix(MEMORY)
        found.uri, found._named = to_uri(self.root, found.scheme), self._named.removeprefix(MEMORY)
        return found

    def flush(self, name: str = "") -> None:
        """Wait until the store has all that was written at ``name`` and below; see ``filesystems.flush``."""
        filesystems.flush(self.scheme, self.path(name))

    def path(self, name: str) -> str:
        """Return the path of ``name``, in pyarrow's terms."""
        return f"{self.root.rstrip('/')}/{name}" if name else self.root

    def uri_of(self, name: str) -> str:
        return to_uri(self.path(name), self.scheme)

    def fs(self) -> Any:
        """Return the ``pyarrow.fs.FileSystem``, as the environment describes it now."""
        return filesystem(self.scheme)

    @contextmanager
    def writing(self, name: str) -> Iterator[Sink]:
        """Write a new file; after the block it is durable. It is not atomic: a manifest makes files count."""
        path = self.path(name)
        if not self.local:
            with self.fs().open_output_stream(path) as out:
                sink = Sink(out)
                yield sink
            if sink.error is not None:
                raise sink.error
            return
        private.make_folder(os.path.dirname(path))
        # unbuffered: a buffer would try its write again while the file is closed after an error
        with private.open_file(path, "xb", buffering=0) as raw:
            sink = Sink(_Whole(raw))
            yield sink
            if sink.error is not None:
                raise sink.error
            os.fsync(raw.fileno())

    def write(self, name: str, data: bytes) -> None:
        """Write a small file atomically and durably; see ``files.write_atomic``."""
        files.write_atomic(self.fs(), self.scheme, self.path(name), data)
        if self.local:
            files.sync_folder(os.path.dirname(self.path(name)))

    def sync(self, name: str = "") -> None:
        """Make the names in a directory durable."""
        if self.local:
            files.sync_folder(self.path(name))

    def read(self, name: str, *, fixed: bool = False) -> bytes:
        """Return a file's content, of one version of it.

        S3 tells the length first and sends that much then: of a file that was replaced in between it would be a part,
        or more than there is. So entity tags are compared afterwards, but where ``fixed`` says that a name is
        written once, which saves a request. Raises ``OSError``, also where the file keeps changing.
        """
        fs, path = self.fs(), self.path(name)
        if fixed or self.behind.local:
            with fs.open_input_file(path) as file:
                return bytes(file.read())
        for number in range(_READS):
            time.sleep(_PAUSE * number)
            data, problem = b"", None
            with fs.open_input_file(path) as file:
                version = file.metadata()
                try:
                    data = bytes(file.read())
                except OSError as exc:  # of another length: there may be nothing where it was to be read
                    problem = exc
            with fs.open_input_file(path) as file:
                if file.metadata() == version:
                    if problem is not None:
                        raise problem
                    return data
        raise OSError(f"{path} changed whenever it was read, {_READS} times; try again once it is left alone")

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Return ``length`` bytes of a file from ``offset``; fewer where it ends."""
        with self.fs().open_input_file(self.path(name)) as file:
            return bytes(file.read_at(length, offset))

    def pieces(self, name: str) -> Iterator[bytes]:
        """Return a file's content, a few megabytes at a time."""
        with self.fs().open_input_stream(self.path(name)) as file:
            while piece := file.read(_PIECE):
                yield piece

    def is_file(self, name: str = "") -> bool:
        """Tell whether there is a file of this name."""
        return bool(self.fs().get_file_info(self.path(name)).is_file)

    def have(self, names: Sequence[str]) -> bool:
        """Tell whether there are files of all these names."""
        return all(info.is_file for info in self.fs().get_file_info([self.path(name) for name in names]))

    def entries(self, name: str = "") -> list[Any]:
        """Return the ``pyarrow.fs.FileInfo`` of all in a directory, sorted; none for one that is missing."""
        return files.listing(self.fs(), self.path(name))

    def remove(self, name: str) -> None:
        """Delete a file; a missing one is no error."""
        with suppress(FileNotFoundError):
            self.fs().delete_file(self.path(name))

    def remove_folder(self, name: str) -> None:
        """Delete a directory and all in it; a missing one is no error."""
        with suppress(FileNotFoundError):
            if self.local:
                shutil.rmtree(self.path(name))
            else:
                self.fs().delete_dir(self.path(name))

    def move_folder(self, name: str, to: str, first: str) -> None:
        """Rename a directory of files. On S3, where each file is copied, ``first`` goes before all others."""
        if self.local:
            os.rename(self.path(name), self.path(to))
            return
        inside = [info.base_name for info in self.entries(name) if info.is_file]
        for file in sorted(inside, key=lambda file: (file != first, file)):
            self.fs().move(self.path(f"{name}/{file}"), self.path(f"{to}/{file}"))
        self.remove_folder(name)


class _Whole:
    """Writes all of a buffer to an unbuffered file, which may take less at once."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def write(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            done += self._raw.write(view[done:])
