"""The blocks as they were last saved, beside the parameters and on their device: what distances are measured from."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ebbflow.infra.training.running.blocks import BlockSpec, block_distances

Tensors = Mapping[str, torch.Tensor]


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
