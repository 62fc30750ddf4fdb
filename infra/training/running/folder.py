"""Where the running checkpoint of one training lies, and how it is read without the training.

Layout::

    <directory>/<start>/owner-<number>/    the blocks of one owner, see ``block_store``
    <directory>/<start>/blocks.json        the tensors, their blocks and owners; written when all of the start is
    durable <directory>/corrupt-<start>/           set aside: something of it is not what was written

Every ``initialize`` makes a new start, so that records of a run that began again never meet those of its past. In
nodes' memory, where several runs may have directories of one path, on other machines or one after another, its blocks
are under a random mark as well, which the table has.
"""

import io
import logging
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ebbflow.infra.errors import StorageError
from ebbflow.infra.storage import checksums
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.checkpoints.states import Signature, read_state
from ebbflow.infra.training.running.blocks import BlockSpec
from ebbflow.infra.training.running.levels import SaveLevels
from ebbflow.infra.training.running.live_state import whole_state
from ebbflow.infra.training.running.memory import NodeMemory
from ebbflow.infra.training.running.segments import STATE, Record
from ebbflow.infra.training.running.store import BlockStore, DamagedError

_TABLE = "blocks.json"
_START = re.compile(r"\d{6}")
_CORRUPT = "corrupt-"
_OWNER = re.compile(r"owner-(\d+)")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Table:
    """What a running checkpoint is made of."""

    blocks: tuple[BlockSpec, ...]
    tensors: Signature
    placement: tuple[int, ...]  # the owner of each block at the start
    mark: str = ""  # of its blocks in nodes' memory


class RunningFolder:
    """Names of the files of a running checkpoint.

    Args:
        place: its directory.
        memory: that nodes lend, where saves may be newer than in the directory; ``None``: it is not looked at.
    """

    def __init__(self, place: StorageLocation, memory: NodeMemory | None = None) -> None:
        self.place, self.memory = place, memory
        self.reads_memory = True  # else it is only written
        self._marks: dict[str, str] = {}  # of starts in nodes' memory
        self.uri = place.uri

    def starts(self) -> list[str]:
        """Return all starts, complete or not, oldest first."""
        with translated(f"list the running checkpoint {self.uri}"):
            return [i.base_name for i in self.place.entries() if _START.fullmatch(i.base_name)]

    def latest(self) -> str | None:
        """Return the newest start whose blocks are all durable."""
        with translated(f"list the running checkpoint {self.uri}"):
            for start in reversed(self.starts()):
                if any(info.base_name == _TABLE for info in self.place.entries(start)):
                    return start
        return None

    def next(self) -> tuple[str, str]:
        """Return a number for a start that no start has had, damaged ones included, and a mark for it."""
        taken = [*self.starts(), *(name.removeprefix(_CORRUPT) for name in self._aside())]
        return f"{max([0, *map(int, taken)]) + 1:06d}", secrets.token_hex(8)

    def set_aside(self, start: str) -> str:
        """Rename a start that is damaged, so that it never counts again; return its new address.

        Raises ``StorageError``.
        """
        self._forget(start)
        with translated(f"set {self.place.uri_of(start)} aside"):
            if (
                not self.place.local
            ):  # which moves files one by one: the table first, without which it does not count
                for owner in self.stores(start):
                    name = f"{start}/owner-{owner}"
                    self.place.move_folder(name, f"{_CORRUPT}{name}", "")
            self.place.move_folder(start, f"{_CORRUPT}{start}", _TABLE)
        return self.place.uri_of(f"{_CORRUPT}{start}")

    def aside(self) -> list[str]:
        """Return the addresses of all that was set aside. Raises ``StorageError``."""
        return [self.place.uri_of(name) for name in self._aside()]

    def _aside(self) -> list[str]:
        with translated(f"list the running checkpoint {self.uri}"):
            names = [info.base_name for info in self.place.entries()]
        return [n for n in names if n.startswith(_CORRUPT) and _START.fullmatch(n.removeprefix(_CORRUPT))]

    def store(self, start: str, owner: int) -> BlockStore:
        return BlockStore(self.place.under(f"{start}/owner-{owner}"))

    def in_memory(self, start: str, owner: int) -> BlockStore | None:
        """Return what nodes' memory has of an owner's blocks; ``None``: nothing that can be read."""
        memory = self.memory if self.reads_memory else None
        found = None if memory is None else memory.store(self._uri_of_owner(start, owner), self._mark(start))
        return found if found is not None and found.contents.entries else None

    def levels(self, start: str, owner: int, mark: str | None = None) -> SaveLevels:
        """Return where saves of an owner's blocks go; ``mark`` is that of a new start, which has no table yet."""
        memory, uri = self.memory, self._uri_of_owner(start, owner)
        store = self.store(start, owner)
        if memory is None:
            return SaveLevels(store)
        under = self._mark(start) if mark is None else mark
        return SaveLevels(store, lambda: memory.fresh(uri, under))

    def continued(self, start: str, owner: int, records: Mapping[int, Record]) -> SaveLevels:
        """Return where saves of an owner's blocks go after all were read: ``records``, its state among them.

        What memory has stays there if it was read; else it is replaced by the first save.
        """
        levels, memory = self.levels(start, owner), self.in_memory(start, owner)
        if memory is not None and all(
            block not in records or records[block].iteration >= entry.iteration
            for block, entry in memory.contents.entries.items()
        ):
            stored = self.store(start, owner).iterations(state=True)
            levels.seed(memory, [r for b, r in records.items() if stored.get(b, -1) < r.iteration])
        return levels

    def _uri_of_owner(self, start: str, owner: int) -> str:
        return self.place.uri_of(f"{start}/owner-{owner}")

    def _mark(self, start: str) -> str:
        if start not in self._marks:
            self._marks[start] = self.table(start).mark
        return self._marks[start]

    def stores(self, start: str) -> dict[int, BlockStore]:
        """Return the stores of all who ever owned blocks of a start."""
        with translated(f"list the running checkpoint {self.uri}"):
            found = [_OWNER.fullmatch(info.base_name) for info in self.place.entries(start)]
        owners = sorted(int(match.group(1)) for match in found if match)
        return {owner: self.store(start, owner) for owner in owners}

    def complete(self, start: str, table: Table) -> None:
        """Make a start the one that counts, and delete those before."""
        content = {
            "blocks": [asdict(block) for block in table.blocks],
            "tensors": {name: [list(shape), kind] for name, (shape, kind) in table.tensors.items()},
            "placement": list(table.placement),
            "mark": table.mark,
        }
        with translated(f"write the running checkpoint {self.uri}"):
            self.place.write(f"{start}/{_TABLE}", checksums.sealed(content))
            for old in self.starts():
                if old < start:
                    self._forget(old)
                    self.place.remove_folder(old)

    def _forget(self, start: str) -> None:
        """Have nodes forget what they keep of a start, complete or not."""
        if self.memory is None or not self.memory.there:
            return
        with suppress(StorageError):  # one without a table has nothing in memory
            mark = self._mark(start)
            for owner in self.stores(start):
                self.memory.fresh(self._uri_of_owner(start, owner), mark)

    def table(self, start: str) -> Table:
        """Return the table of a start. Raises ``StorageError``, and ``DamagedError`` for a damaged one."""
        with translated(f"read the running checkpoint {self.uri}"):
            data = self.place.read(f"{start}/{_TABLE}")
        try:
            raw = checksums.unsealed(data)
            return Table(
                tuple(BlockSpec(**block) for block in raw["blocks"]),
                {name: (tuple(shape), kind) for name, (shape, kind) in raw["tensors"].items()},
                tuple(raw["placement"]),
                str(raw.get("mark", "")),
            )
        except (ValueError, KeyError, TypeError) as exc:
            raise DamagedError(f"{self.place.uri_of(start)}/{_TABLE} is damaged: {exc}") from exc

    def newest(self, start: str, blocks: Iterable[int]) -> dict[int, Record]:
        """Return the newest durable record of each block, whichever process wrote it. Raises ``StorageError``.

        Owners that live on may move records while they are read; such a read is tried once more.
        """
        wanted = list(blocks)
        return dict(next(self.records(start, wanted, len(wanted)), {}))

    def records(self, start: str, blocks: Sequence[int], count: int) -> Iterator[dict[int, Record]]:
        """Yield what ``newest`` returns, of ``count`` blocks at once, so that no more are in memory."""
        stores: Sequence[BlockStore] | None = None
        memory: list[BlockStore] = []
        for first in range(0, len(blocks), max(1, count)):
            wanted = list(blocks[first : first + count])
            try:
                if stores is None:
                    stores, memory = self._sources(start)
                found = _newest(stores, memory, wanted)
            except StorageError:
                stores, memory = self._sources(start)
                found = _newest(stores, memory, wanted)
            yield found

    def _sources(self, start: str) -> tuple[list[BlockStore], list[BlockStore]]:
        stores = self.stores(start)
        memory = (self.in_memory(start, owner) for owner in stores) if self.memory is not None else ()
        return list(stores.values()), [one for one in memory if one is not None]


def small_bytes(content: Any) -> Record:
    """Return the small state as a record; its iteration is set by the caller."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    data = torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)
    return Record(STATE, 0, (("state", data),))


def small_content(record: Record) -> Any:
    """Return the state that a record of small parts holds."""
    return read_state(io.BytesIO(dict(record.parts)["state"].numpy().tobytes()))


def read_running(uri: str | os.PathLike[str]) -> tuple[dict[str, Any], int]:
    """Return the state dicts of a running checkpoint and its iteration; neither model nor other processes needed.

    The state, ``{"model": ..., "optimizer": ..., "run": ...}``, is what ``CheckpointFolder.save`` takes. Its blocks
    are of different iterations, the newest being the iteration returned. Raises ``StorageError`` if there is none.
    """
    state, iteration, _ = read_whole(RunningFolder(StorageLocation(uri)))
    return state, iteration


def read_whole(folder: RunningFolder) -> tuple[dict[str, Any], int, int]:
    """Return what ``read_running`` does, and the iteration of the oldest block. Raises ``StorageError``."""
    start = folder.latest()
    if start is None:
        raise StorageError(f"there is no running checkpoint in {folder.uri}")
    table = folder.table(start)
    records = folder.newest(start, [*range(len(table.blocks)), STATE])
    small: Mapping[str, Any] = small_content(records[STATE])
    state = whole_state(small["live"], records, table.blocks, table.tensors)
    oldest = min(record.iteration for record in records.values())
    return {**state, "run": small["run"]}, records[STATE].iteration, oldest


def _newest(
    stores: Sequence[BlockStore], memory: Sequence[BlockStore], wanted: list[int]
) -> dict[int, Record]:
    """Return the newest records of blocks, those of memory only where all that is wanted of it can be read."""
    if memory:
        try:
            return _newest([*stores, *memory], (), wanted)
        except StorageError as exc:
            log.warning("what nodes' memory has of the running checkpoint is passed over: %s", exc)
    best: dict[int, tuple[int, float, BlockStore]] = {}
    for store in stores:
        for block, entry in store.contents.entries.items():
            rank = (entry.iteration, store.contents.written, store)
            if block not in best or rank[:2] > best[block][:2]:
                best[block] = rank
    missing = [block for block in wanted if block not in best]
    if missing:
        raise DamagedError(f"the running checkpoint lacks block {missing[0]} and {len(missing) - 1} more")
    found: dict[int, Record] = {}
    for store in stores:
        found |= store.read(block for block in wanted if best[block][2] is store)
    return found
