"""A small cache of JSON values with atomic writes, for statistics, calibration and stage history."""

import hashlib
from contextlib import suppress
from typing import Any

from ebbflow.infra.errors import StorageError
from ebbflow.infra.storage import checksums, files
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.places import StorageLocation


class JsonStore:
    """JSON values by key in a directory, local or on S3. Safe for several threads and processes.

    The last writer of a key wins. Entries that are missing, torn, unreadable, of another key or with a byte that
    has changed since they were written read as missing: whatever is here can be computed again.
    """

    def __init__(self, place: StorageLocation) -> None:
        self.place = place

    def get(self, key: str) -> Any | None:
        """Return the value of ``key``, or ``None``."""
        content = self._content(self.file(key))
        return content.get("value") if content is not None and content.get("key") == key else None

    def put(self, key: str, value: Any) -> None:
        """Keep ``value`` under ``key``. Raises ``StorageError`` when it cannot be written."""
        data = checksums.sealed({"key": key, "value": value})
        with translated(f"write to the cache {self.place.uri}"):
            files.write_atomic(self.place.fs(), self.place.scheme, self.file(key), data)

    def remove(self, key: str) -> None:
        """Forget ``key``; one that is not there is no error. Raises ``StorageError``."""
        with translated(f"delete from the cache {self.place.uri}"), suppress(FileNotFoundError):
            self.place.fs().delete_file(self.file(key))

    def under(self, name: str) -> "JsonStore":
        """Return the store of JSON values in the directory ``name`` below this one."""
        return JsonStore(self.place.under(name))

    def folders(self) -> frozenset[str]:
        """Return the names of the directories below this one; none where that cannot be told."""
        try:
            with translated(f"read {self.place.uri}"):
                found = self.place.entries()
        except StorageError:
            return frozenset()
        return frozenset(i.base_name for i in found if not i.is_file)

    def values(self) -> list[Any]:
        """Return the values of all keys, in no particular order, without those of directories below. What ``get``
        would call missing is left out."""
        try:
            with translated(f"read {self.place.uri}"):
                found = self.place.entries()
                there = [i.path for i in found if i.is_file and i.path.endswith(".json")]
                contents = files.in_parallel(self._content, there)
        except StorageError:
            return []
        return [
            content.get("value")
            for path, content in zip(there, contents, strict=True)
            if content is not None and path == self.file(str(content.get("key")))
        ]

    def _content(self, path: str) -> dict[str, Any] | None:
        try:
            with translated(f"read {self.place.uri}"), self.place.fs().open_input_file(path) as file:
                return checksums.unsealed(file.read())
        except (StorageError, checksums.DamagedError):
            return None

    def file(self, key: str, suffix: str = ".json") -> str:
        """Return the path, in pyarrow's terms, of the file that belongs to ``key``."""
        return self.place.path(f"{hashlib.sha256(key.encode()).hexdigest()[:40]}{suffix}")
