"""``MemoryTier``: files that are written to peers' memory first and to the store behind asynchronously.

A file is written once, from its start to its end, and read as often as one likes: from peers' memory while they hold
it, else from the store behind. Names, directories and sizes are those of the store.
"""

import logging
import os
import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from pyarrow.fs import FileInfo, FileType

from ebbflow.infra.errors import MemoryTierError, StorageError
from ebbflow.infra.memory.blocks import BlockSettings
from ebbflow.infra.memory.client import BlockStore
from ebbflow.infra.storage import private
from ebbflow.infra.storage.filesystems import MEMORY, filesystem
from ebbflow.planners.memory.slab_table import BlockRange, SlabState

_SOURCES = 16  # files that are kept open in the store behind, as opening one takes a request there

log = logging.getLogger(__name__)


class TierFile:
    """A file of the tier; as a lane, what is queued for it.

    Args:
        path: in the store's terms.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.blocks: list[int] = []  # of the address space, in the file's order
        self.size = 0  # bytes
        self.modified = 0.0  # Unix time, s, of its end
        self.stored = False  # the store behind has all of it
        self.dropped = False
        self.sink: Any = None  # where it is written in the store behind
        self.origin: tuple[int, int] | None = None  # size and time (ns) there, for those who compare them
        self.compared = 0.0  # when they did
        self.store_reads = 0  # pieces that came from the store behind
        self.released = threading.Event()  # set once it is forgotten, and nothing of it is under way

    def info(self) -> FileInfo:
        """Return what a listing says of it while the store behind has not all of it."""
        modified = datetime.fromtimestamp(self.modified, UTC)
        return FileInfo(self.path, FileType.File, size=self.size, mtime=modified)


class MemoryTier:
    """Files in peers' memory over a store. Safe for several threads.

    Args:
        scheme: of the tier, such as ``memory+file``.
        settings: layout and limits of the blocks.
    """

    def __init__(self, scheme: str, settings: BlockSettings) -> None:
        self.scheme, self.behind = scheme, scheme.removeprefix(MEMORY)
        self.base = filesystem(self.behind)
        self.settings = self._settings = settings
        self._lock = threading.RLock()
        self._files: dict[str, TierFile] = {}  # written to their end, by path
        self._owners: dict[
            int, tuple[TierFile, int]
        ] = {}  # of blocks: the file, and which of its blocks it is
        self._used: dict[int, int] = {}  # of slabs: blocks in use, and one more while a writer has its room
        self._partial: list[tuple[int, int]] = []  # slabs with room: the slab and its first free block
        self._sources: dict[TierFile, Any] = {}  # open in the store behind, the one used last at the end
        self._next = 0  # slab that was never used
        self._free: list[int] = []  # slabs that were
        self.store: BlockStore  # set before the first file is opened
        self.blocks_behind = _FilesBehind(self, settings.block_bytes)

    # --- files --------------------------------------------------------------------------------------------

    def find(self, path: str) -> TierFile | None:
        """Return the file of this path if the tier has it."""
        return self._files.get(path)

    def below(self, folder: str) -> list[TierFile]:
        """Return the tier's files in a directory and those below it."""
        with self._lock:
            return [one for path, one in self._files.items() if path.startswith(f"{folder.rstrip('/')}/")]

    def add(self, file: TierFile) -> None:
        """Let a file that was written to its end be found."""
        with self._lock:
            old = self._files.get(file.path)
            self._files[file.path] = file
        if old is not None:  # without the lock: the store takes it while it has its own
            self.drop(old)

    def drop(self, file: TierFile) -> None:
        """Forget a file: its memory is released. What the store behind has of it stays."""
        with self._lock:
            if file.dropped:
                return
            file.dropped = True
            if self._files.get(file.path) is file:
                del self._files[file.path]
        self._end_source(file)
        # behind what is queued for it, which finds the file by its blocks
        self.store.then(file, lambda: self._release(file), always=True)

    def drop_below(self, path: str, timeout: float | None = None) -> None:
        """Forget the file at ``path``, and all below it, and wait until nothing of them is on its way to the store
        behind: what is deleted or replaced there next would be followed by it.

        ``timeout`` is for all of them, in seconds; by default that of the store behind. What it has not taken then
        is told to the log.
        """
        end = time.monotonic() + (self._settings.store_timeout if timeout is None else timeout)
        files = [file for file in (self.find(path), *self.below(path)) if file is not None]
        for file in files:
            self.drop(file)
        late = [file for file in files if not file.released.wait(max(end - time.monotonic(), 0.0))]
        if late:
            log.warning(
                "%d files at %s, which is deleted or replaced, are still on their way to the store behind the memory",
                len(late),
                path,
            )

    def discard(self, file: TierFile) -> None:
        """Forget a file that is not written to its end, in the store behind as well."""

        def remove() -> None:
            self.finish(file)
            if file.sink is not None:
                with suppress(OSError):
                    self.base.delete_file(file.path)

        file.dropped = True  # so that no block of it is written behind from now on
        self.store.then(file, remove, always=True)
        self.store.then(file, lambda: self._release(file), always=True)

    def follow_move(self, source: str, target: str) -> list[TierFile]:
        """Take note that the store behind has moved a stored file, or a directory; what was at ``target`` is dropped.

        Returns the files that were moved.
        """
        with self._lock:
            old = [file for file in (self.find(target), *self.below(target)) if file is not None]
            moved = [file for file in (self.find(source), *self.below(source)) if file is not None]
            for file in (*old, *moved):
                del self._files[file.path]
            for file in moved:
                file.path = target + file.path[len(source) :]
                self._files[file.path] = file
            ended = [self._sources.pop(file) for file in moved if file in self._sources]
        for one in ended:
            one.close()
        for file in old:
            self.drop(file)
        return moved

    def _release(self, file: TierFile) -> None:
        with self._lock:
            blocks, file.blocks = file.blocks, []
            per_slab = self._settings.blocks_per_slab
            for block in blocks:
                self._owners.pop(block, None)
                self._used[block // per_slab] -= 1
            empty = sorted({block // per_slab for block in blocks if not self._used[block // per_slab]})
            self._partial = [one for one in self._partial if one[0] not in empty]
        with suppress(Exception):  # still open where the store has refused it
            if file.sink is not None:
                file.sink.close()
        file.released.set()
        self._empty(empty)
        self.store.forget(file)

    def _empty(self, slabs: Sequence[int]) -> None:
        """Give slabs without a use back, and let files have them then."""
        for slab in slabs:  # without the lock: the store takes it while it has its own
            self.store.slabs.unmap(slab)
        with self._lock:
            self._free += slabs

    def flush(self, path: str = "") -> None:
        """Wait until the store behind has the file at ``path``, or all below it; by default everything.

        Raises ``StorageError`` where it refuses one.
        """
        found = self.find(path) if path else None
        with self._lock:
            files = [found] if found is not None else self.below(path) if path else list(self._files.values())
        for file in files:
            try:
                self.store.flush(file)
            except StorageError as exc:
                if isinstance(exc.__cause__, OSError):  # such as a full disk, which has an error of its own
                    raise exc.__cause__ from exc
                raise

    def read(self, file: TierFile, offset: int, size: int) -> bytes:
        """Return ``size`` bytes of a file from ``offset`` on; fewer where it ends. Raises ``StorageError``."""
        size = max(0, min(size, file.size - offset))
        with self._lock:
            blocks = list(file.blocks)
        try:
            found = b"".join(self._parts(blocks, offset, size)) if not file.dropped else b""
        except StorageError:
            if not file.dropped:
                raise
        # what was read after its blocks were given to another file is not the file's
        return self.read_behind(file, offset, size) if file.dropped else found

    def _parts(self, blocks: Sequence[int], offset: int, size: int) -> Iterator[bytes]:
        """Yield bytes of blocks, those that follow each other at once."""
        block = self._settings.block_bytes
        while size:
            index, skip = divmod(offset, block)
            run = 1
            while run * block < skip + size and blocks[index + run] == blocks[index] + run:
                run += 1
            part = min(size, run * block - skip)
            yield self.store.read(blocks[index] * block + skip, part)
            offset, size = offset + part, size - part

    # --- blocks -------------------------------------------------------------------------------------------

    def append(self, file: TierFile, data: bytes, room: list[int]) -> None:
        """Write ``data``, whole blocks unless it is the file's end, after what was written.

        Args:
            file: that grows.
            data: at least one byte.
            room: slab and first free block that its writer has to itself; changed.

        Raises ``MemoryTierError`` where nothing is free, or the store behind takes nothing for too long.
        """
        block, per_slab = self._settings.block_bytes, self._settings.blocks_per_slab
        done = 0
        while done < len(data):
            if not room or room[1] == per_slab:
                self.give_room(room)
                self._take_room(room)
            count = min(-(-(len(data) - done) // block), per_slab - room[1])
            first = room[0] * per_slab + room[1]
            with self._lock:
                for block_number in range(first, first + count):
                    self._owners[block_number] = file, len(file.blocks)
                    file.blocks.append(block_number)
                self._used[room[0]] = self._used.get(room[0], 0) + count
            room[1] += count
            part = data[done : done + count * block]
            file.size += len(part)
            self.store.write(first * block, part)
            done += len(part)

    def give_room(self, room: list[int]) -> None:
        """Let other files have what a writer has left of its slab; ``room`` is empty then."""
        with self._lock:
            if not room:
                return
            slab, first = room
            room.clear()
            self._used[slab] -= 1
            empty = not self._used[slab]  # what was written there is released already
            if not empty and first < self._settings.blocks_per_slab:
                self._partial.append((slab, first))
        if empty:
            self._empty([slab])

    def _take_room(self, room: list[int]) -> None:
        """Find a slab with room, which is its writer's alone until ``give_room``."""
        while not self._find_room(room):
            with self._lock:
                oldest = next((one for one in self._files.values() if one.stored), None)
            if oldest is None:
                raise MemoryTierError(f"all {self._settings.slabs} slabs hold files that are not stored yet")
            self.drop(oldest)
            self.store.flush(oldest)
        if not room[1] and self.store.slabs.table.state(room[0]) is SlabState.UNMAPPED:
            self.store.slabs.map(room[0])

    def _find_room(self, room: list[int]) -> bool:
        with self._lock:
            if self._partial:
                room[:] = self._partial.pop()
            elif self._free:
                room[:] = self._free.pop(), 0
            elif self._next < self._settings.slabs:
                room[:] = self._next, 0
                self._next += 1
            else:
                return False
            # a use of its own: until its writer has blocks there, or once they are released, nothing else keeps it
            self._used[room[0]] = self._used.get(room[0], 0) + 1
            return True

    # --- the store behind ---------------------------------------------------------------------------------

    def write_behind(self, blocks: BlockRange, data: bytes) -> None:
        """Append to the store's file what was written to its next blocks. Raises ``OSError``."""
        file, _ = self.owner(blocks)
        if not file.dropped:
            self._sink(file).write(data)

    def read_behind(self, file: TierFile, offset: int, size: int) -> bytes:
        """Return what the store behind has of a file. Raises ``OSError``."""
        with self._lock:
            source, path = self._sources.pop(file, None), file.path  # this reader's alone meanwhile
        if source is None:
            source = self.base.open_input_file(path)
        try:
            found = bytes(source.read_at(size, offset))
        except BaseException:
            source.close()
            raise
        file.store_reads += 1
        with self._lock:
            if not (file.dropped or file.path != path or file in self._sources):
                self._sources[file], source = source, None
            if len(self._sources) > _SOURCES:
                source = self._sources.pop(next(iter(self._sources)))
        if source is not None:
            source.close()
        return found

    def close(self) -> None:
        """Close what is open for reading in the store behind."""
        for file in list(self._sources):
            self._end_source(file)

    def _end_source(self, file: TierFile) -> None:
        with self._lock:
            source = self._sources.pop(file, None)
        if source is not None:
            source.close()

    def holds(self, file: TierFile) -> bool:
        """Tell whether peers have any of a file's blocks, or may have once they answer."""
        table = self.store.slabs.table
        slabs = {block // self._settings.blocks_per_slab for block in file.blocks}
        return any(
            table.state(slab) is SlabState.MAPPED and (table.held(slab) or table.outstanding(slab))
            for slab in slabs
        )

    def finish(self, file: TierFile) -> None:
        """Make a file durable in the store behind; called behind its writes. Raises ``OSError``."""
        if file.dropped:
            with suppress(OSError):
                if file.sink is not None:
                    file.sink.close()
            return
        sink = self._sink(file)
        if self.behind == "file":
            sink.flush()
            os.fsync(sink.fileno())
        sink.close()
        file.stored = True

    def _sink(self, file: TierFile) -> Any:
        if file.sink is None:
            local = self.behind == "file"
            file.sink = (
                private.open_file(file.path, "wb") if local else self.base.open_output_stream(file.path)
            )
        return file.sink

    def owner(self, blocks: BlockRange) -> tuple[TierFile, int]:
        """Return the file that blocks belong to, and which of its blocks is the first. Raises ``StorageError``."""
        block = blocks.slab * self._settings.blocks_per_slab + blocks.first
        with self._lock:
            found = self._owners.get(block)
        if found is None:
            raise StorageError(f"block {block} belongs to a file that was deleted")
        return found


class _FilesBehind:
    """``BehindStore`` of a tier."""

    def __init__(self, tier: MemoryTier, block_bytes: int) -> None:
        self._tier, self._block = tier, block_bytes

    def lane(self, blocks: BlockRange) -> Hashable:
        return self._tier.owner(blocks)[0]

    def write(self, blocks: BlockRange, data: bytes) -> None:
        self._tier.write_behind(blocks, data)

    def read(self, blocks: BlockRange, offset: int, size: int) -> bytes:
        file, index = self._tier.owner(blocks)
        return self._tier.read_behind(file, index * self._block + offset, size)
