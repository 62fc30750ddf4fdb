"""Checksums of what is written and read back: of whole files, and of small JSON texts that carry their own.

They find damage by disks, memory and copies, not forgery: whoever can write a file can write its checksum.
"""

import errno
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import xxhash

from ebbflow.infra.errors import StorageError
from ebbflow.infra.storage import files
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.filesystems import filesystem, translated
from ebbflow.infra.storage.places import StorageLocation

SEED = 42  # Spark's own: what its function xxhash64 returns in an executor is compared with what is computed here
DIGITS = 16
_BLOCK = 1 << 20  # bytes; xxhash lets other threads run while it hashes blocks of this size
_SEAL = b', "checksum": "'
_END = b'"}\n'


class DamagedError(ValueError):
    """A JSON text that is not what ``sealed`` returned; says what is wrong."""


@runtime_checkable
class ChecksumEngine(Protocol):
    """An engine that can have files hashed where they are read and written."""

    def checksums(self, scheme: str, entries: Sequence[FileEntry]) -> list[str]:
        """Return what ``of_files`` returns."""
        ...


def of_bytes(data: bytes | memoryview) -> str:
    """Return the XXH64 of ``data`` as 16 hex digits."""
    return xxhash.xxh64(data, seed=SEED).hexdigest()


def of_file(scheme: str, path: str) -> str:
    """Return the XXH64 of a whole file; ``path`` is in pyarrow's terms. Raises ``OSError``."""
    digest = xxhash.xxh64(seed=SEED)
    # bytes are copied, not mapped: a mapped file that another process shortens ends this one with SIGBUS
    if scheme == "file":
        block = memoryview(bytearray(_BLOCK))
        with open(path, "rb", buffering=0) as source:
            while count := source.readinto(block):
                digest.update(block[:count])
    else:
        with filesystem(scheme).open_input_stream(path) as source:
            while data := source.read(8 * _BLOCK):
                digest.update(data)
    return digest.hexdigest()


def of_files(scheme: str, entries: Sequence[FileEntry]) -> list[str]:
    """Return the XXH64 of each file as it is now, a few at a time. Raises ``OSError``."""
    return files.in_parallel(lambda entry: of_file(scheme, entry.path), entries)


def of_place(place: StorageLocation) -> str:
    """Return the XXH64 of the whole file at ``place``. Raises ``StorageError``."""
    with translated(f"read {place}"):
        return of_file(place.scheme, place.root)


def is_same(place: StorageLocation, xxh64: str) -> bool:
    """Tell whether the file at ``place`` has this checksum; one that is gone or on a broken disk has none.

    Raises ``StorageError`` where nobody can tell: storage that is out of reach has lost nothing.
    """
    try:
        return of_place(place) == xxh64
    except StorageError as error:
        cause = error.__cause__
        if isinstance(cause, FileNotFoundError) or (isinstance(cause, OSError) and cause.errno == errno.EIO):
            return False
        raise


def sealed(content: Mapping[str, Any], indent: int | None = None) -> bytes:
    """Return ``content``, which must not be empty, as a JSON object whose last key, ``checksum``, is the XXH64 of all
    bytes before it. ``unsealed`` is the inverse, and finds every byte that has changed since."""
    head = json.dumps(content, indent=indent).removesuffix("}").rstrip().encode()
    return head + _SEAL + of_bytes(head).encode() + _END


def unsealed(data: bytes) -> dict[str, Any]:
    """Return the content that ``sealed`` was given. Raises ``DamagedError``."""
    body, digits, end = data[: -DIGITS - 3], data[-DIGITS - 3 : -3], data[-3:]
    if end != _END or not body.endswith(_SEAL):
        raise DamagedError("it is torn, or was not written by Ebbflow")
    head = body.removesuffix(_SEAL)
    if of_bytes(head).encode() != digits:
        raise DamagedError("its checksum does not fit")
    try:
        content: dict[str, Any] = json.loads(head + b"}")
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"it is no JSON ({error})") from error
    return content
