"""A cluster of parameter servers and workers, interval by interval, under Optimus and what it is compared with."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from zlib import crc32

import numpy as np

from ebbflow.infra.errors import SimulationError
from ebbflow.planners.training.failures.stragglers import StragglerWatch, late_workers
from ebbflow.planners.tuning.convergence import LossCurve
from tests.evaluation.optimus.bundles import fair_bundles, place_singly, short_bundles
from tests.evaluation.optimus.jobs import TrueJob, packed
from tests.evaluation.optimus.optimus_tasks import Placed, PsJob, Tasks, allocate, place
from tests.evaluation.optimus.ps_speed import SAMPLE_PLAN, MeasuredSpeed, Sample, fit_speed

MACHINES, MEMORY = 13, 48.0  # GB each
SERVER, WORKER = 9.0, 8.0  # GB of a task
INTERVAL = 600.0  # s
RESTART = 25.0  # s to save a checkpoint, start containers anew and load it
SPEED_NOISE, LOSS_NOISE = 0.05, 0.10
POINTS = 4  # losses noted an epoch
YOUNG = 0.95  # on gains while less than a tenth of the predicted epochs is done
MOST_BUNDLES = 8  # that a job asks for under Tetris
SLOW = 3.0  # times that a straggler computes longer
LATEST = 400.0 * 3600  # s: no workload of the evaluation lasts so long

Allocation = Literal["optimus", "fair", "short"]
Placing = Literal["optimus", "spread", "packed"]


@dataclass(frozen=True, slots=True)
class Rules:
    """Which part of a scheduler is whose, and what it knows."""

    allocation: Allocation = "optimus"
    placing: Placing = "optimus"
    balanced: bool = True
    oracle: bool = False  # true remaining epochs and true speeds
    error: float = 0.0  # of an oracle's remaining epochs and speeds, up or down by this share
    straggling: float = 0.0  # rate per worker-hour at which workers become slow
    replaces: bool = True  # stragglers


@dataclass(slots=True)
class _State:
    """What became of a job so far."""

    job: TrueJob
    rng: np.random.Generator
    epoch: float = 0.0
    placed: Placed | None = None
    finish: float = -1.0
    samples: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    curve: LossCurve = field(default_factory=LossCurve)
    noted: int = 0
    fitted: int = 0
    predicted: float = 20.0  # epochs in all; the authors' fallback
    slow: dict[int, float] = field(default_factory=dict)  # worker: since when, s
    restarting: float = 0.0  # s spent
    running: float = 0.0
    replaced: int = 0

    def learn(self, rules: Rules) -> None:
        """Note the losses up to now and fit again where there is a tenth more to learn from."""
        job = self.job
        while self.noted < int(self.epoch * POINTS):
            self.noted += 1
            k = self.noted / POINTS
            seen = job.curve.loss(k) * (1 + LOSS_NOISE * float(self.rng.standard_normal()))
            self.curve.add(k, max(seen, 1e-6))
        if not rules.oracle and self.noted > max(self.fitted * 1.1, self.fitted + 1):
            self.fitted = self.noted
            model = self.curve.fit()
            if model is not None:
                self.predicted = float(min(model.converges_at(job.delta, 3), 1000))

    def asked(self, rules: Rules, balanced: bool) -> PsJob:
        """Return what the job reports."""
        job = self.job
        demands = {"memory": SERVER}, {"memory": WORKER}
        if rules.oracle:
            sign = 1 if crc32(job.id.encode()) % 2 else -1
            left = max(job.epochs - self.epoch, 0.01) * (1 + sign * rules.error)
            return PsJob(job.id, left * job.steps, _true_speed(job, balanced, rules.error), *demands)
        left = max(self.predicted - self.epoch, 1.0)
        factor = YOUNG if self.epoch < self.predicted / 10 else 1.0
        flat = [Sample(p, w, speed) for (p, w), speeds in self.samples.items() for speed in speeds]
        model = fit_speed(flat, job.mode, 1.0)
        assert model is not None
        means = {pair: sum(speeds) / len(speeds) for pair, speeds in self.samples.items()}
        return PsJob(job.id, left * job.steps, MeasuredSpeed(model, means), *demands, factor)

    def measure(self, placed: Placed, balanced: bool) -> None:
        """Note a measured speed."""
        noise = 1 + SPEED_NOISE * float(self.rng.standard_normal())
        self.samples.setdefault(tuple(placed.tasks), []).append(
            self.job.speed(placed, balanced) * max(noise, 0.1)
        )


def _true_speed(job: TrueJob, balanced: bool, error: float) -> Any:
    known: dict[tuple[int, int], float] = {}

    def speed(servers: int, workers: int) -> float:
        pair = servers, workers
        if pair not in known:
            sign = 1 if crc32(f"{job.id} {servers} {workers}".encode()) % 2 else -1
            known[pair] = job.speed(packed(Tasks(*pair)), balanced) * (1 + sign * error)
        return known[pair]

    return speed


def run_world(jobs: list[TrueJob], rules: Rules, seed: int) -> dict[str, Any]:
    """Run all jobs to their end and return arrivals, finishes and what else was seen."""
    states = [_State(job, np.random.default_rng([seed, 7, number])) for number, job in enumerate(jobs)]
    for state in states:
        for pair in SAMPLE_PLAN:
            state.measure(packed(Tasks(*pair)), rules.balanced)
    now, tasks_used = 0.0, []
    while any(state.finish < 0 for state in states):
        if now > LATEST:
            raise SimulationError(f"jobs of Optimus' evaluation are unfinished after {now:g} s")
        active = [state for state in states if state.job.arrival <= now and state.finish < 0]
        placed = _decide(active, rules)
        tasks_used.append(sum(sum(one.tasks) for one in placed.values()))
        for state in active:
            _interval(state, placed.get(state.job.id), now, rules)
        now += INTERVAL
    running = sum(state.running for state in states)
    return {
        "arrival": [state.job.arrival for state in states],
        "finish": [state.finish for state in states],
        "overhead": sum(state.restarting for state in states) / running,
        "tasks": float(np.mean([used for used in tasks_used if used])),
        "replaced": sum(state.replaced for state in states),
    }


def _decide(active: list[_State], rules: Rules) -> Mapping[str, Placed]:
    for state in active:
        state.learn(rules)
    asked = [state.asked(rules, rules.balanced) for state in active]
    capacity = {"memory": MACHINES * MEMORY}
    if rules.allocation == "optimus":
        granted, _ = allocate(asked, capacity, on_full="skip")
    elif rules.allocation == "fair":
        granted = fair_bundles(asked, capacity)
    else:
        granted = short_bundles(asked, capacity, MOST_BUNDLES)
    free = {f"m{at:02}": MEMORY for at in range(MACHINES)}
    size = {job.id: (SERVER, WORKER) for job in asked}
    if rules.placing == "optimus":
        return place(granted, free, size)
    return place_singly(granted, free, size, pack=rules.placing == "packed")


def _interval(state: _State, placed: Placed | None, now: float, rules: Rules) -> None:
    job, left = state.job, INTERVAL
    if placed is None:
        state.placed = None
        return
    first = state.placed is None and state.epoch == 0
    same = state.placed is not None and dict(state.placed.machines) == dict(placed.machines)
    if not same:
        state.slow.clear()  # its containers are new
        if not first:
            left -= RESTART
            state.restarting += RESTART
    state.placed = placed
    state.running += INTERVAL
    speed = job.speed(placed, rules.balanced)
    lost = _stragglers(state, now, rules)
    steps = (job.epochs - state.epoch) * job.steps
    pace = speed * (1 - lost)
    if pace * left >= steps:
        state.finish = now + (INTERVAL - left) + steps / pace
        state.epoch = float(job.epochs)
        return
    state.epoch += pace * left / job.steps
    state.measure(placed, rules.balanced)


def _stragglers(state: _State, now: float, rules: Rules) -> float:
    """Let workers become slow, replace them if the rule says so, and return the share of speed that is lost."""
    if not rules.straggling:
        return 0.0
    assert state.placed is not None
    job, workers = state.job, state.placed.tasks.workers
    struck = state.rng.random(workers) < rules.straggling * INTERVAL / 3600
    for worker in np.flatnonzero(struck).tolist():
        state.slow.setdefault(worker, now)
    if not state.slow:
        return 0.0
    speed = job.speed(state.placed, rules.balanced)
    step = (1 if job.mode == "synchronous" else workers) / speed
    compute = job.forward / (workers if job.mode == "synchronous" else 8) + job.backward
    waste = compute * (SLOW - 1)
    share = waste / (step + waste)
    if job.mode == "asynchronous":
        share *= len(state.slow) / workers
    if not rules.replaces:
        return share
    replaced_after = _detected(state, step, compute, workers)
    if replaced_after is None:
        return share
    state.replaced += len(state.slow)
    state.slow.clear()
    state.restarting += RESTART
    return share * replaced_after / INTERVAL + RESTART / INTERVAL


def _detected(state: _State, step: float, compute: float, workers: int) -> float | None:
    """Return after how many seconds of this interval the watch has every straggler replaced; ``None``: not in it."""
    watch, slow = StragglerWatch(), set(state.slow)
    window = 20 * step
    now = 0.0
    while slow and now + window <= INTERVAL:
        now += window
        own = np.full(workers, compute)
        own[list(slow)] *= SLOW
        arrivals = own * (1 + 0.05 * state.rng.standard_normal((20, workers)))
        found = watch.look(now, late_workers(arrivals.tolist(), step))
        slow.discard(-1 if found is None else found)
    return None if slow else now
