"""Keeps account of a run while it continues: what processes and launcher say becomes a report."""

import logging
import math
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ebbflow.infra.clock import Clock
from ebbflow.infra.logs.json_lines import log_ids
from ebbflow.infra.protocols import GenerationEnd, TrainingEvent, TrainingStatus
from ebbflow.infra.training.process.channel import Report
from ebbflow.tasks.apps.aggregators import AggregationReport, private_report
from ebbflow.tasks.training.listening import TrainingListener, event_text
from ebbflow.tasks.training.report import (
    CapacityPoint,
    CommunicationBar,
    EventReport,
    FailureReport,
    GenerationReport,
    GoodputForecast,
    MetricReport,
    NodeShare,
    PlannedExchange,
    PointReport,
    RecoveryReport,
    SavingReport,
    SpilledCheckpoint,
    TrainingReport,
    goodput_forecast,
)
from ebbflow.tasks.training.request import TrainingRequest

log = logging.getLogger(__name__)

MOST_EXCHANGES = 10  # plans that are kept, the latest
MOST_POINTS = 4000  # of a series; beyond it every other one is dropped


def exchange(at: float, step: int, said: Mapping[str, Any]) -> PlannedExchange:
    """Return the plan that a process reports as committed. Raises ``TypeError``, ``ValueError`` or ``KeyError``."""
    bars = {
        key: tuple(CommunicationBar(str(a), str(b), float(c), float(d)) for a, b, c, d in some)
        for key, some in said["bars"].items()
    }
    return PlannedExchange(
        at,
        step,
        int(said["version"]),
        float(said["seconds"]),
        float(said["plain_seconds"]),
        float(said["measured_seconds"]),
        {str(name): str(choice) for name, choice in said["choices"].items()},
        bars.get("plain", ()),
        bars.get("plan", ()),
    )


class RunRecorder:
    """The account of one run. Safe for several threads; listeners are called in whichever speaks."""

    def __init__(self, request: TrainingRequest, clock: Clock, listener: TrainingListener) -> None:
        self._request, self._clock, self._listener = request, clock, listener
        self._lock = threading.RLock()
        self.started = clock.now()
        self._points: list[PointReport] = []
        self._every, self._skip = 1, 0
        self._metrics: list[MetricReport] = []
        self._events: list[EventReport] = []
        self._exchanges: list[PlannedExchange] = []
        self._generations: list[GenerationReport] = []
        self._capacity: list[CapacityPoint] = []
        self._last_step_at: float | None = None
        self._gap: float | None = None  # before the first step of the generation that runs
        self._waiting = True  # for a generation's first step
        self._checkpoints = 0
        self._stall = 0.0
        self._forecast: GoodputForecast | None = None
        self._resumed: int | None = None
        self._first = 0  # step that this launcher's first generation began with
        self._reached = -1  # step that earlier launchers had reached
        self._saved = -1
        self._spilled: SpilledCheckpoint | None = None
        self._unusable: list[str] = []
        self._saving: SavingReport | None = None
        self._recovery: RecoveryReport | None = None
        self._changes = 0  # of nodes in place
        self._aggregation: AggregationReport | None = None
        self._read = 0  # number of the last event taken in
        self.local_batch: int | None = None  # examples of a GPU in a pass, as last reported
        self.accumulation = 0
        self.step = -1

    @property
    def now(self) -> float:
        return self._clock.now() - self.started

    # --- what is told to it -------------------------------------------------------------------------------

    def record_report(self, report: Report) -> None:
        """Take in what a process reports."""
        at = report.time - self.started
        with self._lock:
            self.step = max(self.step, report.step)
            content = report.content
            if report.kind == "step":
                self._point(at, report.step, content)
                if "job" in content and (found := goodput_forecast(at, content["job"])) is not None:
                    self._forecast = found
                    self._listener.forecast(found)
            elif report.kind == "metrics":
                values, epoch = dict(content.get("metrics", {})), int(content.get("epoch", 0))
                self._metrics += [MetricReport(at, report.step, epoch, k, v) for k, v in values.items()]
                self._listener.metrics(report.step, epoch, values)
            elif report.kind == "checkpoint" and "error" not in content:
                self._checkpoints += 1
                self._stall += float(content.get("stalled", 0.0))
                self._is_saved(int(content.get("saved_step", report.step)))
                if "interval" in content:
                    self._saving = SavingReport(float(content["interval"]), str(content["hazard"]))
            elif report.kind == "started":
                self._begun(report.step, content)
            elif report.kind == "members":
                self._recovery = _recovery(self._request, {"recovery": "in-place", **content})
            elif report.kind == "spilled":
                self._spilled = SpilledCheckpoint(report.step, str(content["uri"]), str(content["host"]))
            elif report.kind == "damaged":
                self._unusable += [text for text in content["checkpoints"] if text not in self._unusable]
                self._reached = max(self._reached, int(content["reached"]))
                if content["restarted"]:
                    self._saved = -1
            elif report.kind == "communication":
                if content.get("state") == "committed":
                    self._exchanges = [
                        *self._exchanges[1 - MOST_EXCHANGES :],
                        exchange(at, report.step, content),
                    ]
            elif report.kind in ("stopped", "finished"):
                self._moved(at)
                if content.get("saved"):
                    self._is_saved(report.step)

    def _is_saved(self, step: int) -> None:
        self._saved = max(self._saved, step)
        if self._spilled is not None and self._spilled.step <= step:
            self._spilled = None

    def _begun(self, step: int, content: Mapping[str, Any]) -> None:
        self._lose(step)
        if self._request.own_checkpoints and self._generations:
            self._compare_start(step)
        if all(g.preflight for g in self._generations):
            self._first = step
        if content.get("restored") is not None:
            self._is_saved(step)
        if self._resumed is None:
            self._resumed = step if content.get("restored") is not None else -1
        self._recovery = _recovery(self._request, content)
        if "batch" in content:
            self._split(int(content["batch"]), int(content["passes"]), int(content["world"]))

    def _compare_start(self, step: int) -> None:
        """Write down where a script with own checkpoints has resumed, by the first step that it printed."""
        before = next((g for g in reversed(self._generations) if g.last_step >= 0), None)
        if before is None:
            return
        if step <= self._first < before.last_step:
            text = (
                f"the script restarted from scratch: its first step is {step} again, {before.last_step - step} steps "
                "are done twice; it must restore its newest checkpoint when it starts"
            )
        else:
            text = f"the script continues at step {step}; its output had reached step {before.last_step}"
        self.notify("continued", text)

    def _split(self, batch: int, passes: int, gpus: int) -> None:
        self.local_batch = -(-batch // max(gpus * passes, 1)) or None
        self.accumulation = passes - 1

    def _point(self, at: float, step: int, content: Mapping[str, Any]) -> None:
        known = {name: content[name] for name in _METRICS if name in content}
        spent = {"lost_steps": self.lost_steps(), "dollars": self.money()}
        point = PointReport(at=at, step=step, **{**known, "loss": _finite(known.get("loss"))}, **spent)
        self._split(point.batch, point.passes, point.gpus)
        self._moved(at)
        self._skip = (self._skip + 1) % self._every
        if self._skip == 0:
            self._points.append(point)
            if len(self._points) > MOST_POINTS:
                del self._points[1::2]
                self._every *= 2
        self._listener.point(point)

    def _moved(self, at: float) -> None:
        """Take note that steps are done."""
        if self._waiting:
            self._waiting = False
            self._gap = at - self._last_step_at if self._last_step_at is not None else None
        self._last_step_at = at

    def tick(self) -> None:
        """Let the listener do what takes longer."""
        self._listener.tick()

    def capacity(self, rented: int, used: int) -> None:
        """Take note of how many GPUs there are from now on; those that leave are there while they are used."""
        rented = max(rented, used)
        with self._lock:
            if not self._capacity or (self._capacity[-1].rented, self._capacity[-1].used) != (rented, used):
                self._capacity.append(CapacityPoint(self.now, rented, used))

    def event(self, event: TrainingEvent) -> None:
        """Take in what the launcher reports."""
        with self._lock:
            if event.number <= self._read:
                return
            self._read = event.number
            if event.kind == "resumed":
                self._reached = max(self._reached, int(event.content.get("reached", -1)))  # type: ignore[call-overload]
            self._changes += event.kind in ("worker-lost", "worker-joins")
        if text := event_text(event):
            node = str(event.content.get("node", ""))
            self.notify(event.kind, text, node=node, at=event.time - self.started)

    def notify(self, kind: str, text: str, *, node: str = "", at: float | None = None) -> None:
        """Write an event down and pass it on."""
        found = EventReport(self.now if at is None else at, kind, text, node)
        with log_ids(run=self._request.run_id):
            log.info("%s: %s", kind, text)
        with self._lock:
            self._events.append(found)
        self._listener.event(found)

    def ended(
        self, end: GenerationEnd, failure: FailureReport | None, decision: str, *, preflight: bool = False
    ) -> None:
        """Take in the end of a generation, a preflight's or the run's own, and what followed."""
        with self._lock:
            placement = tuple(NodeShare(name, slots) for name, slots in end.placement.items())
            self._lose(end.first_step)
            found = private_report(end.aggregators, self._request.aggregators)
            self._aggregation = found or self._aggregation
            self._generations.append(
                GenerationReport(
                    number=end.generation,
                    placement=placement,
                    started=end.started - self.started,
                    ended=end.ended - self.started,
                    kind=end.kind,
                    reason=end.reason,
                    first_step=end.first_step,
                    last_step=end.last_step,
                    saved_step=end.saved_step,
                    gap_seconds=None if self._waiting else self._gap,
                    failure=failure,
                    decision=decision,
                    preflight=preflight,
                    gpu_seconds=end.slot_seconds,
                )
            )
            self._waiting, self._gap = True, None

    def _lose(self, first: int) -> None:
        """Count the steps that the last generation that made any lost; a preflight run's do not count."""
        for at in range(len(self._generations) - 1, -1, -1):
            before = self._generations[at]
            if first >= 0 and before.first_step >= 0 and not before.preflight:
                self._generations[at] = replace(
                    before, lost_steps=max(before.last_step - first, before.lost_steps)
                )
                return

    def close(self, end: GenerationEnd) -> None:
        """Record the last generation where no decision follows it: it finished, or was stopped."""
        with self._lock:
            known = any(g.number == end.generation for g in self._generations)
        if not known:
            self.ended(end, None, "")

    # --- what it makes of it ------------------------------------------------------------------------------

    @property
    def last(self) -> PointReport | None:
        with self._lock:
            return self._points[-1] if self._points else None

    def money(self) -> float:
        """Return dollars for the nodes so far."""
        with self._lock:
            return self._area(lambda point: point.rented) / 3600 * self._request.price

    def lost_steps(self) -> int:
        """Return the steps done twice so far, those included that earlier launchers had done."""
        with self._lock:
            before = max(self._reached - self._first, 0)
            return before + sum(g.lost_steps for g in self._generations)

    def report(self, status: TrainingStatus) -> TrainingReport:
        """Return the account so far."""
        request = self._request
        with self._lock:
            state = status.state if status.state in ("finished", "stopped") else "failed"
            last = self._points[-1] if self._points else None
            steps = max([status.step, self.step, *(g.last_step for g in self._generations)])
            rented = self._area(lambda point: point.rented)
            return TrainingReport(
                id=request.run_id,
                script=request.script,
                directory=request.run_directory,
                started=self.started,
                seconds=self.now,
                state=state,  # type: ignore[arg-type]
                reason=self._reason(status.reason, state, max(steps, 0)),
                arguments=request.arguments,
                title=request.name,
                steps=max(steps, 0),
                epoch=max([m.epoch for m in self._metrics] + [last.epoch if last else 0]),
                resumed_from=self._resumed if self._resumed is not None and self._resumed >= 0 else None,
                lost_steps=self.lost_steps(),
                own_checkpoints=request.own_checkpoints,
                saved_step=self._saved if self._saved >= 0 else None,
                spilled=self._spilled,
                unusable=tuple(self._unusable),
                exchanges=tuple(self._exchanges),
                aggregation=self._aggregation,
                skipped_steps=last.skipped if last else 0,
                checkpoints=self._checkpoints,
                stall_seconds=self._stall,
                saving=self._saving,
                recovery=self._recovery and replace(self._recovery, changes=self._changes),
                gpu_seconds=sum(g.gpu_seconds for g in self._generations),
                rented_gpu_seconds=rented,
                price=request.price,
                dollars=rented / 3600 * request.price,
                goodput_forecast=self._forecast,
                generations=tuple(self._generations),
                series=tuple(self._points),
                metrics=tuple(self._metrics),
                capacity=tuple(self._capacity),
                events=tuple(sorted(self._events, key=lambda event: event.at)),
            )

    def _reason(self, reason: str, state: str, steps: int) -> str:
        """Return why a run ended, with what is not where it should be."""
        if state == "finished":
            return reason
        if self._spilled is not None:
            return f"{reason}; {self._spilled}, from where the run restores it when it is resumed there"
        if state == "stopped" and 0 <= self._saved < steps and not self._request.own_checkpoints:
            return f"{reason}; steps {self._saved + 1} to {steps} are not saved"
        return reason

    def _area(self, of: Any) -> float:
        """Return GPU-seconds of the capacity so far."""
        ends = [point.at for point in self._capacity[1:]] + [self.now]
        return float(
            sum(of(point) * (end - point.at) for point, end in zip(self._capacity, ends, strict=False))
        )


_METRICS = frozenset(PointReport.__dataclass_fields__) - {"at", "step", "lost_steps", "dollars"}


def _recovery(request: TrainingRequest, said: Mapping[str, Any]) -> RecoveryReport:
    """Return what becomes of processes when nodes change, by what they have said and what is known of the request."""
    if request.own_checkpoints:
        return RecoveryReport("restart", "the script has checkpoints of its own")
    if request.pool and request.recovery == "auto":
        return RecoveryReport("restart", "its nodes are of the fleet")
    if fixed := said.get("fixed"):
        return RecoveryReport("restart", str(fixed))
    reason = str(said.get("why") or "each process has the whole model")
    if first := said.get("first"):
        reason += f"; without its first process it restarts, for {first}"
    return RecoveryReport("in-place" if said.get("recovery") == "in-place" else "restart", reason)


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
