"""A running checkpoint: a fraction of the parameters is saved often, those first that changed most, and after a loss
only what was lost is read back (SCAR: Qiao, Aragam, Zhang, Xing, "Fault Tolerance in Iterative-Convergent Machine
Learning", ICML 2019; Qiao's thesis, CMU-CS-21-135, chapter 5).

    running = RunningCheckpoint(StorageLocation("s3://b/run/running"), model, optimizer, period=16, fraction=1 / 8)
    running.initialize()
    for iteration in ...:
        ...; optimizer.step()
        running.step(iteration, {"epoch": epoch})
    running.recover(lost_blocks)        # others keep their values
    running.recover_all()               # nothing survived

It pays where state is sharded, and where everything may be lost at once; while one replica of data-parallel training
lives nothing needs to be recovered. With a process group every process saves the blocks it owns, the choice is made
over the blocks of all, and ``step`` is collective. Tensors that are sharded along dimension 0 (``DTensor``, as of
``fully_shard``) are owned by the process that has the shard; a world of another size reads them with
``read_running``.
"""

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ebbflow.infra.errors import StorageError
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.checkpoints.states import Staging
from ebbflow.infra.training.checkpoints.writer import BackgroundWriter
from ebbflow.infra.training.running.blocks import BlockCache, BlockSpec, PendingSave, copied, copies
from ebbflow.infra.training.running.folder import RunningFolder, Table, small_bytes
from ebbflow.infra.training.running.levels import SaveLevels
from ebbflow.infra.training.running.live_state import LiveState
from ebbflow.infra.training.running.memory import NodeMemory
from ebbflow.infra.training.running.owners import OwnedBlocks, Owners, Partition
from ebbflow.infra.training.running.restoring import Check, Read, Recovery, Restorer
from ebbflow.infra.training.running.segments import STATE, Record
from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.saving.partial import (
    CheckpointSchedule,
    PartialCheckpoints,
    PrioritySelection,
    Strategy,
    selection,
)

TIMEOUT = 120.0  # seconds
NOTICE_SHARE = 0.5  # of the time left at a notice that an extra save plans with

log = logging.getLogger(__name__)


class RunningCheckpoint:
    """Keeps the running checkpoint of a training; one copy of the parameters is held beside them for distances.

    One write is under way at a time. A save that comes due meanwhile is skipped and counted in ``skipped``: training
    never waits for storage. A write that fails is counted in ``failures``; its blocks count as changed again.

    Args:
        place: a directory of this training alone.
        model: a module or tensors by name.
        optimizer: what it keeps of a parameter goes with the parameter's block.
        period: C, iterations in which the volume of everything is written once.
        fraction: r of it in each save, every r·C iterations.
        partition: blocks of rows, or one for each tensor.
        shard_rows: rows of a block; about 16 KiB unless given.
        strategy: which blocks are saved: those that changed most, in turn, or at random.
        max_age: iterations after which a block is saved whether or not it changed; 4·C unless given.
        asynchronous: write in the background.
        group: processes that hold the blocks together; none unless given.
        owner: number of this process among the owners, by which its files are named; its rank unless given.
        seed: of the placement and of what is random.
        timeout: seconds that a write may take where it is waited for.
        memory: that nodes lend: a save counts once it is there, and goes to the directory behind it.
    """

    def __init__(
        self,
        place: StorageLocation,
        model: torch.nn.Module | Mapping[str, torch.Tensor],
        optimizer: torch.optim.Optimizer | None = None,
        *,
        period: int,
        fraction: float = 1 / 8,
        partition: Partition = "shard",
        shard_rows: int | None = None,
        strategy: Strategy = "priority",
        max_age: float | None = None,
        asynchronous: bool = True,
        group: Any = None,
        owner: int | None = None,
        seed: int = 0,
        timeout: float = TIMEOUT,
        memory: NodeMemory | None = None,
    ) -> None:
        self._folder = RunningFolder(place, memory)
        self.uri = self._folder.uri
        self._owners = Owners(group, owner)
        self.owner = self._owners.owner
        self._live = LiveState(model, optimizer, self.owner)
        self._blocks = OwnedBlocks(self._owners, self._live, partition, shard_rows, seed)
        self._plan = PartialCheckpoints(
            CheckpointSchedule(period, fraction), self.sizes.tolist(), selection(strategy), max_age
        )
        self._asynchronous, self._seed, self._timeout = asynchronous, seed, timeout
        self._cache = BlockCache(self.blocks, self._blocks.local)
        self._restoring = Restorer(self._folder, self._blocks, self._live, self._cache)
        self._moved: NDArray[np.float64] | None = None  # distances after the last save
        self._start: str | None = None
        self._store: SaveLevels | None = None
        self._staging = Staging()
        self._writer: BackgroundWriter[float] = BackgroundWriter(f"the running checkpoint {self.uri}")
        self._pending: PendingSave | None = None
        self.bandwidth = 0.0  # bytes/s that the last writes reached, until durable
        self.saves = self.skipped = self.failures = 0
        self.last_error = ""  # of the last write that failed
        self.stalled = 0.0  # seconds that training spent in ``step``

    @property
    def blocks(self) -> tuple[BlockSpec, ...]:
        """Return the blocks of all processes, by number."""
        return self._blocks.specs

    @property
    def sizes(self) -> NDArray[np.float64]:
        """Return the bytes of each block's parameters."""
        return self._blocks.sizes

    @property
    def placement(self) -> tuple[int, ...]:
        """Return the owner of each block."""
        return self._blocks.placement

    # --- saving -------------------------------------------------------------------------------------------

    def initialize(self, state: Any = None, iteration: int = 0) -> None:
        """Save everything and wait until it is durable; collective. What an earlier run left here is replaced.

        Args:
            state: JSON-like and tensors that must stay consistent: counters, data position, random states.
            iteration: after which training begins.
        """
        start, mark = self._owners.together(lambda: self._folder.next() if self._owners.first else None)[0]
        self._start, self._store = start, self._folder.levels(start, self.owner, mark)
        self._cache.fill(self._live.tensors, iteration)
        self._plan.saved[:] = iteration
        self._moved = np.zeros(len(self.blocks))

        def save() -> None:
            self._write(self._blocks.mine(range(len(self.blocks))), iteration, state, through=True)
            self._finish(self._timeout)

        def complete() -> None:
            if self._owners.first:
                table = Table(self.blocks, self._blocks.tensors, self.placement, mark)
                self._folder.complete(start, table)

        self._owners.together(save)
        self._owners.together(complete)

    def due(self, iteration: int) -> bool:
        """Return whether ``step`` saves something after this iteration."""
        return self._plan.due(iteration)

    def step(self, iteration: int, state: Any = None) -> list[int]:
        """Save the blocks whose turn it is, if one is due after this iteration; return those of this process.

        Call it after ``optimizer.step()``, with iterations counted from 1. With a group it is collective when due.
        A write that failed earlier is noted here. Raises ``OptionError`` before ``initialize`` or a recovery.
        """
        if self._store is None:
            raise OptionError("call initialize, or recover_all, before step")
        self._note_written()
        if not self.due(iteration):
            return []
        begun = time.monotonic()
        far, healthy = self._measure()
        rng = np.random.default_rng([self._seed, iteration])
        chosen = [block for block in self._plan.choose(iteration, far, rng) if healthy[block]]
        saved: list[int] = []
        if self._writer.busy:
            self.skipped += 1
        else:
            saved = self._blocks.mine(chosen)
            self._write(saved, iteration, state)
            far[chosen] = 0.0
        self._moved = far
        self.stalled += time.monotonic() - begun
        if not self._asynchronous:
            self._finish(self._timeout, fail=False)
        return saved

    def save_before(self, seconds: float, iteration: int, state: Any = None) -> list[int]:
        """Save now, in ``seconds`` at most, as many of this process' blocks as fit; return those made durable.

        For a notice that this process' node goes away: the blocks that moved most, as many as half of the time left
        pays for at the bandwidth that the last writes reached. No other process participates. Not in the publication.
        """
        begun = time.monotonic()
        with contextlib.suppress(StorageError):
            self._finish(seconds, fail=False)
        if self._store is None or self._writer.busy:
            return []
        far, healthy = self._cache.distances(self._live.tensors)
        mine = [
            block for block in self._blocks.mine(range(len(self.blocks))) if healthy[block] and far[block] > 0
        ]
        if not mine:
            return []
        left = seconds - (time.monotonic() - begun)
        ratio = self._live.size(self.blocks[n] for n in mine) / max(1.0, float(self.sizes[mine].sum()))
        budget = left * NOTICE_SHARE * self.bandwidth / ratio
        if budget <= 0:
            return []
        rng = np.random.default_rng([self._seed, iteration])
        taken = PrioritySelection().select(far[mine], self.sizes[mine], budget, rng)
        chosen = [mine[i] for i in taken]
        self._write(chosen, iteration, state)
        with contextlib.suppress(StorageError):
            self.wait(max(0.0, seconds - (time.monotonic() - begun)))
            return [block for block in chosen if self.durable[block] == iteration]
        return []

    @property
    def cached(self) -> NDArray[np.int64]:
        """Return the iteration at which each block was last taken; that of others' blocks is not kept up."""
        return self._cache.cached

    @property
    def durable(self) -> NDArray[np.int64]:
        """Return the iteration of each block that counts, as far as this process knows; -1: none."""
        return self._cache.durable

    @property
    def busy(self) -> bool:
        """Return whether a write is under way."""
        return self._writer.busy

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the directory has all saves. Raises ``StorageError``, after ``timeout`` seconds too."""
        begun, limit = time.monotonic(), self._timeout if timeout is None else timeout
        self._finish(limit)
        if self._store is not None:
            self._store.flush(max(0.0, limit - (time.monotonic() - begun)))

    def close(self, timeout: float, *, needed: bool = True) -> None:
        """Wait until the directory has all saves, and have nodes forget theirs, in any case where none is needed.

        Raises as ``wait`` does, where saves are needed.
        """
        with contextlib.suppress(*(() if needed else (StorageError,))):
            self.wait(timeout)
        if self._store is not None:
            self._store.release()

    # --- recovering ---------------------------------------------------------------------------------------

    def recover(
        self, lost: Sequence[int], *, contraction: float | None = None, error: float | None = None
    ) -> Recovery:
        """Read back the blocks that were lost; everything else stays as it is, to the bit.

        Args:
            lost: blocks, of whichever owner; this process then holds them.
            contraction: c by which an iteration brings the parameters closer to the optimum, for the bound.
            error: their distance from the optimum now, in L2.

        Raises:
            StorageError: there is no running checkpoint, or a block's record is damaged.
        """
        begun = time.monotonic()
        with contextlib.suppress(StorageError):
            self._finish(self._timeout, fail=False)
        start = self._restoring.start(self._start)
        return self._restoring.lost(start, lost, self._moved, begun).bounded(contraction, error)

    def recover_all(
        self, *, contraction: float | None = None, error: float | None = None, memory: bool = True,
        check: Check = lambda records: None, read: Read = lambda work: work(),
    ) -> Recovery:  # fmt: skip
        """Read back everything, after the loss of all processes; collective only in that each process calls it.

        ``error`` is the distance from the optimum at the loss, see ``recover``; without ``memory`` only the directory
        is read. ``read`` is given what reads and returns what that returns; ``check`` gets what was read, before it
        takes the place of anything. What they raise passes.
        ``Recovery.state`` is that of the newest save, and ``Recovery.iteration`` where training continues.
        """
        begun = time.monotonic()
        self._folder.reads_memory = memory
        own = (*self._blocks.mine(self._blocks.local), STATE)
        start, records, store = read(lambda: self._restoring.read(self._start, self.owner, own))
        check(records)
        found, small = self._restoring.everything(records, begun)
        self._plan.restore(small["plan"])
        self._plan.saved[:] = self.cached
        self._moved = np.asarray(small["moved"], float)
        self._start, self._store = start, store
        return found.bounded(contraction, error)

    def fits(self) -> bool:
        """Return whether what is there was cut as here, so that ``recover_all`` reads it; else ``read_running`` does.

        Raises ``StorageError``.
        """
        start = self._folder.latest()
        return start is None or self._folder.table(start).blocks == self._blocks.specs

    def regroup(self, group: Any, placement: Sequence[int]) -> None:
        """Continue with other processes, after a loss: ``placement`` says who owns each block from now on.

        ``planners.training.saving.partial.assign_lost_blocks`` says who should adopt which. Each process calls
        ``recover`` for what it adopts.
        """
        self._blocks.place(placement)
        self._owners.group = group

    # --- one save, step by step ---------------------------------------------------------------------------

    def _measure(self) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Return all owners' distances, each measured by the owner, and take over their iterations."""
        far, healthy = self._cache.distances(self._live.tensors)
        if self._owners.group is not None:
            owned = np.array(self.placement) == self.owner
            known = np.where(owned, [far, healthy, self.cached], 0.0)
            device = next(iter(self._live.tensors.values())).device  # NCCL knows no other
            known = self._owners.summed(known, device)
            far, healthy = known[0].copy(), known[1] > 0
            self._plan.saved[:] = known[2].astype(np.int64)
        else:
            self._plan.saved[:] = self.cached
        return far, healthy

    def _write(self, chosen: list[int], iteration: int, state: Any, *, through: bool = False) -> None:
        """Copy the blocks to the cache and to host memory, and begin to write them."""
        assert self._store is not None
        self._note_written()  # it may have ended since it was looked at
        before = self._cache.take(chosen, self._live.tensors, iteration)
        parts = [(number, self._live.parts(self.blocks[number])) for number in chosen]
        values = copies([value for _, own in parts for _, value in own], host=True)
        ready = copied(before)
        moved = np.zeros(len(self.blocks)) if self._moved is None else self._moved
        # arrays, not lists: a list is looked through item by item
        plan = {k: np.asarray(v) if isinstance(v, list) else v for k, v in self._plan.state().items()}
        small, small_ready = self._staging.copy(
            {"live": self._live.small(), "run": state, "plan": plan, "moved": moved}
        )
        host = iter(values)
        records = [
            Record(number, iteration, tuple((name, next(host)) for name, _ in own)) for number, own in parts
        ]
        size = sum(value.numel() * value.element_size() for value in values)
        store = self._store

        def job() -> float:
            for event in (ready, small_ready):
                if event is not None:
                    event.synchronize()
            state_record = replace(small_bytes(small), iteration=iteration)
            return store.commit([*records, state_record], through=through)

        self._writer.start(job)
        self._pending = PendingSave(chosen, iteration, before, size)
        self.saves += 1

    def _finish(self, timeout: float, *, fail: bool = True) -> None:
        """Wait for the write and take note of how it ended. Raises its error if ``fail``."""
        pending = self._pending
        if pending is None:
            return
        try:
            bandwidth = self._writer.wait(timeout)
        except StorageError as exc:
            if self._writer.busy:
                raise
            self._pending = None
            self.failures += 1
            self.last_error = str(exc)
            log.warning("blocks of iteration %s were not saved: %s", pending.iteration, exc)
            self._cache.roll_back(pending.blocks, pending.before)
            if fail:
                raise
            return
        self._pending = None
        self.durable[pending.blocks] = pending.iteration
        if bandwidth := bandwidth or (self._store.bandwidth if self._store is not None else 0.0):
            self.bandwidth = bandwidth if not self.bandwidth else 0.7 * self.bandwidth + 0.3 * bandwidth

    def _note_written(self) -> None:
        if not self._writer.busy:
            self._finish(0.0, fail=False)
        if self._store is not None and (problem := self._store.problem()):
            self.failures += 1
            self.last_error = problem
