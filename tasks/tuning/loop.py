"""The loop of a tuning run: who runs where, what trials report, and how they end."""

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import isfinite
from typing import Any

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import LedgerError, RunLockedError, StorageError
from ebbflow.planners.model.scheduling import App, Placement, gpus_of
from ebbflow.planners.tuning.promise import KnownGoodput
from ebbflow.tasks.training.capacity import Nodes
from ebbflow.tasks.training.listening import TrainingListener
from ebbflow.tasks.training.report import TrainingReport, recorded
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.tuning.outcomes import SAME_FAILURES, TrialOutcomes, full_error
from ebbflow.tasks.tuning.population import Population
from ebbflow.tasks.tuning.recorder import TuningRecorder
from ebbflow.tasks.tuning.report import TuningEnd, TuningReport
from ebbflow.tasks.tuning.request import TuningRequest
from ebbflow.tasks.tuning.resources import TrialAllocator, TrialResources
from ebbflow.tasks.tuning.study import Study
from ebbflow.tasks.tuning.trial import Reporter, Trial, TuningStatus, as_arguments

LOCKED = 180.0  # s for which a trial waits for the lock of a process that ran it before, and is then left to others
_LOCK_LOOK = 5.0  # s between two looks at it
_PAUSE = 0.2  # s between looks
_MOVING = 60.0  # s that a trial gets at most to leave GPUs, before others have them

Say = Callable[[str], None]
Watch = Callable[[TuningStatus], None]
RunTrial = Callable[[TrainingRequest, TrainingListener, Nodes, bool], TrainingReport]


class TuningLoop:
    """Runs the trials of a tuning run; all but the trainings themselves happens in its thread.

    See ``run_tuning`` for what it is given.
    """

    def __init__(
        self,
        request: TuningRequest,
        study: Study,
        notify: Say,
        train: RunTrial,
        clock: Clock,
        resources: TrialResources,
        stop: threading.Event,
        watch: Watch | None,
    ) -> None:
        self._request, self._study, self._notify, self._train = request, study, notify, train
        self._clock, self._resources, self._stop, self._watch = clock, resources, stop, watch
        self._leaving = False
        self._running: dict[str, Trial] = {}
        self._recorder = TuningRecorder(request, study, clock)
        self._inbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._taking: tuple[Any, ...] = ()  # what an interrupt may have met in the middle
        self._allocator = TrialAllocator(request, study)
        self._outcomes = TrialOutcomes(request.metric)
        self._nodes = resources.nodes()
        self._population = Population(request, study) if request.pruner == "pbt" else None
        study.meanwhile = self._heed_losses

    def run(self) -> TuningReport:
        """Run all trials that are left."""
        state: TuningEnd = "finished"
        reason = "all trials have ended"
        try:
            while self._step():
                pass
            if line := self._outcomes.given_up:
                state, reason = "failed", f"{SAME_FAILURES} trials failed with the same error: {line}"
            elif self._stop.is_set():
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            self._notify("interrupted: running trials save and exit")
            state, reason = "stopped", "interrupted"
            self._leave()
        except BaseException:
            self._leave()
            raise
        return self._recorder.report(state, reason)

    def _step(self) -> bool:
        """Hand GPUs out, take in what trials report; return whether there is more to do."""
        if self._stop.is_set():
            return False
        self._nodes = self._resources.nodes()
        self._yield()
        self._fill()
        if not self._running and self._study.ended() >= self._request.trials:
            return False
        self._share()
        if self._watch is not None:
            self._watch(self._recorder.status(self._running.values()))
        try:
            self._taking = self._inbox.get(timeout=_PAUSE)
            while True:
                self._take(self._taking)
                self._taking = self._inbox.get_nowait()
        except queue.Empty:
            self._taking = ()
        if self._outcomes.given_up:
            self._leave()
            return False
        return True

    # --- who runs, and where ------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Begin as many trials as there is room for, those first that were begun and left."""
        resources = sum(node.gpus for node in self._nodes) // self._request.gpus_per_trial
        while len(self._running) < min(resources, self._request.parallel or resources):
            # one that was lost runs until it has stopped, whoever has its lease by then
            taken = self._study.take({one.trial.number for one in self._running.values()})
            if taken is None:
                return
            self._enter(*taken)

    def _yield(self) -> None:
        """Leave trials that others have claimed, as this process seemed dead to them."""
        lost = self._study.lost()
        for one in [one for one in self._running.values() if one.trial.number in lost]:
            self._notify(f"{one.run}: is run by another process by now")
            one.lost = True
            if one.nodes is None:
                del self._running[one.run]
            else:
                one.nodes.stop()

    def _enter(self, trial: Any, resumes: bool) -> None:
        request, now = self._request, self._clock.now()
        parameters = self._study.arguments(trial)
        if parameters is None:
            self._study.release(trial)
            return
        run = f"trial-{trial.number:03d}"
        app = App(run, trial.number, now, request.gpus_per_trial, request.gpus_per_trial, request.most_gpus)
        one = Trial(trial, app, run, parameters, resumes)
        if self._population is not None:
            self._population.enter(one)
            run, parameters, app.id = one.run, one.parameters, one.run
        self._running[run] = one
        if resumes and (told := self._study.values(trial)):
            one.epochs, one.value = told[-1]
        shown = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in parameters.items())
        self._notify(f"{run}: {'resumes, ' if resumes else ''}{', '.join(shown)}")

    def _share(self) -> None:
        """Divide the GPUs among the trials that may run."""
        now = self._clock.now()
        for one in self._running.values():
            one.app.remaining = self._recorder.left(one)
        self._heed_losses()
        shrunk = [one for one in self._running.values() if now - one.shrunk_at < _MOVING]
        if shrunk and not (all(map(_has_left, shrunk)) and self._resources.settled()):
            return  # others get its GPUs once it has left them
        taken = False
        may_run = [o for o in self._running.values() if not (o.pausing or o.lost) and o.not_before <= now]
        for run, grant in self._allocator.decide(may_run, self._nodes, now):
            one = self._running[run]
            before, after = gpus_of(one.app.held), gpus_of(grant.placement)
            if after < one.app.min_gpus:
                continue
            if set(grant.placement) == set(one.app.held):
                self._resources.recover(one)
            elif after < before or not taken:
                taken = taken or after < before
                self._place(one, grant.placement, grant.reason)

    def _heed_losses(self) -> None:
        """Pause trials that have too few GPUs left. Called also while the study waits for its database."""
        for one in self._running.values():
            if not one.pausing:
                one.app.held = self._resources.held(one)
                if one.nodes is not None and gpus_of(one.app.held) < one.app.min_gpus:
                    self._pause(one)

    def _place(self, one: Trial, placement: Placement, reason: str) -> None:
        """Give a trial these GPUs, and let it begin or continue if it does not run."""
        now, before, after = self._clock.now(), gpus_of(one.app.held), gpus_of(placement)
        self._resources.give(one, placement)
        if one.thread is not None:
            one.used += (now - one.since) * before
            one.shrunk_at = now if after < before else one.shrunk_at
            if self._request.by_promise and after != before:
                said = f"{reason} ({one.rank})"
                self._recorder.resized(one, before, after, said)
                self._notify(f"{one.run}: {said}")
        one.app.held, one.since = placement, now
        if one.thread is None:
            one.used, one.trains_on = 0.0, 0
            one.begun = one.begun or now
            one.thread = threading.Thread(
                target=partial(self._work, one), name=f"ebbflow-{one.run}", daemon=True
            )
            one.thread.start()

    def _pause(self, one: Trial) -> None:
        """Let a trial that has lost too many GPUs save and leave; it continues when there are some again."""
        assert one.nodes is not None
        one.pausing, one.app.held = True, ()
        self._notify(f"{one.run}: paused, too few GPUs left")
        one.nodes.stop(self._resources.deadline(one))

    def _paused(self, one: Trial, report: TrainingReport) -> None:
        one.spent += report.gpu_seconds
        one.nodes, one.thread = None, None
        one.pausing, one.resumes = False, True

    def _work(self, one: Trial) -> None:
        """Train a trial, in its own thread."""
        assert one.nodes is not None
        arguments = self._request.arguments + as_arguments(one.parameters)
        try:
            request = self._request.trial(one.run, arguments)
            resumes = one.resumes and request.recorded
            if one.copied and not resumes and self._population is not None:
                self._population.seed(request, one.copied)
            done = recorded(request) if resumes else None
            if done is not None and done.state == "finished":  # but the tuning run did not live to hear of it
                reporter = Reporter(self._inbox, one.run, self._request.metric)
                for said in done.metrics:
                    if said.value is not None:
                        reporter.metrics(said.step, said.epoch, {said.name: said.value})
                self._inbox.put(("ended", one.run, done, None))
                return
            report = self._train(
                request, Reporter(self._inbox, one.run, self._request.metric), one.nodes, resumes
            )
            self._inbox.put(("ended", one.run, report, None))
        except Exception as error:
            self._inbox.put(("ended", one.run, None, error))

    # --- what trials report ----------------------------------------------------------------------------------

    def _take(self, said: tuple[Any, ...]) -> None:
        one = self._running.get(said[1])
        if one is None:
            return
        if said[0] == "metric":
            self._metric(one, said[2], said[3])
        elif said[0] == "gpus":
            one.trains_on = said[2]
            one.tried.add(said[2])
        elif said[0] == "goodput":  # of one number of GPUs alone it cannot tell what another would bring
            one.app.goodput = KnownGoodput(said[2]) if len(one.tried) > 1 else None
        else:
            self._end(one, said[2], said[3])
            if (full := full_error(said[2], said[3])) is not None:  # the next trial would meet the same disk
                raise full

    def _metric(self, one: Trial, epoch: int, value: float) -> None:
        one.heard = True
        if one.lost or one.pruned or one.leaves == "copies" or epoch <= one.epochs:
            return  # an epoch that was told before a restart, or that is another process's to tell
        one.epochs = epoch
        if isfinite(value):
            one.value = value
        if not isfinite(value) or self._study.report(one.trial, epoch, value):
            one.pruned = True
            self._notify(f"{one.run}: stopped after epoch {epoch}, {self._request.metric} {value:.4g}")
            assert one.nodes is not None
            one.nodes.stop()
        elif self._population is not None and not one.leaves and not self._leaving:
            self._move(one, self._population)
        self._allocator.compare(self._running.values())
        self._recorder.look_ahead(self._running.values(), sum(node.gpus for node in self._nodes))

    def _move(self, one: Trial, population: Population) -> None:
        """Let a member of a population copy a better one, or make room for those behind it, where that is due."""
        now, running = self._clock.now(), self._running.values()
        idle = {
            other.trial.number
            for other in running
            if (other.nodes is None or other.pausing) and other.not_before <= now
        }
        one.leaves = population.move(one, {other.trial.number for other in running}, idle)
        if one.leaves:
            why = population.lineage(one.trial.number).rpartition(", ")[2]
            self._notify(
                f"{one.run}: {why if one.leaves == 'copies' else f'makes room after epoch {one.epochs}'}"
            )
            assert one.nodes is not None
            one.nodes.stop()

    def _end(self, one: Trial, report: TrainingReport | None, error: Exception | None) -> None:
        self._resources.take_back(one)
        if one.lost:
            del self._running[one.run]
            return
        if isinstance(error, RunLockedError):  # no outcome: who holds it may train it to its end yet
            self._wait_for_lock(one, error)
            return
        stopped = report is not None and report.state == "stopped"
        finished = report is not None and report.state == "finished"
        copies = one.leaves == "copies" and finished
        if report is not None and not one.pruned and (copies or (stopped and not self._leaving)):
            if one.leaves and self._population is not None:
                del self._running[one.run]
                self._population.left(one, report.gpu_seconds)
                self._study.release(one.trial)  # whoever takes it next runs it as its study says
            else:
                self._paused(one, report)
            return
        del self._running[one.run]
        if self._population is not None and finished and one.copied and not one.heard:
            self._population.inherit(one)
        state, reason = self._outcomes.of(one, report, error)
        if self._population is not None and state == "complete":
            reason = self._population.lineage(one.trial.number)
        if state == "stopped":
            self._study.release(one.trial)
        elif not self._study.tell(one.trial, one.value, state, self._recorder.details(one, reason, report)):
            self._notify(f"{one.run}: has ended, but another process runs it by now")
            return
        self._recorder.ended(one, state, reason, report)
        if state == "complete":
            self._notify(f"{one.run}: {self._request.metric} {one.value:.4g} after {one.epochs} epochs")
        elif state == "failed":
            self._notify(f"{one.run}: failed: {reason}")

    def _wait_for_lock(self, one: Trial, error: RunLockedError) -> None:
        """Let a trial try again whose run is locked, for as long as a lock of a process that died may count.

        After that, and where the tuning run leaves, it goes back to whoever takes it next.
        """
        now = self._clock.now()
        one.locked_since = one.locked_since or now
        if self._leaving or now - one.locked_since > LOCKED:
            del self._running[one.run]
            self._study.release(one.trial, LOCKED)
            self._notify(f"{one.run}: left to others for now: {error}")
            return
        one.not_before = now + _LOCK_LOOK
        one.nodes, one.thread, one.app.held = None, None, ()
        one.names.clear()
        one.pausing, one.resumes = False, True

    def _leave(self) -> None:
        """Let all trials that run save and leave, and wait for them."""
        self._leaving = True
        self._study.hurry()
        for one in self._running.values():
            if one.nodes is not None:
                one.nodes.stop()
        for one in [one for one in self._running.values() if one.nodes is None]:
            del self._running[one.run]
            self._study.release(one.trial)
        end = self._clock.now() + 2 * self._request.termination_grace + 60.0
        while self._running and self._clock.now() < end:
            try:
                said = self._taking or self._inbox.get(timeout=_PAUSE)
            except queue.Empty:
                continue
            self._taking = ()
            # what is not written down a tuning run that continues sees for itself
            with suppress(StorageError, LedgerError):
                self._take(said)


def _has_left(one: Trial) -> bool:
    """Return whether a trial trains on no GPUs any more that were taken from it."""
    return one.nodes is None or one.trains_on <= gpus_of(one.app.held)
