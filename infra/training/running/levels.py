"""Where a running checkpoint's saves go: nodes' memory first, where it is faster, and the store behind it.

A save counts once memory has it; the store gets the newest record of each block as fast as it takes them, all of a
save or none, so that what it has is a running checkpoint as well. Whoever recovers takes the newest of both.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from ebbflow.infra.errors import StorageError
from ebbflow.infra.training.running.segments import Record
from ebbflow.infra.training.running.store import BlockStore

_TIMEOUT = 600.0  # s for the store
MEASURED = 3  # saves after which memory that is slower than the store is used no longer

log = logging.getLogger(__name__)


class StoreBehind:
    """Brings records to a store in the background. ``add`` and ``flush`` may be called by different threads.

    Args:
        store: of one owner's blocks.
    """

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._changed = threading.Condition()
        self._pending: dict[int, Record] = {}  # by block, of whole saves: the newest that the store has not
        self._running = False
        self._error = ""  # of the last commit
        self._untold = ""
        self.bandwidth = 0.0  # bytes/s of the last commit that worked

    @property
    def idle(self) -> bool:
        """Tell whether the store has everything."""
        return not self._running and not self._pending

    def add(self, records: Sequence[Record]) -> None:
        """Have the store get the records of a save; those of earlier ones that it has not yet are replaced."""
        with self._changed:
            self._pending |= {record.block: record for record in records}
            self._begin()

    def flush(self, timeout: float) -> None:
        """Wait until the store has everything. Raises ``StorageError``, after ``timeout`` seconds too."""
        with self._changed:
            self._begin()
            if not self._changed.wait_for(lambda: not self._running, timeout):
                raise StorageError(f"{self._store.uri} has not taken all blocks within {timeout:g} s")
            if self._pending:
                raise StorageError(self._error)

    def problem(self) -> str:
        """Return why a commit has failed, once; else an empty text. It is tried again with the next save."""
        with self._changed:
            found, self._untold = self._untold, ""
        return found

    def _begin(self) -> None:
        if self._pending and not self._running:
            self._running = True
            threading.Thread(target=self._run, name=f"behind {self._store.uri}", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._changed:
                taken, self._pending = self._pending, {}
                if not taken:
                    self._end("")
                    return
            begun = time.monotonic()
            try:
                written = self._store.commit(taken.values())
            except Exception as exc:
                with self._changed:
                    self._pending = taken | self._pending
                    self._end(str(exc) or repr(exc))
                return
            self.bandwidth = written / max(time.monotonic() - begun, 1e-6)

    def _end(self, error: str) -> None:
        self._running, self._error = False, error
        self._untold = error or self._untold
        self._changed.notify_all()


class SaveLevels:
    """One owner's saves. ``commit`` is called by one thread.

    Args:
        store: of the owner's blocks.
        memory: makes an empty store of them in nodes' memory, or none where there is no such memory now; ``None``:
            there is only the store.
    """

    def __init__(self, store: BlockStore, memory: Callable[[], BlockStore | None] | None = None) -> None:
        self._store, self._open = store, memory
        self._memory: BlockStore | None = None
        self._behind = StoreBehind(store)
        self._numbered: BlockStore | None = None  # in memory, whose segments have numbers of their own
        self._renew = False  # memory lacks something: it begins anew once the store has everything
        self._newer: Sequence[Record] = ()  # than the store's, of an earlier process
        self._speeds: list[float] = []  # of the last saves to memory, bytes/s
        self._using = threading.Lock()  # of what is in memory: a save may be under way when it is released
        self.off = memory is None
        self.memory_saves = self.refusals = 0

    @property
    def bandwidth(self) -> float:
        """Return the bytes/s that the store has reached, where it is behind memory; else 0."""
        return self._behind.bandwidth

    def seed(self, memory: BlockStore, newer: Sequence[Record]) -> None:
        """Continue with what was found in memory; the store gets ``newer``, which it lacks, with the next save."""
        self._memory, self._newer = memory, newer

    def commit(self, records: Sequence[Record], *, through: bool = False) -> float:
        """Keep a save; return the bandwidth to the store, bytes/s, where that was waited for, else 0.

        Args:
            records: of the save.
            through: wait for the store in any case.

        Raises ``StorageError``.
        """
        self._hand_over()
        if through:
            with self._using, suppress(StorageError):  # where no node lends memory it is known now
                self._begin_memory()
        if not (self.off or through or self._renew) and self._keep(records):
            self._behind.add(records)
            if self._slower:
                self._switch_off()
            return 0.0
        if self.off and self._behind.idle:
            begun = time.monotonic()
            return self._store.commit(records) / max(time.monotonic() - begun, 1e-6)
        self._behind.add(records)
        self._behind.flush(_TIMEOUT)
        if self._renew:  # the store has all that memory had
            memory, self._memory, self._renew = self._memory, None, False
            if memory is not None:
                memory.clear()
        return self.bandwidth

    def flush(self, timeout: float) -> None:
        """Wait until the store has everything. Raises ``StorageError``."""
        self._hand_over()
        self._behind.flush(timeout)

    def problem(self) -> str:
        """Return why the store has refused what is behind memory, once; else an empty text."""
        return self._behind.problem()

    def release(self) -> None:
        """Have nodes forget what they keep of the owner's blocks, also what an earlier process has left there."""
        with self._using:
            if not self.off:
                with suppress(StorageError):
                    self._begin_memory()
            memory, self._memory, self.off = self._memory, None, True
        if memory is not None:
            memory.clear()

    def _hand_over(self) -> None:
        newer, self._newer = self._newer, ()
        if newer:
            self._behind.add(newer)

    def _begin_memory(self) -> None:
        """Have a store in memory, where there is memory. Raises ``StorageError``."""
        if self._memory is None and self._open is not None:
            self._memory = self._open()

    def _keep(self, records: Sequence[Record]) -> bool:
        with self._using:
            return not self.off and self._kept(records)

    def _kept(self, records: Sequence[Record]) -> bool:
        begun = time.monotonic()
        try:
            self._begin_memory()
            if self._memory is None:
                return False
            if not self._memory.whole():
                raise StorageError(f"{self._memory.uri} has lost segments")
            if self._numbered is not self._memory:
                # nodes that come back may have pieces of any earlier number, which a lost manifest does not tell
                self._memory.renumber(time.time_ns() // 1_000_000)
                self._numbered = self._memory
            written = self._memory.commit(records)
        except StorageError as exc:
            self.refusals += 1
            log.warning("nodes' memory has not taken a save, the store has to: %s", exc)
            self._renew = True
            return False
        self.memory_saves += 1
        self._speeds = [*self._speeds, written / max(time.monotonic() - begun, 1e-6)][-MEASURED:]
        return True

    @property
    def _slower(self) -> bool:
        return len(self._speeds) == MEASURED and self.bandwidth > max(self._speeds)

    def _switch_off(self) -> None:
        """Use memory no longer once the store has what is in it."""
        with suppress(StorageError):
            self._behind.flush(_TIMEOUT)
            log.info(
                "nodes' memory takes %.0f MB/s, the store %.0f; only the store is used from now on",
                max(self._speeds) / 1e6,
                self.bandwidth / 1e6,
            )
            self.release()
