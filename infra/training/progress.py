"""How far a run is: steps, place in the data, progress in gain and epochs. Equal on all processes, and saved.

Random numbers that follow from the run's seed, the step and the process, so that nothing of them must be saved.
"""

import random
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from struct import unpack
from typing import Any, Literal, Self

import numpy as np
import torch

from ebbflow.infra.errors import DatasetError, TrainingError
from ebbflow.planners.training.saving.data_order import DataPosition

EpochUnit = Literal["progress", "pass"]
_ROUNDING = 1e-6  # iterations: what a sum of gains may lack of an epoch's end


@dataclass(slots=True)
class Progress:
    """Where a run is after its last complete step.

    An epoch of unit ``"progress"`` is N/M0 iterations' worth of gain (Pollux, OSDI 2021, 4.1): with the initial batch
    throughout exactly one pass over the N samples, with larger batches more samples and fewer steps.
    """

    initial: int  # M0, examples
    length: int = 0  # N; 0 before the data are known
    step: int = 0  # optimizer steps, skipped ones included
    skipped: int = 0  # steps ignored because the gradient was not finite
    skipped_in_row: int = 0
    gained: float = 0.0  # iterations at the initial batch
    samples: int = 0  # that complete steps have used
    cursor: DataPosition = field(default_factory=DataPosition)
    epoch: int = 0  # the one that is under way
    unit: EpochUnit = "progress"
    epoch_end: float | None = None  # ``gained`` at which it is over
    epoch_turn: int = 0  # pass that it began in

    def bind(self, length: int) -> None:
        """Take note of the data's size, and check it against what the run began with.

        Raises ``DatasetError``.
        """
        if self.length and self.length != length:
            raise DatasetError(
                f"the run started on {self.length} samples and continues with {length}: the order of the data would "
                "change within a pass; use the same data or another run ID"
            )
        if length < self.initial:
            raise DatasetError(f"a data set of {length} samples is smaller than the batch of {self.initial}")
        self.length = length
        if self.epoch_end is None:
            self.epoch_end = self.gained + self.iterations

    @property
    def iterations(self) -> float:
        """Return N/M0: iterations of an epoch at the initial batch."""
        return self.length / self.initial

    def took(self, count: int, gain: float, cursor: DataPosition) -> None:
        """Book a step over ``count`` samples that made ``gain`` iterations' progress."""
        self.step += 1
        self.samples += count
        self.gained += gain
        self.skipped_in_row = 0
        self.cursor = cursor

    def left_out(self, count: int, cursor: DataPosition) -> None:
        """Book a step that was skipped: its samples count as seen, and the epoch is not longer for it."""
        self.step += 1
        self.samples += count
        self.skipped += 1
        self.skipped_in_row += 1
        self.cursor = cursor
        if self.epoch_end is not None:
            self.epoch_end -= count / self.initial

    @property
    def epoch_over(self) -> bool:
        """Return whether the epoch that is under way has all its steps."""
        if self.unit == "pass":
            return self.cursor.turn > self.epoch_turn
        return self.epoch_end is not None and self.gained >= self.epoch_end - _ROUNDING

    def next_epoch(self) -> None:
        """End the epoch, complete or not, and begin the next."""
        whole = self.epoch_over and self.epoch_end is not None
        self.epoch += 1
        self.epoch_turn = self.cursor.turn
        if self.length:
            begin = self.epoch_end if whole and self.epoch_end is not None else self.gained
            self.epoch_end = begin + self.iterations

    def forecast(self, epochs: int) -> dict[str, Any]:
        """Return how much of ``epochs`` epochs is left, and what they are in all: nothing before the data are known.

        ``examples_left`` and ``examples_total`` count what ``pace`` names the rate of: the goodput (examples at the
        initial batch) for epochs of unit ``"progress"``, the throughput for those of unit ``"pass"``.
        """
        if not self.length or epochs <= self.epoch or self.epoch_end is None:
            return {}
        after = epochs - self.epoch - 1  # epochs, once the one under way is over
        if self.unit == "pass":
            seen = self.cursor.position if self.cursor.turn == self.epoch_turn else self.length
            left, done = float(self.length - seen), float(self.samples)
        else:
            left = max(self.epoch_end - self.gained, 0.0) * self.initial
            done = self.gained * self.initial
        left += float(after * self.length)
        pace = "throughput" if self.unit == "pass" else "goodput"
        return {"examples_left": left, "examples_total": done + left, "pace": pace}

    def state_dict(self) -> dict[str, Any]:
        return asdict(self) | {"cursor": list(self.cursor)}

    @classmethod
    def from_state(cls, state: dict[str, Any], initial: int) -> Self:
        """Return what was saved. Raises ``TrainingError`` for a run with another batch."""
        if state["initial"] != initial:
            raise TrainingError(
                f"the run started with batch_size={state['initial']} and resumes with {initial}: progress and "
                "learning rate are counted in it; keep it or use another run ID"
            )
        return cls(**(state | {"cursor": DataPosition(*state["cursor"])}))


MOST_SEED = 2**32 - 1


def seed_everything(seed: int, *stream: int) -> None:
    """Seed the global generators of python, numpy and torch (CPU and CUDA) for one stream of a run.

    Equal arguments give equal numbers, different streams unrelated ones. A run calls this at each step: one that
    restarts at step 100 draws what it would have drawn there anyway.

    Raises ``TrainingError`` for a seed outside 0 to 2**32 - 1.
    """
    if not 0 <= seed <= MOST_SEED:
        raise TrainingError(f"seed must be between 0 and {MOST_SEED}; got {seed}")
    # a hash: numpy's SeedSequence takes longer than all that follows
    digest = blake2b(repr((seed, *stream)).encode(), digest_size=20).digest()
    first, second, number = unpack("<QLQ", digest)
    random.seed(first)
    np.random.seed(second)
    torch.default_generator.manual_seed(number)  # torch.manual_seed looks for every kind of device: 100 µs
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
