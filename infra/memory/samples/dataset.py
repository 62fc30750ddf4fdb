"""``RemoteCachedDataset``: a map-style data set whose samples are decoded once and read from nodes' memory then."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import sha256
from operator import index as as_index
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any, Literal

from ebbflow.infra.errors import DatasetError, InfraError, MemoryTierError
from ebbflow.infra.memory.registry import MemoryRegistry
from ebbflow.infra.memory.samples.encoding import decode, encode
from ebbflow.infra.memory.samples.entries import EntryClient
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError

_QUEUED = 64  # samples that may wait for the store
_MEASURED = 64  # samples, at least, from which it is judged what is faster
_AWAY = 30.0  # s, at least, for which a store that could not be read is not asked...
_AWAY_TIMES = 10.0  # ...or as many times as long as it took to find that out, if that is longer

log = logging.getLogger(__name__)


@dataclass(slots=True)
class SampleMetrics:
    """Where a process' samples came from, and what that took.

    Args:
        peer_hits: from nodes' memory.
        store_hits: from the store.
        loaded: from the data set itself.
        timed_hits: from memory, in batches that came from there alone.
        peer_seconds: for these.
        loaded_seconds: for those from the data set.
        damaged: that were not as they had been written, and were loaded again.
    """

    peer_hits: int = 0
    store_hits: int = 0
    loaded: int = 0
    timed_hits: int = 0
    peer_seconds: float = 0.0
    loaded_seconds: float = 0.0
    damaged: int = 0

    def as_dict(self) -> dict[str, float]:
        """Return the values by name."""
        return asdict(self)

    @property
    def slower(self) -> bool:
        """Tell whether memory was measured to be slower than the data set."""
        if self.timed_hits < _MEASURED or self.loaded < _MEASURED:
            return False
        return self.peer_seconds / self.timed_hits > self.loaded_seconds / self.loaded


class RemoteCachedDataset:
    """A map-style data set whose samples other epochs, processes and nodes read from memory instead of decoding them.

    Use it in the place of the data set, in a ``DataLoader`` with any number of workers, forked or spawned: each
    process has connections of its own. A sample comes from nodes' memory, else from the store if there is one, else
    from the data set; then it is kept. It is the same bit by bit, but for the order of an array's memory, which
    becomes C's. Random augmentation belongs behind it: what is kept is not drawn again. Without nodes that lend
    memory, or once they have all gone, samples come from the data set.

    Peers prove that they hold the cluster's token (``MemoryRegistry``). Samples are data and never code: who holds
    the token, or may write the store, could give wrong samples, but run nothing.

    Args:
        dataset: with ``__len__`` and ``__getitem__``; its ``__getitems__`` is used where it has one.
        name: of the samples, the same in all processes; another one whenever data or transforms are others.
        store: directory or ``s3://bucket/prefix`` that keeps samples as well, behind the memory; ``None``: none.
        use: ``auto``: memory is no longer used by a process in which it was slower than the data set; ``always``.
        registry: directory in which daemons are found; by default that of ``EBBFLOW_MEMORY_DIR``, or this user's.

    Raises ``DatasetError`` for what is no map-style data set, ``OptionError`` for a store that is no place, an empty
    name or another use. Reading raises ``DatasetError`` for samples that cannot be kept and indices that are none,
    and whatever the data set raises.
    """

    def __init__(
        self,
        dataset: Any,
        name: str,
        *,
        store: str | os.PathLike[str] | None = None,
        use: Literal["auto", "always"] = "auto",
        registry: str | os.PathLike[str] | None = None,
    ) -> None:
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise DatasetError(
                f"a data set in nodes' memory must have __len__ and __getitem__; {type(dataset).__name__} has not"
            )
        if not name.strip():
            raise OptionError("a data set in nodes' memory must have a name")
        if use not in ("auto", "always"):
            raise OptionError(f"use must be 'auto' or 'always'; got {use!r}")
        self.dataset, self.name = dataset, name
        self._store = None if store is None else os.fspath(store)
        if self._store is not None:
            StorageLocation(self._store)
        self._use = use
        self._registry = None if registry is None else Path(registry)
        self._readers: dict[int, _Reader] = {}  # by process

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        (found,) = self.__getitems__([index])
        return found

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several samples; those in memory are asked for at once."""
        return self._reader().read([self._number(one) for one in indices])

    @property
    def metrics(self) -> SampleMetrics:
        """Return where the samples of this process came from."""
        return self._reader().metrics

    def close(self) -> None:
        """Let the store have what is queued for it, and end this process' connections; reading makes new ones."""
        reader = self._readers.pop(os.getpid(), None)
        if reader is not None:
            reader.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_readers": {}}

    def _reader(self) -> "_Reader":
        own = os.getpid()
        found = self._readers.get(own)
        if found is None:  # of several threads' one is kept; it connects when it is used
            made = _Reader(self.dataset, self.name, self._store, self._use == "auto", self._registry)
            found = self._readers.setdefault(own, made)
        return found

    def _number(self, given: Any) -> int:
        try:
            number = as_index(given)
        except TypeError as exc:
            raise DatasetError(f"samples must be read by whole numbers; got {given!r:.60}") from exc
        length = len(self.dataset)
        if not -length <= number < length:
            raise IndexError(f"a sample must be from {-length} to {length - 1}; got {number}")
        return number % length


class _Reader:
    """Reads samples in one process."""

    def __init__(
        self, dataset: Any, name: str, store: str | None, measure: bool, registry: Path | None
    ) -> None:
        self._dataset, self._measure = dataset, measure
        self._many: Callable[[list[int]], Sequence[Any]] | None = getattr(dataset, "__getitems__", None)
        self._digest = sha256(name.encode(errors="surrogatepass")).hexdigest()
        self._entries = EntryClient(MemoryRegistry(registry))
        self._place = (
            None if store is None else StorageLocation(store).behind.under(f"samples/{self._digest}")
        )
        self._writer: ThreadPoolExecutor | None = None
        self._room = BoundedSemaphore(_QUEUED)
        self._writes = self._place is not None  # until the store refuses one
        self._off = False
        self._back = 0.0  # when the store is asked again, on the monotonic clock
        self.metrics = SampleMetrics()

    def read(self, numbers: list[int]) -> list[Any]:
        found: dict[int, Any] = {}
        self._from_peers(numbers, found)
        self._from_store([one for one in numbers if one not in found], found)
        missing = list(dict.fromkeys(one for one in numbers if one not in found))
        for number, sample in zip(missing, self._load(missing), strict=True):
            found[number] = sample
            self._keep(number, sample)
        return [found[number] for number in numbers]

    def close(self) -> None:
        if self._writer is not None:
            self._writer.shutdown(wait=True)
        self._entries.close()

    # --- how ----------------------------------------------------------------------------------------------

    def _key(self, number: int) -> bytes:
        return sha256(f"{self._digest}|{number}".encode()).digest()

    def _from_peers(self, numbers: list[int], found: dict[int, Any]) -> None:
        if self._off:
            return
        began = time.perf_counter()
        for number, data in zip(numbers, self._entries.get([self._key(one) for one in numbers]), strict=True):
            if data is not None and self._decoded(number, data, found):
                self.metrics.peer_hits += 1
        if len(found) == len(set(numbers)):
            self.metrics.timed_hits += len(numbers)
            self.metrics.peer_seconds += time.perf_counter() - began
        if self._measure and self.metrics.slower:
            self._off = True
            self._entries.close()
            seen = self.metrics
            log.warning(
                "nodes' memory is used no longer: a sample takes %.3g ms there and %.3g ms from the data set",
                1e3 * seen.peer_seconds / seen.timed_hits,
                1e3 * seen.loaded_seconds / seen.loaded,
            )

    def _from_store(self, numbers: list[int], found: dict[int, Any]) -> None:
        if self._place is None or time.monotonic() < self._back:
            return
        for number in numbers:
            began = time.monotonic()
            try:
                data = self._place.read(_file(number))
            except FileNotFoundError:
                continue
            except (OSError, InfraError) as exc:
                wait = max(_AWAY, _AWAY_TIMES * (time.monotonic() - began))
                self._back = time.monotonic() + wait
                log.warning("the store of samples cannot be read, and is not asked for %.0f s: %s", wait, exc)
                return
            if self._decoded(number, data, found):
                self.metrics.store_hits += 1
                if not self._off:
                    self._entries.put(self._key(number), data)

    def _decoded(self, number: int, data: bytes, found: dict[int, Any]) -> bool:
        try:
            found[number] = decode(data)
        except MemoryTierError as exc:
            self.metrics.damaged += 1
            log.warning("sample %d is loaded again: %s", number, exc)
            return False
        return True

    def _load(self, numbers: list[int]) -> Sequence[Any]:
        if not numbers:
            return ()
        began = time.perf_counter()
        found = self._many(numbers) if callable(self._many) else [self._dataset[one] for one in numbers]
        self.metrics.loaded += len(numbers)
        self.metrics.loaded_seconds += time.perf_counter() - began
        return found

    def _keep(self, number: int, sample: Any) -> None:
        if self._off and not self._writes:
            return
        data = encode(sample)
        if not self._off:
            self._entries.put(self._key(number), data)
        if self._writes:
            self._write(number, data)

    def _write(self, number: int, data: bytes) -> None:
        """Queue a sample for the store; waits while too many are queued."""
        place = self._place
        assert place is not None
        if self._writer is None:
            self._writer = ThreadPoolExecutor(2, thread_name_prefix="memory-samples")
        self._room.acquire()
        self._writer.submit(self._store_one, place, number, data).add_done_callback(self._written)

    def _store_one(self, place: StorageLocation, number: int, data: bytes) -> None:
        if self._writes:  # of a store that is away each write takes its time to fail
            place.write(_file(number), data)

    def _written(self, done: "Future[None]") -> None:
        self._room.release()
        error = done.exception()
        if error is not None and self._writes:
            self._writes = False
            log.warning("samples are no longer kept in the store: %s", error)


def _file(number: int) -> str:
    return f"{number // 1000}/{number}"
