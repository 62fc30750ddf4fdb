"""One optimizer step after another, over all processes.

A step is one or more passes, each over a share of its samples on every process. After the last pass one small
all-reduce carries everything on which the processes must agree: whether to stop, whether the gradient is finite, the
mean loss, the norms of gradients, the optimizer's settings, how long each process computed, and the next batch.
Parameters change only after it, so a process whose peers are lost before still holds the whole state of the last
complete step.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from ebbflow.infra.errors import TrainingError
from ebbflow.infra.training.gradients.preconditioner import rescale_moments
from ebbflow.infra.training.metrics import RunStatistics
from ebbflow.infra.training.prepared import PreparedTraining
from ebbflow.infra.training.process import nccl
from ebbflow.infra.training.process.hyperparameters import are_equal, check_equal, digest_pair, settings_of
from ebbflow.infra.training.process.world import ViewChangedError, World
from ebbflow.infra.training.replicas.parallel import Replicas
from ebbflow.infra.training.schedule import scaled
from ebbflow.planners.training.saving.data_order import DataPosition, Share
from ebbflow.planners.training.speed.batch_size import BatchSplit
from ebbflow.planners.training.speed.goodput import GradientStatistics, gain

MOST_SKIPPED = 100  # steps in a row whose gradient is not finite: then it is not going to get better
WARM_UP = 2  # steps of a new split that are not measured

_VOTES, _SAVE, _LOSS, _BATCH, _PASSES = range(5)
_SETTINGS = slice(5, 7)
_NORMS = slice(7, 11)
_COMPUTE = 11


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step is over: ``count`` samples, after which the run is at ``after``."""

    count: int
    after: DataPosition
    passes: int


@dataclass(frozen=True, slots=True)
class StepConsensus:
    """What all processes know after a step."""

    stop: bool = False
    save: bool = False  # whether a stop comes with a checkpoint
    retuned: bool = False  # whether the next step has another batch
    counted: tuple[float, ...] = ()  # sums over processes of what each gave besides


class Members(Protocol):
    """Who trains, where processes come and go."""

    @property
    def begun(self) -> int:
        """Return the number of the view that the training was taken up in."""

    @property
    def view(self) -> int:
        """Return the number of the view that this process is in."""

    def stay(self) -> None:
        """Raise ``RunStopped`` where this process was asked to leave."""

    def welcome(self) -> None:
        """Tell those that have entered with the view where the training is."""

    def stepped(self) -> None:
        """Take note that all have ended a step."""


@dataclass(slots=True)
class _GradientPass:
    share: Share
    last: bool
    plan: StepPlan
    begun: float
    backward: bool = False


class Stepper:
    """Carries out the steps of one prepared run. ``mutating`` is held while the state changes.

    ``members`` is who trains where processes come and go; nobody is asked without it.
    """

    def __init__(
        self, world: World, prepared: PreparedTraining, mutating: Any, members: "Members | None" = None
    ) -> None:
        self._world, self._prepared, self._mutating = world, prepared, mutating
        self._open: _GradientPass | None = None
        self._under_way = False  # whether passes of an unfinished step have left gradients
        self._loss = torch.zeros((), device=world.device)
        self._fresh = 0  # steps with the present split so far
        self._buffers: list[
            tuple[torch.Tensor, torch.Tensor]
        ] = []  # as they were before the step, where it may fail
        # what the moments of an earlier process were gathered with
        self.total, self.passes = prepared.tuner.total or prepared.limits.initial, 1
        self._members = members
        self._view = members.begun if members is not None else 0
        self._set(self._first_split())
        self.last = RunStatistics(gpus=world.size, nodes=world.nodes)

    # --- the batch ----------------------------------------------------------------------------------------

    def _first_split(self) -> BatchSplit:
        chosen = self._prepared.tuner.split(self._world.data_nodes, self._world.data_size)
        if not self._prepared.adaptive or self._world.size == 1:
            return chosen
        try:
            first: Any = self._world.from_first(tuple(chosen))
        except ViewChangedError:  # those that are there then are asked again, before the next step
            return chosen
        return BatchSplit(*first)

    def _set(self, chosen: BatchSplit) -> None:
        prepared, before = self._prepared, self.total
        prepared.tuner.adopt(self._world.data_nodes, self._world.data_size, chosen)
        if prepared.adaptive:
            self.total = chosen.total(self._world.data_size)
            self.passes = chosen.accumulation + 1
        else:  # a fixed batch stays what it is, to the example
            self.total = prepared.limits.initial
            local = -(-self.total // self._world.data_size)
            self.passes = -(-local // prepared.limits.largest_local)
        initial, statistics = prepared.limits.initial, prepared.meter.statistics
        ratio = rescale_moments(prepared.optimizer, statistics, before / initial, self.total / initial)
        if prepared.service is not None:
            prepared.service.scale_squares(ratio)
        self._chosen = chosen
        self._fresh = 0

    def reform(self) -> None:
        """Before a step: share the batch out among those that are there, if others than before are."""
        members = self._members
        with self._world.within():
            if members is not None:
                members.stay()
            while members is not None and self._view != members.view:
                self._view = members.view
                members.welcome()
                self._set(self._first_split())
                members.stay()

    # --- passes -------------------------------------------------------------------------------------------

    def begin(self, share: Share, last: bool, plan: StepPlan) -> None:
        """Begin a pass; its data are read next. Raises ``TrainingError``."""
        if self._open is not None:
            what = "run.step()" if self._open.backward else "run.backward(loss)"
            raise TrainingError(
                f"each batch needs run.backward(loss) and then run.step(); {what} was not called"
            )
        if self._prepared.communication is not None and not self._under_way:
            self._prepared.communication.begin()
        if self._members is not None and not self._under_way:
            self._buffers = [(one, one.clone()) for one in self._prepared.inner.buffers()]
        self._open = _GradientPass(share, last, plan, time.perf_counter())
        if isinstance(self._prepared.model, DistributedDataParallel | Replicas):
            # what no_sync() does: it has to hold while the model is called, not only in backward
            self._prepared.model.require_backward_grad_sync = last

    @property
    def share(self) -> Share:
        """Return what the pass under way is over. Raises ``TrainingError``."""
        if self._open is None:
            raise TrainingError("no batch is at hand: run.step() has ended the last one")
        return self._open.share

    def backward(self, loss: torch.Tensor) -> None:
        """Back-propagate the mean loss of the batch, weighted. Raises ``TrainingError``."""
        now = self._open
        if now is None or now.backward:
            raise TrainingError("run.backward(loss) belongs once to each batch of run.batches(...)")
        prepared = self._prepared
        scale = prepared.scaler.get_scale() if prepared.scaler is not None else 1.0
        meter = prepared.meter
        weighted = loss * (now.share.weight * meter.loss_factor)
        self._loss += weighted.detach()
        self._under_way = True
        if prepared.service is not None:
            prepared.service.pushing = now.last
        planned = prepared.communication if now.last else None
        if planned is not None:
            planned.forward_done()
        with (
            self._world.within(),
            meter.micro_pass(last=now.last, weight=now.share.weight, loss_scale=scale),
        ):
            try:
                (prepared.scaler.scale(weighted) if prepared.scaler is not None else weighted).backward()
            except RuntimeError as exc:
                if not self._world.lost(exc):
                    raise
        if planned is not None:
            planned.reduced()
        now.backward = True

    def step(self, vote: tuple[bool, bool], counts: Sequence[float] = ()) -> StepConsensus | None:
        """End a pass, and with the last one the step; ``None`` where passes of it are left.

        ``vote`` is whether this process wants to stop, and to save then; ``counts`` are summed over processes.

        Raises ``TrainingError``.
        """
        now = self._open
        if now is None or not now.backward:
            raise TrainingError("run.step() comes after run.backward(loss), once for each batch")
        self._open = None
        if not now.last:
            return None
        try:
            return self._end(now, vote, counts)
        except ViewChangedError:  # by those that are left, over the same samples
            self.abandon()
            return None

    def _end(self, now: _GradientPass, vote: tuple[bool, bool], counts: Sequence[float]) -> StepConsensus:
        world, prepared = self._world, self._prepared
        size, samples, view = world.size, world.data_size, self._view
        with world.within():
            world.repeat_broken()
        norms = prepared.meter.local(now.plan.count)
        computed = time.perf_counter() - now.begun - norms.sync
        loss = float(self._loss) / prepared.meter.loss_factor
        try:
            world.check_reduced()  # the GPU has done all of it: its norm and loss are here
        except RuntimeError as exc:
            if not world.lost(exc):
                raise
        norms = norms._replace(sync=norms.sync * samples / size)
        settings = settings_of(prepared.optimizer)
        values = [float(vote[0]), float(vote[0] and vote[1]), loss, *self._proposal()]
        values += [*digest_pair(settings), *norms]
        values += [computed if rank == world.rank else 0.0 for rank in range(size)]
        values += counts
        if (planned := prepared.communication) is not None:
            values += planned.votes()
        asked = time.perf_counter()
        with world.within():
            summed = world.sum_step(values)
            waited = time.perf_counter() - asked
            if self._members is not None:
                self._members.stepped()
            if not are_equal(size, *summed[_SETTINGS]):
                check_equal(settings, world.from_all, prepared.progress.step + 1)
        ranks = _COMPUTE + size
        if planned is not None:
            planned.settle(summed[ranks + len(counts) :])
        statistics = prepared.meter.finish(summed[_NORMS], samples, now.plan.count)
        if prepared.meter.finite:
            worth, factor = self._worth(now.plan.count, statistics)
            self._take(now.plan, worth, factor, view)
        else:
            worth, factor = 0.0, 1.0
            self._leave_out(now.plan, view)
        self._loss.zero_()
        self._under_way = False
        ended = time.perf_counter()
        step_s, sync_s = ended - now.begun, prepared.meter.sync_seconds + waited
        compute = tuple(summed[_COMPUTE:ranks])
        self.last = self._described(now.plan, summed[_LOSS] / size, worth, factor, step_s, sync_s, compute)
        if size == world.size:
            self._observe(now.plan, step_s, sync_s, statistics)
        retuned = summed[_BATCH] > 0
        if retuned:
            self._set(BatchSplit(round(summed[_BATCH]), round(summed[_PASSES]) - 1))
        counted = tuple(summed[ranks : ranks + len(counts)])
        return StepConsensus(summed[_VOTES] > 0, summed[_SAVE] > 0, retuned, counted)

    def abandon(self) -> None:
        """Forget the passes of a step that will not be finished."""
        self._open = None
        if self._prepared.communication is not None:
            self._prepared.communication.abandon()
        if self._under_way:
            with self._mutating, torch.no_grad():
                for buffer, before in self._buffers:  # those of BatchNorm move in each pass
                    buffer.copy_(before)
            self._prepared.meter.discard()
            self._prepared.optimizer.zero_grad()
            self._loss.zero_()
            self._under_way = False

    # --- the end of a step ----------------------------------------------------------------------------------

    def _worth(self, count: int, statistics: GradientStatistics) -> tuple[float, float]:
        """Return a step's gain and the factor on the learning rate. A smaller last batch of a pass is not scaled."""
        scale = count / self._prepared.limits.initial
        worth = float(gain(statistics, scale)) if scale > 1.0 else scale
        reached = self._prepared.progress.gained + worth
        return worth, self._prepared.rule(max(scale, 1.0), statistics, reached)

    def _take(self, plan: StepPlan, worth: float, factor: float, view: int) -> None:
        prepared = self._prepared
        scaler, optimizer = prepared.scaler, prepared.optimizer
        service = prepared.service
        if scaler is not None:
            scaler.unscale_(optimizer)
        if service is None and prepared.clip(self._world):
            nccl.finish(self._world.device)
            self._world.check_reduced()  # of which the norm is, which nothing has waited for
        with self._mutating:
            with scaled(optimizer, factor):
                if service is not None:
                    service.step(view, prepared.clip_norm)
                elif scaler is not None:
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step()
            prepared.progress.took(plan.count, worth, plan.after)
            if prepared.schedule is not None:
                prepared.schedule.follow(prepared.progress.gained, prepared.progress.iterations)
        optimizer.zero_grad()

    def _leave_out(self, plan: StepPlan, view: int) -> None:
        prepared = self._prepared
        with self._mutating:
            if prepared.service is not None:
                prepared.service.skip(view)
            if prepared.scaler is not None:
                prepared.scaler.unscale_(prepared.optimizer)  # it lowers its scale by what it finds here
                prepared.scaler.update()
            prepared.progress.left_out(plan.count, plan.after)
        prepared.optimizer.zero_grad()
        if prepared.progress.skipped_in_row >= MOST_SKIPPED:
            raise TrainingError(
                f"the gradient was not finite in {MOST_SKIPPED} steps in a row, up to step {prepared.progress.step}: "
                "check the learning rate and the data"
            )

    def _described(
        self,
        plan: StepPlan,
        loss: float,
        worth: float,
        factor: float,
        step_s: float,
        sync_s: float,
        compute: tuple[float, ...],
    ) -> RunStatistics:
        progress, world = self._prepared.progress, self._world
        return RunStatistics(
            step=progress.step,
            epoch=progress.epoch,
            progress=progress.gained,
            samples=progress.samples,
            skipped=progress.skipped,
            loss=loss,
            batch=plan.count,
            passes=plan.passes,
            gpus=world.size,
            nodes=world.nodes,
            gain=worth,
            factor=factor,
            learning_rate=float(self._prepared.optimizer.param_groups[0]["lr"]),
            noise_scale=self._prepared.meter.noise_scale,
            step_seconds=step_s,
            sync_seconds=sync_s,
            compute_seconds=compute,
        )

    def _observe(self, plan: StepPlan, step_s: float, sync_s: float, statistics: GradientStatistics) -> None:
        """Notify the tuner how long whole steps take, once the split has settled."""
        self._fresh += 1
        if self._world.rank == 0 and self._fresh > WARM_UP and plan.count == self.total:
            world = self._world
            local = -(-self.total // (world.data_size * self.passes))
            self._prepared.tuner.observe(
                world.data_nodes,
                world.data_size,
                BatchSplit(local, self.passes - 1),
                step_s,
                min(sync_s, 0.99 * step_s),
                statistics,
            )

    def _proposal(self) -> tuple[float, float]:
        """Return the first process's choice of batch and passes, where it is another; zeros else."""
        if not self._prepared.adaptive or self._world.rank != 0:
            return 0.0, 0.0
        chosen = self._prepared.tuner.split(self._world.data_nodes, self._world.data_size)
        if chosen == self._chosen:
            return 0.0, 0.0
        return float(chosen.batch), float(chosen.accumulation + 1)
