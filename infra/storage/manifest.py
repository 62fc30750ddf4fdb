"""What a checkpoint says about itself. Without a valid manifest a checkpoint does not exist."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ebbflow.infra.storage import checksums

VERSION = 2
FINGERPRINT = re.compile(r"[0-9a-f]{1,128}")
ATTEMPT = re.compile(r"(\d{13,16})-\d+-[0-9a-f]{12}")  # milliseconds since 1970, process id, random
_CHECKSUM = re.compile(rf"[0-9a-f]{{{checksums.DIGITS}}}")


class UnusableError(Exception):
    """Why a manifest or its data cannot serve, as the end of a sentence that starts with the checkpoint."""


class OtherVersionError(UnusableError):
    """Written by another version of Ebbflow, which may still use it."""


class DamagedError(UnusableError):
    """The manifest or a file is not what was written. ``attempt`` is the manifest's, empty where it tells none."""

    def __init__(self, why: str, attempt: str) -> None:
        super().__init__(why)
        self.attempt = attempt


class StaleError(UnusableError):
    """Whole, but computed from other versions of its tables than are there now."""


@dataclass(frozen=True, slots=True)
class Part:
    """One Parquet file of a checkpoint."""

    name: str
    size: int  # bytes
    rows: int
    xxh64: str  # of the whole file, see ``infra.storage.checksums``


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of ``manifests/<fingerprint>.json``."""

    fingerprint: str
    attempt: str  # the data lies in data/<fingerprint>/<attempt>
    parts: tuple[Part, ...]
    columns: tuple[tuple[str, str], ...]  # (name, Spark SQL type)
    seconds: float
    created: float  # seconds since the Unix epoch
    sources: Mapping[str, str]  # table name -> version

    @property
    def data(self) -> str:
        """Return the directory of the files, relative to the store."""
        return f"data/{self.fingerprint}/{self.attempt}"

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def size(self) -> int:
        """Return the summed size of the files, bytes."""
        return sum(part.size for part in self.parts)

    def encode(self) -> bytes:
        """Return the manifest as JSON with a checksum of its own."""
        content = {
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "data": self.data,
            "files": [{"name": p.name, "size": p.size, "rows": p.rows, "xxh64": p.xxh64} for p in self.parts],
            "rows": self.rows,
            "bytes": self.size,
            "columns": [list(column) for column in self.columns],
            "seconds": self.seconds,
            "created": self.created,
            "sources": dict(sorted(self.sources.items())),
        }
        return checksums.sealed(content, indent=1)


def decode(content: bytes, fingerprint: str) -> Manifest:
    """Read the manifest of ``fingerprint``. Raises ``UnusableError``, saying what is wrong."""
    try:
        raw = checksums.unsealed(content)
    except checksums.DamagedError as exc:
        _check_version(_unsealed_version(content))
        raise UnusableError(f"has a damaged manifest: {exc}") from exc
    _check_version(raw.get("version"))
    if raw.get("fingerprint") != fingerprint:
        raise UnusableError(f"has the manifest of another fingerprint, {raw.get('fingerprint')!r}")
    manifest = Manifest(
        fingerprint,
        _attempt(raw.get("data"), fingerprint),
        tuple(_part(item) for item in _list(raw, "files")),
        tuple(_column(item) for item in _list(raw, "columns")),
        _number(raw, "seconds"),
        _number(raw, "created"),
        _sources(raw.get("sources")),
    )
    for key, value in (("rows", manifest.rows), ("bytes", manifest.size)):
        if raw.get(key) != value:
            raise UnusableError(f"says {raw.get(key)!r} {key}, its files sum to {value}")
    return manifest


def _unsealed_version(content: bytes) -> Any:
    """Return the version of a manifest without a checksum, as the first version wrote them; else ``VERSION``."""
    try:
        raw = json.loads(content)
    except (ValueError, RecursionError):
        return VERSION
    return raw.get("version") if isinstance(raw, dict) and "checksum" not in raw else VERSION


def _check_version(version: Any) -> None:
    if version != VERSION:
        raise OtherVersionError(f"has a manifest of version {version!r}, not {VERSION}")


def _attempt(data: Any, fingerprint: str) -> str:
    parts = data.split("/") if isinstance(data, str) else []
    if len(parts) != 3 or parts[:2] != ["data", fingerprint] or not ATTEMPT.fullmatch(parts[2]):
        raise UnusableError(f"points outside its own data directory, to {data!r}")
    return str(parts[2])


def _list(raw: Mapping[str, Any], key: str) -> list[Any]:
    value = raw.get(key)
    if not isinstance(value, list):
        raise UnusableError(f"has a manifest without a list of {key}")
    return value


def _part(item: Any) -> Part:
    if not isinstance(item, dict):
        raise UnusableError(f"lists {item!r} as a file")
    name, size, rows, xxh64 = (item.get(key) for key in ("name", "size", "rows", "xxh64"))
    if not isinstance(name, str) or not name or "/" in name or "\0" in name or name in (".", ".."):
        raise UnusableError(f"lists a file outside its own data directory, {name!r}")
    # type() is int: a bool is an int too
    if type(size) is not int or type(rows) is not int or min(size, rows) < 0:
        raise UnusableError(f"lists {name!r} with size {size!r} and rows {rows!r}, not whole numbers >= 0")
    if not isinstance(xxh64, str) or not _CHECKSUM.fullmatch(xxh64):
        raise UnusableError(f"lists {name!r} with the checksum {xxh64!r}")
    return Part(name, size, rows, xxh64)


def _column(item: Any) -> tuple[str, str]:
    if not (isinstance(item, list) and len(item) == 2 and all(isinstance(text, str) for text in item)):
        raise UnusableError(f"lists {item!r} as a column, not a name and a type")
    return item[0], item[1]


def _number(raw: Mapping[str, Any], key: str) -> float:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UnusableError(f"has {value!r} as {key}, not a number")
    return float(value)


def _sources(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise UnusableError(f"has {value!r} as sources, not versions by table")
    return dict(value)
