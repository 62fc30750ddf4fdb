"""A model and an optimizer made ready for a run: on their device, in mixed precision, in DDP, restored."""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from ebbflow.infra.communication.planned import PlannedCommunication
from ebbflow.infra.errors import TrainingError
from ebbflow.infra.training.checkpoints.shards import Cut
from ebbflow.infra.training.gradients.noise import GradientMeter, MakeSamples
from ebbflow.infra.training.gradients.shard_samples import ShardSamples
from ebbflow.infra.training.gradients.tuner import BatchTuner
from ebbflow.infra.training.process.world import World
from ebbflow.infra.training.progress import Progress
from ebbflow.infra.training.replicas.parallel import Replicas
from ebbflow.infra.training.schedule import (
    ProgressSchedule,
    Rule,
    SchedulerFactory,
    ScheduleUnit,
    rule_for,
    script_hyperparameters,
)
from ebbflow.infra.training.service.optimizer import ServiceOptimizer
from ebbflow.infra.training.service.samples import ServiceSamples
from ebbflow.infra.training.sharded.parallel import Parallel, Sharding, Wrap, named, shard
from ebbflow.infra.training.sharded.restoring import cut_for, load_parts
from ebbflow.infra.training.sharded.tensor import Plan, clip, tensor_size
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.trainings import RunSettings
from ebbflow.planners.training.speed.batch_size import BatchLimits

Precision = Literal["fp32", "bf16", "fp16"]
OptimizerFactory = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]

# MiB of gradients that are reduced at a time on CPU cores. gloo's reduction is their own work, so more of it than
# with DDP's 25 had better be done while gradients are still computed. GPUs keep DDP's.
CPU_BUCKET = 8


@dataclass(frozen=True, slots=True)
class Options:
    """What a script asks of ``ElasticRun.prepare``."""

    batch_size: int
    max_batch_size: int | None = None
    min_local: int = 1
    max_local: int | None = None
    learning_rate_rule: str = "auto"
    warm_up: float = 0.0
    scheduler: SchedulerFactory | None = None
    scheduler_unit: ScheduleUnit = "iteration"
    precision: Precision = "fp32"
    clip_norm: float | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)
    parallel: Parallel | None = None
    wrap: Wrap | None = None
    tensor_parallel: Plan | None = None

    @property
    def asked(self) -> dict[str, Any]:
        """Return the options in which all processes must agree."""
        names = ("batch_size", "max_batch_size", "min_local", "max_local", "learning_rate_rule", "warm_up")
        found = {name: getattr(self, name) for name in (*names, "precision", "clip_norm")}
        found["parallel"] = named(self.parallel)
        return found | {"scheduler_unit": self.scheduler_unit if self.scheduler is not None else None}

    def within(self, settings: RunSettings) -> "Options":
        """Return the options for what a process' memory was found to hold."""
        if (most := settings.max_local) is None:
            return self
        most = min(self.max_local or most, most)
        return replace(self, max_local=most, min_local=min(self.min_local, most))

    def limits(self, gpus: int) -> BatchLimits:
        """Return the batches that may be used. Raises ``OptionError`` where ``gpus`` processes cannot share one."""
        limits = BatchLimits(
            self.batch_size,
            max(self.batch_size, self.max_batch_size or 0),
            self.min_local,
            self.max_local or max(self.min_local, self.max_batch_size or 0, self.batch_size),
        )
        if self.max_batch_size is not None and self.max_batch_size < self.batch_size:
            raise OptionError(
                f"max_batch_size must be >= batch_size; got {self.max_batch_size} and {self.batch_size}"
            )
        if gpus > limits.most_gpus:
            raise OptionError(
                f"{gpus} processes cannot share a batch of at most {limits.largest} with at least "
                f"{limits.smallest_local} each: run on {limits.most_gpus} or fewer, or raise max_batch_size"
            )
        return limits


@dataclass(slots=True)
class PreparedTraining:
    """All that a step works on. ``inner`` is the script's model, ``model`` what is called."""

    model: torch.nn.Module
    inner: torch.nn.Module
    optimizer: torch.optim.Optimizer
    limits: BatchLimits
    adaptive: bool
    meter: GradientMeter
    tuner: BatchTuner
    rule: Rule
    schedule: ProgressSchedule | None
    scaler: torch.amp.GradScaler | None
    clip_norm: float | None
    extra: Mapping[str, Any]
    progress: Progress
    communication: PlannedCommunication | None = None
    service: ServiceOptimizer | None = None
    sharding: Sharding | None = None

    def run_state(self) -> dict[str, Any]:
        """Return the small part of a checkpoint: where the run is and what it has measured."""
        run = {
            "progress": self.progress.state_dict(),
            "meter": self.meter.state_dict(),
            "tuner": self.tuner.state_dict(),
        }
        if self.schedule is not None:
            run["schedule"] = self.schedule.state_dict()
        if self.scaler is not None:
            run["scaler"] = self.scaler.state_dict()
        return run

    def extra_state(self) -> dict[str, Any]:
        """Return the state of what the script wants kept besides."""
        return {name: part.state_dict() for name, part in self.extra.items()}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds, good for any number of processes; equal on all unless it is sharded."""
        if self.service is not None:
            self.service.fetch_moments()
        return self._state(self.inner.state_dict())

    def state_beside(self) -> dict[str, Any]:
        """Return ``state`` for another thread than the one that trains, whose parameters stay as they are.

        Asking a sharded model for its state puts away what is gathered of it.
        """
        return self.state() if self.sharding is None else self._state(self.sharding.state_of(self.inner))

    def _state(self, model: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "model": model,
            "optimizer": self.optimizer.state_dict(),
            "run": self.run_state(),
            "extra": self.extra_state(),
        }

    def news(self, epochs: int) -> dict[str, Any]:
        """Return what the launcher is told of a step besides its statistics, ``epochs`` being asked for."""
        found = self.progress.forecast(epochs)
        # a forecast counts those with examples of their own, which are no GPUs where several get the same
        if self.sharding is None or self.sharding.tensor == 1:
            found |= {"job": report.to_dict()} if (report := self.tuner.news()) is not None else {}
        return found

    def clip(self, world: World) -> bool:
        """Scale gradients so that their norm is at most ``clip_norm``, if that is given. Collective.

        The norm is of what the optimizer gets, which a script may have changed since gradients were measured. Returns
        whether processes have exchanged something for it.
        """
        if self.clip_norm is None:
            return False
        parameters, sharding = self.inner.parameters(), self.sharding
        if sharding is None or sharding.tensor == 1:
            torch.nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        else:
            replicas = sharding.division.replicas
            clip(parameters, self.clip_norm, sharding.tensor, replicas, lambda one: world.sum([one])[0])
        return sharding is not None

    def close(self, timeout: float) -> None:
        """End what runs beside the training, within ``timeout`` seconds."""
        if self.communication is not None:
            self.communication.close(timeout)
        if self.service is not None:
            self.service.close()

    def load(self, state: dict[str, Any]) -> None:
        """Take a checkpoint's state, but for a whole model's, which is in place before DDP is."""
        if self.sharding is None:
            self.optimizer.load_state_dict(state["optimizer"])
        else:
            load_parts(self.inner, self.optimizer, state)
        self.load_run(state["run"])
        self.load_extra(state.get("extra", {}))

    def load_run(self, run: dict[str, Any]) -> None:
        """Take what ``run_state`` gave. Raises ``TrainingError`` for a run with another batch."""
        self.progress = Progress.from_state(run["progress"], self.limits.initial)
        self.meter.load_state_dict(run["meter"])
        self.tuner.load_state_dict(run["tuner"])
        if self.schedule is not None and "schedule" in run:
            self.schedule.load_state_dict(run["schedule"])
        if self.scaler is not None and "scaler" in run:
            self.scaler.load_state_dict(run["scaler"])

    def load_extra(self, extra: Mapping[str, Any]) -> None:
        """Take what ``extra_state`` gave; what it lacks stays as it is."""
        for name, part in self.extra.items():
            if name in extra:
                part.load_state_dict(extra[name])


def prepare(
    world: World,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | OptimizerFactory,
    options: Options,
    settings: RunSettings,
    read: Callable[[Cut | None], dict[str, Any] | None],
    communication: PlannedCommunication | None = None,
    connect: Callable[[torch.nn.Module, torch.optim.Optimizer], ServiceOptimizer] | None = None,
    replicas: Callable[[torch.nn.Module, Mapping[str, Any]], Replicas] | None = None,
) -> PreparedTraining:
    """Put everything together; see ``ElasticRun.prepare``.

    ``read`` gives a checkpoint's state, if there is one, or this process' parts of its tensors. ``connect`` takes
    parameters to the aggregation service, where gradients meet there. ``replicas`` makes what reduces gradients, with
    DDP's options, where processes come and go.

    Raises ``OptionError``.
    """
    members = world.size // tensor_size(options.parallel, model)
    limits = options.limits(members)
    adaptive = settings.adaptive and limits.largest > limits.initial
    if not adaptive and members * limits.smallest_local > limits.initial:
        raise OptionError(
            f"{members} processes cannot share the fixed batch of {limits.initial} with at least "
            f"{limits.smallest_local} each: run on {limits.initial // limits.smallest_local} or fewer"
        )
    sharding = None
    if connect is None:
        sharding = shard(
            world, model, optimizer, options.parallel, options.wrap, plan=options.tensor_parallel
        )
    state = None
    if sharding is None:
        model.to(world.device)
        state = read(None)
        if state is not None:
            model.load_state_dict(state["model"])
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(model.parameters())
    if sharding is not None:
        state = read(cut_for(model, optimizer))
    _autocast(model, options.precision, world.device)
    called: torch.nn.Module = model
    service = connect(model, optimizer) if connect is not None else None
    metered = called
    if replicas is not None:
        called = replicas(model, options.ddp)
        metered = called.called
    elif world.size > 1 and service is None and sharding is None:
        devices = [world.device] if world.device.type == "cuda" else None
        ddp: dict[str, Any] = {"gradient_as_bucket_view": True}
        if devices is None:
            ddp["bucket_cap_mb"] = CPU_BUCKET
        ddp.update(options.ddp)
        metered = called = DistributedDataParallel(model, device_ids=devices, **ddp)
    samples: MakeSamples | None = None
    if service is not None:
        samples = functools.partial(ServiceSamples, service)
    elif sharding is not None and world.size > 1:
        samples = functools.partial(ShardSamples, model, sharding.division, tensor=sharding.tensor)
    schedule = None
    if options.scheduler is not None:
        schedule = ProgressSchedule(options.scheduler(optimizer), options.scheduler_unit)
    made = PreparedTraining(
        model=called,
        inner=model,
        optimizer=optimizer,
        limits=limits,
        adaptive=adaptive,
        meter=GradientMeter(
            metered,
            optimizer,
            limits.initial,
            submit=communication.submit if communication else None,
            samples=samples,
            refresh=service.fetch_moments if service is not None else None,
            lost=called.lost if isinstance(called, Replicas) else None,
        ),
        tuner=BatchTuner(limits, adaptive=adaptive, every=settings.retune_every),
        rule=rule_for(options.learning_rate_rule, optimizer, options.warm_up),
        schedule=schedule,
        scaler=torch.amp.GradScaler(world.device.type) if options.precision == "fp16" else None,
        clip_norm=options.clip_norm,
        extra=options.state,
        progress=Progress(limits.initial),
        communication=communication,
        service=service,
        sharding=sharding,
    )
    if state is not None:
        with script_hyperparameters(optimizer, schedule, keep=settings.script_hyperparameters):
            made.load(state)
    return made


def _autocast(model: torch.nn.Module, precision: Precision, device: torch.device) -> None:
    """Run the model's own forward in lower precision, and give its outputs back in single precision."""
    if precision == "fp32":
        return
    if precision not in ("bf16", "fp16"):
        raise OptionError(f"precision must be fp32, bf16 or fp16; got {precision!r}")
    if "forward" in vars(model):
        raise TrainingError("this model was prepared before; make a new one for each run")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    forward = model.forward

    def lower(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype=dtype):
            return _single(forward(*args, **kwargs))

    model.forward = lower


def _single(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if isinstance(value, dict):
        return {key: _single(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_single(item) for item in value)
    return value
