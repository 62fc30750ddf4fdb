"""Begins steps when what they wait for has finished, takes note of how they end, and continues with lost ones."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import StorageError
from ebbflow.infra.storage.checksums import is_same
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import EbbflowError, OptionError
from ebbflow.tasks.pipeline.file.order import hopeless, ready
from ebbflow.tasks.pipeline.file.references import Reference, fill_in
from ebbflow.tasks.pipeline.file.requests import Fill, places_of
from ebbflow.tasks.pipeline.file.spec import TABLES, Pipeline, StepSpec
from ebbflow.tasks.pipeline.interrupts import deferred
from ebbflow.tasks.pipeline.outcome import ENDED, StepOutcome, StepState
from ebbflow.tasks.pipeline.record import RunFolder, RunRecord, app_id

LOOK_EVERY = 0.2  # s
AGAIN_AFTER = 1.0  # s before a lost step is resumed, doubled each time
_MOST_DELAY = 60.0  # s

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Attempt:
    """One try at a step, handed to whoever carries it out."""

    step: StepSpec
    app: str  # its id in the ledger
    number: int  # from 1, across processes
    fill: Fill  # replaces references by the results that they stand for
    deadline: float | None  # s since the Unix epoch
    stop: threading.Event  # set: save and leave


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """How an attempt ended."""

    state: Literal["finished", "stopped", "failed", "lost"]  # lost: worth another attempt
    reason: str = ""
    results: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)  # as in ``StepRecord``


Carry = Callable[[Attempt], AttemptResult]


class Background(Protocol):
    """Puts steps into the background: plain threads, or an orchestrator's tasks."""

    def submit(self, step: StepSpec, work: Callable[[], AttemptResult], lost: Callable[[str], None]) -> None:
        """Start ``work`` soon, in a thread of its own; if it cannot begin, call ``lost`` with the reason, once.

        It never raises.
        """
        ...

    def settle(self, timeout: float) -> None:
        """Wait, bounded, until what was submitted is over."""
        ...


class PipelineListener(Protocol):
    """Hears what happens, in the coordinator's thread."""

    def began(self, outcome: StepOutcome) -> None: ...
    def ended(self, outcome: StepOutcome) -> None: ...
    def note(self, text: str) -> None: ...
    def tick(self) -> None: ...


class NullPipelineListener:
    """A listener that does nothing; others extend it."""

    def began(self, outcome: StepOutcome) -> None: ...
    def ended(self, outcome: StepOutcome) -> None: ...
    def note(self, text: str) -> None: ...
    def tick(self) -> None: ...


class Threads:
    """The plain background."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def submit(self, step: StepSpec, work: Callable[[], AttemptResult], lost: Callable[[str], None]) -> None:
        thread = threading.Thread(target=work, name=f"ebbflow-step-{step.name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the machine has no room for one more
            lost(str(error))
        else:
            self._threads.append(thread)

    def settle(self, timeout: float) -> None:
        end = time.monotonic() + timeout  # of all together
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))


class Coordinator:
    """Runs the steps of one pipeline. ``run`` is called once, from the thread that signals reach.

    Args:
        pipeline: what to run.
        record: what is known of the run; kept in ``folder`` as it continues.
        folder: of the run.
        carry: carries one attempt out, in a thread of its own, and returns how it ended.
        background: where those threads come from.
        listener: hears what happens.
        clock: the time.
        asked: set by others to let all steps save and leave.
        timeout: s that steps get to save and leave after an interrupt.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        record: RunRecord,
        folder: RunFolder,
        carry: Carry,
        *,
        background: Background,
        listener: PipelineListener,
        clock: Clock,
        asked: threading.Event | None = None,
        timeout: float = 120.0,
    ) -> None:
        self._pipeline, self._folder, self._carry = pipeline, folder, carry
        self._background, self._listener, self._clock = background, listener, clock
        self._asked, self._timeout = asked or threading.Event(), timeout
        self._inbox: queue.SimpleQueue[tuple[str, AttemptResult]] = queue.SimpleQueue()
        self._stops: dict[str, threading.Event] = {}  # of the steps that run
        self._again: dict[str, float] = {}  # lost steps -> when they are resumed
        self._lost: dict[str, int] = {}  # how often, in this process
        self._stopping = ""  # why
        self._interrupted = False
        self.record = record

    # --- what others ask --------------------------------------------------------------------------------

    def outcomes(self) -> tuple[StepOutcome, ...]:
        """Return where every step stands."""
        return tuple(self._outcome(step) for step in self._pipeline.steps.values())

    def app(self, step: str) -> str:
        """Return the id that a step has in the ledger."""
        return app_id(self.record.id, step)

    def stop(self, reason: str) -> None:
        """Ask all steps to save and leave. Safe from any thread."""
        self._stopping = self._stopping or reason
        for event in list(self._stops.values()):
            event.set()

    # --- the loop ---------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run all steps that are left; an interrupt lets them save and leave, a second one leaves at once."""
        for name, one in self.record.steps.items():
            if one.state != "finished":
                self._note(name, state="waiting", reason="", ended=None)
        self._look_at_results()
        try:
            with deferred(self._interrupt):
                while self._turn():
                    pass
        except KeyboardInterrupt:
            self._listener.note("leaving at once")
            self._rest_stopped()
            raise
        except BaseException as error:
            self._leave(f"{type(error).__name__}: {error}")
            raise

    def _look_at_results(self) -> None:
        """Let steps of an earlier process run again whose results are not what was written, or are gone, where a
        step that is left needs them."""
        left = [name for name, one in self.record.steps.items() if one.state == "waiting"]
        seen: set[str] = set()
        while left:
            for name in self._pipeline.needs[left.pop()] - seen:
                seen.add(name)
                known = self.record.steps[name]
                wrong = next(
                    (uri for uri, xxh64 in known.files.items() if not is_same(StorageLocation(uri), xxh64)),
                    None,
                )
                if known.state == "finished" and wrong is not None:
                    label = self._pipeline.steps[name].label
                    reason = f"its result {wrong} is not what was written"
                    self._note(name, state="waiting", reason=reason, ended=None)
                    self._listener.note(f"{label} runs again: {reason}")
                    left.append(name)

    def _interrupt(self) -> None:
        """Take note of an interrupt. Called between any two instructions of the loop, so it only leaves a mark."""
        self._interrupted = True

    def _turn(self) -> bool:
        """Do what is due; tell whether there is more to come."""
        if self._interrupted and not self._stopping:
            self.stop("interrupted")
            if self._stops:
                self._listener.note("interrupted: all steps save and leave; again to leave at once")
        if self._asked.is_set() and not self._stopping:
            self.stop("cancelled")
        if not self._stopping:
            self._begin()
        try:
            self._take(*self._inbox.get(timeout=LOOK_EVERY))
            while True:
                self._take(*self._inbox.get_nowait())
        except queue.Empty:
            pass
        self._listener.tick()
        if self._stops or (self._again and not self._stopping):
            return True
        if self._stopping:
            self._rest_stopped()
            return False
        return bool(self._ready())

    def _ready(self) -> list[str]:
        steps = self.record.steps
        finished = [name for name, one in steps.items() if one.state == "finished"]
        busy = [name for name, one in steps.items() if one.state in ENDED] + [*self._stops, *self._again]
        return list(ready(self._pipeline.needs, finished, busy))

    def _begin(self) -> None:
        now = self._clock.now()
        for name in [name for name, at in self._again.items() if at <= now]:
            del self._again[name]
            self._start(name)
        for name in self._ready():
            self._start(name)

    def _start(self, name: str) -> None:
        step, known = self._pipeline.steps[name], self.record.steps[name]
        number = known.attempts + 1
        stop = self._stops[name] = threading.Event()
        attempt = Attempt(step, self.app(name), number, self._fill, self._deadline(step), stop)
        self._note(name, state="running", reason="", attempts=number, began=known.began or self._clock.now())
        self._listener.began(self._outcome(step))
        self._background.submit(
            step, lambda: self._work(attempt), lambda why: self._inbox.put((name, AttemptResult("lost", why)))
        )

    def _work(self, attempt: Attempt) -> AttemptResult:
        """Carry an attempt out, in its own thread; whatever happens, the coordinator hears how it ended."""
        carried = AttemptResult("failed", "its thread ended")
        try:
            carried = self._carry(attempt)
        except EbbflowError as error:
            carried = AttemptResult("failed", str(error))
        except Exception as error:
            log.exception("step %s failed", attempt.step.name)
            carried = AttemptResult("failed", f"{type(error).__name__}: {error}")
        finally:
            self._inbox.put((attempt.step.name, carried))
        return carried

    def _take(self, name: str, carried: AttemptResult) -> None:
        del self._stops[name]
        step, now = self._pipeline.steps[name], self._clock.now()
        if carried.state == "lost" and self._stopping:
            carried = AttemptResult("stopped", carried.reason, details=carried.details)
        if carried.state == "lost":
            lost = self._lost[name] = self._lost.get(name, 0) + 1
            if lost < step.attempts:
                delay = min(AGAIN_AFTER * 2.0 ** (lost - 1), _MOST_DELAY)
                self._again[name] = now + delay
                self._note(name, state="waiting", reason=carried.reason)
                self._listener.note(f"{step.label} was lost ({carried.reason}); next attempt in {delay:g} s")
                return
            carried = AttemptResult("failed", f"lost {lost} times, the last time: {carried.reason}")
        state: StepState = carried.state  # type: ignore[assignment]
        self._note(
            name,
            state=state,
            reason=carried.reason,
            ended=now,
            results=dict(carried.results),
            details=dict(carried.details),
            files=dict(carried.files),
        )
        self._listener.ended(self._outcome(step))
        if state == "failed":
            self._skip()

    def _skip(self) -> None:
        """End the steps that wait for failed ones."""
        failed = [name for name, one in self.record.steps.items() if one.state == "failed"]
        for name, cause in hopeless(self._pipeline.needs, failed).items():
            if self.record.steps[name].state == "waiting":
                label = self._pipeline.steps[cause].label
                self._note(name, state="skipped", reason=f"{label} has failed", ended=self._clock.now())
                self._listener.ended(self._outcome(self._pipeline.steps[name]))

    # --- leaving ----------------------------------------------------------------------------------------

    def _leave(self, reason: str) -> None:
        """Let all steps save and leave, for a bounded time."""
        self.stop(reason)
        end = self._clock.now() + self._timeout
        while self._stops and self._clock.now() < end:
            try:
                self._take(*self._inbox.get(timeout=LOOK_EVERY))
            except queue.Empty:
                continue
        self._rest_stopped()

    def _rest_stopped(self) -> None:
        for name, one in self.record.steps.items():
            if one.state not in ENDED:
                self._note(name, state="stopped", reason=self._stopping, ended=self._clock.now())

    # --- what is known ----------------------------------------------------------------------------------

    def _note(self, name: str, **changes: Any) -> None:
        """Write down what became of a step; a disk that is full must not end what runs."""
        self.record = self.record.with_step(name, **changes)
        try:
            self._folder.save(self.record)
        except StorageError as error:
            log.warning("the run's record is behind: %s", error)

    def _deadline(self, step: StepSpec) -> float | None:
        return None if step.deadline is None else step.deadline.moment(self.record.began)

    def _fill(self, text: str) -> str:
        """Return ``text`` with the results that it refers to. Raises ``OptionError``."""
        return fill_in(text, self._value)

    def _value(self, reference: Reference) -> str:
        if reference.of == "run":
            place = places_of(self._pipeline, str(self._folder.path)).folder  # that all nodes reach
            own = {"id": self.record.id, "name": self._pipeline.name, "directory": place}
            return own[reference.field]
        step = self._pipeline.steps[reference.name]
        results = self.record.steps[reference.name].results
        if reference.field not in results:
            known = ", ".join(sorted(results)) or "nothing"
            raise OptionError(
                f"{reference}: {TABLES[step.kind]}.{step.name} has no {reference.field!r}; it has {known}"
            )
        return results[reference.field]

    def _outcome(self, step: StepSpec) -> StepOutcome:
        known = self.record.steps[step.name]
        return StepOutcome(
            step.name,
            step.kind,
            step.label,
            step.team,
            known.state,
            known.reason,
            self.app(step.name) if known.attempts else "",
            known.attempts,
            known.began,
            known.ended,
            self._deadline(step),
            known.results,
            known.details,
        )
