"""A small cache of JSON values with atomic writes, for statistics, calibration and stage history."""

import hashlib
import json
from typing import Any

from ebbflow.infra import files
from ebbflow.infra.errors import StorageError
from ebbflow.infra.filesystems import filesystem, split, to_uri, translated


class JsonStore:
    """JSON values by key in a folder, local or on S3. Safe for several threads and processes.

    The last writer of a key wins. Entries that are missing, torn, unreadable or of another key read as
    missing: whatever is here can be computed again.
    """

    def __init__(self, uri: str) -> None:
        self.scheme, self.path = split(uri)
        self.uri = to_uri(self.path, self.scheme)

    def get(self, key: str) -> Any | None:
        """Return the value of ``key``, or ``None``."""
        try:
            with (
                translated(f"read {self.uri}"),
                filesystem(self.scheme).open_input_file(self.file(key)) as file,
            ):
                content = json.loads(file.read())
        except (StorageError, ValueError, RecursionError):
            return None
        if not isinstance(content, dict) or content.get("key") != key:
            return None
        return content.get("value")

    def put(self, key: str, value: Any) -> None:
        """Keep ``value`` under ``key``. Raises ``StorageError`` when it cannot be written."""
        data = json.dumps({"key": key, "value": value}, allow_nan=True).encode()
        with translated(f"write to the cache {self.uri}"):
            files.write_atomic(filesystem(self.scheme), self.scheme, self.file(key), data)

    def file(self, key: str, suffix: str = ".json") -> str:
        """Return the path, in pyarrow's terms, of the file that belongs to ``key``."""
        return f"{self.path}/{hashlib.sha256(key.encode()).hexdigest()[:40]}{suffix}"
