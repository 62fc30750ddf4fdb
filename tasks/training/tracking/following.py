"""Follows a training for its trackers: what is reported becomes a record in its directory, which others pass on."""

import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import EbbflowError
from ebbflow.infra.storage import checksums
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.tracking.record import TrackingRecord
from ebbflow.infra.training.tracking.sender import Sender
from ebbflow.infra.training.tracking.targets import TrackTarget
from ebbflow.infra.training.tracking.trackers import TrackedRun, common_name
from ebbflow.tasks.training.listening import NullTrainingListener
from ebbflow.tasks.training.recorder import RunRecorder
from ebbflow.tasks.training.report import EventReport, PointReport, TrainingReport
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.training.supervisor import Supervisor
from ebbflow.tasks.training.tracking.describing import lineage_tags, model_tags, params_of

AWAIT_ID = 10.0  # seconds that a new run waits for its MLflow run, which its script may log to
SETTLE = 20.0  # seconds for trackers to get the rest when the run has ended
ASK_EVERY = 10.0  # seconds between two looks at what auctions say
SHIP_EVERY = 5.0  # seconds between two writes of the record to S3
_FIGURES = {
    "loss": "loss",
    "epoch": "epoch",
    "learning_rate": "learning_rate",
    "batch": "batch_size",
    "gpus": "world_size",
    "nodes": "ebbflow/nodes",
    "goodput": "ebbflow/goodput",
    "throughput": "ebbflow/throughput",
    "noise_scale": "ebbflow/noise_scale",
    "step_seconds": "ebbflow/step_seconds",
    "skipped": "ebbflow/skipped_steps",
}  # of a point -> metric
_LOST = ("node-lost", "worker-lost", "node-notice")


class Tracking(NullTrainingListener):
    """The trackers of one launcher. A listener; safe for several threads.

    Counts go on where earlier launchers of the run have left them. Raises ``StorageError`` where the record cannot be
    begun, ``EngineUnavailableError``, ``OptionError``.
    """

    def __init__(self, request: TrainingRequest, clock: Clock, lineage: Mapping[str, Any]) -> None:
        targets = [TrackTarget.parse(text) for text in request.track]
        self._request, self._clock = request, clock
        self._record = TrackingRecord(request.place, request.run_id)
        self._lock = threading.Lock()
        said = self._record.said
        self._dollars = said.values.get("ebbflow/dollars", 0.0)  # of earlier launchers
        self._lost = said.values.get("ebbflow/lost_nodes", 0.0)
        self._seconds_lost = said.values.get("ebbflow/seconds_lost", 0.0)
        self._starts = said.values["ebbflow/restarts"] + 1 if "ebbflow/restarts" in said.values else 0.0
        self._interrupted = said.step >= 0  # whether the next new step is the first after an interruption
        self._gone: dict[str, float] = {}  # nodes that are counted as lost, and the generation
        self._rho: float | None = None
        self._fairness: Callable[[], float | None] | None = None
        self._ask_at = 0.0
        self._notes: deque[str] = deque(maxlen=100)
        self._started = clock.now()
        self._told = ""
        self._trial: Callable[[], bool] = lambda: False
        self._notify: Callable[[str], None] = lambda _: None
        tags = {"ebbflow.run": request.run_id, "ebbflow.directory": request.run_directory}
        tags |= {"ebbflow.launcher": socket.gethostname(), "ebbflow.name": request.name}
        tags |= {"ebbflow.script": request.script, **_digest(request), **lineage_tags(lineage)}
        self._record.add("text", params=params_of(request), tags={k: v for k, v in tags.items() if v})
        self._senders = list[Sender]()
        self._stop = threading.Event()
        self._shipper = threading.Thread(target=self._ship, daemon=True, name="tracking-record")
        try:
            self._record.ship()  # its key is kept before a tracker knows it
            for target in targets:
                self._senders.append(Sender(target, self._run(target), self._record, self._notes.append))
        except BaseException:
            self.close()
            raise
        if not request.place.local:
            self._shipper.start()

    def _run(self, target: TrackTarget) -> TrackedRun:
        said, request = self._record.said, self._request
        return TrackedRun(
            request.run_id,
            request.name or request.run_id,
            said.key,
            said.ids.get(str(target), ""),
            request.run_directory,
        )

    def variables(self) -> dict[str, str]:
        """Return the environment in which a script's own ``mlflow`` logs to the run.

        It waits ``AWAIT_ID`` seconds at most, and not at all for a run that is known or where MLflow has a problem.
        """
        end = self._clock.now() + AWAIT_ID
        for sender in self._senders:
            left = max(end - self._clock.now(), 0.0)
            if sender.target.kind == "mlflow" and (id := sender.await_id(left)):
                place = {"MLFLOW_TRACKING_URI": sender.target.place} if sender.target.place else {}
                return place | {"MLFLOW_RUN_ID": id, "MLFLOW_EXPERIMENT_NAME": sender.target.experiment}
        return {}

    def attach(
        self, recorder: RunRecorder, supervisor: Supervisor, fairness: Callable[[], float | None] | None
    ) -> None:
        """Follow the account of the run, know its trial steps, which count for nothing, and ask for its fairness."""
        self._fairness = fairness
        self._notify = partial(recorder.notify, "tracking")
        self._trial = lambda: supervisor.in_preflight

    # --- what it hears --------------------------------------------------------------------------------------

    def point(self, point: PointReport) -> None:
        if self._trial():
            return
        found = {name: getattr(point, field) for field, name in _FIGURES.items()}
        if point.tokens:
            found["ebbflow/goodput_tokens"] = point.goodput * point.tokens
            found["ebbflow/throughput_tokens"] = point.throughput * point.tokens
        if self._request.own_checkpoints:
            found = {"loss": point.loss}
        if not point.loss and point.loss != 0:
            found.pop("loss")
        with self._lock:
            now = self._started + point.at
            self._moved(point.step, now)
            found |= self._counts(point.dollars)
            self._record.values(point.step, now, found)

    def metrics(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        if self._trial():
            return
        with self._lock:
            now = self._clock.now()
            self._moved(step, now)
            self._record.values(step, now, {common_name(k): v for k, v in values.items()})

    def _moved(self, step: int, now: float) -> None:
        """Count the time since the last step where this is the first new one after an interruption."""
        if self._interrupted and step > self._record.said.step:
            self._seconds_lost += max(0.0, now - self._record.said.time)
            self._interrupted = False

    def event(self, event: EventReport) -> None:
        if self._trial():
            return
        with self._lock:
            if event.kind == "generation":
                self._starts += 1
                self._interrupted = self._record.said.step >= 0
            elif event.kind in _LOST:
                if self._starts - self._gone.get(event.node, -2.0) > 1:  # not what its notice has said before
                    self._lost += 1
                self._gone[event.node] = self._starts

    def tick(self) -> None:
        """Say what there is to say of trackers, in the thread that runs the training."""
        if self._fairness is not None and (now := self._clock.now()) >= self._ask_at:
            self._ask_at = now + ASK_EVERY
            self._rho = self._fairness()
        while self._notes:
            self._notify(self._notes.popleft())
        if self._record.problem and self._record.problem != self._told:
            self._told = self._record.problem
            self._notify(f"values are not recorded for trackers: {self._told}")

    def _counts(self, dollars: float) -> dict[str, float]:
        found = {
            "ebbflow/restarts": max(self._starts - 1, 0.0),
            "ebbflow/lost_nodes": self._lost,
            "ebbflow/seconds_lost": self._seconds_lost,
            "ebbflow/dollars": self._dollars + dollars,
        }
        return found if self._rho is None else found | {"ebbflow/rho": self._rho}

    # --- the end --------------------------------------------------------------------------------------------

    def finish(self, report: TrainingReport) -> None:
        """Record how the run ended, and let trackers get the rest within ``SETTLE`` seconds."""
        tags = {"ebbflow.state": report.state, "ebbflow.reason": report.reason}
        try:
            tags |= model_tags(self._request, report)
        except (EbbflowError, ValueError, KeyError, TypeError, OSError) as error:
            self._notify(f"trackers do not hear of the model: {error}")
        with self._lock:
            counts = {f"{key}": f"{value:.6g}" for key, value in self._counts(report.dollars).items()}
        counts |= {"ebbflow/lost_steps": str(report.lost_steps), "ebbflow/steps": str(report.steps)}
        tags |= {key.replace("/", "."): value for key, value in counts.items()}
        self._record.add("text", params={}, tags=tags)
        end = self._clock.now() + SETTLE
        for sender in self._senders:
            sender.end(report.state)
        for sender in self._senders:
            if problem := sender.await_end(max(end - self._clock.now(), 1.0)):
                self._notes.append(
                    f"{sender.target.kind} lacks the run's last values, which the run's directory keeps: {problem}"
                )
        self.close()
        self.tick()

    def close(self) -> None:
        """End what is left. May be called twice."""
        if self._stop.is_set():
            return
        self._stop.set()
        for sender in self._senders:
            sender.kill()
        if self._shipper.is_alive():
            self._shipper.join(60.0)
        if not self._shipper.is_alive():
            self._record.close()

    def _ship(self) -> None:
        while True:
            last = self._clock.wait(self._stop, SHIP_EVERY)
            try:
                self._record.ship()
            except (EbbflowError, OSError) as error:
                self._notes.append(f"the record for trackers is not in the run's directory: {error}")
            if last:
                return


def _digest(request: TrainingRequest) -> dict[str, str]:
    """Return the checksum of the script; none where it is not here (any more)."""
    if request.workdir:
        return {}
    try:
        return {"ebbflow.script.xxh64": checksums.of_place(StorageLocation(request.script))}
    except EbbflowError:
        return {}


def check_trackers(request: TrainingRequest) -> None:
    """Raise ``EngineUnavailableError`` without a tracker's package, ``OptionError`` for one without a place."""
    for text in request.track:
        TrackTarget.parse(text).check_ready()


@contextmanager
def tracked(request: TrainingRequest, clock: Clock, lineage: Mapping[str, Any]) -> Iterator[Tracking]:
    """Follow ``request`` for the trackers that it names, until the end of the block. See ``Tracking``."""
    tracking = Tracking(request, clock, lineage)
    try:
        yield tracking
    finally:
        tracking.close()
