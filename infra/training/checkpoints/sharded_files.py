"""The files of a checkpoint of sharded state: each process writes its own part, and reads what it needs of all.

Layout, in the checkpoint's directory beside its manifest::

    part-0001-of-0004.bin     values of the pieces that the second of four processes holds, one after another
    part-0001-of-0004.json    its index: of which tensor each piece is, where it lies, and its CRC-32
    rest.pt                   what all processes have alike, as ``torch.save`` has it

The manifest has the checksum of every file, as of other checkpoints. Who looks for a whole checkpoint compares sizes
and what is small; a process that reads pieces compares each with its own checksum, so that nobody reads everything.
"""

import io
import json
import re
from collections.abc import Collection, Sequence
from hashlib import sha256
from itertools import pairwise
from typing import Any, NamedTuple
from zlib import crc32

import torch

from ebbflow.infra.errors import UnusableCheckpointError
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.checkpoints.manifest import Payload
from ebbflow.infra.training.checkpoints.shards import (
    Cut,
    Division,
    Path,
    Piece,
    Region,
    elements,
    overlap,
    put,
    within,
)
from ebbflow.infra.training.checkpoints.states import read_state

VERSION = 1
REST = "rest.pt"
_PART = re.compile(r"part-(\d{4,})-of-(\d{4,})\.json")
_VALUES = re.compile(r"part-(\d{4,})-of-(\d{4,})\.bin")


def write_part(
    place: StorageLocation,
    name: str,
    division: Division,
    pieces: Sequence[tuple[Piece, torch.Tensor]],
    rest: dict[str, Any],
) -> None:
    """Write one part of the checkpoint ``name``, durably; its index is last. ``rest`` goes with the first part.

    Args:
        place: directory of the checkpoints.
        name: of the checkpoint.
        division: which part it is.
        pieces: values in the host's memory.
        rest: what all processes have alike.

    Raises the system's errors.
    """
    stem = f"part-{division.part:04d}-of-{division.parts:04d}"
    index = []
    with place.writing(f"{name}/{stem}.bin") as sink:
        for piece, values in pieces:
            data = _bytes(values)
            at = sink.size
            sink.write(data)
            index.append(
                {
                    "path": list(piece.path),
                    "dtype": piece.dtype,
                    "shape": list(piece.shape),
                    "start": list(piece.start),
                    "size": list(piece.size),
                    "at": at,
                    "bytes": data.nbytes,
                    "crc32": crc32(data),
                }
            )
    files = [Payload(f"{stem}.bin", sink.size, sink.digest)]
    if division.part == 0:
        with place.writing(f"{name}/{REST}") as sink:
            torch.save(rest, sink)
        files.append(Payload(REST, sink.size, sink.digest))
    content = {
        "version": VERSION,
        "files": [[file.name, file.size, file.sha256] for file in files],
        "pieces": index,
    }
    place.write(f"{name}/{stem}.json", json.dumps(content).encode())


def parts_of(place: StorageLocation, name: str) -> tuple[Payload, ...] | None:
    """Return all files of a checkpoint whose parts are all written; ``None`` where one is missing.

    Raises ``StorageError``.
    """
    with translated(f"read the checkpoint {place.uri_of(name)}"):
        indices = sorted(i.base_name for i in place.entries(name) if _PART.fullmatch(i.base_name))
        if not indices:
            return None
        found = [_PART.fullmatch(one) for one in indices]
        wanted = {int(match.group(2)) for match in found if match}
        if len(wanted) != 1 or len(indices) != wanted.pop():
            return None
        files = []
        for one in indices:
            data = place.read(f"{name}/{one}", fixed=True)
            files.append(Payload(one, len(data), sha256(data).hexdigest()))
            files += [Payload(*file) for file in json.loads(data)["files"]]
    return tuple(files)


class DamagedPartError(UnusableCheckpointError):
    """A part of a checkpoint is not what was written."""


def holds_values(file: str) -> bool:
    """Return whether a file of a checkpoint has values of one part; they are compared when they are read."""
    return _VALUES.fullmatch(file) is not None


class _Stored(NamedTuple):
    piece: Piece
    file: str
    at: int
    bytes: int
    crc32: int

    @property
    def region(self) -> Region:
        return tuple(slice(s, s + n) for s, n in zip(self.piece.start, self.piece.size, strict=True))


def read(
    place: StorageLocation,
    name: str,
    files: Sequence[Payload],
    map_location: Any = "cpu",
    cut: Cut | None = None,
    only: Collection[str] | None = None,
) -> dict[str, Any]:
    """Return the state, or the parts of its tensors that ``cut`` wants, compared with checksums.

    Args:
        place: directory of the checkpoints.
        name: of the checkpoint.
        files: of its manifest.
        map_location: device for the tensors.
        cut: which part of each sharded tensor; whole ones unless given.
        only: keys of the state, all unless given.

    Raises ``DamagedPartError`` for bytes that are not those written, ``UnusableCheckpointError`` for what is missing
    or of another version, and ``StorageError``.
    """
    uri = place.uri_of(name)
    with translated(f"read the checkpoint {uri}"):
        tensors = _index(place, name, files)
        rest = next((file for file in files if file.name == REST), None)
        if rest is None or not tensors:
            raise UnusableCheckpointError(
                f"{uri} has no index of shards; it is of another version of Ebbflow"
            )
        state = read_state(io.BytesIO(_whole(place, name, rest)), map_location)
        for path, stored in tensors.items():
            if only is None or path[0] in only:
                put(state, path, _assembled(place, name, path, stored, cut).to(map_location))
    return {key: value for key, value in state.items() if only is None or key in only}


def _index(place: StorageLocation, name: str, files: Sequence[Payload]) -> dict[Path, list[_Stored]]:
    found: dict[Path, list[_Stored]] = {}
    for file in files:
        if not _PART.fullmatch(file.name):
            continue
        try:
            content = json.loads(_whole(place, name, file))
            if content["version"] != VERSION:
                raise UnusableCheckpointError(
                    f"{place.uri_of(name)} has an index of version {content['version']!r}, not {VERSION}"
                )
            values = file.name.removesuffix(".json") + ".bin"
            for raw in content["pieces"]:
                piece = Piece(
                    tuple(raw["path"]),
                    raw["dtype"],
                    tuple(raw["shape"]),
                    tuple(raw["start"]),
                    tuple(raw["size"]),
                )
                one = _Stored(piece, values, int(raw["at"]), int(raw["bytes"]), int(raw["crc32"]))
                found.setdefault(piece.path, []).append(one)
        except (ValueError, KeyError, TypeError) as exc:
            raise UnusableCheckpointError(
                f"{place.uri_of(name)} has a torn index {file.name} ({exc})"
            ) from exc
    return found


def _assembled(
    place: StorageLocation, name: str, path: Path, stored: list[_Stored], cut: Cut | None
) -> torch.Tensor:
    """Return the wanted part of one tensor, from the pieces that it overlaps."""
    shape = stored[0].piece.shape
    dtype = getattr(torch, stored[0].piece.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UnusableCheckpointError(
            f"{place.uri_of(name)} has a tensor of {stored[0].piece.dtype}, which is no dtype"
        )
    wanted = cut(path, shape) if cut is not None else None
    if wanted is None:
        wanted = tuple(slice(0, length) for length in shape)
    found = torch.empty([part.stop - part.start for part in wanted], dtype=dtype)
    filled = 0
    for one in _distinct(stored):
        common = overlap(one.region, wanted)
        if common is None:
            continue
        values = _values(place, name, one, dtype)
        found[within(common, wanted)] = values[within(common, one.region)]
        filled += elements(common)
    if filled != found.numel():
        raise UnusableCheckpointError(
            f"{place.uri_of(name)} has {filled} of {found.numel()} elements that are wanted of "
            f"{'.'.join(map(str, path))}"
        )
    return found


def _distinct(stored: list[_Stored]) -> list[_Stored]:
    """Return the pieces without those that another part has as well (of tensors that are not cut)."""
    ordered = sorted(stored, key=lambda one: (one.piece.start, one.file))
    again = {two for one, two in pairwise(ordered) if one.region == two.region}
    return [one for one in ordered if one not in again]


def _values(place: StorageLocation, name: str, one: _Stored, dtype: torch.dtype) -> torch.Tensor:
    data = place.read_range(f"{name}/{one.file}", one.at, one.bytes)
    count = elements(one.region)
    if len(data) != one.bytes or crc32(data) != one.crc32 or one.bytes != count * dtype.itemsize:
        raise DamagedPartError(
            f"{place.uri_of(name)} has {one.file} with bytes that are not those written, in "
            f"{'.'.join(map(str, one.piece.path))}"
        )
    if not count:
        return torch.empty(one.piece.size, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(one.piece.size)


def _whole(place: StorageLocation, name: str, file: Payload) -> bytes:
    data = place.read(f"{name}/{file.name}", fixed=True)
    if sha256(data).hexdigest() != file.sha256:
        raise DamagedPartError(
            f"{place.uri_of(name)} has {file.name} with bytes that are not those written (its checksum differs)"
        )
    return data


def _bytes(values: torch.Tensor) -> memoryview:
    """Return a tensor's values as they lie in memory, row by row."""
    flat = values.detach().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")
