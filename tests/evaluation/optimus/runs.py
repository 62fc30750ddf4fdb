"""The experiments on Optimus: a cluster of parameter servers, its estimators, its balancing, and its cost."""

from time import process_time
from typing import Any

import numpy as np

from ebbflow.planners.tuning.convergence import LossCurve
from tests.evaluation.experiments import Experiment
from tests.evaluation.optimus.jobs import made, packed, resnet50_blocks
from tests.evaluation.optimus.optimus_tasks import PsJob, Tasks, allocate, place
from tests.evaluation.optimus.ps_blocks import assign_blocks, round_robin
from tests.evaluation.optimus.ps_blocks_mxnet import mxnet_blocks
from tests.evaluation.optimus.ps_speed import SAMPLE_PLAN, Sample, fit_speed
from tests.evaluation.optimus.world import LOSS_NOISE, POINTS, SPEED_NOISE, Rules, run_world

JOBS = 60
SEEDS = (0, 1, 2)
VARIANTS: dict[str, dict[str, Any]] = {
    "drf": {"allocation": "fair", "placing": "spread", "balanced": False},
    "tetris": {"allocation": "short", "placing": "packed", "balanced": False},
    "allocation": {"placing": "spread", "balanced": False},
    "placement": {"allocation": "fair", "balanced": False},
    "allocation-placement": {"balanced": False},
    "optimus": {},
    "oracle": {"oracle": True},
    "stragglers-kept": {"straggling": 0.2, "replaces": False},
    "stragglers-replaced": {"straggling": 0.2},
}
ERRORS = (0.1, 0.2, 0.3, 0.4)
COUNTS = (30, 60, 90)
SIZES = ((250, 1000), (1000, 4000), (4000, 16_000))
PROGRESS = (0.2, 0.4, 0.6, 0.8)
SERVERS = 10


def world(seed: int, jobs: int = JOBS, **rules: Any) -> dict[str, Any]:
    """Run the evaluation's workload under ``Rules``."""
    return run_world(made(seed, jobs), Rules(**rules), seed)


def convergence(seed: int, jobs: int) -> dict[str, list[float]]:
    """Return relative errors of the predicted epoch of convergence, by progress: one a job."""
    errors: dict[str, list[float]] = {}
    for number, job in enumerate(made(seed, jobs)):
        rng = np.random.default_rng([seed, 11, number])
        for share in PROGRESS:
            curve = LossCurve()
            for at in range(1, int(share * job.epochs * POINTS) + 1):
                loss = job.curve.loss(at / POINTS) * (1 + LOSS_NOISE * float(rng.standard_normal()))
                curve.add(at / POINTS, max(loss, 1e-6))
            model = curve.fit()
            if model is not None:
                predicted = min(model.converges_at(job.delta, 3), 1000)
                errors.setdefault(f"{share:g}", []).append(abs(predicted / job.epochs - 1))
    return errors


def speed_fit(seed: int, jobs: int) -> list[float]:
    """Return the mean relative error of each job's fitted speed on all pairs up to 8, from the pre-run's samples."""
    errors = []
    for number, job in enumerate(made(seed, jobs)):
        rng = np.random.default_rng([seed, 13, number])
        samples = [
            Sample(
                p, w, job.speed(packed(Tasks(p, w)), True) * (1 + SPEED_NOISE * float(rng.standard_normal()))
            )
            for p, w in SAMPLE_PLAN
        ]
        model = fit_speed(samples, job.mode)
        assert model is not None
        off = [
            abs(model.speed(p, w) / job.speed(packed(Tasks(p, w)), True) - 1)
            for p in range(1, 9)
            for w in range(1, 9)
        ]
        errors.append(float(np.mean(off)))
    return errors


def balancing(seed: int) -> dict[str, dict[str, float]]:
    """Return, for ResNet-50 on ten servers, gaps between the fullest and the emptiest server, and all requests."""
    sizes = resnet50_blocks()
    found = {
        "optimus": assign_blocks(sizes, SERVERS),
        "mxnet": mxnet_blocks(sizes, SERVERS, np.random.default_rng(seed)),
        "round robin": round_robin(sizes, SERVERS),
    }
    return {
        name: {
            "blocks": len(sizes),
            "size_gap": max(s.load for s in loads) - min(s.load for s in loads),
            "request_gap": max(s.requests for s in loads) - min(s.requests for s in loads),
            "requests": sum(s.requests for s in loads),
        }
        for name, loads in found.items()
    }


def scale(jobs: int, machines: int, seed: int) -> dict[str, float]:
    """Return the CPU seconds of allocating and placing all tasks at once, and how many tasks that were."""
    rng = np.random.default_rng(seed)

    def job(number: int) -> PsJob:
        a, b, c, d = rng.uniform((6, 0.5, 0.3, 0.01), (20, 2.0, 3.0, 0.03)).tolist()

        def speed(p: int, w: int) -> float:
            return 1 / (a / w + b + c * w / p + d * (w + p))

        return PsJob(f"{number:05}", float(rng.uniform(100, 10_000)), speed, {"units": 1.0}, {"units": 1.0})

    asked = [job(number) for number in range(jobs)]
    began = process_time()
    granted, steps = allocate(asked, {"units": 6.0 * machines}, on_full="skip")
    allocated = process_time() - began
    free = {f"m{at:05}": 6.0 for at in range(machines)}
    placed = place(granted, free, dict.fromkeys(granted, (1.0, 1.0)))
    tasks = sum(sum(one.tasks) for one in placed.values())
    return {
        "allocate_s": allocated,
        "place_s": process_time() - began - allocated,
        "grants": len(steps),
        "tasks": tasks,
    }


def experiments(quick: bool) -> list[Experiment]:
    """Return all of them; the quick ones use fewer jobs, seeds and machines."""
    seeds, jobs = (SEEDS[:1], 20) if quick else (SEEDS, JOBS)
    made_: list[Experiment] = []
    for seed in seeds:
        for name, rules in VARIANTS.items():
            made_.append(Experiment(f"{name}-{seed}", world, {"seed": seed, "jobs": jobs, **rules}, 1.0))
        for error in ERRORS:
            rules = {"seed": seed, "jobs": jobs, "oracle": True, "error": error}
            made_.append(Experiment(f"error-{error:g}-{seed}", world, rules, 0.1))
        for count in COUNTS[:2] if quick else COUNTS:
            for name in ("drf", "tetris", "optimus"):
                rules = {"seed": seed, "jobs": count // 3 if quick else count, **VARIANTS[name]}
                made_.append(Experiment(f"load-{count}-{name}-{seed}", world, rules, count / 60))
        made_.append(Experiment(f"convergence-{seed}", convergence, {"seed": seed, "jobs": jobs}, 2.0))
        made_.append(Experiment(f"speed-fit-{seed}", speed_fit, {"seed": seed, "jobs": jobs}, 0.5))
        made_.append(Experiment(f"balancing-{seed}", balancing, {"seed": seed}, 0.1))
    for count, machines in SIZES[:1] if quick else SIZES:
        given = {"jobs": count, "machines": machines, "seed": 0}
        made_.append(Experiment(f"scale-{count}", scale, given, 30 * (count / 4000) ** 2))
    return made_
