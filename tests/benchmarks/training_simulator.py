"""Processor time of the training simulator: public workloads, and Philly-like traces by jobs, GPUs and load.

Run from the repository root: ``python -m tests.benchmarks.training_simulator --out DIR``. Writes
``training_simulator.json`` and ``training_simulator.svg`` and exits with 1 when a bound is missed: Tiresias on 160
jobs 0.5 s, Optimus 1 s, the ten-week trace of 10,000 jobs on 2,000 GPUs 60 s and 1 GB. Files are read before.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import json
import resource
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ebbflow.infra.simulation.engine import simulate
from ebbflow.infra.simulation.jobs.adaptdl import adaptdl_jobs
from ebbflow.infra.simulation.jobs.profiles import Profiles
from ebbflow.infra.simulation.traces.cluster import Cluster
from ebbflow.infra.simulation.traces.generators import WEEK, philly_like
from ebbflow.infra.simulation.traces.workloads import read_adaptdl
from ebbflow.planners.model.scheduling import Policy
from ebbflow.planners.scheduling.gangs.optimus import Optimus
from ebbflow.planners.scheduling.gangs.tiresias import Tiresias
from ebbflow.planners.scheduling.placement import most_free_first
from ebbflow.tasks.drawing.charts import lines_svg

DATA = Path(__file__).parent.parent / "fixtures" / "training" / "adaptdl"
BOUNDS = {"tiresias": 0.5, "optimus": 1.0}  # CPU s of 160 jobs
SECONDS, MEGABYTES = 60.0, 1024.0  # of 10,000 jobs on 2,000 GPUs over ten weeks


@dataclass(frozen=True)
class Trace:
    """One Philly-like trace under Tiresias, by events."""

    jobs: int
    gpus: int
    weeks: float
    load: float  # GPU time asked for over GPU time there was
    decisions: int
    cpu_s: float
    policy_cpu_s: float
    peak_mb: float  # of the process, so far


def public(rounds: int) -> dict[str, list[float]]:
    """Return the median CPU seconds of each public workload by policy."""
    profiles = Profiles(DATA / "traces")
    policies: list[Policy] = [Tiresias([57_600], order="insertion", placer=most_free_first), Optimus()]
    medians: dict[str, list[float]] = {}
    for policy in policies:
        for number in (1, 2, 3, 4):
            jobs = read_adaptdl(DATA / "workloads" / f"workload-{number}.csv", profiles)
            for job in jobs.jobs:
                profiles[job.model]
            seconds = []
            for _ in range(rounds):
                began = time.process_time()
                simulate(jobs, Cluster.grid(16, 4), policy, models=adaptdl_jobs(profiles), tick=60)
                seconds.append(time.process_time() - began)
            medians.setdefault(policy.name, []).append(statistics.median(seconds))
            print(f"{policy.name} workload {number}: {medians[policy.name][-1]:.3f} CPU s", flush=True)
    return medians


def philly(jobs: int, gpus: int, weeks: float) -> Trace:
    """Simulate one trace on 8-GPU nodes."""
    span = weeks * WEEK
    workload = philly_like(np.random.default_rng(0), jobs, span=span)
    asked = sum(job.gpus * (job.duration or 0.0) for job in workload.jobs)
    began = time.process_time()
    result = simulate(workload, Cluster.grid(gpus // 8, 8, per_rack=25), Tiresias())
    cpu = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    trace = Trace(
        jobs, gpus, weeks, asked / (gpus * span), result.decisions, cpu, result.policy_seconds, peak
    )
    print(
        f"{jobs:6} jobs {gpus:5} GPUs {weeks:4g} weeks load {trace.load:4.2f}: {cpu:6.2f} CPU s {peak:5.0f} MB",
        flush=True,
    )
    return trace


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    medians = public(given.rounds)
    by_jobs = [philly(jobs, 2000, jobs / 1000) for jobs in (1000, 2000, 4000, 7000, 10_000)]
    by_gpus = [philly(4000, gpus, 4) for gpus in (1000, 4000, 8000)]
    busy = [philly(10_000, 2000, weeks) for weeks in (4, 2.5)]
    found = {
        "public": medians,
        "by_jobs": [asdict(trace) for trace in by_jobs],
        "by_gpus": [asdict(trace) for trace in by_gpus],
        "busy": [asdict(trace) for trace in busy],
    }
    (given.out / "training_simulator.json").write_text(json.dumps(found, indent=1) + "\n")
    points = {"CPU s": [(float(trace.jobs), trace.cpu_s) for trace in by_jobs]}
    drawn = lines_svg("Tiresias on 2,000 GPUs, a thousand jobs a week", points, label="jobs", unit="s")
    (given.out / "training_simulator.svg").write_text(drawn)
    missed = [name for name, bound in BOUNDS.items() if max(medians[name]) > bound]
    missed += ["ten weeks"] if by_jobs[-1].cpu_s > SECONDS or by_jobs[-1].peak_mb > MEGABYTES else []
    print("missed: " + ", ".join(missed) if missed else "all bounds hold")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
