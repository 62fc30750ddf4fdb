"""Reading a running checkpoint back: the blocks that were lost, or everything."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ebbflow.infra.errors import StorageError
from ebbflow.infra.training.checkpoints.states import check_model
from ebbflow.infra.training.running.blocks import BlockCache
from ebbflow.infra.training.running.folder import RunningFolder, small_content
from ebbflow.infra.training.running.levels import SaveLevels
from ebbflow.infra.training.running.live_state import LiveState
from ebbflow.infra.training.running.owners import OwnedBlocks
from ebbflow.infra.training.running.segments import STATE, Record
from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.saving.rework import rework_after_recovery

Check = Callable[[Mapping[int, Record]], None]  # of the records that were read, by block
Read = Callable[[Callable[[], Any]], Any]  # returns what is read


@dataclass(frozen=True, slots=True)
class Recovery:
    """What was read back."""

    blocks: int
    bytes: int  # of the parameters
    seconds: float
    iteration: int  # of the newest block, or of the small state
    oldest: int  # iteration of the oldest block
    perturbation: (
        float | None
    )  # how far these blocks had moved from what was read, when last measured; L2 norm
    rework: float | None = (
        None  # iterations that it costs at most (theorem 5.3.1), where c and the error were given
    )
    state: Any = None  # of ``step``, after ``recover_all``

    def bounded(self, contraction: float | None, error: float | None) -> "Recovery":
        """Return it with the bound of what it costs, where all that is known that the bound needs."""
        if contraction is None or error is None or self.perturbation is None:
            return self
        return replace(self, rework=rework_after_recovery(contraction, error, self.perturbation))


class Restorer:
    """Puts what is in storage into the live tensors, and into the cache beside them."""

    def __init__(
        self, folder: RunningFolder, blocks: OwnedBlocks, live: LiveState, cache: BlockCache
    ) -> None:
        self._folder, self._blocks, self._live, self._cache = folder, blocks, live, cache

    def start(self, known: str | None) -> str:
        """Return the start to read, ``known`` or the newest, once it is found to fit what is trained here.

        Raises ``StorageError`` where there is none, ``OptionError`` and ``OtherModelError`` for one of another cut.
        """
        start, uri = known or self._folder.latest(), self._folder.uri
        if start is None:
            raise StorageError(f"there is no running checkpoint in {uri}; it was never initialized")
        table = self._folder.table(start)
        before, now = len(set(table.placement)), len(set(self._blocks.placement))
        if self._live.sharded and before != now:
            raise OptionError(
                f"{uri} holds the shards of {before} processes, here are {now}; read it whole with read_running"
            )
        check_model(table.tensors, self._blocks.tensors, uri)
        if table.blocks != self._blocks.specs:
            raise OptionError(
                f"{uri} has {len(table.blocks)} blocks, cut differently from the {len(self._blocks)} here; use "
                f"the same partition and shard_rows"
            )
        return start

    def lost(
        self, start: str, lost: Sequence[int], moved: NDArray[np.float64] | None, since: float
    ) -> Recovery:
        """Read these blocks; ``moved`` says how far each was from what is saved, and is 0 for them afterwards.

        ``since`` is when the recovery began, on the monotonic clock.

        Raises ``OptionError`` for blocks of shards that are not here, ``StorageError``.
        """
        elsewhere = [block for block in lost if block not in self._blocks.local]
        if elsewhere:
            raise OptionError(f"blocks {elsewhere[:8]} are of shards that this process does not have")
        records = self._folder.newest(start, lost)
        perturbation = None if moved is None else float(np.linalg.norm(moved[list(lost)]))
        oldest = self._put(records, moved)
        newest = max((record.iteration for record in records.values()), default=-1)
        return self._recovery(since, lost, newest, oldest, perturbation)

    def read(
        self, known: str | None, owner: int, own: Sequence[int]
    ) -> tuple[str, dict[int, Record], SaveLevels]:
        """Return the start to read, see ``start``, the newest records of this process' tensors and of what was saved
        beside them, and where saves of ``owner``, whose blocks are ``own``, continue. Changes nothing.
        """
        start = self.start(known)
        records = self._folder.newest(start, [*self._blocks.local, STATE])
        return start, records, self._folder.continued(start, owner, {block: records[block] for block in own})

    def everything(self, records: Mapping[int, Record], since: float) -> tuple[Recovery, Mapping[str, Any]]:
        """Take up all that ``read`` has returned; return also what was saved beside the blocks."""
        iteration = records[STATE].iteration
        small = small_content(records[STATE])
        blocks = {block: record for block, record in records.items() if block != STATE}
        self._live.put_small(small["live"])
        self._cache.fill(self._live.tensors, iteration)
        oldest = self._put(blocks, None)
        self._live.complete()
        perturbation = float(np.linalg.norm(np.asarray(small["moved"], float)))
        found = self._recovery(since, list(blocks), iteration, oldest, perturbation)
        return replace(found, state=small["run"]), small

    def _recovery(
        self, since: float, read: Sequence[int], newest: int, oldest: int, perturbation: float | None
    ) -> Recovery:
        size = int(self._blocks.sizes[list(read)].sum())
        return Recovery(len(read), size, time.monotonic() - since, newest, oldest, perturbation)

    def _put(self, records: Mapping[int, Record], moved: NDArray[np.float64] | None) -> int:
        now = self._live.tensors
        for number, record in records.items():
            self._live.put(self._blocks.specs[number], record)
            self._cache.put(number, now, record.iteration)
            if moved is not None:
                moved[number] = 0.0
        return min((record.iteration for record in records.values()), default=-1)
