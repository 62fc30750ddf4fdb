"""Documents of tokens, packed into rows of one length: a run's samples are the rows."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ebbflow.infra.errors import DatasetError
from ebbflow.infra.training.data.samples import Collate, Samples
from ebbflow.infra.training.data.streams import SampleStream
from ebbflow.infra.training.metrics import Tokens
from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.packing import Packing, pack
from ebbflow.planners.training.saving.data_order import DataOrder

IGNORED = -100
"""Label of tokens that have no next one in their document, as torch's losses ignore it."""
_PADDING = -1

Row = list[tuple[torch.Tensor, torch.Tensor]]
"""Pieces of documents: tokens, and the one after each where there is one."""


class PackedBatch(NamedTuple):
    """Rows of tokens. Attention is among tokens of one document: by ``cu_seqlens``, ``mask_mod`` or ``mask``."""

    tokens: torch.Tensor  # (rows, length), 0 where there is none
    labels: (
        torch.Tensor
    )  # (rows, length): the next token of the document; ``IGNORED`` at its end and in padding
    positions: torch.Tensor  # (rows, length), in the piece of the document
    documents: torch.Tensor  # (rows, length): number of the document in its row, from 0; -1 in padding
    cu_seqlens: (
        torch.Tensor
    )  # int32: where documents begin in all rows one after the other; padding is one, too
    max_seqlen: int  # the longest of them

    def mask_mod(self, causal: bool = True) -> Callable[..., torch.Tensor]:
        """Return what ``create_block_mask`` of ``torch.nn.attention.flex_attention`` takes."""
        documents = self.documents

        def attends(batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
            same = documents[batch, query] == documents[batch, key]
            return same & (query >= key) if causal else same

        return attends

    def mask(self, causal: bool = True) -> torch.Tensor:
        """Return (rows, 1, length, length): whether a query attends to a key, for ``scaled_dot_product_attention``.

        Padding attends to padding, so that no row of it is empty.
        """
        same = self.documents[:, None, :, None] == self.documents[:, None, None, :]
        return same.tril() if causal else same


class PackedSamples(Samples):
    """Rows of packed documents. ``DatasetError`` for what holds no lists of tokens.

    Args:
        documents: ``__len__`` and ``__getitem__`` of one-dimensional tensors, arrays or lists of whole numbers.
            Where it has ``lengths``, their tokens, documents are not read to be measured.
        length: tokens of a row.
        order: of the documents that are packed together.
        workers: processes that read ahead.
    """

    def __init__(self, documents: Any, length: int, order: NDArray[np.int64], workers: int = 0) -> None:
        packing = pack(_lengths(documents), length, order)
        super().__init__(_Rows(documents, packing), _Collate(length), workers)
        self.packing = packing


def samples_of(
    before: Samples | None,
    dataset: Any,
    collate: Collate | None,
    workers: int,
    tokens: Tokens | None,
    seed: int,
    shuffle: bool,
    packed: bool,
) -> tuple[Samples, DataOrder, Tokens | None]:
    """Return the samples that a script asks for, ``before`` if it asks again, their order, and what their tokens are.

    Raises ``DatasetError`` and ``OptionError``.
    """
    key = (id(dataset), collate, workers, tokens if packed else None)
    if packed and collate is not None:
        raise OptionError("pack=True makes batches itself; leave collate out")
    if isinstance(dataset, SampleStream) and (shuffle or workers or packed):
        raise OptionError(
            "a SampleStream is read in its own order, by the process itself: shuffle=False, workers=0, without pack; "
            f"got shuffle={shuffle}, workers={workers}, pack={packed}"
        )
    if before is None or before.key != key:
        if packed:
            before = packed_samples(dataset, tokens, seed, shuffle, workers)
        else:
            before = Samples(dataset, collate, workers)
        before.key = key
    return before, DataOrder(before.length, seed, shuffle), count_tokens if packed else tokens


def count_tokens(batch: PackedBatch) -> float:
    """Return the tokens of a batch, padding left out."""
    return float((batch.documents != _PADDING).sum())


def packed_samples(documents: Any, length: Any, seed: int, shuffle: bool, workers: int) -> PackedSamples:
    """Return the rows of documents in the order of a run's seed. Raises ``DatasetError`` and ``OptionError``."""
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise OptionError(
            f"pack=True takes the tokens of a row: tokens must be a whole number >= 1; got {length!r}"
        )
    try:
        count = len(documents)
    except TypeError:
        raise DatasetError(
            f"documents to pack need __len__ and __getitem__; {type(documents).__name__} has no length"
        ) from None
    order = DataOrder(count, seed, shuffle).indices(0, 0, count)
    return PackedSamples(documents, length, order, workers)


class _Rows:
    """A data set of rows, each the tokens of its pieces; loaders' workers get it, too."""

    def __init__(self, documents: Any, packing: Packing) -> None:
        self._documents, self._packing = documents, packing

    def __len__(self) -> int:
        return len(self._packing)

    def __getitem__(self, number: int) -> Row:
        row = []
        for piece in self._packing.row(number):
            document = _tokens(self._documents, piece.document)
            row.append((document[piece.start : piece.stop], document[piece.start + 1 : piece.stop + 1]))
        return row


class _Collate:
    """Makes a batch of rows."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, rows: Sequence[Row]) -> PackedBatch:
        shape = (len(rows), self._length)
        tokens, positions = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
        labels, documents = torch.full(shape, IGNORED), torch.full(shape, _PADDING)
        lengths: list[int] = []
        for number, pieces in enumerate(rows):
            at = 0
            for document, (piece, following) in enumerate(pieces):
                end = at + len(piece)
                tokens[number, at:end] = piece
                labels[number, at : at + len(following)] = following
                positions[number, at:end] = torch.arange(len(piece))
                documents[number, at:end] = document
                lengths.append(len(piece))
                at = end
            if at < self._length:
                positions[number, at:] = torch.arange(self._length - at)
                lengths.append(self._length - at)
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        return PackedBatch(tokens, labels, positions, documents, starts, max(lengths))


def _lengths(documents: Any) -> NDArray[np.int64]:
    """Return the tokens of each document."""
    known = getattr(documents, "lengths", None)
    if known is None:
        return np.array([len(_tokens(documents, number)) for number in range(len(documents))], dtype=np.int64)
    found = np.asarray(known() if callable(known) else known, dtype=np.int64)
    if found.shape != (len(documents),):
        raise DatasetError(f"lengths must be the tokens of {len(documents)} documents; got {found.shape}")
    return found


def _tokens(documents: Any, number: int) -> torch.Tensor:
    document = documents[number]
    try:
        found = torch.as_tensor(document)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DatasetError(
            f"a document to pack is a list of tokens, whole numbers; document {number} is of "
            f"{type(document).__name__}: {error}"
        ) from error
    if found.ndim == 1 and not len(found):  # an empty list is of no type
        return found.long()
    if found.ndim != 1 or found.is_floating_point():
        raise DatasetError(
            f"a document to pack is a list of tokens, whole numbers; document {number} has the shape "
            f"{tuple(found.shape)} and is of {found.dtype}"
        )
    return found
