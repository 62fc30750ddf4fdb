"""The round-based clusters of Gavel (OSDI 2020) and Shockwave (NSDI 2023), as their public simulators run them.

A round lasts as long as its longest micro-round; everyone else waits for it. The oddities are kept, since published
numbers depend on them. The policy is any ``Policy``; gangs are rigid.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import floor, inf, nan
from typing import NamedTuple

from ebbflow.infra.errors import SimulationError, WorkloadError
from ebbflow.infra.simulation.metrics import JobResult
from ebbflow.infra.simulation.rounds.batch import TOP, epoch_steps, job_type, time_alone, up, wish
from ebbflow.infra.simulation.rounds.setting import Dropped, Outcome, Rules, gpu_cluster, python_generator
from ebbflow.infra.simulation.rounds.trace import Throughputs, TraceJob
from ebbflow.planners.model.scheduling import App, Grant, Placement, Policy, Run, View, gpus_of


class MicroRound(NamedTuple):
    """One job's part of a round."""

    finish: float  # s
    job: int
    type: str
    steps: int
    start: float  # s


@dataclass(slots=True)
class _Job:
    """A job's state in the world."""

    trace: TraceJob
    app: App
    alone: float
    batch: int
    steps: int  # at the present batch size
    done: int = 0  # steps at the present batch size
    failures: int = 0
    mark: str = ""
    total: float = 0.0  # s, of all its micro-rounds
    finish: float | None = None
    status: str = "unfinished"
    reason: str = "the simulation ended when no job was active"


Agent = Callable[[App, float], None]
"""Equips an app, given its run time alone in seconds: with a bidder, a speed or a goodput model."""


class RoundsScenario:
    """One run of a trace under a policy."""

    def __init__(
        self,
        trace: Sequence[TraceJob],
        table: Throughputs,
        gpus: Mapping[str, int],
        rules: Rules,
        agent: Agent | None = None,
        gpus_per_node: int = 1,
    ) -> None:
        """Set up the cluster of ``gpus`` per type.

        Raises ``WorkloadError`` for a GPU type that the table lacks and for jobs that it did not measure.
        """
        missing = [gpu for gpu in gpus if gpu not in table.alone]
        if missing or not gpus or min(gpus.values()) < 1:
            known = ", ".join(table.alone)
            raise WorkloadError(
                f"the cluster needs at least 1 GPU of known types ({known}); got {dict(gpus)}"
            )
        self.rules, self.table, self.gpus = rules, table, dict(gpus)
        self.capacity = gpu_cluster(self.gpus, gpus_per_node)
        self._type_of = {node.id: node.instance_type for node in self.capacity.nodes}
        self._room = {node.id: node.gpus for node in self.capacity.nodes}
        reference = rules.reference if rules.reference in table.alone else sorted(gpus)[-1]
        self.jobs: list[_Job] = []
        for row in trace:
            try:
                self.jobs.append(self._job(row, reference))
            except WorkloadError as error:
                raise WorkloadError(f"line {row.number + 1} of the trace: {error}") from None
        if agent:
            for job in self.jobs:
                if job.status != "rejected":
                    agent(job.app, job.alone)

    def _job(self, job: TraceJob, reference: str) -> _Job:
        # a gang that no GPU type can hold need not have been measured to be rejected
        fits = max(self.gpus.values()) >= job.gpus
        speeds = {gpu: self.table.of(gpu, job.type, job.gpus) if fits else 0.0 for gpu in self.gpus}
        app = App(
            id=str(job.number),
            number=job.number,
            arrival=job.arrival,
            gpus=job.gpus,
            min_gpus=job.gpus,
            max_gpus=job.gpus,
            weight=job.weight,
            model=job.model,
            remaining=float(job.steps),
            throughputs=speeds,
        )
        if not any(speed > 0 and self.gpus[gpu] >= job.gpus for gpu, speed in speeds.items()):
            reason = f"no GPU type on which it runs has {job.gpus} GPUs"
            return _Job(job, app, nan, job.batch, job.steps, status="rejected", reason=reason)
        if not self.table.of(reference, job.type, job.gpus) > 0:
            reference = max(speeds, key=lambda gpu: speeds[gpu])
        return _Job(job, app, time_alone(job, self.table, reference), job.batch, job.steps)

    def run(self, policy: Policy, seed: int = 0, progress: Callable[[int], None] | None = None) -> Outcome:
        """Return what became of every job.

        ``progress`` is told the number of jobs that have left so far. Raises ``SimulationError`` if the policy
        grants what the cluster has not, part of a gang, or nothing to anybody for ever.
        """
        rules = self.rules
        rng = python_generator(seed + 5)
        waiting = [job for job in self.jobs if job.status != "rejected"]
        waiting.reverse()
        active: dict[int, _Job] = {}
        running: list[MicroRound] = []
        before: frozenset[int] = frozenset()  # jobs of the round before the running one
        started: float = 0.0
        ended: float | None = None
        now, busy, idle, memory = 0.0, 0.0, 0, None
        rounds: list[float] = []
        allocations: list[float] = []
        chosen: list[tuple[tuple[int, str], ...]] = []
        while waiting or active:
            ran: list[Run] = []
            if running:
                first = ended is None
                started = started if ended is None else ended
                now = ended = max(micro.finish for micro in running)
                for micro in sorted(running, key=lambda m: (-m.finish, m.job)):
                    new = not first and micro.job not in before
                    run = self._book(active[micro.job], micro, started, new)
                    ran.append(run)
                    busy += 0.0 if run.failed else run.seconds * active[micro.job].trace.gpus
            elif waiting:
                now = max(now, waiting[-1].trace.arrival)
            for number in [n for n, job in active.items() if job.status != "unfinished"]:
                del active[number]
            for job in active.values():
                self._wish(job)
            while waiting and waiting[-1].trace.arrival <= now:
                job = waiting.pop()
                active[job.trace.number] = job
            if progress:
                progress(len(self.jobs) - len(waiting) - len(active))
            if not active and rules.stops_when_idle:
                break
            view = View(now, [job.app for job in active.values()], self.capacity, ran)
            decision = policy.decide(view, memory, rng)
            memory = decision.memory
            if decision.notes.get("allocated"):
                allocations.append(now)
            granted = {a: grant for a, grant in decision.grants.items() if grant.placement}
            before = frozenset(micro.job for micro in running)
            running = self._start(active, granted, now, before)
            rounds.append(now)
            chosen.append(tuple((micro.job, micro.type) for micro in running))
            idle = 0 if running or waiting or not active else idle + 1
            if idle > 2:
                raise SimulationError(f"{policy.name} lets jobs {', '.join(map(str, active))} wait for ever")
        return Outcome(
            policy.name,
            tuple(self._result(job) for job in self.jobs if self._finished(job)),
            tuple(
                Dropped(job.trace.number, job.status, job.reason)
                for job in self.jobs
                if not self._finished(job)
            ),
            now,
            tuple(rounds),
            tuple(chosen),
            tuple(allocations),
            busy,
            sum(self.gpus.values()),
        )

    def _start(
        self,
        active: Mapping[int, _Job],
        granted: Mapping[str, Grant],
        now: float,
        before: frozenset[int],
    ) -> list[MicroRound]:
        """Return the micro-rounds of the granted jobs, in order of submission."""
        self._check(active, {app: grant.placement for app, grant in granted.items()})
        running = []
        for number, job in active.items():
            app = job.app
            grant = granted.get(app.id)
            app.held, app.lease_until = (grant.placement, grant.until) if grant else ((), inf)
            if not app.held:
                continue
            speed, gpu = min(
                (app.throughputs[kind], kind) for kind in {self._type_of[n] for n, _ in app.held}
            )
            if not speed > 0:
                raise SimulationError(f"job {number} cannot run on {gpu}, where it was placed")
            steps = min(floor(speed * self.rules.round_s), job.steps - job.done)
            running.append(MicroRound(max(now, now + steps / speed), number, gpu, steps, now))
            if app.first_start is None:
                app.first_start = now
            elif number not in before:
                app.restarts += 1
            app.most_gpus = max(app.most_gpus, app.gpus)
        return running

    def _check(self, active: Mapping[int, _Job], placements: Mapping[str, Placement]) -> None:
        """Refuse what no cluster could follow."""
        known = {job.app.id: job.app for job in active.values()}
        used: dict[str, int] = {}
        for app, placement in placements.items():
            if app not in known:
                raise SimulationError(f"GPUs for job {app}, which is not active")
            if gpus_of(placement) != known[app].gpus:
                raise SimulationError(f"{gpus_of(placement)} GPUs for job {app}, a gang of {known[app].gpus}")
            for node, gpus in placement:
                used[node] = used.get(node, 0) + gpus
                if node not in self._room or used[node] > self._room[node]:
                    raise SimulationError(f"{used[node]} GPUs on {node}, which has {self._room.get(node, 0)}")

    def _book(self, job: _Job, micro: MicroRound, started: float, new: bool) -> Run:
        """Book one micro-round of the round that began at ``started`` and return what it came to."""
        rules, app = self.rules, job.app
        seconds, steps = micro.finish - started, micro.steps
        if rules.overhead_s and new and seconds != 0 and seconds > rules.round_s - rules.overhead_slack_s:
            steps = floor(steps * ((seconds - rules.overhead_s) / seconds))
            seconds -= rules.overhead_s
        job.total += seconds
        share = steps // app.gpus
        least = min(share, steps - share * (app.gpus - 1))
        nothing = (least <= 0 or seconds <= 0) if rules.fails_on_either else (least <= 0 and seconds <= 0)
        if nothing:
            job.failures += 1
            if job.failures >= rules.failures:
                job.status, job.finish = "removed", micro.finish
                job.reason = f"{job.failures} micro-rounds in a row gained nothing"
        else:
            job.failures = 0
            job.done += steps
            app.run_time += seconds
            app.service += seconds * app.gpus
            limit = floor(rules.longest_run * floor(job.alone)) if rules.longest_run else None
            if job.done >= job.steps or (limit is not None and job.total > limit):
                job.status, job.finish = "done", micro.finish
        if rules.batches_change and job.mark:
            self._change_batch(job)
        app.remaining = float(job.steps - job.done)
        return Run(app.id, micro.type, seconds, nothing)

    def _wish(self, job: _Job) -> None:
        trace = job.trace
        if not self.rules.batches_change or trace.mode == "static":
            return
        epoch = up(job.done, epoch_steps(trace.model, job.batch))
        job.mark = wish(trace.mode, trace.model, trace.batch, trace.gpus, job.batch, epoch) or job.mark

    def _change_batch(self, job: _Job) -> None:
        """Carry out the mark, if the table allows it: as many epochs as before at the new batch size."""
        trace, grow = job.trace, job.mark == "grow"
        job.mark = ""
        top = TOP.get(trace.model)
        if trace.mode == "gns":
            batch = 2 * job.batch
        elif grow:
            batch = top or job.batch
        else:
            batch = trace.batch
        kind = job_type(trace.model, batch)
        if trace.batch == top or not all(self.table.knows(gpu, kind, trace.gpus) for gpu in self.gpus):
            return
        old, new = epoch_steps(trace.model, job.batch), epoch_steps(trace.model, batch)
        epochs = up(job.steps, old)
        steps = up(job.steps * job.batch, batch)
        if up(steps, new) != epochs:
            steps = epochs * new
        job.done = up(job.done, old) * new
        job.steps, job.batch = steps, batch
        job.app.throughputs = {gpu: self.table.of(gpu, kind, trace.gpus) for gpu in self.gpus}

    def _finished(self, job: _Job) -> bool:
        return job.status == "done" or (job.status == "removed" and self.rules.failed_jobs_count)

    def _result(self, job: _Job) -> JobResult:
        trace, app, finish = job.trace, job.app, job.finish
        assert finish is not None
        assert app.first_start is not None
        admitted = sum(other.status != "rejected" for other in self.jobs)
        fair = job.alone * max(1.0, admitted / sum(self.gpus.values()))
        return JobResult(
            name=app.id,
            arrival=trace.arrival,
            start=app.first_start,
            finish=finish,
            restarts=app.restarts,
            gpus=trace.gpus,
            alone=job.alone,
            rho=round((finish - trace.arrival) / fair, 5),
            gpu_seconds=app.service,
            run_time=app.run_time,
            model=trace.model,
        )
