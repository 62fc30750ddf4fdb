"""Goodput over batch sizes: predicted from speed and noise, and measured as the time to reach a given loss.

The prediction takes the noise scale that runs at the initial batch measured, step by step, and a throughput model
fitted to three of the batch sizes. The measurement trains at that batch until the loss is reached. How long steps
take is measured apart, for all batch sizes in turns: a machine's speed changes in the minutes that runs last.

A running average tells what was the case its own age ago. In hindsight that is known, so the noise of an iteration is
read off the average of ``AGE`` iterations later; what follows without that is given beside it.
"""

import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ebbflow.infra.training.gradients.noise import DENSE, EVERY, GradientMeter
from ebbflow.infra.training.process.world import World
from ebbflow.infra.training.schedule import scaled
from ebbflow.planners.training.speed.batch_size import BatchLimits, BatchSplit, split
from ebbflow.planners.training.speed.goodput import GradientStatistics, adascale, gain
from ebbflow.planners.training.speed.throughput import Observation, fit, throughput

INITIAL = 32  # M0, examples
SCALES = (1, 2, 4, 8, 16, 32)
FITTED = (1, 4, 32)  # whose speed the throughput model knows
ITERATIONS = 3000  # at M0, whose loss is the target
LOOKS = 80  # evaluations in as many iterations' progress
BEYOND = 1.4  # times the target's progress: how long runs go on
RATE = 0.01
SMOOTHING = 0.995  # runs are so short that averages over 1000 iterations would lag far behind
AGE = round(1 / (1 - SMOOTHING))  # iterations: what the averages are made of is as old in the mean
TURNS, TURN = 60, 20  # how often each batch size has its turn, and for how many steps
WARM_UP = DENSE + 2 * EVERY  # steps before: all of the first are measured


@dataclass(slots=True)
class Trained:
    """One run: its loss by steps, and how noisy they were."""

    steps: list[int] = field(default_factory=list)  # at each look
    losses: list[float] = field(default_factory=list)
    noise: list[GradientStatistics] = field(default_factory=list)

    def reached(self, target: float) -> float:
        """Return the steps after which the smoothed loss is ``target``, between two looks by straight lines."""
        smooth = np.convolve(np.log(self.losses), np.ones(5) / 5, mode="valid")
        at = np.convolve(self.steps, np.ones(5) / 5, mode="valid")
        below = np.flatnonzero(smooth <= np.log(target))
        if not len(below) or below[0] == 0:
            raise RuntimeError(f"the loss {target} is not passed by a run that ends at {self.losses[-1]}")
        n = int(below[0])
        share = (smooth[n - 1] - np.log(target)) / (smooth[n - 1] - smooth[n])
        return float(at[n - 1] + share * (at[n] - at[n - 1]))


def goodput(world: int, device: str, width: int, seeds: int) -> dict[str, Any]:
    """Return predicted and measured goodput by batch, of a perceptron of this width on scikit-learn's digits."""
    place = World.join(120.0)
    data = _digits(device)
    limits = BatchLimits(INITIAL, INITIAL * SCALES[-1])
    splits = {scale: split(INITIAL * scale, world, limits) for scale in SCALES}
    runs: dict[int, list[Trained]] = {scale: [] for scale in SCALES}
    for seed in range(seeds):
        for scale in SCALES:  # in turns, so that a busy minute hits all
            runs[scale].append(_train(_Trainer(place, device, data, width, splits[scale], seed)))
    target = float(np.exp(np.mean([np.interp(ITERATIONS, r.steps, np.log(r.losses)) for r in runs[1]])))
    steps = {scale: statistics.mean(r.reached(target) for r in runs[scale]) for scale in SCALES}
    times = _times(place, device, data, width, splits)
    place.leave()
    taken = {scale: statistics.median(whole for whole, _ in times[scale]) for scale in SCALES}
    seen = {scale: _observation(world, splits[scale], times[scale]) for scale in SCALES}
    speed = fit([seen[scale] for scale in FITTED])
    rows = []
    for scale in SCALES:
        chosen = splits[scale]
        expected, lagging = (
            statistics.mean(_steps(r, steps[1], scale, age) for r in runs[1]) for age in (AGE, 0)
        )
        per_second = float(throughput(speed, 1, world, chosen.batch, chosen.accumulation))
        worth = INITIAL * steps[1]  # examples at M0 that get as far
        rows.append(
            {
                "batch": chosen.total(world),
                "fitted": scale in FITTED,
                "steps": steps[scale],
                "predicted_steps": expected,
                "throughput": chosen.total(world) / taken[scale],
                "predicted_throughput": per_second,
                "goodput": worth / (steps[scale] * taken[scale]),
                "predicted_goodput": worth / (expected * chosen.total(world) / per_second),
                "lagging_goodput": worth / (lagging * chosen.total(world) / per_second),
            }
        )
    return {
        "processes": world,
        "width": width,
        "seeds": seeds,
        "target_loss": target,
        "noise_scale": [statistics.mean(r.noise[n].noise_scale(INITIAL) for r in runs[1]) for n in (50, -1)],
        "rows": rows,
    }


def _steps(run: Trained, iterations: float, scale: int, age: int) -> float:
    """Return the steps at ``scale`` times M0 that get as far as ``iterations`` steps of ``run``, which is at M0."""
    return sum(1.0 / float(gain(noise, scale)) for noise in run.noise[age : age + round(iterations)])


def _observation(world: int, chosen: BatchSplit, times: list[tuple[float, float]]) -> Observation:
    """Return what the tuner would have measured: the medians of a last pass and of its synchronisation."""
    whole, sync = (statistics.median(part) for part in zip(*times, strict=True))
    alone = (whole - sync) / (chosen.accumulation + 1)
    return Observation(1, world, chosen.batch, alone + sync, sync)


class _Trainer:
    """A model, and steps on it at one batch."""

    def __init__(
        self,
        place: World,
        device: str,
        data: tuple[Tensor, Tensor],
        width: int,
        chosen: BatchSplit,
        seed: int,
    ) -> None:
        torch.manual_seed(seed)
        self.inner = nn.Sequential(
            nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10)
        ).to(device)
        several = place.size > 1
        self._model = (
            DistributedDataParallel(self.inner, gradient_as_bucket_view=True) if several else self.inner
        )
        self._optimizer = torch.optim.SGD(self._model.parameters(), RATE)
        self._meter = GradientMeter(self._model, self._optimizer, INITIAL, smoothing=SMOOTHING)
        self._place, self.data, self._chosen = place, data, chosen
        self._total = chosen.total(place.size)
        self.scale = self._total / INITIAL
        self._drawn = torch.Generator().manual_seed(1000 * seed + place.rank)

    def step(self) -> tuple[float, float, GradientStatistics]:
        """Return what a step took, how much of it for synchronisation, s, and how noisy gradients are."""
        passes, (x, y) = self._chosen.accumulation + 1, self.data
        begun = time.perf_counter()
        for number in range(passes):
            rows = torch.randint(len(x), (self._chosen.batch,), generator=self._drawn)
            last = number == passes - 1
            with nullcontext() if last or self._place.size == 1 else self._model.no_sync():
                loss = nn.functional.cross_entropy(self._model(x[rows]), y[rows])
                with self._meter.micro_pass(last=last, weight=1 / passes):
                    (loss * self._meter.loss_factor / passes).backward()
        norms = self._meter.local(self._total)
        asked = time.perf_counter()
        summed = self._place.sum(norms)
        waited = time.perf_counter() - asked
        noise = self._meter.finish(summed, self._place.size, self._total)
        with scaled(self._optimizer, adascale(self.scale, noise)):
            self._optimizer.step()
        self._optimizer.zero_grad()
        whole = time.perf_counter() - begun
        return whole, min(self._meter.sync_seconds + waited, 0.95 * whole), noise


def _train(trainer: _Trainer) -> Trained:
    found, progress, look = Trained(), 0.0, 0.0
    x, y = trainer.data
    while progress < BEYOND * ITERATIONS:
        if progress >= look:
            with torch.no_grad():
                found.losses.append(float(nn.functional.cross_entropy(trainer.inner(x), y)))
            found.steps.append(len(found.noise))
            look += ITERATIONS / LOOKS
        noise = trainer.step()[2]
        found.noise.append(noise)
        progress += float(gain(noise, trainer.scale))
    return found


def _times(
    place: World, device: str, data: tuple[Tensor, Tensor], width: int, splits: dict[int, BatchSplit]
) -> dict[int, list[tuple[float, float]]]:
    """Return what steps took by scale, and how much of it for synchronisation, s."""
    trainers = {scale: _Trainer(place, device, data, width, chosen, 0) for scale, chosen in splits.items()}
    found: dict[int, list[tuple[float, float]]] = {scale: [] for scale in splits}
    for trainer in trainers.values():
        for _ in range(WARM_UP):
            trainer.step()
    for _ in range(TURNS):
        for scale, trainer in trainers.items():
            trainer.step()  # what it works on is in the caches then
            found[scale] += [trainer.step()[:2] for _ in range(TURN)]
    return found


def _digits(device: str) -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    found = load_digits()
    x = torch.from_numpy(found.data).float() / 16.0
    return x.to(device), torch.from_numpy(found.target).to(device)
