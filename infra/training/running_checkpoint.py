"""A running checkpoint: a fraction of the parameters is saved often, those first that changed most, and after a loss
only what was lost is read back (SCAR: Qiao, Aragam, Zhang, Xing, "Fault Tolerance in Iterative-Convergent Machine
Learning", ICML 2019; Qiao's thesis, CMU-CS-21-135, chapter 5).

    running = RunningCheckpoint("s3://b/run/running", model, optimizer, period=16, fraction=1 / 8)
    running.initialize()
    for iteration in ...:
        ...; optimizer.step()
        running.step(iteration, {"epoch": epoch})
    running.recover(lost_blocks)        # others keep their values
    running.recover_all()               # nothing survived

It pays where state is sharded, and where everything may be lost at once; while one replica of data-parallel training
lives nothing needs to be recovered. With a process group every process saves the blocks it owns, the choice is made
over the blocks of all, and ``step`` is collective.
"""

import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ebbflow.infra.errors import StorageError
from ebbflow.infra.training.block_store import BlockStore
from ebbflow.infra.training.blocks import (
    BlockSpec,
    block_distances,
    partition_by_layer,
    partition_by_shard,
    place_blocks,
)
from ebbflow.infra.training.checkpoint_writer import BackgroundWriter
from ebbflow.infra.training.live_state import LiveState
from ebbflow.infra.training.running_folder import RunningFolder, Table, small_bytes, small_content
from ebbflow.infra.training.segments import STATE, Record
from ebbflow.infra.training.states import Staging, check_model, signature
from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.partial_checkpoint import (
    CheckpointSchedule,
    PartialCheckpoints,
    PrioritySelection,
    Strategy,
    selection,
)
from ebbflow.planners.training.rework import rework_after_recovery

TIMEOUT = 120.0  # seconds
NOTICE_SHARE = 0.5  # of the time left at a notice that an extra save plans with

log = logging.getLogger(__name__)


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
    rework: float | None  # iterations that it costs at most (theorem 5.3.1), where c and the error were given
    state: Any = None  # of ``step``, after ``recover_all``


@dataclass(frozen=True, slots=True)
class _Pending:
    """A save under way, and what its blocks in the cache were before."""

    blocks: list[int]
    iteration: int
    before: list[torch.Tensor]
    bytes: int


class RunningCheckpoint:
    """Keeps the running checkpoint of a training; one copy of the parameters is held beside them for distances.

    One write is under way at a time. A save that comes due meanwhile is left out and counted in ``skipped``: training
    never waits for storage. A write that fails is counted in ``failures``; its blocks count as changed again.

    Args:
        uri: a folder or ``s3://bucket/folder``, of this training alone.
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
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        model: torch.nn.Module | Mapping[str, torch.Tensor],
        optimizer: torch.optim.Optimizer | None = None,
        *,
        period: int,
        fraction: float = 1 / 8,
        partition: Literal["shard", "layer"] = "shard",
        shard_rows: int | None = None,
        strategy: Strategy = "priority",
        max_age: float | None = None,
        asynchronous: bool = True,
        group: Any = None,
        owner: int | None = None,
        seed: int = 0,
        timeout: float = TIMEOUT,
    ) -> None:
        self._folder = RunningFolder(uri)
        self.uri = self._folder.uri
        self._live = LiveState(model, optimizer)
        tensors = self._live.tensors
        cut = partition_by_layer(tensors) if partition == "layer" else partition_by_shard(tensors, shard_rows)
        self.blocks: tuple[BlockSpec, ...] = cut
        self.sizes: NDArray[np.float64] = np.array([block.nbytes for block in cut], float)
        self._plan = PartialCheckpoints(
            CheckpointSchedule(period, fraction), self.sizes.tolist(), selection(strategy), max_age
        )
        self._asynchronous, self._seed, self._timeout = asynchronous, seed, timeout
        self._group = group
        rank, size = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
        self.owner = rank if owner is None else owner
        owners = self._everybody(self.owner)
        if len(set(owners)) != size:
            raise OptionError(f"owners must differ between processes; got {owners}")
        self.placement = place_blocks(len(cut), owners, seed)
        self.cached: NDArray[np.int64] = np.full(len(cut), -1, np.int64)  # iteration of each block here
        self.durable: NDArray[np.int64] = np.full(len(cut), -1, np.int64)  # and in storage, as known here
        self._cache: dict[str, torch.Tensor] = {}
        self._moved: NDArray[np.float64] | None = None  # distances after the last save
        self._start: str | None = None
        self._store: BlockStore | None = None
        self._staging = Staging()
        self._writer: BackgroundWriter[float] = BackgroundWriter(f"the running checkpoint {self.uri}")
        self._pending: _Pending | None = None
        self.bandwidth = 0.0  # bytes/s that the last writes reached, until durable
        self.saves = self.skipped = self.failures = 0
        self.stalled = 0.0  # seconds that training spent in ``step``

    # --- saving -------------------------------------------------------------------------------------------

    def initialize(self, state: Any = None, iteration: int = 0) -> None:
        """Save everything and wait until it is durable; collective. What an earlier run left here is replaced.

        Args:
            state: JSON-like and tensors that must stay consistent: counters, data position, random states.
            iteration: after which training begins.
        """
        start: str = self._everybody(self._folder.next() if self._first else "")[0]
        self._start, self._store = start, self._folder.store(start, self.owner)
        self._cache = {name: tensor.clone() for name, tensor in self._live.tensors.items()}
        self.cached[:] = iteration
        self._plan.saved[:] = iteration
        self._moved = np.zeros(len(self.blocks))
        error: StorageError | None = None
        try:
            self._write(self._mine(range(len(self.blocks))), iteration, state)
            self._finish(self._timeout)
        except StorageError as exc:
            error = exc
        for failed in self._everybody(error):
            if failed is not None:
                raise failed
        if self._first:
            table = Table(self.blocks, signature(self._live.tensors), self.placement)
            self._folder.complete(start, table)
        self._everybody(None)

    def step(self, iteration: int, state: Any = None) -> list[int]:
        """Save the blocks whose turn it is, if one is due after this iteration; return those of this process.

        Call it after ``optimizer.step()``, with iterations counted from 1. With a group it is collective when due.
        A write that failed earlier is noted here. Raises ``OptionError`` before ``initialize`` or a recovery.
        """
        if self._store is None:
            raise OptionError("call initialize, or recover_all, before step")
        self._note_written()
        if not self._plan.due(iteration):
            return []
        begun = time.monotonic()
        far, healthy = self._measure()
        rng = np.random.default_rng([self._seed, iteration])
        chosen = [block for block in self._plan.choose(iteration, far, rng) if healthy[block]]
        saved: list[int] = []
        if self._writer.busy:
            self.skipped += 1
        else:
            saved = self._mine(chosen)
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
        pays for at the bandwidth that the last writes reached. No other process takes part. Not in the publication.
        """
        begun = time.monotonic()
        with contextlib.suppress(StorageError):
            self._finish(seconds, fail=False)
        if self._store is None or self._writer.busy:
            return []
        far, healthy = self._distances()
        mine = [block for block in self._mine(range(len(self.blocks))) if healthy[block] and far[block] > 0]
        left = seconds - (time.monotonic() - begun)
        ratio = self._bytes(mine) / max(1.0, float(self.sizes[mine].sum())) if mine else 1.0
        budget = left * NOTICE_SHARE * self.bandwidth / ratio
        if not mine or budget <= 0:
            return []
        rng = np.random.default_rng([self._seed, iteration])
        taken = PrioritySelection().select(far[mine], self.sizes[mine], budget, rng)
        chosen = [mine[i] for i in taken]
        self._write(chosen, iteration, state)
        self._finish(max(0.0, seconds - (time.monotonic() - begun)), fail=False)
        return [block for block in chosen if self.durable[block] == iteration]

    @property
    def busy(self) -> bool:
        """Tell whether a write is under way."""
        return self._writer.busy

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the write under way. Raises its error, or ``StorageError`` after ``timeout`` seconds."""
        self._finish(self._timeout if timeout is None else timeout)

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
        start = self._checked_start()
        records = self._folder.newest(start, lost)
        perturbation = None if self._moved is None else float(np.linalg.norm(self._moved[list(lost)]))
        oldest = self._put(records)
        return Recovery(
            len(records),
            int(self.sizes[list(lost)].sum()),
            time.monotonic() - begun,
            max((record.iteration for record in records.values()), default=-1),
            oldest,
            perturbation,
            _bound(contraction, error, perturbation),
        )

    def recover_all(self, *, contraction: float | None = None, error: float | None = None) -> Recovery:
        """Read back everything, after the loss of all processes; collective only in that each process calls it.

        ``error`` is the distance from the optimum at the loss, see ``recover``; ``Recovery.state`` is that of the
        newest save, and ``Recovery.iteration`` where training goes on.
        """
        begun = time.monotonic()
        start = self._checked_start()
        records = self._folder.newest(start, [*range(len(self.blocks)), STATE])
        iteration = records[STATE].iteration
        small = small_content(records.pop(STATE))
        self._live.put_small(small["live"])
        self._cache = {name: tensor.clone() for name, tensor in self._live.tensors.items()}
        oldest = self._put(records)
        self._live.complete()
        self._plan.restore(small["plan"])
        self._plan.saved[:] = self.cached
        self._moved = np.asarray(small["moved"], float)
        self._start, self._store = start, self._folder.store(start, self.owner)
        perturbation = float(np.linalg.norm(self._moved))
        return Recovery(
            len(self.blocks),
            int(self.sizes.sum()),
            time.monotonic() - begun,
            iteration,
            oldest,
            perturbation,
            _bound(contraction, error, perturbation),
            small["run"],
        )

    def regroup(self, group: Any, placement: Sequence[int]) -> None:
        """Go on with other processes, after a loss: ``placement`` says who owns each block from now on.

        ``planners.training.partial_checkpoint.assign_lost_blocks`` says who should adopt which. Each process calls
        ``recover`` for what it adopts.
        """
        if len(placement) != len(self.blocks):
            raise OptionError(
                f"placement must name an owner for {len(self.blocks)} blocks; got {len(placement)}"
            )
        self._group, self.placement = group, tuple(placement)

    def _checked_start(self) -> str:
        start = self._start or self._folder.latest()
        if start is None:
            raise StorageError(f"there is no running checkpoint in {self.uri}; it was never initialized")
        table = self._folder.table(start)
        check_model(table.tensors, signature(self._live.tensors), self.uri)
        if table.blocks != self.blocks:
            raise OptionError(
                f"{self.uri} has {len(table.blocks)} blocks, cut differently from the {len(self.blocks)} here; use "
                f"the same partition and shard_rows"
            )
        return start

    def _put(self, records: Mapping[int, Record]) -> int:
        now = self._live.tensors
        for number, record in records.items():
            block = self.blocks[number]
            self._live.put(block, record)
            block.of(self._cache[block.tensor]).copy_(block.of(now[block.tensor]))
            self.cached[number] = self.durable[number] = record.iteration
            if self._moved is not None:
                self._moved[number] = 0.0
        return min((record.iteration for record in records.values()), default=-1)

    # --- one save, step by step ---------------------------------------------------------------------------

    def _distances(self) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Return how far each block moved since it was saved, and which are finite; the others count as unmoved."""
        far = block_distances(self._live.tensors, self._cache, self.blocks).cpu().numpy().astype(float)
        healthy = np.isfinite(far)
        far[~healthy] = 0.0
        return far, healthy

    def _measure(self) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Return all owners' distances, each measured by the owner, and take over their iterations."""
        far, healthy = self._distances()
        if self._group is not None:
            owned = np.array(self.placement) == self.owner
            known = np.where(owned, [far, healthy, self.cached], 0.0)
            shared = torch.from_numpy(known)
            dist.all_reduce(
                shared, group=self._group
            )  # each column has one term that is not 0: nothing is rounded
            far, healthy = shared[0].numpy().copy(), shared[1].numpy() > 0
            self._plan.saved[:] = shared[2].numpy().astype(np.int64)
        else:
            self._plan.saved[:] = self.cached
        return far, healthy

    def _write(self, chosen: list[int], iteration: int, state: Any) -> None:
        """Copy the blocks to the cache and to host memory, and begin to write them."""
        assert self._store is not None
        self._note_written()  # it may have ended since it was looked at
        now = self._live.tensors
        cells = [self.blocks[number].of(self._cache[self.blocks[number].tensor]) for number in chosen]
        before = _copies(cells, host=False)
        if cells:
            torch._foreach_copy_(cells, [self.blocks[n].of(now[self.blocks[n].tensor]) for n in chosen])
        parts = [(number, self._live.parts(self.blocks[number])) for number in chosen]
        values = _copies([value for _, own in parts for _, value in own], host=True)
        ready = None
        if cells and cells[0].is_cuda:
            ready = torch.cuda.Event()
            ready.record()
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
        store, begun = self._store, time.monotonic()

        def job() -> float:
            for event in (ready, small_ready):
                if event is not None:
                    event.synchronize()
            state_record = replace(small_bytes(small), iteration=iteration)
            written = store.commit([*records, state_record])
            return written / max(time.monotonic() - begun, 1e-6)

        self._writer.start(job)
        self._pending = _Pending(chosen, iteration, before, size)
        self.cached[chosen] = iteration
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
            log.warning("blocks of iteration %s were not saved: %s", pending.iteration, exc)
            self._roll_back(pending)
            if fail:
                raise
            return
        self._pending = None
        self.durable[pending.blocks] = pending.iteration
        if bandwidth is not None:
            self.bandwidth = bandwidth if not self.bandwidth else 0.7 * self.bandwidth + 0.3 * bandwidth

    def _note_written(self) -> None:
        if not self._writer.busy:
            self._finish(0.0, fail=False)

    def _roll_back(self, pending: _Pending) -> None:
        """Make the cache what is durable again, so that the distances of what was not written grow on."""
        cells = [self.blocks[n].of(self._cache[self.blocks[n].tensor]) for n in pending.blocks]
        if cells:
            torch._foreach_copy_(cells, pending.before)
        self.cached[pending.blocks] = self.durable[pending.blocks]

    def _mine(self, blocks: Sequence[int]) -> list[int]:
        return [block for block in blocks if self.placement[block] == self.owner]

    def _bytes(self, blocks: Sequence[int]) -> float:
        parts = (value for number in blocks for _, value in self._live.parts(self.blocks[number]))
        return float(sum(value.numel() * value.element_size() for value in parts))

    @property
    def _first(self) -> bool:
        return self._group is None or dist.get_rank(self._group) == 0

    def _everybody(self, value: Any) -> list[Any]:
        """Return what each process of the group gives, in the order of ranks."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values


def _copies(views: Sequence[torch.Tensor], *, host: bool) -> list[torch.Tensor]:
    """Return copies, those of one dtype in one piece of memory; in pinned memory of the host if ``host``."""
    kinds: dict[torch.dtype, list[int]] = {}
    for place, view in enumerate(views):
        kinds.setdefault(view.dtype, []).append(place)
    found: list[torch.Tensor] = [torch.empty(0)] * len(views)
    for dtype, places in kinds.items():
        whole = torch.cat([views[place].reshape(-1) for place in places])
        if host and whole.is_cuda:
            pinned = torch.empty(whole.shape, dtype=dtype, pin_memory=True)
            whole = pinned.copy_(whole, non_blocking=True)
        for place, piece in zip(places, whole.split([views[p].numel() for p in places]), strict=True):
            found[place] = piece.view(views[place].shape)
    return found


def _bound(contraction: float | None, error: float | None, perturbation: float | None) -> float | None:
    if contraction is None or error is None or perturbation is None:
        return None
    return rework_after_recovery(contraction, error, perturbation)
