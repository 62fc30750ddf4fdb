"""Trace-driven simulation of GPU schedulers on a virtual clock.

One engine for two ways of asking a policy: at every tick of a fixed interval (AdaptDL's simulator, Pollux OSDI 2021),
or at events: arrivals, completions, ends of leases, capacity changes, and when the policy wants to be woken.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import replace
from math import ceil, inf
from typing import get_args

import numpy as np

from ebbflow.infra.errors import SimulationError
from ebbflow.infra.simulation.asking import Asking
from ebbflow.infra.simulation.entry import Entry, Ledger, admissible, contended
from ebbflow.infra.simulation.jobs.plain import plain_jobs
from ebbflow.infra.simulation.metrics import Contention
from ebbflow.infra.simulation.protocols import ModelOf, Saves
from ebbflow.infra.simulation.result import RejectedJob, Result, result_of
from ebbflow.infra.simulation.traces.cluster import CapacityChange, Cluster
from ebbflow.infra.simulation.traces.workloads import Workload
from ebbflow.infra.simulation.usage import Usage
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Capacity, Notice
from ebbflow.planners.model.scheduling import App, Decision, Placement, Policy

__all__ = ["RejectedJob", "Result", "simulate"]


def simulate(
    workload: Workload,
    cluster: Cluster,
    policy: Policy,
    *,
    models: ModelOf | None = None,
    tick: float | None = None,
    restart_delay: float = 30.0,
    start_delay: float | None = None,
    interference: float = 0.0,
    saves: Saves | None = None,
    contention: Contention = "static",
    seed: int = 0,
    idle_limit: int = 10_000,
    on_finished: Callable[[int, int], None] | None = None,
) -> Result:
    """Run ``workload`` on ``cluster`` under ``policy`` to the end.

    Args:
        models: how jobs truly progress; by default their plain durations.
        tick: s between decisions, from time 0; ``None`` decides at events, from the first arrival.
        restart_delay: s that a job waits on every new placement.
        start_delay: s, the same for its first placement; ``None``: as ``restart_delay``.
        interference: share of speed lost by jobs that span nodes while they share one with another such job.
        saves: when jobs save checkpoints; losing a node loses the work since the last one.
        contention: what ρ compares with (``metrics.finish_time_fairness``).
        seed: of the policy's generator.
        idle_limit: decisions in a row without any training, or without any time between them, after which the policy
            is said to be stuck.
        on_finished: called with (jobs finished or rejected, jobs) whenever the first grows.

    Raises:
        SimulationError: the policy broke capacity or a gang, or leaves jobs waiting for ever.
        OptionError: an option outside its rule.
        WorkloadError: a job whose speed is not known where the policy puts it.
    """
    if tick is not None and not 0 < tick < inf:
        raise OptionError(f"tick must be > 0 s; got {tick}")
    if contention not in get_args(Contention):
        raise OptionError(f"contention must be one of {', '.join(get_args(Contention))}; got {contention!r}")
    if not restart_delay >= 0 or not (start_delay or 0) >= 0:
        raise OptionError(f"delays must be >= 0 s; got {restart_delay}, {start_delay}")
    if not 0 <= interference < 1:
        raise OptionError(f"interference must be >= 0 and < 1; got {interference}")
    run = _Run(
        workload,
        cluster,
        Asking(policy, np.random.default_rng(seed), idle_limit),
        models or plain_jobs(),
        tick,
        (restart_delay if start_delay is None else start_delay, restart_delay),
        interference,
        saves or Saves(),
        on_finished,
    )
    run.to_the_end()
    return run.result(seed, contention)


class _Run:
    """The state of one simulation."""

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        asking: Asking,
        models: ModelOf,
        tick: float | None,
        delays: tuple[float, float],
        interference: float,
        saves: Saves,
        on_finished: Callable[[int, int], None] | None,
    ) -> None:
        self.workload, self.cluster, self.asking, self.tick = workload, cluster, asking, tick
        self.delays, self.interference, self.saves = delays, interference, saves
        self.on_finished = on_finished
        self.ledger = Ledger()
        self.usage = Usage()
        self.notices: dict[str, Notice] = {}
        self.revision = 0
        self.capacity = Capacity(0, ())
        self.most_ahead = cluster.most_ahead()
        self.next_change = 0
        self.entries = [Entry(number, job, models(job)) for number, job in enumerate(workload.jobs)]
        self.waiting = sorted(
            self.entries, key=lambda e: (-e.job.arrival, -e.number)
        )  # the next arrival is last
        self.active: list[Entry] = []
        self.apps: list[App] = []
        self.by_id: dict[str, Entry] = {}
        self.running: list[Entry] = []
        self.rejected: list[RejectedJob] = []
        self.ended = 0
        self.now = 0.0 if tick is not None else self.waiting[-1].job.arrival
        self.intervals = 0
        self.held_seconds = 0.0
        self.held = 0
        self.trained = False
        self._apply(CapacityChange(self.now, cluster.nodes))

    def to_the_end(self) -> None:
        """Continue until every job is finished or rejected."""
        while self.active or self.waiting:
            at = self._next_tick() if self.tick is not None else self._next_event()
            due = self._go_to(at) or self.tick is not None
            if self.active and due:
                self._decide()
            elif not self.active:
                self.asking.wake = inf  # it was asked for jobs that are over

    # Time

    def _next_tick(self) -> float:
        assert self.tick is not None
        ticks = 1
        if not self.active and self.waiting:  # nothing happens before the next arrival
            ticks = max(1, ceil(self.waiting[-1].job.arrival / self.tick) - self.intervals)
        self.intervals += ticks
        return self.intervals * self.tick

    def _next_event(self) -> float:
        at = self.asking.wake
        if self.waiting:
            at = min(at, self.waiting[-1].job.arrival)
        if self.next_change < len(self.cluster.changes):
            at = min(at, self.cluster.changes[self.next_change].at)
        if self.running:
            at = min(at, *[entry.finish_at for entry in self.running])
            at = min(at, *[entry.app.lease_until for entry in self.running])
        if at == inf:
            raise self.asking.stuck(self.now, self.active, "nothing will ever happen again")
        return max(at, self.now)

    def _go_to(self, at: float) -> bool:
        """Let time pass until ``at``; tell whether anything happened that a policy should hear of."""
        due = at >= self.asking.wake
        changes = self.cluster.changes
        while self.next_change < len(changes) and changes[self.next_change].at <= at:
            change = changes[self.next_change]
            self.next_change += 1
            due = self._advance(max(change.at, self.now)) or due
            self._apply(change)
            due = due or bool(change.add or change.remove or change.notices)  # a new price is no event
        due = self._advance(at) or due
        if self.tick is None and not due:
            due = any(entry.app.lease_until <= at for entry in self.running)
        while self.waiting and self.waiting[-1].job.arrival <= at:
            due = self._admit(self.waiting.pop()) or due
        return due

    def _advance(self, at: float) -> bool:
        """Run all jobs until ``at`` and free what finished; tell whether any did, or began another phase."""
        seconds = at - self.now
        finished = changed = False
        for entry in self.running:
            if entry.next_save <= at:
                trained = entry.train_and_save(self.now, at, self.saves.every)
            else:
                trained = seconds > 0 and entry.train(self.now, seconds)
            self.trained = self.trained or trained
            if self.tick is None and (at >= entry.finish_at or not entry.model.steady):
                changed = entry.look(at) or changed
            finished = finished or entry.model.done
        self.held_seconds += self.held * seconds
        self.now = at
        if finished:
            self._end_finished()
        return finished or changed

    # Jobs

    def _admit(self, entry: Entry) -> bool:
        reason = admissible(entry.app, self.asking.elastic, self.most_ahead[self.next_change])
        if reason:
            self._reject(entry, reason)
            return False
        insort(self.active, entry, key=lambda e: e.number)
        insort(self.apps, entry.app, key=lambda a: a.number)
        self.by_id[entry.job.id] = entry
        self.asking.news()
        return True

    def _reject(self, entry: Entry, reason: str) -> None:
        self.rejected.append(RejectedJob(entry.job.id, reason))
        self._count_ended(1)

    def _count_ended(self, more: int) -> None:
        self.ended += more
        if self.on_finished:
            self.on_finished(self.ended, len(self.entries))

    def _drop(self, gone: list[Entry]) -> None:
        ids = {entry.job.id for entry in gone}
        self.active = [entry for entry in self.active if entry.job.id not in ids]
        self.apps = [entry.app for entry in self.active]
        for id_ in ids:
            del self.by_id[id_]

    def _end_finished(self) -> None:
        ended = [entry for entry in self.running if entry.model.done]
        for entry in ended:
            self._place(entry, ())
        self.running = [entry for entry in self.running if not entry.model.done]
        self._drop(ended)
        self._count_ended(len(ended))
        self.usage.held.set(self.now, self.held)

    # Capacity

    def _apply(self, change: CapacityChange) -> None:
        """Add and remove nodes, take note of notices, and let jobs lose what vanished."""
        if change.remove:
            gone = frozenset(change.remove)
            for entry in self.running:
                if any(node in gone for node, _ in entry.app.held):
                    self._lose(entry, gone)
        for id_ in change.remove:
            self.ledger.remove(id_)
            self.notices.pop(id_, None)
        for node in change.add:
            self.ledger.add(node)
        for notice in change.notices:
            if notice.node_id not in self.ledger.nodes:
                raise SimulationError(
                    f"a notice at {change.at:g} s names node {notice.node_id}, which is absent"
                )
            known = self.notices.get(notice.node_id)
            if known is None or known.kind != "interruption" or notice.kind == "interruption":
                self.notices[notice.node_id] = notice  # mere advice takes no firm notice back
        for id_, price in change.prices:
            if id_ in self.ledger.nodes:
                self.ledger.nodes[id_] = replace(self.ledger.nodes[id_], price=price)
        self.running = [entry for entry in self.running if entry.app.held]
        self.revision += 1
        nodes = tuple(sorted(self.ledger.nodes.values(), key=lambda node: node.id))
        self.capacity = Capacity(self.revision, nodes, tuple(self.notices.values()), at=self.now)
        self.usage.capacity.set(self.now, self.ledger.gpus)
        self.usage.held.set(self.now, self.held)
        self.usage.price.set(self.now, sum(node.price for node in nodes))
        self.asking.news()
        if change.remove:
            most = self.most_ahead[self.next_change]
            hopeless = [
                (e, admissible(e.app, self.asking.elastic, most)) for e in self.active if not e.app.held
            ]
            for entry, reason in hopeless:
                if reason:
                    self._reject(entry, reason)
            self._drop([entry for entry, reason in hopeless if reason])

    def _lose(self, entry: Entry, gone: frozenset[str]) -> None:
        held = entry.app.held
        if self.saves.on_notice and all(node in self.notices for node, _ in held if node in gone):
            entry.save(self.now)
        entry.lost += max(0.0, self.now - max(entry.saved_at, entry.trains_from)) * entry.held_gpus
        kept = tuple(part for part in held if part[0] not in gone)
        self._place(entry, entry.model.lose(kept), lost=True)

    def _place(self, entry: Entry, placement: Placement, *, lost: bool = False) -> None:
        """Give back what an entry holds and let it hold ``placement``, which is checked and taken already."""
        app = entry.app
        self.ledger.give_back(app.held)
        self.held -= entry.held_gpus
        if not lost and app.held:
            entry.model.save()
        if lost:
            self.ledger.hold(placement)
        self._hold(entry, placement)

    def _hold(self, entry: Entry, placement: Placement) -> None:
        entry.hold(placement, self.now, self.ledger.nodes, self.delays, self.saves.every)
        self.held += entry.held_gpus
        self.usage.note(self.now, entry.app.id, entry.held_gpus)
        self._expect(entry)

    def _expect(self, entry: Entry) -> None:
        if self.tick is None:
            entry.expect(self.now)

    # Decisions

    def _decide(self) -> None:
        trained, self.trained = self.trained, False
        self._carry_out(self.asking.ask(self.now, self.active, self.apps, self.capacity, trained))

    def _carry_out(self, decision: Decision) -> None:
        grants = decision.grants
        found = 0
        changed: list[tuple[Entry, Placement]] = []
        for entry in self.active:
            app = entry.app
            grant = grants.get(app.id)
            placement: Placement = ()
            if grant is not None:
                found += 1
                placement = grant.placement
                if placement:
                    if grant.until <= self.now:
                        raise self.asking.wrong(self.now, f"gives job {app.id} a lease that is over")
                    app.lease_until = grant.until
                else:
                    self.asking.reason = f"{app.id}: {grant.reason}" if grant.reason else self.asking.reason
            if placement is not app.held and placement != app.held:
                changed.append((entry, placement))
        if found != len(grants):
            unknown = sorted(set(grants) - set(self.by_id))
            raise self.asking.wrong(self.now, f"grants GPUs to jobs that are not active: {unknown[:3]}")
        if changed:
            self._move(changed)
        if self.interference:
            self._interfere()

    def _move(self, changed: list[tuple[Entry, Placement]]) -> None:
        leases = {entry.job.id: entry.app.lease_until for entry, _ in changed}
        for entry, _ in changed:
            if entry.app.held:
                self._place(entry, ())
        for entry, placement in changed:
            if placement:
                self.ledger.take(
                    self.asking.name, entry.app, placement, elastic=self.asking.elastic, now=self.now
                )
                entry.app.lease_until = leases[entry.job.id]
                self._hold(entry, placement)
        self.running = [entry for entry in self.active if entry.app.held]
        self.usage.held.set(self.now, self.held)

    def _interfere(self) -> None:
        """Slow down every job that spans nodes and shares one with another such job."""
        shared = contended(entry.app.held for entry in self.running)
        for entry in self.running:
            held = entry.app.held
            factor = 0.0
            if len(held) > 1 and any(id_ in shared for id_, _ in held):
                factor = self.interference
            if factor != entry.interference:
                entry.interference = factor
                self._expect(entry)

    def result(self, seed: int, contention: Contention) -> Result:
        """Return what the run gave."""
        refused = {job.name for job in self.rejected}
        return result_of(
            [entry.result() for entry in self.entries if entry.job.id not in refused],
            tuple(self.rejected),
            self.usage,
            contention,
            workload=self.workload.name,
            policy=self.asking.name,
            seed=seed,
            gpu_hours=self.held_seconds / 3600,
            policy_seconds=self.asking.seconds,
            intervals=self.intervals,
            decisions=self.asking.decisions,
            notes=self.asking.notes,
        )
