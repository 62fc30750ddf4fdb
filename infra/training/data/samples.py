"""Reads the samples of a step from a data set, in this process or ahead of it in worker processes."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from ebbflow.infra.errors import DatasetError

Collate = Callable[[Sequence[Any]], Any]


class Samples:
    """A data set whose samples are read by number.

    Tensors, numpy arrays, tuples of them and ``TensorDataset`` are indexed a batch at a time; of anything else with
    ``__len__`` and ``__getitem__`` (``__getitems__`` where there is one) the samples are put together by ``collate``.

    Raises:
        DatasetError: it cannot be read by number, or its parts have different lengths.
    """

    def __init__(self, dataset: Any, collate: Collate | None = None, workers: int = 0) -> None:
        self.dataset, self.collate, self.workers = dataset, collate, workers
        self.key: Hashable = None  # what was asked for
        self._columns = _columns(dataset) if collate is None else None
        if isinstance(dataset, IterableDataset) or not (
            hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        ):
            raise DatasetError(
                "the order of the data must survive restarts, so samples are read by number: a data set needs "
                f"__len__ and __getitem__; {type(dataset).__name__} can only be iterated: a SampleStream reads it in "
                "its own order"
            )
        if workers < 0:
            raise DatasetError(f"workers must be >= 0; got {workers}")
        self.length = len(self._columns[0]) if self._columns else len(dataset)
        if self._columns and any(len(column) != self.length for column in self._columns):
            lengths = ", ".join(str(len(column)) for column in self._columns)
            raise DatasetError(f"tensors of one data set must be equally long; got {lengths}")
        self._loader: DataLoader[Any] | None = None
        self._queue: list[Iterable[list[int]]] = []

    def read(self, indices: NDArray[np.int64]) -> Any:
        """Return the batch of these samples."""
        if self._columns is not None:
            rows = torch.from_numpy(np.array(indices))
            parts = tuple(column[rows] for column in self._columns)
            return parts[0] if isinstance(self.dataset, torch.Tensor | np.ndarray) else parts
        numbers: list[int] = indices.tolist()
        getitems = getattr(self.dataset, "__getitems__", None)
        found = getitems(numbers) if callable(getitems) else [self.dataset[i] for i in numbers]
        return (self.collate or default_collate)(found)

    def stream(self, plan: Iterable[NDArray[np.int64]]) -> Iterator[Any]:
        """Return the batches of ``plan``, read ahead by the worker processes where there are any.

        A stream may be left unread at any place; the next call reuses the workers.
        """
        if self.workers == 0 or self._columns is not None:
            return (self.read(indices) for indices in plan)
        if self._loader is None:
            self._loader = DataLoader(
                self.dataset,
                batch_sampler=_PlannedSampler(self._queue),
                num_workers=self.workers,
                collate_fn=self.collate,
                persistent_workers=True,
                pin_memory=torch.cuda.is_available(),
            )
        self._queue[:] = [(indices.tolist() for indices in plan)]
        return iter(self._loader)


class _PlannedSampler:
    """Hands a loader the plan that was put into ``queue`` last."""

    def __init__(self, queue: list[Iterable[list[int]]]) -> None:
        self._queue = queue

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._queue[0])


def to_device(batch: Any, device: torch.device) -> Any:
    """Return ``batch`` with all tensors in it on ``device``."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def _columns(dataset: Any) -> tuple[torch.Tensor, ...] | None:
    """Return the tensors that make up a data set, if it is made of tensors alone."""
    parts: Sequence[Any] = ()
    if isinstance(dataset, TensorDataset):
        parts = dataset.tensors
    elif isinstance(dataset, torch.Tensor | np.ndarray):
        parts = (dataset,)
    elif (
        isinstance(dataset, tuple)
        and dataset
        and all(isinstance(x, torch.Tensor | np.ndarray) for x in dataset)
    ):
        parts = dataset
    return tuple(torch.as_tensor(part) for part in parts) or None
