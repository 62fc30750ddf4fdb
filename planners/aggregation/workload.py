"""Trainings with the aggregation profiles that a job trace lacks: the models of AutoPS' evaluation (Table 4.2).

A trace has arrivals, GPUs and durations. The rest is assumed, and a parameter: as many servers as workers, one of
four models drawn evenly, iterations around the model's median, and execution times from one rate of reduction. The
rate is that at which VGG19 on one server with two workers keeps it busy for 16 % of the time, as measured there.

With it a day of 200 trainings saves 85 % of the server time where 52.7 % are published for the ten weeks of a trace
that is not public; that much is saved with execution times four to five times as long (58 % at four, 47 % at six).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil, log

import numpy as np

from ebbflow.planners.aggregation.model import AggregationTask, JobProfile
from ebbflow.planners.errors import OptionError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model as aggregation sees it.

    Args:
        tensors: number of tensors.
        size_bytes: of all its parameters.
        largest: fraction of the bytes that its largest tensor holds; the others are equal.
        iteration_s: median seconds of an iteration.
    """

    tensors: int
    size_bytes: int
    largest: float
    iteration_s: float

    def sizes(self) -> list[int]:
        """Return the bytes of each tensor."""
        first = round(self.size_bytes * self.largest)
        rest, more = divmod(self.size_bytes - first, self.tensors - 1)
        return [first] + [rest + (i < more) for i in range(self.tensors - 1)]


MODELS: Mapping[str, ModelShape] = {
    "alexnet": ModelShape(17, 236_000_000, 0.64, 0.3),
    "vgg19": ModelShape(39, 548_000_000, 0.75, 1.0),
    "awd-lm": ModelShape(14, 396_000_000, 1 / 14, 0.8),
    "bert": ModelShape(393, 1_278_000_000, 0.1, 2.0),
}
REDUCTION_RATE = 2 * MODELS["vgg19"].size_bytes / 0.16  # bytes/s of gradients on a whole server


@dataclass(frozen=True, slots=True)
class TraceJob:
    """A training of a trace.

    Args:
        arrival_s: seconds from the trace's beginning.
        duration_s: seconds that it runs.
        profile: what it needs of the service.
    """

    arrival_s: float
    duration_s: float
    profile: JobProfile


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """What is assumed of a trace's trainings.

    Args:
        gpus_per_worker: GPUs that one worker drives.
        spread: standard deviation of the logarithm of iterations.
        reduction_rate: bytes/s of gradients that a server sums and applies.

    Raises ``OptionError`` for numbers outside their range.
    """

    gpus_per_worker: int = 4
    spread: float = 0.3
    reduction_rate: float = REDUCTION_RATE

    def __post_init__(self) -> None:
        if self.gpus_per_worker < 1:
            raise OptionError(f"gpus_per_worker must be at least 1, not {self.gpus_per_worker}")
        if self.spread < 0 or not self.reduction_rate > 0:
            raise OptionError(
                "spread must not be negative and reduction_rate must be positive, not"
                f" {self.spread} and {self.reduction_rate}"
            )


def model_profile(
    job_id: str, model: str, workers: int, iteration_s: float, reduction_rate: float = REDUCTION_RATE
) -> JobProfile:
    """Return the profile of a training of one of ``MODELS`` with as many servers as workers.

    Args:
        job_id: of the training.
        model: a key of ``MODELS``.
        workers: that push gradients.
        iteration_s: seconds of an iteration whose servers are fast enough; it is longer where the busiest of its own
            servers, to which tensors are assigned round-robin, needs more.
        reduction_rate: bytes/s of gradients that a server sums and applies.

    Raises ``OptionError`` for an unknown model.
    """
    if model not in MODELS:
        raise OptionError(f"model must be one of {', '.join(MODELS)}, not {model!r}")
    tasks = tuple(
        AggregationTask(job_id, f"{i:03}", max(round(size * workers / reduction_rate * 1e6), 1), size)
        for i, size in enumerate(MODELS[model].sizes())
    )
    busiest = max(sum(task.execution_us for task in tasks[i::workers]) for i in range(workers))
    return JobProfile(job_id, max(round(iteration_s * 1e6), busiest), tasks, workers)


def with_profiles(
    rows: Iterable[tuple[str, float, int, float]],
    rng: np.random.Generator,
    options: WorkloadOptions | None = None,
) -> list[TraceJob]:
    """Return the trainings of a trace with profiles, in the order of the rows.

    Args:
        rows: id, arrival in seconds, GPUs and duration in seconds of each training.
        rng: draws models and iterations.
        options: what is assumed; defaults as in ``WorkloadOptions``.
    """
    options = options or WorkloadOptions()
    names = sorted(MODELS)
    made = []
    for job_id, arrival, gpus, duration in rows:
        model = names[int(rng.integers(len(names)))]
        iteration = float(rng.lognormal(log(MODELS[model].iteration_s), options.spread))
        workers = ceil(gpus / options.gpus_per_worker)
        profile = model_profile(job_id, model, workers, iteration, options.reduction_rate)
        made.append(TraceJob(arrival, duration, profile))
    return made
