"""Small JSON files beside a run that say what was asked for: written whole, read back with their checksum."""

from collections.abc import Mapping
from typing import Any

from ebbflow.infra.storage import checksums, private
from ebbflow.infra.storage.files import write_atomic
from ebbflow.infra.storage.filesystems import filesystem, split, translated


class OtherVersionError(Exception):
    """A record that another version of Ebbflow has written."""


def save(uri: str, content: Mapping[str, Any], version: int) -> None:
    """Write ``content`` to ``uri``, for its user alone; its folder is made. Raises ``StorageError``."""
    scheme, path = split(uri)
    data = checksums.sealed({"format": version, **content}, indent=1)
    with translated(f"write {uri}"):
        store = filesystem(scheme)
        private.folder_maker(store, scheme)(path.rpartition("/")[0])
        write_atomic(store, scheme, path, data)


def load(uri: str, version: int) -> dict[str, Any]:
    """Return the content that ``save`` was given.

    Raises ``StorageError`` where there is none, ``DamagedError`` (a ``ValueError``) or ``KeyError`` for one that is
    not what was written, ``OtherVersionError`` for one of another ``version``.
    """
    scheme, path = split(uri)
    with translated(f"read {path}"), filesystem(scheme).open_input_file(path) as file:
        data = file.read()
    content = checksums.unsealed(data)
    if content.pop("format") != version:
        raise OtherVersionError(uri)
    return content


def remove(uri: str) -> None:
    """Remove the record; one that is not there is fine. Raises ``StorageError``."""
    scheme, path = split(uri)
    with translated(f"remove {path}"):
        store = filesystem(scheme)
        if store.get_file_info(path).is_file:
            store.delete_file(path)
