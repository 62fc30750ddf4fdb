"""What collectives work on: one tensor that is summed in place, or rows that ranks exchange."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ebbflow.infra.errors import TrainingError


@dataclass(frozen=True)
class Summed:
    """A tensor that an all-reduce sums over ranks, in place; contiguous.

    Args:
        tensor: of any shape; all ranks have the same number of elements and the same type.
    """

    tensor: Tensor

    def __post_init__(self) -> None:
        if not self.tensor.is_contiguous():
            raise TrainingError("a tensor that is summed over ranks must be contiguous")

    def part(self, low: int, high: int, units: int) -> Tensor:
        """Return the view of a range in units."""
        flat = self.tensor.view(-1)
        size = flat.numel()
        return flat[size * low // units : size * high // units]


@dataclass(frozen=True)
class Exchanged:
    """Rows that an all-to-all sends and receives.

    Args:
        sent: all rows for rank 0, then those for rank 1, and so on; contiguous.
        received: the same by sender; contiguous, of the same type.
        sent_rows: elements for each rank.
        received_rows: elements from each rank.
    """

    sent: Tensor
    received: Tensor
    sent_rows: Sequence[int]
    received_rows: Sequence[int]

    def __post_init__(self) -> None:
        for what, tensor, rows in (
            ("sent", self.sent, self.sent_rows),
            ("received", self.received, self.received_rows),
        ):
            if not tensor.is_contiguous():
                raise TrainingError(f"the tensor that is {what} must be contiguous")
            if sum(rows) != tensor.numel() or any(n < 0 for n in rows):
                raise TrainingError(
                    f"elements {what} must be >= 0 and add up to {tensor.numel()}; got {list(rows)!s:.80}"
                )
        if self.sent.dtype != self.received.dtype:
            raise TrainingError(f"rows must keep their type; got {self.sent.dtype} and {self.received.dtype}")

    def to_rank(self, rank: int, low: int, high: int, units: int) -> Tensor:
        """Return the view of a range of what goes to a rank."""
        return _row(self.sent, self.sent_rows, rank, low, high, units)

    def from_rank(self, rank: int, low: int, high: int, units: int) -> Tensor:
        """Return the view of a range of what comes from a rank."""
        return _row(self.received, self.received_rows, rank, low, high, units)

    def reversed(self, gradient: Tensor, into: Tensor) -> "Exchanged":
        """Return the exchange that takes gradients of what was received back to their senders."""
        return Exchanged(gradient, into, self.received_rows, self.sent_rows)


Payload = Summed | Exchanged


def _row(tensor: Tensor, rows: Sequence[int], rank: int, low: int, high: int, units: int) -> Tensor:
    begin, size = sum(rows[:rank]), rows[rank]
    return tensor.view(-1)[begin + size * low // units : begin + size * high // units]
