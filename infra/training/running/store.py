"""The durable blocks of one owner: segments, and a manifest that says where the newest record of each lies.

Layout::

    <directory>/segment-<number>.seg     records, never changed
    <directory>/manifest.json            replaced atomically after its segments are durable

Readers need only the manifest. A segment without a live record is deleted; when less than half of the bytes are live
the rest is copied into one segment. The manifest names also what was to be deleted after it was written: files of a
process that was killed in between are not listed everywhere.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from zlib import crc32

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import StorageError
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.manifest import UnusableError
from ebbflow.infra.training.running import segments
from ebbflow.infra.training.running.segments import Record

MANIFEST = "manifest.json"
_SEGMENT = re.compile(r"segment-(\d{10,})\.seg")
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a record lies."""

    segment: int
    offset: int  # bytes
    length: int  # bytes
    iteration: int


@dataclass(frozen=True, slots=True)
class Contents:
    """What a manifest says."""

    number: int = 0  # counts commits
    written: float = 0.0  # seconds since the Unix epoch
    entries: Mapping[int, Entry] = field(default_factory=dict)  # by block
    sizes: Mapping[int, int] = field(default_factory=dict)  # bytes of each segment
    unused: tuple[int, ...] = ()  # segments of earlier commits that may still have to be deleted

    @property
    def live(self) -> int:
        return sum(entry.length for entry in self.entries.values())

    @property
    def total(self) -> int:
        return sum(self.sizes.values())


class BlockFiles(Protocol):
    """The files of a ``BlockStore``, as ``StorageLocation`` has them; see there. Errors are those of the system."""

    uri: str

    def uri_of(self, name: str) -> str:
        """Return what a file is called."""
        ...

    def writing(self, name: str) -> AbstractContextManager[Any]:
        """Write a new file; after the block it is durable."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write or replace a small file atomically."""
        ...

    def sync(self, name: str = "") -> None:
        """Make the names durable."""
        ...

    def read(self, name: str) -> bytes:
        """Return a file."""
        ...

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Return a part of a file."""
        ...

    def have(self, names: Sequence[str]) -> bool:
        """Tell whether there are files of all these names."""
        ...

    def entries(self, name: str = "") -> Sequence[Any]:
        """Return the files, each with its ``base_name``."""
        ...

    def remove(self, name: str) -> None:
        """Delete a file; a missing one is no error."""
        ...


class DamagedError(StorageError):
    """Something of a running checkpoint is not what was written, or is not there."""


class BlockStore:
    """Commits and reads records. One process writes; any may read."""

    def __init__(self, place: BlockFiles, clock: Clock | None = None) -> None:
        self._place = place
        self.uri = place.uri
        self._clock = clock or SystemClock()
        self.contents = self._load()

    def iterations(self, *, state: bool = False) -> dict[int, int]:
        """Return the iteration of each durable block, and of the small state among them if ``state``."""
        kept = self.contents.entries.items()
        return {block: entry.iteration for block, entry in kept if state or block != segments.STATE}

    def commit(self, records: Iterable[Record]) -> int:
        """Make the records durable, all or none; return the bytes written.

        Raises ``StorageFullError`` or ``StorageError``; what was committed before is untouched then.
        """
        before = self.contents
        number = max([before.number, *before.sizes]) + 1
        name = _segment(number)
        entries: dict[int, Entry] = dict(before.entries)
        try:
            with translated(f"write the running checkpoint {self.uri}"):
                size = self._append(name, records, number, entries)
                after = replace(before, number=number, entries=entries, sizes={**before.sizes, number: size})
                after = self._without_dead(after)
                written = size
                if after.live < after.total / 2:
                    after, size = self._compacted(after, number + 1)
                    written += size
                unused = {*before.sizes, *before.unused, number} - set(after.sizes)
                self._publish(replace(after, written=self._clock.now(), unused=tuple(sorted(unused))))
        except BaseException:
            for made in (name, _segment(number + 1)):
                with suppress(Exception):
                    self._place.remove(made)
            raise
        self._delete_unused()
        return written

    def read(self, blocks: Iterable[int]) -> dict[int, Record]:
        """Return the newest durable record of each block, with one read a segment.

        Raises ``DamagedError`` if there is none or it is not what was written, ``StorageError``.
        """
        wanted: dict[int, list[tuple[int, Entry]]] = {}
        for block in blocks:
            entry = self.contents.entries.get(block)
            if entry is None:
                raise DamagedError(f"the running checkpoint {self.uri} has no block {block}")
            wanted.setdefault(entry.segment, []).append((block, entry))
        found = {}
        for segment, entries in wanted.items():
            name = _segment(segment)
            start = min(entry.offset for _, entry in entries)
            stop = max(entry.offset + entry.length for _, entry in entries)
            with translated(f"read {self._place.uri_of(name)}"):
                try:
                    data = memoryview(self._place.read_range(name, start, stop - start))
                except FileNotFoundError as exc:
                    raise DamagedError(f"the running checkpoint {self.uri} lacks {name}") from exc
            for block, entry in entries:
                piece = data[entry.offset - start : entry.offset - start + entry.length]
                found[block] = self._decoded(name, piece, block, entry)
        return found

    def whole(self) -> bool:
        """Tell whether the files of all records are there."""
        return self._place.have([_segment(number) for number in self.contents.sizes])

    def clear(self) -> None:
        """Delete everything, the manifest first; what is committed from now on is all there is."""
        before = self.contents
        begun = max([before.number, *before.sizes])  # a process that was killed may have written the next two
        with suppress(StorageError), translated(f"clear {self.uri}"):
            self._place.remove(MANIFEST)
            for number in {*before.sizes, *before.unused, begun + 1, begun + 2}:
                self._place.remove(_segment(number))
        self.contents = Contents(begun + 2)
        self._delete_unused()

    def renumber(self, least: int) -> None:
        """Have segments from now on get numbers above ``least``, and above those that a killed process may have used.

        The manifest says so, and names the latter to be deleted. Raises ``StorageError``.
        """
        before = self.contents
        begun = max([before.number, *before.sizes])
        unused = tuple(sorted({*before.unused, begun + 1, begun + 2}))
        with translated(f"write the running checkpoint {self.uri}"):
            self._publish(replace(before, number=max(begun + 2, least), unused=unused))

    def _decoded(self, name: str, data: memoryview, block: int, entry: Entry) -> Record:
        try:
            record = segments.decode(data)
        except UnusableError as exc:
            raise DamagedError(f"{self._place.uri_of(name)} {exc}") from exc
        if (record.block, record.iteration) != (block, entry.iteration):
            raise DamagedError(f"{self._place.uri_of(name)} has block {record.block} where {block} should be")
        return record

    def _append(self, name: str, records: Iterable[Record], number: int, entries: dict[int, Entry]) -> int:
        self._place.remove(name)  # of a commit that a crash cut off
        offset = 0
        with self._place.writing(name) as sink:
            for record in records:
                buffers = segments.encode(record)
                size = segments.length(buffers)
                for buffer in buffers:
                    sink.write(buffer)
                entries[record.block] = Entry(number, offset, size, record.iteration)
                offset += size
        self._place.sync()
        return offset

    def _compacted(self, contents: Contents, number: int) -> tuple[Contents, int]:
        name, offset, entries = _segment(number), 0, {}
        self._place.remove(name)
        with self._place.writing(name) as sink:
            for segment in sorted(contents.sizes):
                data = self._place.read(_segment(segment))
                for block, entry in contents.entries.items():
                    if entry.segment == segment:
                        # as it is: a damaged record stays one, and is found where it is read
                        sink.write(data[entry.offset : entry.offset + entry.length])
                        entries[block] = replace(entry, segment=number, offset=offset)
                        offset += entry.length
        self._place.sync()
        return replace(contents, number=number, entries=entries, sizes={number: offset}), offset

    @staticmethod
    def _without_dead(contents: Contents) -> Contents:
        used = {entry.segment for entry in contents.entries.values()}
        return replace(contents, sizes={n: size for n, size in contents.sizes.items() if n in used})

    def _delete_unused(self) -> None:
        """Delete segments that the manifest does not name; what fails now is tried again by the next commit."""
        with suppress(StorageError), translated(f"tidy {self.uri}"):
            listed = [_SEGMENT.fullmatch(info.base_name) for info in self._place.entries()]
            there = {int(match.group(1)) for match in listed if match}
            for number in sorted(there.union(self.contents.unused) - set(self.contents.sizes)):
                self._place.remove(_segment(number))
            self.contents = replace(self.contents, unused=())

    def _publish(self, contents: Contents) -> None:
        blocks = sorted(contents.entries)
        rows = [contents.entries[block] for block in blocks]
        body = json.dumps(
            {
                "version": _VERSION,
                "number": contents.number,
                "written": contents.written,
                "sizes": [[n, size] for n, size in sorted(contents.sizes.items())],
                "unused": list(contents.unused),
                "blocks": blocks,
                "segment": [row.segment for row in rows],
                "offset": [row.offset for row in rows],
                "length": [row.length for row in rows],
                "iteration": [row.iteration for row in rows],
            }
        )
        self._place.write(
            MANIFEST, f'{{"crc32": {crc32(body.encode())}, "body": {json.dumps(body)}}}'.encode()
        )
        self.contents = contents

    def _load(self) -> Contents:
        with translated(f"read the running checkpoint {self.uri}"):
            try:
                data = self._place.read(MANIFEST)
            except FileNotFoundError:
                return Contents()
        try:
            outer = json.loads(data)
            if crc32(outer["body"].encode()) != outer["crc32"]:
                raise ValueError("its checksum differs")
            said: dict[str, Any] = json.loads(outer["body"])
            if said["version"] != _VERSION:
                raise ValueError(f"it is of version {said['version']}, not {_VERSION}")
            rows = zip(said["segment"], said["offset"], said["length"], said["iteration"], strict=True)
            entries = {block: Entry(*row) for block, row in zip(said["blocks"], rows, strict=True)}
            unused = tuple(said.get("unused", ()))
            return Contents(said["number"], said["written"], entries, dict(said["sizes"]), unused)
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise DamagedError(f"the running checkpoint {self.uri} has a damaged manifest: {exc}") from exc


def _segment(number: int) -> str:
    return f"segment-{number:010d}.seg"
