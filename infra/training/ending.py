"""The ways in which a process of a run ends: at the script's end, on request, at a deadline, when peers are lost."""

import logging
import os
from typing import Any, NoReturn

from ebbflow.infra.errors import LauncherLostError, StorageError
from ebbflow.infra.training.metrics import RunStatistics
from ebbflow.infra.training.preflight import rehearse
from ebbflow.infra.training.prepared import PreparedTraining
from ebbflow.infra.training.process import nccl
from ebbflow.infra.training.process.channel import StopRequest
from ebbflow.infra.training.process.generation import Generation
from ebbflow.infra.training.process.leaving import PEER_LOST, RunStopped
from ebbflow.infra.training.saver import RESCUE, Saver

RESCUE_TIMEOUT = 20.0  # seconds
RESERVE = 1.0  # seconds before a deadline, besides twice what a checkpoint takes

log = logging.getLogger(__name__)


class ProcessExit:
    """Saves what is to be saved, states what happened, and ends one process."""

    def __init__(self, generation: Generation, saver: Saver) -> None:
        self._generation, self._saver = generation, saver
        self._link, self._trial, self._clock = generation.link, generation.trial, generation.clock
        self._prepared: PreparedTraining | None = None

    def attach(self, prepared: PreparedTraining, saver: Saver) -> None:
        """From now on there is something to save."""
        self._prepared, self._saver = prepared, saver
        self.watch()

    def watch(self) -> None:
        """Request that the listening thread saves before a deadline that training does not keep."""
        if not self._trial:
            reserve = RESERVE + nccl.patience() + 2 * self._saver.costs.write
            self._link.before_deadline(reserve, self._at_last_moment)

    def stop(self, save: bool) -> NoReturn:
        """Leave on request; all processes come here after the same step. Raises ``StorageError`` if it fails."""
        self._link.before_deadline(0.0, None)
        prepared = self._ready()
        stop = self._link.reason()
        step, begun = prepared.progress.step, self._clock.now()
        main = self._generation.is_main
        if save and not self._trial and (main or self._saver.collective):
            try:
                self._saver.last(prepared.state, step, stop.reason, stop.deadline)
            except StorageError as exc:
                if main:
                    self._post("stopped", step, begun, reason=stop.reason, saved=False, error=str(exc))
                raise
        if main:
            self._post("stopped", step, begun, reason=stop.reason, saved=self._saver.saved_step >= step)
        raise RunStopped(stop.reason)

    def end_after_peer_loss(self, error: BaseException | None) -> NoReturn:
        """Save the last complete step because other processes are lost, and leave with status 75."""
        self._link.before_deadline(0.0, None)
        # what saves at the last moment holds the lock until it ends the process: it must not end before
        if self._saver.lock.acquire(timeout=RESCUE_TIMEOUT):
            self._saver.lock.release()
        begun, saved = self._clock.now(), False
        reason = "a peer was lost"
        if self._prepared is not None and not self._trial:
            step = self._prepared.progress.step
            saved = self._saver.rescue(self._prepared.state, step, RESCUE, RESCUE_TIMEOUT)
            self._post("stopped", step, begun, reason=reason, saved=saved, error=str(error)[:500])
            reason += f"; step {step} is saved" if saved else ""
        log.warning("%s (%s)", reason, str(error).splitlines()[0][:200] if str(error) else "")
        raise RunStopped(reason, PEER_LOST) from error

    def end_without_service(self, error: BaseException) -> NoReturn:
        """Leave with status 75 because the launcher or an aggregator is lost.

        Without a launcher aggregators stay for a while, and the first process saves the last complete step; without
        aggregators any survivor can. Moments of a lost aggregator are gone: then there is nothing to save.
        """
        service = self._prepared is not None and self._prepared.service is not None
        if isinstance(error, LauncherLostError) and (self._generation.is_main or not service):
            self.end_after_peer_loss(error)
        self._link.before_deadline(0.0, None)
        raise RunStopped(str(error), PEER_LOST) from error

    def rehearse(self, statistics: RunStatistics, steps: int) -> NoReturn:
        """Save, load and leave after a trial of ``steps`` steps."""
        prepared = self._ready()
        main = self._generation.is_main
        if main or self._saver.collective:
            weighs = self._generation.settings.weighs_sync
            content = rehearse(prepared, statistics, self._generation, steps, weighs_sync=weighs)
            if main:
                self._link.post("preflight", prepared.progress.step, content)
        raise RunStopped("preflight")

    def finish(self, metrics: dict[str, Any], statistics: RunStatistics) -> None:
        """Save the end of the run, and say that it is finished once it is saved.

        Raises ``StorageError`` where the run's directory could not take it (see ``Saver.last``): it is not finished.
        """
        self._link.before_deadline(0.0, None)
        prepared = self._ready()
        main = self._generation.is_main
        step, begun = prepared.progress.step, self._clock.now()
        if main or self._saver.collective:
            self._saver.last(prepared.state, step, "finished")
        if not main:
            return
        saved = self._saver.saved_step >= step
        self._post("finished", step, begun, metrics=metrics, saved=saved, statistics=statistics.to_json())

    def _at_last_moment(self, stop: StopRequest) -> None:
        """Save the last complete step in the listening thread and end: the step under way takes too long."""
        if self._prepared is None or not stop.save or not self._saver.lock.acquire(timeout=RESERVE / 2):
            return
        step, begun = self._prepared.progress.step, self._clock.now()
        nccl.abort()  # what waits for others on the GPU would hold up the copy
        saved = self._saver.rescue(self._prepared.state_beside, step, stop.reason, RESCUE_TIMEOUT)
        content = {"reason": stop.reason, "saved": saved, "seconds": self._clock.now() - begun}
        content |= {"saved_step": self._saver.saved_step, "last_moment": True}
        self._link.send_now("stopped", step, content)
        os._exit(0)

    def _post(self, kind: Any, step: int, begun: float, **content: Any) -> None:
        content |= {"seconds": self._clock.now() - begun, "saved_step": self._saver.saved_step}
        self._link.post(kind, step, content)

    def _ready(self) -> PreparedTraining:
        assert self._prepared is not None
        return self._prepared
