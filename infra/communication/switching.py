"""What a training submits its collectives through: plain ones or a plan's, changed on all ranks at one boundary."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ebbflow.infra.communication.all_to_all import Submit
from ebbflow.infra.communication.enforcer import Enforcer
from ebbflow.infra.communication.payloads import Payload, Summed
from ebbflow.infra.communication.profiler import IterationProfiler
from ebbflow.planners.communication.commit import PLAIN, Decision, Participant, Prepare, Vote, agreed
from ebbflow.planners.communication.dag import Kind

log = logging.getLogger(__name__)

Report = Callable[[dict[str, object]], None]
"""Takes what became of planned communication on this rank: ``state`` (``plan`` or ``ddp``) and more."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """What ranks have agreed on at the end of an iteration."""

    version: int
    changed: bool
    waited: float  # s, mean over ranks, that pieces waited for the planned order
    seconds: float  # that the iteration took on this rank


class PlanSwitch:
    """One rank's way to the channels. Plain collectives until all ranks may run a plan.

    A boundary is an agreement that the training makes anyway: ``votes`` are added to what is summed over ranks, and
    ``settle`` takes their sums. A plan that fails on one rank ends on all: what was under way becomes not a number,
    so that all ranks drop that step, and the next one is plain.

    Args:
        rank: of this process.
        ranks: of the training.
        plain: how collectives run without a plan.
        profiler: told of each submission.
        report: called in the training's thread when another version takes over.
        clock: s.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        plain: Submit,
        profiler: IterationProfiler,
        report: Report,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._rank, self._ranks, self._plain = rank, ranks, plain
        self._profiler, self._report, self._clock = profiler, report, clock
        self._lock = threading.Lock()
        self._participant = Participant(rank)
        self._enforcers: dict[int, Enforcer] = {}  # by version: prepared, running or not closed yet
        self._current: Enforcer | None = None
        self._ended_at = clock()
        self.version = PLAIN
        self.iteration = 0  # that is under way, counted from 0
        self.failure = ""  # why this rank runs no plan any more
        self.returned = False  # whether plain collectives took over from a plan

    # --- collectives ------------------------------------------------------------------------------------------

    def submit(self, op: str, payload: Payload) -> "torch.futures.Future[Payload]":
        """Take a collective; its future never fails because of a plan."""
        self._profiler.submitted(op, payload)
        enforcer = self._current
        if enforcer is None:
            return self._plain(op, payload)
        try:
            return enforcer.submit(op, payload).then(self._received(payload))
        except Exception as error:
            enforcer.fail(error)
            self.fail(str(error))
            _spoil(payload)
            future: torch.futures.Future[Payload] = torch.futures.Future()
            future.set_result(payload)
            return future

    def _received(self, payload: Payload) -> "Callable[[torch.futures.Future[Payload]], Payload]":
        def received(future: "torch.futures.Future[Payload]") -> Payload:
            try:
                done: Payload = future.value()
                return done
            except Exception as error:
                self.fail(str(error))
                _spoil(payload)
                return payload

        return received

    def fail(self, reason: str) -> None:
        """Run no plan any more from the next boundary on; the first reason counts."""
        with self._lock:
            self._participant.forget_all()
            if not self.failure:
                self.failure = (reason.splitlines() or ["unknown"])[0][:300] or "unknown"
                log.warning("planned communication ends: %s", self.failure)

    # --- plans, from the control plane's thread -------------------------------------------------------------------

    def prepare(
        self, asked: Prepare, enforcer: Enforcer, collectives: Mapping[str, tuple[Kind, float]]
    ) -> Vote:
        """Answer whether this rank can run a plan; the enforcer is kept for it if so, and closed if not.

        Args:
            asked: the coordinator's question.
            enforcer: of the plan.
            collectives: what this rank submits in an iteration: name -> kind and bytes.
        """
        problem = self.failure or enforcer.plan.problem(self._ranks, collectives)
        with self._lock:
            vote = self._participant.prepare(asked, self.iteration, problem)
            if vote.yes:
                self._enforcers[asked.version] = enforcer
        if not vote.yes:
            enforcer.close(1.0)
        return vote

    def decide(self, decision: Decision) -> None:
        """Take what the coordinator has decided."""
        with self._lock:
            self._participant.decide(decision)
            dropped = None if decision.commit else self._enforcers.pop(decision.version, None)
        if dropped is not None:
            dropped.close(1.0)

    # --- boundaries, in the training's thread ---------------------------------------------------------------------

    def votes(self) -> list[float]:
        """Return this rank's part of the sums of a boundary: the version it may run next, and how long it waited."""
        with self._lock:
            newest = self._participant.newest(self.iteration + 1)
        waited = self._current.waited() if self._current is not None else 0.0
        return [float(newest) if rank == self._rank else 0.0 for rank in range(self._ranks)] + [waited]

    @property
    def width(self) -> int:
        """Return how many numbers ``votes`` are."""
        return self._ranks + 1

    def settle(self, summed: Sequence[float]) -> Boundary:
        """End an iteration: run from now on what all ranks may run. ``summed`` are the votes of all ranks."""
        version = agreed(round(one) for one in summed[: self._ranks])
        now = self._clock()
        seconds, self._ended_at = now - self._ended_at, now
        self.iteration += 1
        changed = version != self.version
        if changed:
            self._change(version)
        return Boundary(version, changed, summed[self._ranks] / self._ranks, seconds)

    def _change(self, version: int) -> None:
        before, self._current = self._current, None
        if before is not None and not self.failure:
            try:
                before.drain()
            except Exception as error:
                self.fail(str(error))
        with self._lock:
            self._current = self._enforcers.get(version)
            old = [v for v in self._enforcers if v < version]
            closed = [self._enforcers.pop(v) for v in old]
            self._participant.settle(version)
        self.version = version
        self._profiler.forget()
        if closed:  # their threads end by themselves
            threading.Thread(target=_close_all, args=(closed,), daemon=True).start()
        if self._current is not None:
            plan = self._current.plan
            self._report(
                {
                    "state": "plan",
                    "version": version,
                    "seconds": plan.seconds,
                    "plain_seconds": plan.plain_seconds,
                }
            )
        else:
            self.returned = True

    def close(self) -> None:
        """End all enforcers within a second."""
        with self._lock:
            closed = list(self._enforcers.values())
            self._enforcers.clear()
        _close_all(closed, 1.0)


def _close_all(enforcers: Sequence[Enforcer], timeout: float = 60.0) -> None:
    for one in enforcers:
        try:
            one.close(timeout)
        except Exception as error:
            log.debug("a plan that has ended: %s", error)


def _spoil(payload: Payload) -> None:
    """Make what a failed collective leaves something that no rank takes for a result; integers become 0."""
    tensor = payload.tensor if isinstance(payload, Summed) else payload.received
    tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
