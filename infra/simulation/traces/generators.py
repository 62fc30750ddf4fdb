"""Made-up workloads with the distributions that the Tiresias paper and its authors published (NSDI 2019, section 5).

Equal generators give equal workloads.
"""

from collections.abc import Mapping, Sequence
from math import exp, log

import numpy as np

from ebbflow.infra.simulation.traces.workloads import Job, Workload
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.skew import TENSORS, is_skewed

WEEK = 7 * 86_400.0  # s

TESTBED_GPUS: Mapping[int, int] = {1: 240, 2: 40, 4: 80, 8: 90, 16: 25, 32: 5}
"""Jobs by GPUs in the paper's testbed workload."""

SERVICE_QUANTILES: Sequence[tuple[float, float]] = (
    (0.0, 121.0),
    (0.1, 357.0),
    (0.25, 860.0),
    (0.5, 2_227.0),
    (0.6, 3_064.0),
    (0.7, 5_555.0),
    (0.75, 8_220.0),
    (0.8, 12_720.0),
    (0.9, 76_000.0),
    (0.95, 328_000.0),
    (0.99, 2_290_000.0),
    (1.0, 53_300_000.0),
)
"""(share of jobs, GPU-s at most) in Microsoft's trace, as Tiresias' authors published them."""

_LARGE_GPUS: Mapping[int, int] = {**TESTBED_GPUS, 64: 2, 128: 1}


def tiresias_testbed(rng: np.random.Generator) -> Workload:
    """Return 480 jobs for 60 GPUs: the paper's GPU counts and models, about four hours of Poisson arrivals.

    The paper gives no durations beyond 2 min to 2 h and the shares of short and long; these fit all of that.
    Each of ten models is in 48 jobs.
    """
    gpus = rng.permutation(np.repeat(list(TESTBED_GPUS), list(TESTBED_GPUS.values())))
    models = rng.permutation(np.repeat(sorted(TENSORS), 48))
    arrivals = np.cumsum(rng.exponential(30.0, len(gpus)))
    jobs = []
    for number, (count, model, arrival) in enumerate(zip(gpus, models, arrivals, strict=True)):
        long = rng.random() < (0.164 if count <= 4 else 0.3125)
        duration = _cut(rng, 800.0, 1600.0, 7200.0) if long else _cut(rng, 120.0, 150.0, 800.0)
        jobs.append(_job(number, float(arrival), int(count), duration, str(model)))
    return Workload("tiresias-testbed", tuple(jobs))


def _cut(rng: np.random.Generator, least: float, mean: float, most: float) -> float:
    """Return ``least`` plus an exponential of ``mean``, conditioned on at most ``most``."""
    share = rng.random() * (1 - exp(-(most - least) / mean))
    return least - mean * log(1 - share)


def philly_like(
    rng: np.random.Generator,
    jobs: int = 10_000,
    *,
    span: float = 10 * WEEK,
    least: float = 60.0,
    longest: float = 2 * WEEK,
) -> Workload:
    """Return ``jobs`` jobs over ``span`` s whose GPU-seconds follow the published quantiles of Microsoft's trace.

    GPU-seconds are drawn log-linearly between quantiles; GPUs by the testbed's shares (and a few of 64 and 128),
    among the counts that let the job run for ``least`` to ``longest`` s. The paper kept jobs of at least one minute.

    Raises ``OptionError``.
    """
    if jobs < 1 or span <= 0 or not 0 < least < longest:
        raise OptionError(
            f"jobs >= 1, span > 0 and 0 < least < longest must hold; got {jobs}, {span}, {least}, {longest}"
        )
    shares, services = zip(*SERVICE_QUANTILES, strict=True)
    service = np.exp(np.interp(rng.random(jobs), shares, np.log(services)))
    arrivals = np.sort(rng.random(jobs)) * span
    names = sorted(TENSORS)
    counts = np.array(list(_LARGE_GPUS))
    weights = np.array(list(_LARGE_GPUS.values()), float)
    made = []
    for number in range(jobs):
        durations = service[number] / counts
        fits = (durations >= least) & (durations <= longest)
        if not fits.any():
            fits[-1 if durations[-1] > longest else 0] = True
        odds = weights * fits
        count = int(rng.choice(counts, p=odds / odds.sum()))
        model = names[int(rng.integers(len(names)))]
        made.append(_job(number, float(arrivals[number]), count, float(service[number]) / count, model))
    return Workload(f"philly-like-{jobs}", tuple(made))


def _job(number: int, arrival: float, gpus: int, duration: float, model: str) -> Job:
    return Job(f"job-{number:05}", arrival, gpus, duration, model, skewed=is_skewed(model))
