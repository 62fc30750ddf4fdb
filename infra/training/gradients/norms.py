"""What one rank finds out about the gradients of a step: their norms, by the samples that it has."""

from typing import NamedTuple, Protocol


class LocalNorms(NamedTuple):
    """What one rank adds to a step's all-reduce; the sums over ranks go to ``GradientMeter.finish``.

    A gradient with NaN or infinite elements makes ``local`` or ``total`` NaN or infinite, so the sums tell all ranks.
    So does one whose squared norm single precision cannot hold.
    """

    local: float  # sum of |h|**2 / w over the rank's samples
    samples: float  # gradients over examples of their own; 0 in a step whose noise is not measured
    total: float  # part of the squared norm of the mean gradient
    sync: float = 0.0  # seconds from the last local gradient to the end of the reduction


class Samples(Protocol):
    """Collects the gradients of one step after another."""

    loss_factor: float  # what losses are multiplied by besides their weights
    pair: float | None  # examples of both steps, where the last norms are those of a pair of steps

    def begin(self, measured: bool) -> None:
        """Begin a step; one that is not ``measured`` only tells whether its gradient is finite."""
        ...

    def after_pass(self, weight: float, last: bool) -> None:
        """Look at the gradients right after a backward pass with this weight."""
        ...

    def norms(self, examples: float, scale: float) -> LocalNorms:
        """Return the norms of the step over ``examples`` examples, whose loss was multiplied by ``scale``.

        Ends the step. Waits for a GPU.
        """
        ...

    def forget(self) -> None:
        """Drop the step that is under way, and what was kept of earlier ones."""
        ...
