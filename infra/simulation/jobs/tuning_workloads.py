"""Workloads and clusters of Themis' evaluation (NSDI 2020, sections 6 and 8; PhD thesis 2021, section 3.6).

The trace is not public. What is published of it is drawn anew: apps, jobs, durations, models. Equal generators give
equal workloads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ebbflow.infra.simulation.jobs.plain import Locality
from ebbflow.infra.simulation.jobs.tuning import Stage, Tuning
from ebbflow.infra.simulation.traces.cluster import Cluster, gpu_node
from ebbflow.infra.simulation.traces.workloads import Job, Workload
from ebbflow.planners.errors import OptionError

NETWORK = Locality(1.0, 1.29, 1.6)
"""How network-intensive models slow down across machines and racks (Themis, NSDI 2020, sections 2 and 8)."""

COMPUTE = Locality(1.0, 1.0, 1.02)
"""How compute-intensive models do."""

HOUR = 3600.0  # s
RACKS = 4
SHRUNK = 0.4
"""Of the published number of jobs in an app: 4 to 40, so that an app wants about 50 GPUs, as in the trace."""

INVENTORIES: Mapping[str, Mapping[int, int]] = {
    "sim-256": {8: 16, 4: 28, 1: 16},
    "sim-128": {8: 8, 4: 14, 1: 8},
    "sim-64": {8: 4, 4: 7, 1: 4},
    "sim-168": {8: 16, 4: 6, 1: 16},  # as printed
    "testbed-64": {4: 12, 2: 8},  # 12 NC24 and 8 NC12
    "one-dense-64": {8: 1, 2: 28},  # of the experiment on lying
}
"""Machines by GPUs. The printed inventory of the simulator's 256 GPUs sums to 168; here it has 28 machines of 4."""

FIELDS: tuple[tuple[float, Mapping[str, bool]], ...] = (
    (0.1, {"inception3": False, "alexnet": True, "resnet50": False, "vgg16": True, "vgg19": True}),
    (0.6, {"bi-att-flow": False, "language-model": True, "gnmt": False, "transformer": True}),
    (0.3, {"wavenet": False, "deepspeech": True}),
)
"""(share of apps, models and whether they are network-intensive) by field: vision, language, speech."""


@dataclass(frozen=True, slots=True)
class Apps:
    """A workload and what its apps are."""

    workload: Workload
    tunings: Mapping[str, Tuning]


def inventory(name: str) -> Cluster:
    """Return a cluster of :data:`INVENTORIES`, machines of each size dealt out to four racks in turn.

    Raises:
        OptionError: an unknown name.
    """
    if name not in INVENTORIES:
        raise OptionError(f"a cluster must be one of {', '.join(INVENTORIES)}; got {name!r}")
    nodes = []
    for gpus, count in INVENTORIES[name].items():
        for number in range(count):
            nodes.append(gpu_node(f"g{gpus}-{number:02}", gpus, rack=f"rack-{number % RACKS}"))
    return Cluster(tuple(nodes))


def tuning_apps(
    rng: np.random.Generator,
    *,
    halving: bool,
    apps: int = 50,
    span: float = 10 * HOUR,
    gpus: float = 64.0,
    network_share: float | None = None,
) -> Apps:
    """Return Themis' workload 1 (jobs of 1 or 2 tasks) or, with ``halving``, workload 2 (2, 4 or 8 tasks, in phases).

    A tenth of the apps have one job, the others 10 to 100 times :data:`SHRUNK`. A job takes log-normal time
    (σ 1.4, cut at 2 σ: 0.2 of it among the jobs of an app, the rest among apps). Gaps between arrivals are
    hyper-exponential with a coefficient of variation of 2. With halving every phase has as many iterations, the
    surviving half of the jobs has twice as many tasks each, up to 8, and the tuner forecasts later phases by the
    median job.

    All work is scaled so that it would keep ``gpus`` GPUs busy for ``span`` s: that, not its absolute size, says how
    crowded the cluster is. ``network_share`` draws who is network-intensive instead of taking it from the model.

    Raises:
        OptionError: a number outside its rule.
    """
    if apps < 1 or not span > 0 or not gpus > 0 or not 0 <= (network_share or 0) <= 1:
        raise OptionError(
            "apps >= 1, span > 0 s, gpus > 0 and 0 <= network_share <= 1 must hold;"
            f" got {apps}, {span}, {gpus}, {network_share}"
        )
    drawn = [_drawn(rng, halving) for _ in range(apps)]
    arrivals = np.cumsum(_gaps(rng, apps))
    arrivals = (arrivals - arrivals[0]) * span / max(float(arrivals[-1]), 1e-9)
    factor = gpus * span / sum(tuning.work for _, tuning in drawn)
    order = rng.permutation(apps)  # who is network-intensive: the same apps first, whatever the share
    jobs, tunings = [], {}
    for number, ((model, tuning), arrival) in enumerate(zip(drawn, arrivals, strict=True)):
        if network_share is not None:
            network = bool(order[number] < round(network_share * apps))
            tuning = replace(tuning, locality=NETWORK if network else COMPUTE)  # noqa: PLW2901
        id_ = f"app-{number:03}"
        tunings[id_] = tuning.scaled(factor)
        jobs.append(_job(id_, float(arrival), tuning, model))
    return Apps(Workload(f"themis-{2 if halving else 1}", tuple(jobs)), tunings)


def identical_apps(
    count: int = 8, *, gpus: int = 8, hours: float = 2.0, locality: Locality = NETWORK
) -> Apps:
    """Return ``count`` equal apps of one job that all arrive at 0; ``hours`` each on its ``gpus`` GPUs alone."""
    work = hours * HOUR * gpus
    tuning = Tuning((Stage(work, work, 1, gpus),), locality)
    jobs = tuple(_job(f"app-{number}", 0.0, tuning, "vgg16") for number in range(count))
    return Apps(Workload("identical", jobs), {job.id: tuning for job in jobs})


def _job(id_: str, arrival: float, tuning: Tuning, model: str) -> Job:
    skewed = tuning.locality.cluster > 1.1 and tuning.stages[-1].tasks > 1
    return Job(
        id_, arrival, tuning.demand, None, model, min_gpus=1, max_gpus=tuning.demand, skewed=skewed
    )  # fmt: skip


def _drawn(rng: np.random.Generator, halving: bool) -> tuple[str, Tuning]:
    models = FIELDS[int(rng.choice(len(FIELDS), p=[share for share, _ in FIELDS]))][1]
    model = sorted(models)[int(rng.integers(len(models)))]
    count = 1
    if rng.random() >= 0.1:
        count = max(2, round((10 + 90 * rng.random() ** (1 / 2.494)) * SHRUNK))
    tasks = int(rng.choice([2, 4, 8] if halving else [1, 2]))
    normal = float(np.clip(rng.standard_normal(), -2, 2))
    hours = 3.75 * np.exp((1.4**2 - 0.2**2) ** 0.5 * normal)
    works = hours * tasks * np.exp(0.2 * rng.standard_normal(count))
    locality = NETWORK if models[model] else COMPUTE
    if not halving:
        return model, Tuning((_stage(works, tasks),), locality)
    rounds = count.bit_length()
    alive = rng.permutation(works / rounds)
    sizes = [(count >> number, min(tasks << number, 8)) for number in range(rounds)]
    stages = tuple(_stage(alive[:jobs], most) for jobs, most in sizes)
    forecast = tuple(_stage(np.full(jobs, np.median(alive)), most) for jobs, most in sizes)
    return model, Tuning(stages, locality, forecast)


def _stage(works: np.ndarray[Any, Any], tasks: int) -> Stage:
    return Stage(float(works.sum()), float(works.max()), len(works), tasks)


def _gaps(rng: np.random.Generator, count: int) -> np.ndarray[Any, Any]:
    """Return gaps of mean 1: two exponentials with balanced means, coefficient of variation 2."""
    often = 0.5 * (1 + 0.6**0.5)
    short = rng.random(count) < often
    means = np.where(short, 0.5 / often, 0.5 / (1 - often))
    gaps: np.ndarray[Any, Any] = rng.exponential(1.0, count) * means
    return gaps
