"""What follows when a generation of a run has ended: the launcher asks, the failure classes answer."""

import threading
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ebbflow.infra.clock import Clock
from ebbflow.infra.protocols import Continue, GenerationEnd, Halt, RankFailure
from ebbflow.planners.aggregation.choice import SyncCosts, SyncDecision, choose_sync
from ebbflow.planners.model.trainings import RunSettings
from ebbflow.planners.training.failures.failures import (
    Failure,
    FailureClass,
    FailureEvent,
    RankEnd,
    classify,
)
from ebbflow.planners.training.failures.preflight import verdict
from ebbflow.planners.training.failures.retries import Attempt, Requeue, Retry, Shape, Stop
from ebbflow.planners.training.plan import TrainingPlan
from ebbflow.tasks.training.capacity import Nodes
from ebbflow.tasks.training.recorder import RunRecorder
from ebbflow.tasks.training.report import FailureReport

SURVIVOR = 75  # exit status of a process that saved because another was lost
_GONE = ("node-lost", "node-notice")  # the launcher's events of nodes that it loses
SYNC_COSTS = "sync-costs"  # the launcher's event with what a preflight run has measured
NO_ELASTIC_RUN = (
    "the script ended without connecting to its launcher: it must train inside "
    "`with ElasticRun.start() as run:` (from ebbflow import ElasticRun), or saves and restores by itself: "
    "--own-checkpoints"
)


class Supervisor:
    """Decides for one run. Called in the launcher's thread, one end at a time; implements ``Decide``.

    Args:
        plan: of the run.
        nodes: that the run has.
        recorder: where ends and decisions are written down.
        clock: the time.
    """

    def __init__(self, plan: TrainingPlan, nodes: Nodes, recorder: RunRecorder, clock: Clock) -> None:
        self._plan, self._nodes, self._recorder, self._clock = plan, nodes, recorder, clock
        self._settings, self._preflight = plan.settings, plan.preflight  # as of now
        self._rng = np.random.default_rng(plan.seed)
        self._losses, self._node_seconds = 0, 0.0
        self._history: list[Attempt] = []
        self._shape = Shape()
        self._saved = -1  # newest step that is saved
        self._noticed: set[str] = set()
        self._repeated = False  # the preflight
        self._late = threading.Event()  # the preflight took too long
        self.tried = 0  # the preflight's last generation

    # --- what others tell ---------------------------------------------------------------------------------

    @property
    def in_preflight(self) -> bool:
        """Return whether the preflight has yet to end."""
        return self._preflight is not None

    def wanted(self) -> dict[str, int] | None:
        """Return the placement on all nodes that are there; ``None`` where they are too few."""
        return self._nodes.placement(self._shape.memory)

    def begin(self) -> tuple[dict[str, int], RunSettings]:
        """Return the first placement and its settings: the preflight's where there is one, which is told."""
        if (preflight := self._preflight) is not None:
            gpus = f"{preflight.steps} steps on {preflight.ranks} GPUs"
            self._recorder.notify("preflight", f"preflight run of {gpus}: {self._plan.why}")
            return self._preflight_order()
        return self.wanted() or self._nodes.there(), self._settings

    def noticed(self, node: str) -> None:
        """Take note that a node will leave soon."""
        self._noticed.add(node)
        self._nodes.remove([node])

    def overdue(self, now: float) -> bool:
        """Return whether a preflight run is over its limit ``now`` (s after the run's start) and to be ended."""
        preflight = self._preflight
        if preflight is None or now <= preflight.limit:
            return False
        self._late.set()
        return True

    # --- what follows -------------------------------------------------------------------------------------

    def __call__(self, end: GenerationEnd) -> Continue | Halt:
        """Return what follows ``end``."""
        self._record_end(end)
        failure, preflight = self._why(end), self.in_preflight
        self._learn(end, failure)
        decision = self._decide(end, failure)
        self._saved = max(self._saved, end.saved_step)
        self._recorder.ended(end, self._described(failure), decision.reason, preflight=preflight)
        taken = failure is None or failure.failure_class is FailureClass.SCHEDULER  # which other events say
        if failure is not None and not taken and failure.line not in decision.reason:
            self._recorder.notify("failure", f"{failure}", node=failure.node)
        if decision.reason:
            self._recorder.notify("decision", decision.reason)
        return decision

    def _learn(self, end: GenerationEnd, failure: Failure | None) -> None:
        """Let the checkpoints' interval follow the losses seen so far."""
        self._node_seconds += len(end.placement) * (end.ended - end.started)
        self._losses += failure is not None and failure.failure_class is FailureClass.SCHEDULER
        gone = {str(event.content.get("node")) for event in end.events if event.kind in _GONE}
        self._losses += len(gone - end.placement.keys())  # while the others trained on
        rate = self._plan.hazard(self._losses, self._node_seconds)
        self._settings = replace(self._settings, interruption_rate=rate)

    def _record_end(self, end: GenerationEnd) -> None:
        for event in end.events:
            if event.kind == "node-notice":
                self.noticed(str(event.content.get("node", "")))
        gone = [name for name in end.placement if name not in end.left]
        if end.kind == "unformed":
            self._nodes.give_up(gone)
        self._nodes.remove(gone)
        self._nodes.adopt({name: slots for name, slots in end.left.items() if name not in self._noticed})

    def _decide(self, end: GenerationEnd, failure: Failure | None) -> Continue | Halt:
        if end.kind == "silent":
            return Halt("failed", NO_ELASTIC_RUN)
        if end.kind == "unprepared":
            return Halt("failed", end.reason)
        if end.kind == "finished":
            return Halt("finished", end.reason)
        if self._preflight is not None:
            return self._after_preflight(end, failure)
        if failure is None:
            return self._continue(end, "")
        attempt = self._attempt(end, failure)
        self._history.append(attempt)
        answer = self._plan.retries.decide(self._history, self._current_shape(), self._rng)
        if isinstance(answer, Stop):
            return Halt("failed", answer.reason)
        if isinstance(answer, Requeue):
            return self._continue(end, answer.reason)
        return self._retry(end, answer)

    def _retry(self, end: GenerationEnd, answer: Retry) -> Continue | Halt:
        if answer.shape is not None:
            self._shape = answer.shape
            self._settings = replace(self._settings, max_local=answer.shape.local_batch)
        self._nodes.replace_nodes(answer.exclude)
        return self._continue(end, answer.reason, answer.after)

    def _continue(self, end: GenerationEnd, reason: str, delay: float = 0.0) -> Continue | Halt:
        """Continue with all nodes: at once with those that are ready, if they are enough, until the others are."""
        placement = self.wanted()
        if placement is None:
            return Halt("waiting", f"{reason or 'too few nodes'}; {self._nodes.slots} GPUs are left")
        ready = {name: slots for name, slots in placement.items() if end.left.get(name) == slots}
        if ready != placement and self._nodes.enough(ready) and not delay:
            return Continue(ready, reason=reason, then=placement, settings=self._settings)
        return Continue(placement, reason=reason, delay=delay, settings=self._settings)

    # --- the preflight ---------------------------------------------------------------------------------------

    def _preflight_order(self) -> tuple[dict[str, int], RunSettings]:
        assert self._preflight is not None
        placement = self._nodes.preflight(self._preflight.ranks, self._preflight.nodes)
        return placement, replace(self._settings, preflight_steps=self._preflight.steps)

    def _after_preflight(self, end: GenerationEnd, failure: Failure | None) -> Continue | Halt:
        if (
            failure is not None
            and failure.failure_class is FailureClass.SCHEDULER
            and not self._late.is_set()
        ):
            return self._again(f"{failure.reason} during the preflight run")
        if failure is not None and failure.failure_class is FailureClass.RESOURCE:
            return self._smaller_preflight(end, failure)
        steps = max(end.last_step - max(end.first_step, 0), 0)
        if failure is not None and failure.failure_class is FailureClass.SCHEDULER:
            failure = None  # it was we who stopped it
        said = verdict(failure, steps, self._late.is_set(), self._repeated)
        if said.outcome == "repeat":
            self._repeated = True
            self._nodes.replace_nodes(end.suspects or end.placement)
            return self._again(f"preflight: {said.reason}")
        self._preflight, self.tried = None, end.generation
        if not said.admitted:
            return Halt("failed", f"preflight: {said.reason}")
        reason = f"preflight: {said.outcome}, {said.reason}"
        if self._plan.sync == "auto":
            chosen = sync_of(end, self._settings, self.wanted() or self._nodes.there())
            self._settings = replace(self._settings, sync=chosen.sync, weighs_sync=False)
            reason = f"{reason}; {chosen.reason}"
        return self._continue(replace(end, left={}), reason)

    def _smaller_preflight(self, end: GenerationEnd, failure: Failure) -> Continue | Halt:
        """Try again in another shape where that may help; the whole run keeps it."""
        self._history.append(self._attempt(end, failure))
        answer = self._plan.retries.decide(self._history, self._current_shape(), self._rng)
        if not isinstance(answer, Retry) or answer.shape is None:
            return Halt("failed", f"preflight: {answer.reason}")
        self._shape = answer.shape
        self._settings = replace(self._settings, max_local=answer.shape.local_batch)
        return self._again(f"preflight: {answer.reason}")

    def _again(self, reason: str) -> Continue | Halt:
        placement, settings = self._preflight_order()
        if not placement:
            return Halt("waiting", reason)
        return Continue(placement, reason=reason, settings=settings)

    # --- why it ended -------------------------------------------------------------------------------------

    def _why(self, end: GenerationEnd) -> Failure | None:
        if end.kind in ("finished", "preflight", "silent", "unprepared"):
            return None
        if end.kind == "stopped" and all(node in end.left for node in end.placement):
            return None  # somebody asked for it
        return classify(_ends(end), self._plan.table, self._events(end))

    def _events(self, end: GenerationEnd) -> list[FailureEvent]:
        gone = [name for name in end.placement if name not in end.left]
        if end.kind == "hung" and end.suspects and all(node in gone for node in end.suspects):
            return [FailureEvent("node-lost", node, end.reason) for node in end.suspects]  # it was paused
        if end.kind == "hung":
            return [FailureEvent("hang", node, end.reason) for node in end.suspects or [""]]
        if end.kind == "unformed":
            return [FailureEvent("unformed", node, end.reason) for node in end.suspects or gone or [""]]
        if end.kind not in ("lost", "stopped"):
            return []
        noticed_lost = [node for node in gone if node in self._noticed]
        if noticed_lost:
            return [FailureEvent("spot-notice", node, end.reason) for node in noticed_lost]
        return [FailureEvent("node-lost", node, end.reason) for node in gone]

    def _attempt(self, end: GenerationEnd, failure: Failure) -> Attempt:
        held = sum(end.placement.values()) * (end.ended - end.started)
        first, last = max(end.first_step, 0), max(end.last_step, 0)
        kept = max(min(end.saved_step, last) - first, 0) if end.first_step >= 0 else 0
        useful, progressed = (
            held * kept / max(last - first, 1),
            end.saved_step > max(self._saved, end.first_step),
        )
        if (
            self._settings.own_checkpoints
        ):  # what is saved is not known: the steps that it printed, or its time
            progressed = end.idle == 0
            useful = held if progressed else 0.0
        return Attempt(
            failure,
            frozenset(end.placement),
            held,
            useful,
            progressed,
            self._clock.now(),
            frozenset(end.suspects),
        )

    def _current_shape(self) -> Shape:
        """Return the shape that failed: what was requested, or what the run chose."""
        local = self._shape.local_batch or self._recorder.local_batch
        return replace(self._shape, local_batch=local, accumulation=self._recorder.accumulation)

    def _described(self, failure: Failure | None) -> FailureReport | None:
        if failure is None:
            return None
        return FailureReport(
            failure.reason,
            failure.failure_class.value,
            failure.signature,
            failure.line,
            failure.rank,
            failure.node,
            failure.advice,
        )


def _ends(end: GenerationEnd) -> list[RankEnd]:
    own = [f for f in end.failures if f.exit_code != SURVIVOR]
    return [_rank_end(f) for f in own or end.failures]


def _rank_end(failure: RankFailure) -> RankEnd:
    code = failure.exit_code if failure.exit_code is not None else 1
    rank = -1 if failure.rank is None else failure.rank
    return RankEnd(rank, code or 1, f"{failure.error}\n{failure.log}", failure.node, failure.time)


def sync_of(end: GenerationEnd, settings: RunSettings, placement: Mapping[str, int]) -> SyncDecision:
    """Return where gradients meet after a preflight run.

    Args:
        end: of the preflight run.
        settings: of the run.
        placement: slots of each node that the run will have.
    """
    found = [dict(event.content) for event in end.events if event.kind == SYNC_COSTS]
    if not found:
        return SyncDecision("allreduce", "all-reduce: the preflight run measured no costs")
    costs = found[-1]
    if obstacle := costs.get("obstacle"):
        return SyncDecision("allreduce", f"all-reduce: {obstacle}")
    statistics = costs["statistics"]
    assert isinstance(statistics, dict)
    step, steps = float(statistics["step_seconds"]), int(statistics["step"])
    known = SyncCosts(
        parameter_bytes=int(str(costs["parameter_bytes"])),
        sum_s=float(str(costs["sum_s"])),
        update_s=float(str(costs["update_s"])),
        step_s=step,
        sync_s=min(float(statistics["sync_seconds"]), step),
        measured_world=int(statistics["gpus"]),
        world=max(sum(placement.values()), 1),
        nodes=max(len(placement), 1),
        interruption_rate=settings.interruption_rate,
        restart_s=max(end.ended - end.started - steps * step, 0.0),
        in_place=settings.in_place,
        aggregators=settings.aggregators,
        mirrors=settings.mirrors,
    )
    return choose_sync(known)
