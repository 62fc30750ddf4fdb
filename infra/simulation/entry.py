"""One job in the simulation: how it spends its time, and what it was given.

The one place where what a policy grants is checked: capacity, gangs, double allocation.
"""

from collections.abc import Iterable, Mapping
from math import inf, ulp

from ebbflow.infra.errors import SimulationError
from ebbflow.infra.simulation.metrics import JobResult
from ebbflow.infra.simulation.protocols import JobModel
from ebbflow.infra.simulation.traces.workloads import Job
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.scheduling import App, Placement, gpus_of, take

ROUNDING = 1e-6  # s: less than this left to run is floating-point residue


class Entry:
    """A job, its true progress, and what policies see of it. The engine alone changes it."""

    __slots__ = (
        "_countdown",
        "_phase",
        "_score",
        "_scored",
        "_scored_to",
        "app",
        "finish",
        "finish_at",
        "held_gpus",
        "interference",
        "job",
        "lost",
        "model",
        "next_save",
        "number",
        "saved_at",
        "trains_from",
    )

    def __init__(self, number: int, job: Job, model: JobModel) -> None:
        self.number, self.job, self.model = number, job, model
        self.app = App(
            id=job.id,
            number=number,
            arrival=job.arrival,
            gpus=job.gpus,
            min_gpus=job.gpus if job.min_gpus is None else job.min_gpus,
            max_gpus=job.gpus if job.max_gpus is None else job.max_gpus,
            weight=job.weight,
            team=job.team,
            model=job.model,
            skewed=job.skewed,
        )
        model.report(self.app)
        self.finish = inf
        self.finish_at = inf  # expected, or when its speed may change
        self.held_gpus = 0
        self.interference = 0.0
        self.lost = 0.0  # GPU-s
        self.next_save = inf
        self.saved_at = self.trains_from = 0.0
        self._countdown = 0.0
        self._phase = 0
        self._score, self._scored, self._scored_to = 1.0, 0.0, 0.0

    def train(self, start: float, seconds: float) -> bool:
        """Wait out the restart delay and train, from ``start``; tell whether any training happened."""
        waited = 0.0
        if self._countdown > 0:
            waited = min(self._countdown, seconds)
            self._countdown -= waited
        model, app = self.model, self.app
        used = 0.0
        over = model.done
        if seconds > waited and not over:
            used = model.advance(seconds - waited, self.interference)
            if model.done:
                self.finish = start + waited + used
        app.run_time += waited + used
        app.restart_time += waited
        app.service += (waited + used) * self.held_gpus
        return used > 0

    def train_and_save(self, start: float, at: float, every: float) -> bool:
        """Train from ``start`` to ``at``, saving at the last checkpoint that falls before."""
        save = self.next_save + (at - self.next_save) // every * every
        trained = save > start and self.train(start, save - start)
        self.save(save)
        self.next_save = save + every
        rest = max(save, start)
        return (at > rest and self.train(rest, at - rest)) or trained

    def save(self, at: float) -> None:
        """Save a checkpoint."""
        self.model.save()
        self.saved_at = at

    def look(self, at: float) -> bool:
        """See when it will finish, since it was expected to by now or its speed may have changed.

        Tell whether it continued to another phase, where it can use other numbers of GPUs.
        """
        model = self.model
        over = model.done
        if over:
            return False
        # so late that the clock can't tell what is left from nothing, it is nothing
        if self._countdown + model.horizon(self.interference) <= max(ROUNDING, ulp(at)):
            model.complete()
            if model.done:
                self.finish = at
                return False
        self.expect(at)
        before, self._phase = self._phase, getattr(model, "phase", 0)
        return self._phase != before

    def expect(self, now: float) -> None:
        """Work out when it will finish, or may change its speed, if nothing else happens."""
        if self.held_gpus:
            self.finish_at = now + self._countdown + self.model.horizon(self.interference)

    def hold(
        self,
        placement: Placement,
        now: float,
        nodes: Mapping[str, Node],
        delays: tuple[float, float],
        save_every: float,
    ) -> None:
        """Continue with ``placement`` after the delay of a first start or of a restart; empty: wait."""
        app = self.app
        self._scored += self._score * (app.service - self._scored_to)
        self._scored_to = app.service
        app.held = placement
        self.held_gpus = gpus_of(placement)
        if not placement:
            app.lease_until = self.finish_at = self.next_save = inf
            if not self.model.done:
                self.model.place((), nodes)
            return
        self.model.place(placement, nodes)
        if app.first_start is None:
            app.first_start = now
            self._countdown = delays[0]
        else:
            app.restarts += 1
            self._countdown = delays[1]
        app.most_gpus = max(app.most_gpus, self.held_gpus)
        self._score = self.model.score()
        self.saved_at = now
        self.trains_from = now + self._countdown
        self.next_save = now + save_every

    def result(self) -> JobResult:
        """Return what became of it, without ρ."""
        app = self.app
        return JobResult(
            name=app.id,
            arrival=app.arrival,
            start=app.first_start if app.first_start is not None else inf,
            finish=self.finish,
            restarts=app.restarts,
            gpus=app.gpus,
            alone=self.model.alone(),
            gpu_seconds=app.service,
            lost_gpu_seconds=self.lost,
            run_time=app.run_time,
            score=self._scored / app.service if app.service else 1.0,
            team=app.team,
            model=app.model,
        )


class Ledger:
    """Free GPUs by node. Placements are taken and given back; nothing is ever taken twice."""

    def __init__(self) -> None:
        self.free: dict[str, int] = {}
        self.nodes: dict[str, Node] = {}
        self.gpus = 0

    def add(self, node: Node) -> None:
        """Add a node.

        Raises:
            SimulationError: it is already there.
        """
        if node.id in self.nodes:
            raise SimulationError(f"node {node.id} is added while present")
        self.nodes[node.id] = node
        self.free[node.id] = node.gpus
        self.gpus += node.gpus

    def remove(self, id_: str) -> None:
        """Remove a node that nobody holds any more.

        Raises:
            SimulationError: it isn't there.
        """
        if id_ not in self.nodes:
            raise SimulationError(f"node {id_} is removed while absent")
        self.gpus -= self.nodes.pop(id_).gpus
        del self.free[id_]

    def hold(self, placement: Placement) -> None:
        """Take what was just given back."""
        for id_, gpus in placement:
            self.free[id_] -= gpus

    def give_back(self, placement: Placement) -> None:
        """Give the GPUs of a placement back."""
        for id_, gpus in placement:
            self.free[id_] += gpus

    def take(self, policy: str, app: App, placement: Placement, *, elastic: bool, now: float) -> None:
        """Take the GPUs of a placement, checking that they exist, are free, and are what the app can use.

        Raises:
            SimulationError: naming policy, app, node and rule.
        """
        if what := take(self.free, app, placement, elastic=elastic):
            raise _broken(policy, app, now, what)


def _broken(policy: str, app: App, now: float, what: str) -> SimulationError:
    return SimulationError(f"policy {policy} at {now:g} s gives job {app.id} {what}")


def contended(placements: Iterable[Placement]) -> set[str]:
    """Return the nodes on which two or more jobs that span nodes have GPUs (Pollux, OSDI 2021, section 4.2.1)."""
    once: set[str] = set()
    twice: set[str] = set()
    for placement in placements:
        if len(placement) > 1:
            for id_, _ in placement:
                (twice if id_ in once else once).add(id_)
    return twice


def admissible(app: App, elastic: bool, most: float) -> str:
    """Return why an app could never run if at most ``most`` GPUs will exist at once; empty if it could."""
    needs = app.min_gpus if elastic else app.gpus
    if needs > most:
        return f"needs {needs} GPUs at once; the cluster never has more than {most:g}"
    return ""
