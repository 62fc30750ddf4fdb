"""100 trials of a hyper-parameter search, four at once on 16 GPUs (thesis, section 3.5.5, Table 3.3), simulated.

A trial begins when one before it ends, as the search's own tool lets them. Pollux shares all GPUs among those that
are there and chooses their batches; beside it each trial has four GPUs of one node, each with a fixed batch. By
promise each has one GPU at least, the others go to those that rank higher, and batches are chosen as under Pollux.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, ClassVar

import numpy as np

from ebbflow.infra.simulation.engine import simulate
from ebbflow.infra.simulation.jobs.adaptdl import adaptdl_jobs
from ebbflow.infra.simulation.jobs.profiles import Profile, Profiles
from ebbflow.infra.simulation.traces.cluster import Cluster
from ebbflow.infra.simulation.traces.workloads import Job, Workload
from ebbflow.planners.model.scheduling import Decision, Grant, Policy, View
from ebbflow.planners.scheduling.goodput.pollux import Pollux
from ebbflow.planners.tuning.promise import ByPromise, rank_trials, unranked
from ebbflow.tasks.simulation import sources
from ebbflow.tasks.simulation.scenarios import goodput_agent
from tests.evaluation.runs import Run, kept

TRIALS, AT_ONCE = 100, 4
NODES, PER_NODE = 4, 4
WIDTHS = (0.5, 0.71, 1.0, 1.41, 2.0)
"""Time per example over that of the measured model: trials differ in the model's width."""
APPLICATION = "cifar10"  # ResNet18
EPOCHS, RUNGS, FACTOR = 81, (1, 3, 9, 27), 3  # of successive halving, which compares here but stops nobody
BEST = 0.2  # share of the trials that counts as the best ones
LOCAL_BATCHES = (32, 64, 128)  # examples of each GPU where that is fixed; the thesis does not say how many


@dataclass(frozen=True, slots=True)
class AtOnce:
    """Lets another policy see the first ``most`` jobs only; the others wait until one of these has ended."""

    inner: Policy
    most: int = AT_ONCE

    @property
    def elastic(self) -> bool:
        """Return what the policy says."""
        return self.inner.elastic

    @property
    def name(self) -> str:
        """Return the policy's name."""
        return self.inner.name

    def decide(self, view: View, memory: Any, rng: np.random.Generator) -> Decision:
        """Return what the policy decides for them."""
        return self.inner.decide(replace(view, apps=tuple(view.apps[: self.most])), memory, rng)


@dataclass(frozen=True, slots=True)
class ByQuality:
    """Divides GPUs by promise, where a trial's metric is its ``quality``, from its first rung on."""

    quality: tuple[float, ...]  # by trial, in order of submission
    inner: ByPromise = field(default_factory=ByPromise)
    elastic: ClassVar[bool] = True
    name: str = "by-promise"

    def decide(self, view: View, memory: Any, rng: np.random.Generator) -> Decision:
        """Return the placements; the memory is each trial's work when it was first seen, and what is left."""
        work: dict[int, tuple[float, float]] = dict(memory or {})
        for app in view.apps:
            if isfinite(app.goodput_left):
                work[app.number] = work.get(app.number, (app.goodput_left, 0.0))[0], app.goodput_left
        done = {number: EPOCHS * (1 - left / total) for number, (total, left) in work.items()}
        curves = {
            number: {rung: self.quality[number] for rung in RUNGS if rung <= epochs}
            for number, epochs in done.items()
        }
        ranks = rank_trials(curves, RUNGS, FACTOR, maximize=True)
        apps = [replace(app, weight=ranks.get(app.number, unranked(FACTOR)).weight) for app in view.apps]
        return replace(self.inner.decide(replace(view, apps=apps), None, rng), memory=work)


@dataclass(frozen=True, slots=True)
class NodeEach:
    """Gives each job a node of its own, for as long as it lives."""

    elastic: ClassVar[bool] = False
    name: str = "node-each"

    def decide(self, view: View, memory: Any, rng: np.random.Generator) -> Decision:
        """Return the placements."""
        held = {node for app in view.apps for node, _ in app.held}
        free = [node for node in view.capacity.usable if node.id not in held]
        grants = {}
        for app in view.apps:
            if not app.held and free:
                node = free.pop(0)
                grants[app.id] = Grant(((node.id, node.gpus),), reason=f"starts on {node.id}")
            else:
                grants[app.id] = Grant(app.held, reason="keeps its node")
        return Decision(grants)


def faster(profile: Profile, factor: float) -> Profile:
    """Return an application of which each example takes ``factor`` times less; all else is as it was measured.

    A pass takes a constant and a time per example, by least squares over the batches of each placement.
    """
    placements, scalability = profile._rows

    def saved(rows: Sequence[Any]) -> dict[Any, float]:
        groups: dict[Any, list[tuple[float, float]]] = {}
        for *place, local, step, sync in rows:
            groups.setdefault(tuple(place), []).append((local, step - sync))
        slopes = {key: float(np.polyfit(*zip(*group, strict=True), 1)[0]) for key, group in groups.items()}
        return {key: max(slope, 0.0) * (1 - 1 / factor) for key, slope in slopes.items()}

    def changed(rows: Sequence[Any]) -> list[Any]:
        less = saved(rows)
        return [
            (*place, local, max(step - less[tuple(place)] * local, sync + 1e-4), sync)
            for *place, local, step, sync in rows
        ]

    return Profile(profile.name, changed(placements), changed(scalability), profile._validation)


def trials(policy: str, seed: int = 0, count: int = TRIALS, local: int = 0) -> Run:
    """Run ``count`` trials of the search; ``jct`` is each one's time from when it could begin to its end, s,
    and ``quality`` how good each one's model is, from 0 to 1.

    Args:
        policy: ``pollux``, ``promising`` or ``fixed``.
        seed: of the trials' widths, and of the policy.
        count: of trials.
        local: examples of each GPU where the batch is fixed.
    """
    measured = Profiles(sources.DATA / "adaptdl" / "traces")[APPLICATION]
    profiles = {f"{APPLICATION}-{width:g}": faster(measured, 1 / width) for width in WIDTHS}
    jobs = tuple(
        Job(f"trial-{n:03d}", 0.0, PER_NODE, model=f"{APPLICATION}-{width:g}", batch=PER_NODE * local or None)
        for n, width in enumerate(np.random.default_rng(seed).choice(WIDTHS, count))
    )
    quality = np.random.default_rng((seed, 1)).permutation(count) / max(count - 1, 1)
    adapts = policy != "fixed"
    if adapts:  # which begins with one GPU and the application's first batch
        jobs = tuple(replace(job, gpus=1) for job in jobs)
    result = simulate(
        Workload("search", jobs),
        Cluster.grid(NODES, PER_NODE),
        AtOnce(
            Pollux()
            if policy == "pollux"
            else ByQuality(tuple(quality.tolist()))
            if policy == "promising"
            else NodeEach()
        ),
        models=adaptdl_jobs(profiles, agent=goodput_agent if adapts else None, per_node=PER_NODE),
        tick=60.0 if adapts else None,
        restart_delay=30.0,
        seed=seed,
    )
    run = kept(result)
    ended = sorted(job.finish for job in result.jobs)
    could = [0.0] * min(AT_ONCE, count) + ended[: max(count - AT_ONCE, 0)]
    began = sorted(result.jobs, key=lambda job: (job.start, job.name))
    run["jct"] = [job.finish - at for job, at in zip(began, could, strict=True)]
    run["quality"] = [float(quality[int(job.name.rpartition("-")[2])]) for job in began]
    return run
