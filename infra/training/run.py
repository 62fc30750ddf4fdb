"""What makes a plain PyTorch script elastic: the library inside a training process.

::

    with ElasticRun.start() as run:
        model, optimizer = run.prepare(make_model(), make_optimizer, batch_size=128, max_batch_size=4096)
        for epoch in run.epochs(30):
            for x, y in run.batches(dataset):
                loss = loss_fn(model(x), y)
                run.backward(loss)
                run.step()
            run.report(accuracy=evaluate(model))

The same script runs alone, under plain torchrun, and under Ebbflow's launcher. It may end after any step and continue
from there on another number of processes.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import torch

from ebbflow.infra.errors import AggregationError, LauncherLostError, TrainingError
from ebbflow.infra.training.data.feeding import Feed
from ebbflow.infra.training.data.packed import samples_of
from ebbflow.infra.training.data.samples import Collate, Samples
from ebbflow.infra.training.ending import ProcessExit
from ebbflow.infra.training.metrics import Rates, RunStatistics, TokenCount, Tokens
from ebbflow.infra.training.prepared import OptimizerFactory, Options, Precision, PreparedTraining, prepare
from ebbflow.infra.training.process.communication import Communication, plan_communication, settings_of
from ebbflow.infra.training.process.generation import Generation
from ebbflow.infra.training.process.leaving import PEER_LOST, RunStopped
from ebbflow.infra.training.process.link import TERMINATED
from ebbflow.infra.training.process.world import peer_lost
from ebbflow.infra.training.progress import EpochUnit, Progress, seed_everything
from ebbflow.infra.training.replicas.joining import take_part
from ebbflow.infra.training.resuming import PatientReader, describe_start, load, look_back
from ebbflow.infra.training.running_saves import RunningSaves
from ebbflow.infra.training.saver import Saver
from ebbflow.infra.training.schedule import RuleName, SchedulerFactory, ScheduleUnit
from ebbflow.infra.training.sharded.parallel import Parallel, Wrap, check_parallel
from ebbflow.infra.training.sharded.saver import ShardedSaver
from ebbflow.infra.training.sharded.tensor import Plan, fed, tensor_size
from ebbflow.infra.training.spill import Spill
from ebbflow.infra.training.stepper import Stepper
from ebbflow.planners.model.trainings import RunSettings, SyncChoice
from ebbflow.planners.training.saving.data_order import Share

log = logging.getLogger(__name__)


class ElasticRun:
    """One process of a run; made by ``start`` and used as a context."""

    def __init__(self, generation: Generation, seed: int) -> None:
        self._generation, self.seed = generation, seed
        self.world, self.settings, self._link = generation.world, generation.settings, generation.link
        place, settings = generation.place, generation.settings
        self._spill = spill = Spill(place, settings.spill_dir) if place else None
        checkpoints = spill.checkpoints(settings.keep_checkpoints) if spill else None
        self._saver = Saver(checkpoints, generation, spill=self._spill)
        self._ending = ProcessExit(generation, self._saver)
        self._running = RunningSaves(generation)
        self._rates, self._tokens = Rates(generation.clock), TokenCount()
        self._fed = self.world  # with whom it shares examples
        self._prepared: PreparedTraining | None = None
        self._stepper: Stepper | None = None
        self._samples: Samples | None = None
        self._in_epoch, self._epochs = False, 0  # epochs that the script asks for
        self._closed = False
        self._began_at = 0  # steps done when this process took over
        self.metrics: dict[str, Any] = {}  # what was reported last

    @classmethod
    def start(
        cls,
        *,
        directory: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        seed: int = 0,
        settings: RunSettings | None = None,
        restart: bool = False,
    ) -> Self:
        """Join the run, and seed all random generators.

        Args:
            directory: where runs keep their checkpoints, a path or ``s3://``; nothing is saved without. A launcher's
                goes first.
            run_id: name of this run's directory in it; the script's name unless given.
            seed: of the data's order and all random numbers.
            settings: a launcher's go first.
            restart: begin again where none of the run's checkpoints can be used; without a launcher.

        Raises ``TrainingError`` when the other processes or the launcher cannot be reached, and ``RunLockedError``
        where another process runs in the same directory.
        """
        seed_everything(seed)
        generation = Generation.join(directory, run_id, settings, restart)
        try:
            run = cls(generation, seed)
        except BaseException:
            generation.close(0.0)
            raise
        generation.link.open()
        return run

    def prepare(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | OptimizerFactory,
        *,
        batch_size: int,
        max_batch_size: int | None = None,
        min_local: int = 1,
        max_local: int | None = None,
        learning_rate_rule: RuleName = "auto",
        warm_up: float = 0.0,
        scheduler: SchedulerFactory | None = None,
        scheduler_unit: ScheduleUnit = "iteration",
        precision: Precision = "fp32",
        clip_norm: float | None = None,
        state: Mapping[str, Any] | None = None,
        ddp: Mapping[str, Any] | None = None,
        communication: Communication | None = None,
        sync: SyncChoice | None = None,
        parallel: Parallel | None = None,
        wrap: Wrap | None = None,
        tensor_parallel: Plan | None = None,
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """Return the model to call and the optimizer, restored from the newest checkpoint; once in a run.

        Args:
            model: moved to its device; in several processes ``DistributedDataParallel`` is put around it. One that
                the script has sharded with ``fully_shard`` stays as it is.
            optimizer: one over the model's parameters, or a function of ``model.parameters()`` that makes it. Its
                learning rate is made for ``batch_size``.
            batch_size: M0, examples of a step on all processes together.
            max_batch_size: up to which the batch may grow where that pays; it is fixed unless given.
            min_local: examples that a process gets in a pass at least, but for the last batch of the data.
            max_local: examples that a process' memory holds in a pass; more are accumulated over passes.
            learning_rate_rule: how the learning rate follows the batch; ``"auto"`` is AdaScale for SGD and the square
                root for others. ``"legw"`` is the square root after a warm-up that grows with the batch.
            warm_up: its length for ``"legw"``, iterations at ``batch_size``.
            scheduler: makes a scheduler of torch, which follows progress instead of steps.
            scheduler_unit: whether it counts iterations at ``batch_size``, or epochs.
            precision: ``"bf16"`` and ``"fp16"`` run the model's forward in it; parameters stay as they are.
            clip_norm: largest norm of the gradient.
            state: more that checkpoints keep, by name: things with ``state_dict`` and ``load_state_dict``.
            ddp: options of ``DistributedDataParallel``; its buckets have 8 MiB on CPU cores.
            communication: ``"planned"`` exchanges gradients by a plan that is searched while the run trains,
                ``"ddp"`` leaves that to DDP; the launcher's choice unless given. ``PlanningSettings`` say how.
            sync: ``"service"`` sums gradients and updates parameters on aggregators, so that processes can be lost
                and join while the others train on; ``"allreduce"`` does both in the processes. The launcher's choice
                unless given, with which it must agree.
            parallel: ``"fsdp"`` shards the model over all processes, ``"hsdp"`` a replica of it over those of each
                node, a ``DeviceMesh`` over its shards, or replicas and shards, and within the parts of tensor
                parallelism if its last dimension is named ``"tp"``; ``"ddp"``, whole, unless given.
            wrap: which modules are gathered as one where the model is sharded: classes, or a function of a module's
                name and itself; each repeated block unless given.
            tensor_parallel: plan of ``parallelize_module`` for ``"tp"``; not for a model that is spread already.

        Raises:
            OptionError: options that contradict each other, or a batch that so many processes cannot share.
            OtherModelError: the checkpoint is of another model; the message names the parameters that differ.
            TrainingError: the run began with another batch size, or processes ask for different things.
            CheckpointsLostError: the run had checkpoints, and none of them can be used.
            StorageError: the checkpoint cannot be read.
        """
        if self._prepared is not None:
            raise TrainingError("a run is prepared once")
        planning = settings_of(carried := communication or self.settings.communication)
        options = Options(
            batch_size, max_batch_size, min_local, max_local, learning_rate_rule, warm_up, scheduler,
            scheduler_unit, precision, clip_norm, state or {}, ddp or {}, parallel, wrap, tensor_parallel,
        ).within(self.settings)  # fmt: skip
        check_parallel(options, model, self.world, planned=planning is not None, settings=self.settings)
        asked = {"seed": self.seed, **options.asked, "communication": str(carried)}
        members = take_part(self.world, sync, model, options, asked, self.settings, self._link, planning)
        options.limits(self.world.size // tensor_size(parallel, model))
        folder = None if members is not None and members.joins else self._saver.folder
        reader = PatientReader(self._generation)
        look = partial(look_back, self.world, folder, self._spill, self._running, self.settings, reader)
        chosen = look()
        planned = plan_communication(
            self.world, model, None if self.settings.preflight_steps or members is not None else planning,
            self.settings.collective_timeout,
            lambda said: self._link.post("communication", self._done + self._began_at, said), self._generation.place,
        )  # fmt: skip
        made = prepare(
            self.world, model, optimizer, options, self.settings,
            partial(load, self.world, chosen, look, folder, model, reader), planned,
            **(members.makes if members else {}),
        )  # fmt: skip
        if made.sharding is not None:
            self._saver = ShardedSaver(self._saver.folder, self._generation, made.sharding)
            self._fed = fed(self.world, made.sharding.mesh)
        if members is not None:
            members.begin(made)
        if chosen.found is not None:
            self._saver.took_over(chosen.found, chosen.taken_from)
        self._running.begin(made, chosen.running, chosen.full, partial(reader.together, self.world))
        self._prepared = made
        self._stepper = Stepper(self._fed, made, self._saver.lock, members)
        self._began_at = made.progress.step
        self._ending.attach(made, self._saver)
        if self._generation.is_main:
            started = describe_start(self.world, chosen, self._stepper, self._running, self.settings)
            self._link.post("started", made.progress.step, started)
        return made.model, made.optimizer

    # --- epochs and batches ---------------------------------------------------------------------------------

    def epochs(self, count: int, *, unit: EpochUnit = "progress") -> Iterator[int]:
        """Yield the numbers of the epochs that are left of ``count``, beginning with the one under way.

        An epoch is N/M0 iterations' worth of progress: with a fixed batch one pass over the N examples, with an
        adaptive one as many more examples as larger batches need to get as far. ``unit="pass"`` makes it one pass
        always.
        """
        progress = self._ready()[0].progress
        progress.unit = unit
        self._epochs = count
        while progress.epoch < count:
            self._in_epoch = True
            yield progress.epoch
            self._in_epoch = False
            progress.next_epoch()

    def batches(
        self, dataset: Any, *, shuffle: bool = True, collate: Collate | None = None, workers: int = 0,
        tokens: Tokens | None = None, pack: bool = False,
    ) -> Iterator[Any]:  # fmt: skip
        """Return this process' batches of the epoch under way, on its device.

        Each needs ``backward`` and ``step``. In a pass each sample is used once, whatever restarts or changes of the
        world come between; the order follows from the run's seed.

        Args:
            dataset: tensors, arrays, tuples of them, anything with ``__len__`` and ``__getitem__``, ``SampleStream``.
            shuffle: whether each pass has a new order.
            collate: makes a batch of a list of samples; torch's default unless given.
            workers: processes that read ahead.
            tokens: of each sample, or a function of a batch that returns its tokens: rates are told in tokens, too.
            pack: samples are rows of ``tokens`` tokens that several documents of ``dataset`` share: ``PackedBatch``.

        Raises:
            DatasetError: data that can only be iterated, fewer samples than the batch, or others than before.
            TrainingError: data of different lengths in different processes.
        """
        prepared, stepper = self._ready()
        if not self._in_epoch:
            raise TrainingError("run.batches(...) belongs in a loop over run.epochs(...)")
        asked = (dataset, collate, workers, tokens, self.seed, shuffle, pack)
        samples, order, tokens = samples_of(self._samples, *asked)
        self._samples = samples
        if prepared.progress.length == 0:  # later, each compares with that
            self.world.check_same({"the number of samples": samples.length, "shuffle": shuffle})
        prepared.progress.bind(samples.length)
        return Feed(self._fed, prepared, stepper, samples, order, self._tokens.counting(tokens)).batches()

    # --- steps ------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor) -> None:
        """Back-propagate the loss of a batch: its mean over the examples that the batch holds."""
        self._ready()[1].backward(loss)

    def step(self) -> bool:
        """End a batch; return whether it ended a step, in which case the optimizer has moved.

        A step whose gradient is not finite is ignored by all processes and counted. Raises ``RunStopped`` when the
        run is to stop; its state has been saved then.
        """
        prepared, stepper = self._ready()
        stop = self._link.stop
        if prepared.service is not None and stop is not None and stop.reason == TERMINATED:
            raise RunStopped("this process was terminated; the others train on", PEER_LOST)
        vote = (stop is not None, stop is not None and stop.save)
        saved = () if self.settings.preflight_steps else self._saver.counts()
        agreed = stepper.step(vote, (*saved, self._tokens.step))
        if agreed is None:
            return False
        self._account(prepared, stepper, agreed.counted[-1])
        if agreed.stop:
            self._ending.stop(agreed.save)
        preflight = self.settings.preflight_steps
        if preflight and self._done >= preflight:
            self._ending.rehearse(self.statistics, self._done)
        if not preflight:
            self._saver.maybe(prepared.state, prepared.progress.step, agreed.counted[:-1])
            for said in self._running.step(prepared):
                self._link.post("checkpoint", prepared.progress.step, said)
        return True

    @property
    def _done(self) -> int:
        """Return the steps that this process has taken part in."""
        return self._prepared.progress.step - self._began_at if self._prepared is not None else 0

    def _account(self, prepared: PreparedTraining, stepper: Stepper, tokens: float) -> None:
        last = stepper.last
        if last.gain == 0.0 and self._generation.is_main:
            self._link.post("skipped", last.step, {"skipped": last.skipped})
        if self._rates.add(last.batch, last.gain, last.step_seconds, tokens):
            self._ending.watch()
            if self._generation.is_main:
                said = self.statistics.to_json() | {"rank_ready_s": list(last.compute_seconds)}
                self._link.post("step", last.step, said | prepared.news(self._epochs))

    def report(self, **metrics: float) -> None:
        """Report how good the model is; what the first process reports counts. Without a launcher it prints it."""
        self.metrics = {name: float(value) for name, value in metrics.items()}
        if self._generation.is_main:
            progress = self._ready()[0].progress
            content = {"metrics": self.metrics, "epoch": progress.epoch, "progress": progress.gained}
            self._link.post("metrics", progress.step, content)
            if not self._link.launched:
                said = ", ".join(f"{name} {value:.3g}" for name, value in self.metrics.items())
                print(f"epoch {progress.epoch}, step {progress.step}: {said}", flush=True)

    # --- what is known ------------------------------------------------------------------------------------------

    @property
    def is_main(self) -> bool:
        """Return whether this is the process that speaks and writes for all; another one may become it."""
        return self._generation.is_main if self._in_epoch else self.world.is_first()

    @property
    def directory(self) -> str | None:
        """Return the run's directory, as it was named; ``None``: nothing is saved."""
        return None if self._generation.place is None else str(self._generation.place)

    @property
    def device(self) -> torch.device:
        return self.world.device

    @property
    def progress(self) -> Progress:
        """Return how far the run is. It must not be changed."""
        return self._ready()[0].progress

    @property
    def share(self) -> Share:
        """Return which positions of the pass the batch at hand is; weight 0: it counts elsewhere."""
        return self._ready()[1].share

    @property
    def statistics(self) -> RunStatistics:
        """Return the figures of the last step; throughput, goodput and tokens of the last half second or more."""
        prepared, stepper = self._ready()
        goodput, stall = self._rates.progress_rate * prepared.limits.initial, self._saver.costs.stall
        speed, tokens = self._rates.throughput, self._rates.tokens
        return replace(stepper.last, throughput=speed, goodput=goodput, tokens=tokens, stall_seconds=stall)

    def _ready(self) -> tuple[PreparedTraining, Stepper]:
        if self._prepared is None or self._stepper is None:
            raise TrainingError("call run.prepare(model, optimizer, batch_size=...) first")
        return self._prepared, self._stepper

    # --- the end ------------------------------------------------------------------------------------------------

    def close(self, timeout: float = 5.0) -> None:
        """Stop listening and free the run. May be called twice."""
        if not self._closed:
            self._closed = True
            if self._prepared is not None:
                self._prepared.close(timeout)
            self._running.close(timeout)
            self._generation.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        ended = error is None or (type(error) is SystemExit and not error.code)
        try:
            if ended and self._prepared is not None:
                if preflight := self.settings.preflight_steps:  # the script is shorter than the trial
                    self._ending.rehearse(self.statistics, min(preflight, self._done))
                self._ending.finish(self.metrics, self.statistics)
                self._running.needed = False
            elif self.world.elastic and isinstance(error, LauncherLostError | AggregationError):
                self._ending.end_without_service(error)
            elif self.world.size > 1 and not isinstance(error, SystemExit) and peer_lost(error):
                self._ending.end_after_peer_loss(error)
        finally:
            self.close()
            if ended or isinstance(error, RunStopped):
                with suppress(RuntimeError):
                    self.world.leave()
        return False
