"""Feeds one process its share of every step's samples."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ebbflow.infra.training.data.samples import Samples, to_device
from ebbflow.infra.training.metrics import TokenCount
from ebbflow.infra.training.prepared import PreparedTraining
from ebbflow.infra.training.process.world import World
from ebbflow.infra.training.progress import Progress, seed_everything
from ebbflow.infra.training.stepper import Stepper, StepPlan
from ebbflow.planners.training.saving.data_order import DataOrder, Share, row_of


class _Split(NamedTuple):
    total: int  # examples of a step
    passes: int


class Feed:
    """The batches of one epoch, from wherever the run is in its data."""

    def __init__(
        self,
        world: World,
        prepared: PreparedTraining,
        stepper: Stepper,
        samples: Samples,
        order: DataOrder,
        count: TokenCount | None = None,
    ) -> None:
        self._count = count or TokenCount()
        self._world, self._prepared, self._stepper = world, prepared, stepper
        self._samples, self._order = samples, order

    def batches(self) -> Iterator[Any]:
        """Yield batches until the epoch is over; the stepper has taken each before the next is asked for."""
        progress, stepper = self._prepared.progress, self._stepper
        stream: Iterator[Any] | None = None
        place = (-1, 0)
        try:
            while not progress.epoch_over:
                stepper.reform()
                rank = self._world.data_rank
                if place != (place := (rank, self._world.data_size)):
                    stream = None
                turn, split = progress.cursor.turn, _Split(stepper.total, stepper.passes)
                if stream is None:
                    stream = iter(self._samples.stream(self._ahead(progress, split)))
                plan, row = self._next(progress, split)
                step = progress.step
                seed_everything(self._order.seed, progress.step, rank)
                for number, share in enumerate(row):
                    stepper.begin(share, number == len(row) - 1, plan)
                    batch = next(stream)
                    # of several that get the same samples each counts for its share of them
                    part = self._world.data_size / self._world.size
                    self._count.read(batch, share, first=number == 0, part=part)
                    yield to_device(batch, self._world.device)
                same = progress.cursor.turn == turn and split == (stepper.total, stepper.passes)
                if not same or progress.step == step:  # of a step that is repeated, too
                    stream = None  # what was read ahead is for other steps
            if self._prepared.service is not None:
                self._prepared.service.settle()
        finally:
            stepper.abandon()

    def _next(self, progress: Progress, split: _Split) -> tuple[StepPlan, tuple[Share, ...]]:
        """Return the next step and this process' share of it."""
        cursor, smallest = progress.cursor, self._prepared.limits.smallest_local
        count = min(split.total, self._order.left(cursor))
        world = self._world
        row = row_of(world.data_rank, cursor.position, count, world.data_size, split.passes, smallest)
        return StepPlan(count, self._order.after(cursor, count), len(row)), row

    def _ahead(self, progress: Progress, split: _Split) -> Iterator[NDArray[np.int64]]:
        """Yield the samples of this process' batches to the end of the pass, if the split stays."""
        ahead = replace(progress)
        turn = ahead.cursor.turn
        while ahead.cursor.turn == turn:
            plan, row = self._next(ahead, split)
            for share in row:
                yield self._order.indices(turn, share.start, share.stop)
            ahead.cursor = plan.after
