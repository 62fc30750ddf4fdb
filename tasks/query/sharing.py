"""A query's share of a cluster that several queries use: followed, held to, and told to whoever plans on it."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import StorageError
from ebbflow.infra.protocols import CapacitySource, Claim, ShareHandle, ShareRegistry, StageProgress
from ebbflow.planners.model import Capacity, Portion
from ebbflow.planners.query.plan.qep import Stage
from ebbflow.planners.query.plan.state import ReplanDecision
from ebbflow.planners.query.running.execution import Execution
from ebbflow.planners.query.shares import entitlements, whole_cores
from ebbflow.tasks.query.listening import NullQueryListener
from ebbflow.tasks.query.report import StageReport

TURN = 60.0  # seconds after which cores that do not divide go to the next query
_STEADY = (
    10.0  # seconds for which a query must have been unable to use cores before others get them: about what
)
# it takes to end an executor here and to start one there


def divide(
    claims: Sequence[Claim], mine: Claim, cores: int, *, unit: int = 1, whole: bool = True, turn: int = 0
) -> tuple[Portion, float]:
    """Return what ``mine`` may count on of ``cores``, and what it should hold now.

    It may count on its weighted share and on what others leave; what it leaves itself is held by them, and is
    its own again as soon as it can use it (QOOP 2.4: the share told to a query is a guarantee, not the present
    allocation). With ``whole`` both are multiples of ``unit`` cores; ``turn`` moves what does not divide from one
    query to the next in the order of their arrival. Of more queries than units the first to come have one each
    and the others wait: without any executor a query loses its shuffle files, so taking turns would be work for
    nothing.
    """
    others = [c for c in claims if c.id != mine.id]
    present = [*claims] if len(others) < len(claims) else [*claims, mine]
    first = turn % len(present) if len(present) <= cores // unit else 0
    present = present[first:] + present[:first]
    weights = {c.id: c.weight for c in present}
    limits = {c.id: math.ceil(c.limit / unit) * unit for c in others if c.limit < math.inf}

    def given(limits: dict[str, int]) -> tuple[float, float]:
        shares = entitlements(weights, float(cores), limits)
        if not whole:
            return shares[mine.id], shares[mine.id]
        units = whole_cores({q: share / unit for q, share in shares.items()}, cores // unit)
        return shares[mine.id], float(units[mine.id] * unit)

    entitled, counted = given(limits)
    if mine.limit == math.inf:
        return Portion(counted, entitled, len(present)), counted
    possible, held = given(limits | {mine.id: math.ceil(mine.limit / unit) * unit})
    # rounding may favour others in one of the two; what it holds it may count on
    counted = max(counted, held) if possible < entitled else held
    return Portion(counted, entitled, len(present)), held


class SharedCapacity:
    """A ``CapacitySource`` that adds the query's portion to another's capacity, and holds the engine to it.

    ``capacity`` looks at both, the nodes and the queries, so that an arrival or a departure is a change of
    capacity like any other, with a revision of its own. ``hold`` is called with the cores that the query should
    hold, ``None`` while it is alone, at every look: at once, before anybody plans on the change.
    ``fraction`` of the cluster is the most it takes.
    """

    def __init__(
        self,
        source: CapacitySource,
        registry: ShareRegistry,
        clock: Clock,
        *,
        weight: float = 1.0,
        fraction: float = 1.0,
        unit: int = 1,
        whole: bool = True,
        application: str = "",
        hold: Callable[[float | None], None] = lambda cores: None,
        allied: Callable[[frozenset[str]], None] = lambda applications: None,
    ) -> None:
        self.source = source
        self._registry = registry
        self._clock = clock
        self._fraction = fraction
        self._unit = unit
        self._whole = whole
        self._hold = hold
        self._allied = allied
        self._demands: deque[tuple[float, float]] = deque()  # (when, cores), of the last seconds
        self._handle: ShareHandle = registry.join(weight, application=application)
        self._claims: Sequence[Claim] = (self._handle.claim,)
        self._last: Capacity | None = None

    def capacity(self) -> Capacity:
        """Look now. A registry that does not answer leaves the queries last seen."""
        now = self._clock.now()
        with suppress(StorageError):
            self._claims = self._registry.claims()
        self._allied(frozenset(c.application for c in self._claims if c.application))
        seen = self.source.capacity()
        most = self._fraction * seen.cores if self._fraction < 1.0 else math.inf
        self._handle.limit(min(most, self._demand(now)))
        mine = self._handle.claim
        if most == math.inf and all(c.id == mine.id for c in self._claims):
            portion, held = None, None
        else:
            turn = int(now // TURN)
            portion, held = divide(
                self._claims, mine, seen.cores, unit=self._unit, whole=self._whole, turn=turn
            )
            if portion.cores > most:
                portion = replace(portion, cores=most)
        self._hold(held)
        found = replace(seen, portion=portion)
        if self._last is not None:
            changed = not found.same_nodes(self._last)
            found = replace(found, revision=max(seen.revision, self._last.revision + changed))
        self._last = found
        return found

    def want(self, cores: float) -> None:
        """Say how many cores the query could use now; it gives up others only after some seconds, since Spark
        tells of the next tasks of a statement only when those before them are done."""
        self._demands.append((self._clock.now(), cores))

    def leave(self) -> None:
        """Give the share up. An engine that stays open keeps its cores only if nobody else is there."""
        self._handle.leave()
        mine = self._handle.claim.id
        self._hold(0.0 if any(c.id != mine for c in self._claims) else None)

    def _demand(self, now: float) -> float:
        """Return the most cores asked for within the last seconds."""
        demands = self._demands
        while len(demands) > 1 and demands[1][0] <= now - _STEADY:
            demands.popleft()  # the newest that is older still held when the period began
        return max((cores for _, cores in tuple(demands)), default=math.inf)


class Demand(NullQueryListener):
    """Tells ``want`` how many cores a query can use: the tasks that are left of what its plan still needs.

    What has not finished a task yet may still turn out to have any number of them: there is no limit then.
    """

    def __init__(self, execution: Execution, want: Callable[[float], None]) -> None:
        self._execution = execution
        self._want = want
        self._progress: dict[str, StageProgress] = {}

    def stage_started(self, stage: Stage) -> None:
        self._progress.pop(stage.output_fp, None)
        self._tell()

    def stage_progress(self, stage: Stage, progress: StageProgress) -> None:
        self._progress[stage.output_fp] = progress
        self._tell()

    def stage_ended(self, stage: Stage, report: StageReport) -> None:
        self._tell()

    def decided(self, decision: ReplanDecision) -> None:
        self._tell()

    def _tell(self) -> None:
        plan, done = self._execution.plan, self._execution.checkpoints
        stages = {s.output_fp: s for s in plan.stages}
        needed, stack = set[str](), [plan.sink.output_fp]
        while stack:
            fp = stack.pop()
            if fp not in needed and fp not in done:
                needed.add(fp)
                stack.extend(stages[fp].inputs)
        self._want(max(1.0, sum(self._left(stages[fp]) for fp in needed)))

    def _left(self, stage: Stage) -> float:
        seen = self._progress.get(stage.output_fp)
        if seen is None or not seen.tasks_done:
            return math.inf
        return max(
            float(seen.tasks_running), max(math.ceil(stage.work.tasks), seen.tasks_total) - seen.tasks_done
        )
