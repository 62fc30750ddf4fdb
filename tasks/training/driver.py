"""Follows a launched run until it ends: events, nodes that come and go, interrupts."""

from collections.abc import Mapping, Sequence
from typing import cast

from ebbflow.infra.protocols import Trainer, TrainingEvent, TrainingStatus
from ebbflow.tasks.faults import Schedule
from ebbflow.tasks.training.capacity import Nodes
from ebbflow.tasks.training.recorder import RunRecorder
from ebbflow.tasks.training.supervisor import Supervisor

LOOK_EVERY = 0.2  # s


class Driver:
    """Follows a launched run until it ends."""

    def __init__(
        self,
        trainer: Trainer,
        nodes: Nodes,
        supervisor: Supervisor,
        recorder: RunRecorder,
    ) -> None:
        self._trainer, self._nodes, self._supervisor, self._recorder = trainer, nodes, supervisor, recorder
        self._read = 0
        self._interrupts = 0
        self._stopping = False
        self._leaving = False  # the generation that runs is being stopped, or has lost a node
        self._asked: dict[str, int] | None = None  # placement that was requested last

    def drive(self, faults: Schedule) -> TrainingStatus:
        """Return where the run stands when it has ended."""
        while True:
            try:
                while (status := self._trainer.wait(LOOK_EVERY)).state not in (
                    "finished",
                    "stopped",
                    "failed",
                ):
                    self._look(status, faults)
                self._look(status, faults)
                self._close_book(status)
                return status
            except KeyboardInterrupt:
                self._interrupted()

    def _reconcile(self, status: TrainingStatus) -> None:
        """Ask for the nodes that are there, unless the end of a generation is about to settle that anyway."""
        settled = status.state == "waiting" or (status.state == "running" and not self._leaving)
        if not settled:
            return
        if self._supervisor.in_preflight:
            self._cut_preflight_short(status)
            return
        wanted = self._supervisor.wanted()
        if wanted is None:
            return
        if wanted == status.placement and status.state == "running":
            self._asked = None
        elif wanted != self._asked:
            self._asked = wanted
            self._trainer.resize(wanted, self._nodes.deadline(wanted))

    def _cut_preflight_short(self, status: TrainingStatus) -> None:
        """End a preflight run some of whose nodes are to be left; what it has shown by then has to do."""
        there = self._nodes.there()
        if status.state == "running" and any(there.get(n, 0) < k for n, k in status.placement.items()):
            self._trainer.end_generation(status.generation, "its nodes are to be left")

    def _look(self, status: TrainingStatus, faults: Schedule) -> None:
        if self._nodes.stopped and not self._stopping:
            self._stopping = True
            self._trainer.stop(self._nodes.stop_by)
        for event in self._news():
            self._read = event.number
            if (
                event.kind == "started"
                and not self._supervisor.in_preflight
                and event.generation > self._supervisor.tried
            ):
                faults.begin()
            if event.kind == "generation":
                self._leaving, self._asked = False, None
            elif event.kind == "worker-lost":  # the others train on in the same generation
                self._leaving, self._asked = False, None
                if not event.content.get("idle"):
                    self._nodes.remove([str(event.content.get("node", ""))])
            elif event.kind in ("node-notice", "node-lost"):  # one that has not joined ends nothing
                self._leaving |= str(event.content.get("node", "")) in self._trainer.status().placement
            elif event.kind in ("stop-requested", "stopped", "hang"):
                self._leaving = True
            if event.kind == "resize-changed":
                self._nodes.give_up(map(str, cast("Sequence[object]", event.content.get("unstarted", ()))))
            elif event.kind == "node-notice":
                self._supervisor.noticed(str(event.content.get("node", "")))
            elif event.kind == "straggler" and isinstance(target := event.content.get("target"), Mapping):
                self._nodes.remove([str(event.content.get("node", ""))])
                self._nodes.adopt({str(name): int(slots) for name, slots in target.items()})
            self._recorder.event(event)
        if status.end is not None and status.generation > status.end.generation:
            self._recorder.close(
                status.end
            )  # of which the supervisor was not asked what follows: it was told before
        running = status.state in ("running", "stopping", "starting")
        used = sum(status.placement.values()) if running else 0
        self._recorder.capacity(self._nodes.slots, used)
        self._reconcile(status)
        self._recorder.tick()
        if self._supervisor.overdue(self._recorder.now):
            self._trainer.end_generation(status.generation, "the preflight run exceeded its time limit")

    def _news(self) -> Sequence[TrainingEvent]:
        """Return the launcher's events since the last look, without those of launchers before it."""
        events = self._trainer.events(self._read)
        begun = max((place for place, event in enumerate(events, 1) if event.kind == "launched"), default=0)
        return events[begun:]

    def _interrupted(self) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            self._trainer.close()
        else:
            self._recorder.notify("interrupted", "saving and exiting; interrupt again to exit at once")
            self._trainer.stop()

    def _close_book(self, status: TrainingStatus) -> None:
        """Write the last generation down where the supervisor was not asked what follows it."""
        if status.end is not None:
            self._recorder.close(status.end)
