"""What WebHDFS' requests ask, and how it answers: parameters, statuses of files, errors as Hadoop's classes.

https://hadoop.apache.org/docs/stable/hadoop-project-dist/hadoop-hdfs/WebHDFS.html
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote_to_bytes

PREFIX = "/webhdfs/v1"
MAX_PATH = 4096  # characters
MAX_BYTES = 5 << 40  # of a file: the largest object of S3
BLOCK_BYTES = 128 << 20  # by which Hadoop splits files
_MAX_PARAMETERS = 64
_DIGITS = re.compile(r"\d{1,19}")

_CLASSES = {  # status and Java package of an error
    "FileNotFoundException": (404, "java.io"),
    "FileAlreadyExistsException": (403, "org.apache.hadoop.fs"),
    "ParentNotDirectoryException": (403, "org.apache.hadoop.fs"),
    "PathIsNotEmptyDirectoryException": (403, "org.apache.hadoop.fs"),
    "AccessControlException": (403, "org.apache.hadoop.security"),
    "IllegalArgumentException": (400, "java.lang"),
    "UnsupportedOperationException": (400, "java.lang"),
    "RetriableException": (503, "org.apache.hadoop.ipc"),
    "IOException": (500, "java.io"),
}


class RefusedError(Exception):
    """A request that is answered by an error.

    Args:
        kind: Hadoop's name of it, such as ``FileNotFoundException``.
        message: what the client shows.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.status, package = _CLASSES[kind]
        self.java = f"{package}.{kind}"

    def body(self) -> dict[str, Any]:
        """Return WebHDFS' ``RemoteException``."""
        found = {"exception": self.kind, "javaClassName": self.java, "message": str(self)}
        return {"RemoteException": found}


@dataclass(frozen=True, slots=True)
class FileStatus:
    """A file or directory.

    Args:
        name: the last part of its path.
        directory: whether it is one.
        size: bytes.
        modified: Unix time in ms.
    """

    name: str
    directory: bool
    size: int = 0
    modified: int = 0

    def to_json(self, owner: str, *, named: bool) -> dict[str, Any]:
        """Return it as WebHDFS writes it.

        Args:
            owner: who asks: whoever may, may do everything.
            named: with its name, as in a listing.
        """
        return {
            "accessTime": self.modified,
            "blockSize": 0 if self.directory else BLOCK_BYTES,
            "childrenNum": 0,
            "fileId": 0,
            "group": owner,
            "length": self.size,
            "modificationTime": self.modified,
            "owner": owner,
            "pathSuffix": self.name if named else "",
            "permission": "700" if self.directory else "600",
            "replication": 0 if self.directory else 1,
            "storagePolicy": 0,
            "type": "DIRECTORY" if self.directory else "FILE",
        }


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asks.

    Args:
        path: below the root, without a slash at its ends; empty: the root.
        parameters: by their names in lower case.
    """

    path: str
    parameters: Mapping[str, str] = field(default_factory=dict)

    @property
    def op(self) -> str:
        """Return the operation, in capitals."""
        return self.parameters.get("op", "").upper()

    @property
    def owner(self) -> str:
        """Return what files' owner is called: the name that the client has said."""
        return self.parameters.get("user.name", "")[:64] or "ebbflow"

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a parameter that is true or false. Raises ``RefusedError``."""
        value = self.parameters.get(name, str(default)).lower()
        if value not in ("true", "false"):
            raise _invalid(name, value, "must be true or false")
        return value == "true"

    def number(self, name: str) -> int | None:
        """Return a parameter that is a number of bytes; ``None`` without it. Raises ``RefusedError``."""
        value = self.parameters.get(name, "null")
        if value == "null":
            return None
        if not _DIGITS.fullmatch(value) or int(value) > MAX_BYTES:
            raise _invalid(name, value, f"must be 0 to {MAX_BYTES}")
        return int(value)

    def destination(self) -> str:
        """Return the path of ``destination``. Raises ``RefusedError``."""
        return path_of(self.parameters.get("destination", ""))


def _invalid(name: str, value: str, rule: str) -> RefusedError:
    return RefusedError(
        "IllegalArgumentException",
        f'Invalid value for webhdfs parameter "{name}": it {rule}; got {value!r:.80}',
    )


def parse(target: str) -> Request:
    """Return what the target of a request line asks. Raises ``RefusedError``.

    Args:
        target: as it came, its bytes as Latin-1.
    """
    raw, _, query = target.partition("?")
    if raw != PREFIX and not raw.startswith(PREFIX + "/"):
        raise RefusedError("FileNotFoundException", f"there is WebHDFS below {PREFIX} only; got {raw!r:.80}")
    try:
        path = unquote_to_bytes(raw.removeprefix(PREFIX).encode("latin-1")).decode()
        pairs = parse_qsl(
            query.encode("latin-1").decode(),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=_MAX_PARAMETERS,
        )
    except ValueError as error:
        raise RefusedError("IllegalArgumentException", f"the request cannot be read: {error}") from error
    return Request(path_of(path or "/"), {name.lower(): value for name, value in pairs})


def path_of(text: str) -> str:
    """Return a path below the root in its one form. Raises ``RefusedError`` for one that is none, or leaves it.

    Examples:
        >>> path_of("/sales//2024/")
        'sales/2024'
    """
    parts = [part for part in text.split("/") if part]
    if not text.startswith("/") or len(text) > MAX_PATH or "\0" in text:
        rule = f"must begin with / and have at most {MAX_PATH} characters, none of them NUL"
    elif any(part in (".", "..") for part in parts):
        rule = "must not hold '.' or '..' as a part"
    elif any(len(part.encode()) > 255 for part in parts):
        rule = "must not have a part of more than 255 bytes"
    else:
        return "/".join(parts)
    raise RefusedError("IllegalArgumentException", f"a path {rule}; got {text!r:.80}")


def to_bytes(value: Mapping[str, Any]) -> bytes:
    """Return an answer as JSON."""
    return json.dumps(value, separators=(",", ":")).encode()
