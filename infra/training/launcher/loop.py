"""The launcher's loop: one generation after another until the run ends."""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import InfraError
from ebbflow.infra.protocols import Continue, Decide, GenerationEnd, Halt, TrainingJob
from ebbflow.infra.protocols.trainings import SETTINGS
from ebbflow.infra.training.channel import keys
from ebbflow.infra.training.channel.wire import Order
from ebbflow.infra.training.launcher import job as jobs
from ebbflow.infra.training.launcher.decide import unformed, unprepared
from ebbflow.infra.training.launcher.generation import Generation
from ebbflow.infra.training.launcher.hang import HangRule
from ebbflow.infra.training.launcher.job import Options, checked_placement
from ebbflow.infra.training.launcher.journal import Record
from ebbflow.infra.training.launcher.members import Members
from ebbflow.infra.training.launcher.moves import Control, Resizer
from ebbflow.infra.training.process import channel as names
from ebbflow.infra.training.process.channel import Report
from ebbflow.planners.errors import EbbflowError
from ebbflow.planners.model.trainings import RunSettings

if TYPE_CHECKING:
    from ebbflow.infra.training.channel.exchange import Exchange
    from ebbflow.infra.training.launcher.service import Workforce
    from ebbflow.infra.training.service.aggregator_sets import AggregatorSet

_HOPELESS = 20  # generations in a row without a step won, whatever is decided
_OWN_PROGRESS = 60.0  # seconds after which a script that prints no steps is taken to have got further
_POLL = 0.05  # seconds between polls
_LAST = 120.0  # seconds in which the run's directory must take how the run has ended
_NOTED = ("checkpoint", "metrics", "skipped", "spilled", "damaged", "communication")

log = logging.getLogger(__name__)


class Loop:
    """Runs in a thread of its own; ``over`` is set when the run has ended."""

    def __init__(
        self,
        job: TrainingJob,
        exchange: "Exchange",
        pool: str,
        members: Members,
        record: Record,
        control: Control,
        decide: Decide,
        options: Options,
        logs: Path,
        on_report: Callable[[Report], None] | None,
        clock: Clock,
    ) -> None:
        self._job, self._exchange, self._pool = job, exchange, pool
        self._members, self._record, self._control = members, record, control
        self._decide, self._options, self._logs = decide, options, logs
        self._on_report, self._clock = on_report, clock
        self._settings = job.settings or RunSettings()
        self._environment: dict[str, str] = {}
        self._aggregators: AggregatorSet | None = None
        self._moves = Resizer(control, members, record, options, clock)
        # number of the last event that the decider knows of; those of earlier launchers are no news
        self._told = max((event.number for event in record.events()), default=0)
        self.generation: Generation | None = None
        self.over = threading.Event()

    def run(self, placement: dict[str, int], release: Callable[[], None]) -> None:
        """Run to the end, whatever happens, then call ``release``."""
        halt = Halt("failed", "the launcher itself failed")
        try:
            halt = self._run(placement)
        except EbbflowError as exc:
            halt = Halt("failed", str(exc))
        except Exception as exc:  # raised in the thread that waits
            halt = Halt("failed", f"the launcher itself failed: {type(exc).__name__}: {exc}")
            raise
        finally:
            self._finish(halt, release)

    def _finish(self, halt: Halt, release: Callable[[], None]) -> None:
        acts: list[Callable[[], object]] = [
            lambda: self._members.end(self._members.names),
            lambda: self._aggregators.close() if self._aggregators is not None else None,
            lambda: self._look_for_refusals(everything=True),
            lambda: self._record.note("ended", state=halt.state, reason=halt.reason),
            lambda: self._record.write(self._job, self._pool, halt.state),
            lambda: self._record.flush(_LAST),
            release,
        ]
        try:
            for act in acts:  # each of them, whether or not the one before it can be done
                try:
                    act()
                except InfraError as exc:
                    halt = replace(halt, reason=f"{halt.reason}; {exc}")
        finally:
            self._record.stand(state=halt.state, reason=halt.reason)
            self.over.set()

    def _run(self, placement: dict[str, int]) -> Halt:
        while True:
            end = self._book(self._once(placement))
            verdict = self._follow(end)
            if isinstance(verdict, Halt) and verdict.state == "waiting":
                verdict = self._wait_for_nodes(verdict)
            if isinstance(verdict, Halt):
                return verdict
            placement = checked_placement(verdict.placement)
            self._record.note(
                "continues",
                placement=placement,
                reason=verdict.reason,
                delay=verdict.delay,
                then=verdict.then,
            )
            if verdict.settings is not None:
                self._settings = verdict.settings.keeping(self._settings)
                self._job = replace(self._job, settings=self._settings)
            self._environment |= verdict.environment
            if verdict.then is not None and self._control.target is None:
                self._control.resize(checked_placement(verdict.then), "replacement")
            self._delay(verdict.delay)

    # --- one generation -----------------------------------------------------------------------------------

    def _once(self, placement: dict[str, int]) -> GenerationEnd:
        """Run one generation to its end."""
        number = self._record.status.generation + 1
        self._record.stand(state="starting", generation=number, placement=placement)
        self._record.write(self._job, self._pool, "running")
        generation = Generation(
            number, dict(placement), self._members, self._exchange, self._clock, self._record.note, self._hang,
            self._options.rescue, self._options.form, self._hear, self._settings.own_checkpoints,
            minimum=self._options.minimum,
        )  # fmt: skip
        self._members.end(self._noticed & placement.keys())  # asked for under the name of a node that leaves
        before = {name for name in placement if name in self._members and self._members[name].ready}
        self._members.start(placement)
        generation.workforce = self._workforce(number)
        jobs.load_torch()
        if missing := self._await_ready(placement):
            if problems := self._members.problems():
                return unprepared(generation.end(), problems)
            return unformed(generation.end(), missing, before)
        self._moves.restart()
        self.generation = generation
        self._record.note("generation", placement=placement, trial=self._settings.preflight_steps > 0)
        generation.launch(self._order(), {name: self._logs_of(name, number) for name in placement})
        # Those that are not needed any more take their time to end, and training need not wait for that.
        self._members.end([name for name in self._members.names if name not in placement])
        while not generation.look(self._members.look()):
            self._moves.serve(generation, self._settings.termination_grace, self._join)
            self._follow_members(generation)
            if self._control.closed:
                self._members.end(self._members.names)
            self._look_for_refusals()
            self._control.pause(_POLL, self._clock)
        self.generation = None
        held = self._aggregators.held() if self._aggregators is not None else {}
        generation.close()
        return replace(generation.end(), aggregators=held)

    @property
    def _hang(self) -> HangRule:
        exchange = self._settings.collective_timeout if self._settings.in_place else 0.0
        return replace(self._options.hang, exchange=exchange)

    def _workforce(self, number: int) -> "Workforce | None":
        """Return the workers of a generation that come and go; aggregators are there then, where they need some."""
        if self._settings.sync != "service" and not self._settings.in_place:
            return None
        from ebbflow.infra.training.launcher.service import Workforce
        from ebbflow.infra.training.service.aggregator_sets import aggregators_of

        silence = self._options.hang.worker_silence
        if self._settings.in_place:
            return Workforce(None, self._exchange, number, silence)
        given = self._exchange.address.rpartition(":")[0], self._options.ledger
        self._aggregators = self._aggregators or aggregators_of(self._settings, self._job.id, *given)
        self._aggregators.start()
        return Workforce(self._aggregators, self._exchange, number, silence, self._settings.mirrors)

    def _join(self, generation: Generation, placement: dict[str, int]) -> None:
        """Let nodes join a generation that trains."""
        logs = {name: self._logs_of(name, generation.number) for name in placement}
        generation.join(placement, self._order(), logs)

    def _follow_members(self, generation: Generation) -> None:
        """Start processes again on nodes that have lost theirs, and take note of who trains."""
        workforce = generation.workforce
        if workforce is None:
            return
        for name in list(workforce.idle):
            there = name in self._members and name not in generation.placement
            if generation.stop is None and workforce.may_start(name) and there:
                self._join(generation, {name: self._members[name].slots})
                if name not in generation.placement and workforce.may_start(name):
                    continue  # aggregators have not admitted it yet
            workforce.idle.remove(name)
        if self._record.status.placement != generation.placement:
            self._record.stand(placement=dict(generation.placement))

    def _await_ready(self, placement: Mapping[str, int]) -> dict[str, str]:
        """Wait until the nodes have reported; return those that have not, and why."""
        begun = self._clock.now()
        while not self._control.closed and self._control.deadline is None:
            self._look_for_refusals()
            lost = {name: loss for name, loss in self._members.look().items() if name in placement}
            if lost:
                return {name: f"{loss.how}\n{self._members.log(name)}" for name, loss in lost.items()}
            if refused := {
                name: self._members.refused[name] for name in placement if name not in self._members
            }:
                return refused
            missing = [name for name in placement if not self._members[name].ready]
            if not missing:
                return {}
            if problems := self._members.problems():
                return problems
            now, form = self._clock.now(), self._options.form
            late = [name for name in missing if self._members.late(name, form)]
            if late and now - begun > form:
                self._members.end(late)
                return dict.fromkeys(late, f"it did not report within {form:g} s")
            self._control.pause(_POLL, self._clock)
        return dict.fromkeys(placement, "the run was stopped before it started")

    def _order(self) -> Order:
        status, record = self._record.status, self._record
        # the user's word to begin again holds until there is something to lose again
        settings = replace(
            self._settings,
            saved_step=record.best,
            restart=self._settings.restart and not record.saved_here,
        )
        environment = {
            **self._job.environment,
            **self._options.variables,
            **self._environment,
            names.RUN_ID: self._job.id,
            names.RUN_FOLDER: self._job.folder,
            names.GENERATION: str(status.generation),
            **(self._aggregators.environment if self._aggregators is not None else {}),
            names.CHANNEL: self._exchange.address,
            keys.SERVER_KEY: self._exchange.public,
            SETTINGS: settings.to_json(),
        }
        return Order(
            "launch",
            script=self._job.script,
            arguments=self._job.arguments,
            environment=environment,
            own_checkpoints=self._settings.own_checkpoints,
            step_pattern=self._settings.step_pattern,
            start=self._options.start,
            form=self._options.form,
            grace=self._settings.termination_grace
            if self._settings.own_checkpoints
            else self._options.rescue,
        )

    def _logs_of(self, node: str, number: int) -> str:
        return str(self._logs / f"generation-{number}" / node)

    def _hear(self, report: Report) -> None:
        if report.kind in ("started", "step") and self._record.status.state == "starting":
            self._record.stand(state="running")
        if report.kind == "step" and self.generation is not None and self._settings.sync == "allreduce":
            self._moves.look_for_straggler(report, self.generation)
        if report.kind == "preflight" and "service" in report.content:
            content = report.content
            self._record.note("sync-costs", **content["service"], statistics=content["statistics"])
        if report.kind == "damaged" and report.content.get("restarted"):
            self._record.restart()
        if report.kind in _NOTED or (report.kind == "saving" and report.content):
            content = {
                name: value for name, value in report.content.items() if name not in ("bars", "profile")
            }
            self._record.note(report.kind, **{**content, "step": report.step, "rank": report.rank})
        if self._on_report is not None:
            self._on_report(report)

    def _look_for_refusals(self, *, everything: bool = False) -> None:
        """Write down who was refused: somebody tries to speak to this run, or a node is not what it should be."""
        for refusal in self._exchange.refusals.take(self._clock.now(), everything=everything):
            self._record.note("peer-refused", address=refusal.address, why=refusal.why, times=refusal.times)
            log.warning(
                "run %s: refused %s, %d times: %s",
                self._job.id,
                refusal.address or "a peer",
                refusal.times,
                refusal.why,
            )

    # --- what follows -------------------------------------------------------------------------------------

    def _book(self, end: GenerationEnd) -> GenerationEnd:
        """Write down how a generation ended, and return that with ``idle``."""
        record = self._record
        won = self._has_won(end)
        record.saved(end.saved_step)
        record.idle = 0 if won or end.kind == "stopped" else record.idle + 1
        end = replace(end, idle=record.idle)
        record.stand(end=end, reason=end.reason, step=max(record.status.step, end.last_step))
        record.note(
            "generation-ended",
            how=end.kind,
            reason=end.reason,
            left=dict(end.left),
            suspects=list(end.suspects),
            failures=[
                {"rank": f.rank, "node": f.node, "exit_code": f.exit_code, "signal": f.signal}
                for f in end.failures
            ],
            first_step=end.first_step,
            last_step=end.last_step,
            saved_step=end.saved_step,
        )
        return end

    def _has_won(self, end: GenerationEnd) -> bool:
        """Return whether a generation took the run further."""
        if not self._settings.own_checkpoints:
            return end.saved_step > self._record.best
        if end.last_step >= 0:
            return end.last_step > self._record.status.step
        return end.ended - end.started >= _OWN_PROGRESS

    @property
    def _noticed(self) -> set[str]:
        """Return the nodes that are about to leave."""
        return {name for name in self._members.names if self._members[name].notice is not None}

    def _follow(self, end: GenerationEnd) -> Continue | Halt:
        """Return what comes next: what was requested, or what is decided."""
        control = self._control
        if control.closed:
            return Halt("stopped", "closed")
        if end.kind == "finished":
            return Halt("finished", end.reason)
        if control.deadline is not None:
            return Halt("stopped", end.reason)
        target = control.target
        if target is not None and end.kind in ("stopped", "lost", "hung", "unformed"):
            if control.by is not None:  # what is left on the other nodes, which somebody else waits for
                self._members.end([name for name in self._members.names if name not in target])
            control.drop(target)
            return self._towards(target, control.reason)
        if end.idle >= _HOPELESS:
            return Halt("failed", f"{end.reason} (no step won in {end.idle} generations)")
        events = tuple(self._record.events(self._told))
        self._told = max((event.number for event in events), default=self._told)
        return self._decide(replace(end, events=events))

    def _towards(self, target: dict[str, int], reason: str) -> Continue:
        """Go to ``target``: at once, or first to those of its nodes that are ready, where they are enough."""
        members = self._members
        ready = {
            name: slots
            for name, slots in target.items()
            if name in members and members[name].ready and members[name].slots == slots
        }
        count, options = sum(ready.values()), self._options
        if ready != target and count >= options.minimum and not count % options.replica:
            return Continue(ready, reason, then=target)
        return Continue(target, reason)

    def _wait_for_nodes(self, halt: Halt) -> Continue | Halt:
        self._members.end(self._noticed)
        self._record.stand(state="waiting", reason=halt.reason)
        self._record.note("waiting", reason=halt.reason)
        control = self._control
        end = self._clock.now() + self._options.node_timeout
        while self._clock.now() < end:
            if control.closed or control.deadline is not None:
                return Halt("stopped", halt.reason)
            if (target := control.target) is not None:
                control.drop(target)
                return Continue(target, control.reason)
            self._members.look()
            control.pause(_POLL, self._clock)
        return Halt("failed", f"{halt.reason}; no nodes came within {self._options.node_timeout:g} s")

    def _delay(self, seconds: float) -> None:
        """Wait, unless something is asked meanwhile."""
        control, end = self._control, self._clock.now() + seconds
        while (left := end - self._clock.now()) > 0:
            if control.closed or control.deadline is not None:
                return
            control.pause(min(left, 1.0), self._clock)
