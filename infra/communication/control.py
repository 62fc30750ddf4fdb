"""The control plane of planned communication: a thread on each rank, which training never waits for.

Ranks meet in the store that their process group has. In round ``n`` each publishes its profile; the first rank merges
them, and in the first round all measure their channels; a process of its own searches a plan; two-phase commit makes
it version ``n`` (``planners.communication.commit``). Another round follows where ranks wait too long for the planned
order. Whatever goes wrong ends planning in this generation, with plain collectives and a reason.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch.distributed as dist

from ebbflow.infra.communication.channels import Channels
from ebbflow.infra.communication.enforcer import Enforcer
from ebbflow.infra.communication.measuring import Sweep, measure, sizes_for
from ebbflow.infra.communication.profiler import IterationProfiler
from ebbflow.infra.communication.searching import BackgroundSearch, SearchAnswer, SearchRequest
from ebbflow.infra.communication.switching import Boundary, PlanSwitch, Report
from ebbflow.planners.communication.commit import (
    PLAIN,
    Coordinator,
    Decision,
    Prepare,
    ReplanRule,
    ReplanWatch,
    Vote,
)
from ebbflow.planners.communication.measured import MeasuredLinks
from ebbflow.planners.communication.plan import CommunicationPlan
from ebbflow.planners.communication.planning import choices_of
from ebbflow.planners.communication.recorded import RankProfile, RecordedTraining, merge_profiles
from ebbflow.planners.errors import OptionError

MOST_BARS = 400  # of a timeline that is reported
POLL = 0.1  # s between two looks at the store
UNEXPLAINED = (
    5.0  # s after which a return to plain collectives is reported without the reason of the rank that asked
)
PREFIX = "ebbflow/communication"

log = logging.getLogger(__name__)

Steps = Generator[None, None, None]


@dataclass(frozen=True, slots=True)
class PlanningSettings:
    """How a training's communication is planned. Raises ``OptionError`` for a value that breaks its rule.

    Args:
        channels: process groups that carry pieces side by side.
        measure_seconds: bound of the measurement of the channels, s.
        search_seconds: bound of the search, s.
        vote_timeout: s in which all ranks must accept a plan.
        min_gain: predicted share of the iteration that a plan must save to be used; below 0: any plan is.
        max_slowdown: share by which measured iterations may be longer than plain ones before the plan is dropped.
        max_rounds: plans of a generation.
        seed: of the search.
    """

    channels: int = 2
    measure_seconds: float = 3.0
    search_seconds: float = 5.0
    vote_timeout: float = 20.0
    min_gain: float = 0.01
    max_slowdown: float = 0.05
    max_rounds: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.channels <= 8 or self.max_rounds < 1 or self.seed < 0:
            raise OptionError(
                "planned communication needs channels from 1 to 8, max_rounds >= 1 and seed >= 0; got "
                f"{self.channels}, {self.max_rounds} and {self.seed}"
            )
        for name in ("measure_seconds", "search_seconds", "vote_timeout"):
            if not 0 < getattr(self, name) < float("inf"):
                raise OptionError(f"{name} must be > 0 and finite, s; got {getattr(self, name)}")
        if not self.min_gain < 1 or not self.max_slowdown >= 0:
            raise OptionError(
                f"min_gain must be < 1 and max_slowdown >= 0; got {self.min_gain} and {self.max_slowdown}"
            )


def sweep_of(recorded: RecordedTraining, settings: PlanningSettings) -> Sweep:
    """Return what is measured for a training: the same on all ranks."""
    sizes, choices = {}, {}
    for kind in sorted({op.kind for op in recorded.dag.comm}):
        payloads = [op.bytes for op in recorded.dag.comm if op.kind == kind]
        sizes[kind] = sizes_for(payloads)
        choices[kind] = choices_of(kind, recorded.ranks, settings.channels, max(payloads))
    return Sweep(sizes, choices, settings.measure_seconds)


class ControlPlane:
    """The thread of one rank.

    Args:
        store: of the process group; a connection of its own is made where the store can.
        rank: of this process.
        switch: told of plans and decisions.
        profiler: whose profile is published.
        channels: that are measured and planned for.
        settings: of planning.
        report: called in the first rank's thread with what became of planning.
        stall_timeout: s after which pieces that wait for others fail.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        switch: PlanSwitch,
        profiler: IterationProfiler,
        channels: Channels,
        settings: PlanningSettings,
        report: Report,
        *,
        stall_timeout: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        with suppress(RuntimeError):  # a store of the user's own class may have no clone
            store = store.clone()  # else a wait of this thread would keep others from the store
        self._store = dist.PrefixStore(PREFIX, store)
        self._rank, self._ranks = rank, channels.ranks
        self._switch, self._profiler, self._channels = switch, profiler, channels
        self._settings, self._report, self._stall = settings, report, stall_timeout
        self._clock = clock
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._links: MeasuredLinks | None = None
        self._search: BackgroundSearch | None = None
        self._watch = ReplanWatch(ReplanRule())
        self._replan = ""  # why a plan should be searched again
        self._reported = False  # that plain collectives are back

    def start(self) -> None:
        """Begin to plan."""
        self._thread = threading.Thread(target=self._run, name="ebbflow-communication", daemon=True)
        self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """End within ``timeout`` seconds. May be called twice."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def observe(self, boundary: Boundary) -> None:
        """Take in an iteration, in the training's thread."""
        if boundary.changed:
            self._watch.changed()
        if boundary.version != PLAIN:
            self._replan = (
                self._watch.observe(boundary.waited, boundary.seconds, self._clock()) or self._replan
            )

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        parts = [self._participate(), self._announce()]
        if self._rank == 0:
            parts += [self._coordinate(), self._explain()]
        try:
            while not self._ended.is_set() and parts:
                for part in list(parts):
                    try:
                        next(part)
                    except StopIteration:
                        parts.remove(part)
                self._ended.wait(POLL)
        except Exception as error:
            if not self._ended.is_set():
                self._fail(str(error))
        finally:
            if self._search is not None:
                self._search.cancel()

    def _fail(self, reason: str) -> None:
        self._switch.fail(reason)
        with suppress(Exception):  # the store may be what has failed
            self._put("failed", {"rank": self._rank, "reason": self._switch.failure})
        if self._rank == 0:
            self._tell_plain(self._switch.failure)

    def _tell_plain(self, reason: str) -> None:
        if not self._reported:
            self._reported = True
            self._report({"state": "ddp", "reason": reason})

    def _announce(self) -> Steps:
        """Tell the others why this rank runs no plan any more, once there is a reason."""
        while not self._switch.failure:
            yield
        self._put("failed", {"rank": self._rank, "reason": self._switch.failure})

    def _explain(self) -> Steps:
        """Report why plain collectives run, whichever rank has asked for them."""
        since: float | None = None
        while not self._reported:
            if self._store.check(["failed"]):
                said = self._get("failed")
                reason = f"rank {said['rank']}: {said['reason']}"
                self._switch.fail(reason)
                self._tell_plain(reason)
            elif self._switch.returned:
                since = self._clock() if since is None else since
                if self._clock() - since > UNEXPLAINED:
                    self._tell_plain("a rank has ended the plan without a reason")
            yield

    # --- each rank ------------------------------------------------------------------------------------------------

    def _participate(self) -> Steps:
        for n in range(1, self._settings.max_rounds + 1):
            if n > 1:
                yield from self._until(f"round/{n}")
            while not self._profiler.ready:
                yield
            profile = self._profiler.profile(self._rank, self._ranks)
            self._store.set(f"profile/{n}/{self._rank}", profile.to_json())
            if n == 1:
                yield from self._until("recorded")
                recorded = RecordedTraining.from_json(self._store.get("recorded").decode())
                self._links = measure(self._channels, sweep_of(recorded, self._settings))
            yield from self._until(f"outcome/{n}")
            outcome = self._get(f"outcome/{n}")
            if "plan" not in outcome:
                return
            self._put(f"vote/{n}/{self._rank}", asdict(self._vote(n, outcome, profile)))
            yield from self._until(f"decision/{n}")
            self._switch.decide(Decision(**self._get(f"decision/{n}")))

    def _vote(self, version: int, outcome: dict[str, Any], profile: RankProfile) -> Vote:
        asked = Prepare(version, str(outcome["digest"]))
        try:
            plan = CommunicationPlan.from_json(str(outcome["plan"]))
            if plan.digest != asked.digest or plan.version != version:
                return Vote(version, self._rank, False, self._switch.iteration, "the plan is damaged")
            enforcer = Enforcer(plan, self._channels, stall_timeout=self._stall)
        except (OptionError, RuntimeError) as error:
            return Vote(version, self._rank, False, self._switch.iteration, str(error)[:300])
        collectives = {one.op: (one.kind, one.bytes) for one in profile.iteration.submissions}
        return self._switch.prepare(asked, enforcer, collectives)

    # --- the first rank -------------------------------------------------------------------------------------------

    def _coordinate(self) -> Steps:
        plain = 0.0
        for n in range(1, self._settings.max_rounds + 1):
            names = [f"profile/{n}/{rank}" for rank in range(self._ranks)]
            while not self._store.check(names):
                yield
            recorded = merge_profiles(RankProfile.from_json(self._store.get(name).decode()) for name in names)
            if n == 1:
                plain = recorded.seconds
                self._store.set("recorded", recorded.to_json())
            while self._links is None:
                yield
            if n == 1:
                self._report(
                    {"state": "profiled", "training": recorded.to_json(), "links": self._links.to_json()}
                )
            self._search = BackgroundSearch(
                SearchRequest(recorded, self._links, n, self._settings.search_seconds, self._settings.seed)
            )
            while (answer := self._search.poll()) is None:
                yield
            self._search = None
            if answer.gain < self._settings.min_gain:
                self._put(f"outcome/{n}", {})
                if n == 1:
                    self._tell_plain(
                        f"the best plan saves {answer.gain:.1%} of the iteration by prediction, less than "
                        f"{self._settings.min_gain:.1%}"
                    )
                return
            self._put(f"outcome/{n}", {"plan": answer.plan.to_json(), "digest": answer.plan.digest})
            decision = yield from self._decide(n, answer)
            self._put(f"decision/{n}", asdict(decision))
            if not decision.commit:
                if n == 1:
                    self._tell_plain(f"the plan was not committed: {decision.reason}")
                return
            self._tell_plan(recorded, answer, decision)
            yield from self._supervise(n, plain)
            self._put(f"round/{n + 1}", {"reason": self._replan})
            self._replan = ""

    def _decide(self, version: int, answer: SearchAnswer) -> Generator[None, None, Decision]:
        coordinator = Coordinator(
            version,
            answer.plan.digest,
            frozenset(range(self._ranks)),
            self._clock() + self._settings.vote_timeout,
        )
        heard: set[int] = set()
        while True:
            for rank in range(self._ranks):
                if rank not in heard and self._store.check([f"vote/{version}/{rank}"]):
                    heard.add(rank)
                    coordinator.vote(Vote(**self._get(f"vote/{version}/{rank}")))
            if (decision := coordinator.tick(self._clock())) is not None:
                return decision
            yield

    def _tell_plan(self, recorded: RecordedTraining, answer: SearchAnswer, decision: Decision) -> None:
        self._report(
            {
                "state": "committed",
                "version": answer.plan.version,
                "activate_at": decision.activate_at,
                "seconds": answer.plan.seconds,
                "plain_seconds": answer.plan.plain_seconds,
                "measured_seconds": recorded.seconds,
                "choices": {name: one.choice.name for name, one in answer.plan.collectives.items()},
                "training": recorded.to_json(),
                "links": self._links.to_json() if self._links is not None else "",
                "bars": {name: _readable(bars) for name, bars in answer.bars.items()},
            }
        )

    def _supervise(self, version: int, plain: float) -> Steps:
        """Return when a plan should be searched again; drop one whose iterations are longer than plain ones."""
        while self._switch.version != version:
            yield
        while not self._profiler.ready:
            yield
        planned = median(self._profiler.seconds)
        if planned > plain * (1 + self._settings.max_slowdown):
            self._fail(
                f"iterations take {planned * 1e3:.3g} ms with the plan, {plain * 1e3:.3g} ms without, more than "
                f"{self._settings.max_slowdown:.0%} longer"
            )
        self._replan = ""
        while not self._replan or version >= self._settings.max_rounds or self._switch.failure:
            yield

    # --- the store ------------------------------------------------------------------------------------------------

    def _until(self, name: str) -> Steps:
        while not self._store.check([name]):
            yield

    def _get(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._store.get(name).decode())
        return found

    def _put(self, name: str, value: dict[str, Any]) -> None:
        self._store.set(name, json.dumps(value))


def _readable(bars: list[list[Any]]) -> list[list[Any]]:
    """Return the longest bars of a timeline, to the microsecond."""
    kept = sorted(bars, key=lambda bar: bar[2] - bar[3])[:MOST_BARS]
    return sorted([lane, name, round(start, 6), round(end, 6)] for lane, name, start, end in kept)
