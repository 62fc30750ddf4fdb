"""The parameters cut into blocks: what is saved, lost and adopted on its own (SCAR, ICML 2019, section 4).

Blocks are numbered in the order of the tensors and of their rows, so that equal models have equal blocks everywhere.

The blocks as they were last saved, beside the parameters and on their device: what distances are measured from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ebbflow.infra.training.process.agreeing import exchangeable
from ebbflow.planners.errors import OptionError

SHARD_BYTES = 16 << 10  # of a block, about, where its number of rows is not given


@exchangeable
@dataclass(frozen=True, slots=True)
class BlockSpec:
    """Rows ``start`` to ``stop`` of a tensor along its first dimension; a scalar is one row."""

    tensor: str
    start: int
    stop: int
    nbytes: int  # of the parameter alone

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the block's part of ``tensor``, a view."""
        return tensor[self.start : self.stop] if tensor.dim() else tensor.view(1)


def partition_by_shard(tensors: Mapping[str, torch.Tensor], rows: int | None = None) -> tuple[BlockSpec, ...]:
    """Cut every tensor along its first dimension into blocks of ``rows`` rows, or of about 16 KiB.

    Many blocks make partial saves fine and priorities worth having; ten, as by layer, do neither.

    Raises ``OptionError`` for ``rows`` below 1.
    """
    if rows is not None and rows < 1:
        raise OptionError(f"rows of a block must be >= 1; got {rows}")
    found = []
    for name, tensor in tensors.items():
        count = _rows(tensor)
        row_bytes = tensor.numel() // max(count, 1) * tensor.element_size()
        step = rows or max(1, round(SHARD_BYTES / max(row_bytes, 1)))
        for start in range(0, count, step):
            stop = min(start + step, count)
            found.append(BlockSpec(name, start, stop, (stop - start) * row_bytes))
    return _some(found)


def partition_by_layer(tensors: Mapping[str, torch.Tensor]) -> tuple[BlockSpec, ...]:
    """Make each tensor one block: weights and biases apart."""
    return _some(
        [
            BlockSpec(name, 0, _rows(t), t.numel() * t.element_size())
            for name, t in tensors.items()
            if t.numel()
        ]
    )


def place_blocks(count: int, owners: Sequence[int], seed: int) -> tuple[int, ...]:
    """Return the owner of each block: random by ``seed``, equal numbers up to one (SCAR, section 4.1).

    Raises ``OptionError``.
    """
    if not owners:
        raise OptionError("blocks need at least one owner")
    order = np.random.default_rng(seed).permutation(count)
    placed = [0] * count
    for place, block in enumerate(order.tolist()):
        placed[block] = owners[place % len(owners)]
    return tuple(placed)


def block_distances(
    now: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor], blocks: Sequence[BlockSpec]
) -> torch.Tensor:
    """Return the Euclidean norm of each block's change, on the tensors' device; shape (blocks,), float32.

    The temporary memory is that of the largest tensor.
    """
    names = list(dict.fromkeys(block.tensor for block in blocks))
    rows = []
    for name in names:
        count = _rows(now[name])
        change = (now[name].detach() - saved[name]).reshape(count, -1)
        kind = torch.promote_types(change.dtype, torch.float32)
        rows.append(torch.linalg.vector_norm(change, dim=1, dtype=kind).square().float())
    squares = torch.cat(rows)
    lengths = torch.tensor([block.stop - block.start for block in blocks], device=squares.device)
    return torch.segment_reduce(squares, "sum", lengths=lengths).sqrt()


def _rows(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


def _some(found: list[BlockSpec]) -> tuple[BlockSpec, ...]:
    return tuple(block for block in found if block.nbytes and block.stop > block.start)


Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class PendingSave:
    """A save under way: its blocks, their bytes, and what they were before in the cache."""

    blocks: list[int]
    iteration: int
    before: list[torch.Tensor]
    bytes: int


class BlockCache:
    """Runs ahead of storage by the write under way.

    ``cached`` and ``durable`` are the iterations of each block here and in storage; -1 is never.
    """

    def __init__(self, blocks: Sequence[BlockSpec], local: range) -> None:
        self._blocks = blocks
        self._local = local  # blocks whose tensors this process has
        self._saved: dict[str, torch.Tensor] = {}
        self.cached: NDArray[np.int64] = np.full(len(blocks), -1, np.int64)
        self.durable: NDArray[np.int64] = np.full(len(blocks), -1, np.int64)

    def fill(self, now: Tensors, iteration: int) -> None:
        """Take all blocks as they are."""
        self._saved = {name: tensor.clone() for name, tensor in now.items()}
        self.cached[list(self._local)] = iteration

    def distances(self, now: Tensors) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Return how far each block moved since, in L2, and which are finite; the others count as unmoved."""
        far = np.zeros(len(self._blocks))
        if self._local:
            own = slice(self._local.start, self._local.stop)
            far[own] = block_distances(now, self._saved, self._blocks[own]).cpu().numpy()
        healthy = np.isfinite(far)
        far[~healthy] = 0.0
        return far, healthy

    def take(self, chosen: Sequence[int], now: Tensors, iteration: int) -> list[torch.Tensor]:
        """Take the chosen blocks as they are now; return what was there."""
        cells = self._cells(chosen)
        before = copies(cells)
        if cells:
            torch._foreach_copy_(cells, [self._blocks[n].of(now[self._blocks[n].tensor]) for n in chosen])
        self.cached[list(chosen)] = iteration
        return before

    def roll_back(self, chosen: Sequence[int], before: list[torch.Tensor]) -> None:
        """Put back what is durable, so that the distance of what was not written grows on."""
        cells = self._cells(chosen)
        if cells:
            torch._foreach_copy_(cells, before)
        self.cached[list(chosen)] = self.durable[list(chosen)]

    def put(self, number: int, now: Tensors, iteration: int) -> None:
        """Take a block that was read from storage."""
        block = self._blocks[number]
        block.of(self._saved[block.tensor]).copy_(block.of(now[block.tensor]))
        self.cached[number] = self.durable[number] = iteration

    def _cells(self, chosen: Sequence[int]) -> list[torch.Tensor]:
        return [self._blocks[number].of(self._saved[self._blocks[number].tensor]) for number in chosen]


def copies(views: Sequence[torch.Tensor], *, host: bool = False) -> list[torch.Tensor]:
    """Return copies, those of one dtype in one piece of memory; in pinned memory of the host if ``host``.

    From a GPU to the host the copy is only begun: record an event and wait for it.
    """
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


def copied(tensors: Sequence[torch.Tensor]) -> Any:
    """Return an event of the GPU after all that was begun there; ``None`` for tensors of the host."""
    if not tensors or not tensors[0].is_cuda:
        return None
    event = torch.cuda.Event()
    event.record()
    return event
