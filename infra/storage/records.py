"""Small JSON files beside a run that say what was asked for: written whole, read back with their checksum."""

from collections.abc import Mapping
from typing import Any

from ebbflow.infra.storage import checksums, private
from ebbflow.infra.storage.files import write_atomic
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.places import StorageLocation


class OtherVersionError(Exception):
    """A record that another version of Ebbflow has written."""


def save(place: StorageLocation, content: Mapping[str, Any], version: int) -> None:
    """Write ``content`` to the file ``place``, for its user alone; its directory is made. Raises ``StorageError``."""
    data = checksums.sealed({"format": version, **content}, indent=1)
    with translated(f"write {place}"):
        store = place.fs()
        private.folder_maker(store, place.scheme)(place.root.rpartition("/")[0])
        write_atomic(store, place.scheme, place.root, data)


def load(place: StorageLocation, version: int) -> dict[str, Any]:
    """Return the content that ``save`` was given.

    Raises ``StorageError`` where there is none, ``DamagedError`` (a ``ValueError``) or ``KeyError`` for one that is
    not what was written, ``OtherVersionError`` for one of another ``version``.
    """
    with translated(f"read {place.root}"):
        data = place.read("")
    content = checksums.unsealed(data)
    if content.pop("format") != version:
        raise OtherVersionError(str(place))
    return content


def remove(place: StorageLocation) -> None:
    """Remove the record; one that is not there is fine. Raises ``StorageError``."""
    with translated(f"remove {place.root}"):
        if place.is_file():
            place.fs().delete_file(place.root)
