"""Nodes' memory and the stores behind it, for running checkpoints, without daemons."""

import threading
from collections.abc import Iterable, Sequence

import pytest

from ebbflow.infra.errors import StorageError
from ebbflow.infra.training.running.memory import NodeMemory
from ebbflow.infra.training.running.segments import Record
from ebbflow.infra.training.running.store import BlockStore


class Nodes:
    """Entries that outlive a process, as ``EntryClient`` has them; ``room`` more are kept."""

    def __init__(self) -> None:
        self.kept: dict[bytes, bytes] = {}
        self.room = 1 << 30
        self.peers: tuple[str, ...] = ("node-1",)
        self.problems: tuple[str, ...] = ()
        self.moments: list[dict[bytes, bytes]] | None = (
            None  # what is kept after each change, if that is wanted
        )

    def get(self, keys: Sequence[bytes], *, everywhere: bool) -> list[bytes | None]:
        assert everywhere
        return [self.kept.get(key) for key in keys]

    def copies(self, key: bytes) -> list[bytes]:
        return [self.kept[key]] if key in self.kept else []

    def keep(self, entries: Sequence[tuple[bytes, bytes]], *, alone: bool) -> bool:
        whole = True
        for key, data in entries:
            self.room -= 1
            if self.room < 0:
                whole = False
                continue
            self.kept[key] = bytes(data)
            self._note()
        return whole

    def drop(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.kept.pop(key, None)
            self._note()

    def close(self) -> None: ...

    def _note(self) -> None:
        if self.moments is not None:
            self.moments.append(dict(self.kept))

    def memory(self) -> NodeMemory:
        return NodeMemory(client=self)  # type: ignore[arg-type]


class Gate:
    """Holds up or refuses the commits of all stores that are not nodes' memory."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.open.set()
        self.refuses = False
        self.killed: set[int] = set()  # stores of processes that are gone
        commit = BlockStore.commit

        def held(store: BlockStore, records: Iterable[Record]) -> int:
            if not store.uri.startswith("nodes' memory"):
                assert self.open.wait(150)
                if self.refuses or id(store) in self.killed:
                    raise StorageError("the disk is full")
            return commit(store, records)

        patch.setattr(BlockStore, "commit", held)
