"""One query from its candidate plans to its result: everything that is decided on the way, and nothing done.

Whoever runs the query tells what happens and carries out the actions that come back, in order, before it tells of the
next event.
"""

import math
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ebbflow.planners.memory.tiers import Tier
from ebbflow.planners.model import Capacity, Measured, Share
from ebbflow.planners.query.costs.output_tiers import tier_changed
from ebbflow.planners.query.plan.qep import QueryExecutionPlan, Stage, Statement
from ebbflow.planners.query.plan.state import ReplanDecision, StageOutput
from ebbflow.planners.query.planner import QueryPlanner
from ebbflow.planners.query.running.baselines import policy_named
from ebbflow.planners.query.running.execution import Cancel, Execution, Finish, Reuse, Start
from ebbflow.planners.query.running.progress import repriced
from ebbflow.planners.query.running.replanner import Replanner, Risk
from ebbflow.planners.query.running.speed import RunCosts, RunSpeed, deviates, with_rows

MAX_PARALLEL_STAGES = 4
_SLICES_LEFT = 8  # into which a stage is divided of which an earlier run has left slices
_MAX_FAILURES = 3  # of one stage; only those that another run may mend are repeated at all
_CANCELLING = 1.0  # seconds after which cancelled tasks have left their cores

FailureKind = Literal["cancelled", "broadcast", "statement", "other"]  # of a broadcast: it did not fit


@dataclass(frozen=True, slots=True)
class StageFailure:
    """How a run of a stage failed, as far as decisions depend on it."""

    kind: FailureKind
    message: str = ""
    lost: frozenset[str] = frozenset()  # fingerprints of what it has read that is not whole any more
    gone: frozenset[str] = frozenset()  # those of them that have not been computed again since
    held: frozenset[str] = frozenset()  # output_fps of stages to start that read those and have not begun
    moved: bool = False  # capacity has changed since the run began


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision was made. For reports; there is nothing to do."""

    decision: ReplanDecision


@dataclass(frozen=True, slots=True)
class Notify:
    """Tell people."""

    text: str


Action = Start | Cancel | Reuse | Finish | Decided | Notify


class Session:
    """Plans one query, and plans it anew when capacity or sizes turn out differently.

    Plans are made anew, with rates fitted to this run, at every change of capacity and after a stage whose rows
    were not as estimated, unless the policy never re-plans.

    Args:
        planner: of the query, with costs before any history; from now on it belongs to this session.
        share: to make the first candidates for.
        policy: by which plans are chosen; "single" runs the query as one statement.
        hysteresis: fraction by which another plan must be sooner.
        fraction: of the cluster that the query may count on.
        history: stages of earlier runs at this place, which the planner's costs are fitted to.
        versions: of the base tables, by name.
        execution: over the planner's candidates; made unless given.

    Raises:
        PlanningError: the query cannot be planned.
        OptionError: there is no such policy.
    """

    def __init__(
        self,
        planner: QueryPlanner,
        share: Share,
        policy: str = "qoop",
        *,
        hysteresis: float = 0.15,
        fraction: float = 1.0,
        history: Sequence[Measured] = (),
        versions: Mapping[str, str] | None = None,
        execution: Execution | None = None,
    ) -> None:
        self.planner = planner
        self.share = share  # the newest that was told
        self._capacity: Capacity | None = None  # likewise
        self._speed = RunSpeed()
        self.measured: list[Measured] = []  # stages that this run has computed
        self.plans: dict[str, QueryExecutionPlan] = {}  # all that were considered, by id, as first made
        self._policy = policy
        self._hysteresis = hysteresis
        self._fraction = fraction
        self._costs = RunCosts(planner, history)
        self._versions = {name.lower(): version for name, version in (versions or {}).items()}
        self._first = share  # what the first stages' estimates assumed
        self._divided: dict[str, tuple[str, int]] = {}  # by output_fp: how stages begun here are divided
        self._fractions: dict[str, float] = {}  # by output_fp: the most of a stage that has existed in slices
        self._failures: Counter[str] = Counter()  # by output_fp
        self._unfit: set[str] = set()  # physical keys of stages whose broadcasts do not fit
        self._sources: dict[str, dict[str, str]] = {}  # output_fp -> versions of all tables below it
        self._volatile: set[str] = set()  # by output_fp
        self._unrendered: deque[Statement] = deque()
        self._reported = 0  # decisions already passed on
        self._surprises: list[str] = []  # outputs from which plans are to be made
        self._planning = 0.0  # seconds that the newest candidates took
        self._enumerated = False  # and were made since the last decision that was told of
        self.execution = execution or self._execution()
        self._learn(self.execution.candidates)

    # --- what is known ------------------------------------------------------------------------------------

    @property
    def plan(self) -> QueryExecutionPlan:
        """Return the current plan."""
        return self.execution.plan

    @property
    def fingerprints(self) -> frozenset[str]:
        """Return the fingerprints of all stages, and of the partial results that plans may have."""
        return frozenset(self._sources) | frozenset(self.planner.partial_fps)

    def sources(self, output_fp: str) -> Mapping[str, str]:
        """Return the versions of all tables that a stage is computed from."""
        return self._sources[output_fp]

    def fallback(self, stage: Stage) -> bool:
        """Tell whether a stage must be run without broadcasts."""
        return stage.physical_key in self._unfit

    def render(self) -> bool:
        """Render one more of the statements that only a report shows; return whether there was one left.

        It takes milliseconds: for whoever has nothing else to do.
        """
        if not self._unrendered:
            return False
        getattr(self._unrendered.popleft(), "duckdb" if self.planner.model.embedded else "spark")
        return True

    # --- what happens -------------------------------------------------------------------------------------

    def divide_as_before(self, grids: Mapping[str, str]) -> None:
        """Keep to the divisions of which earlier runs have left slices: grids' names by output fingerprint.

        Only before ``begin``.
        """
        self.planner.keep_divided({fp: (name, _SLICES_LEFT) for fp, name in grids.items()})
        self.plans.clear()
        self._unrendered.clear()
        self.execution = self._execution()
        self._learn(self.execution.candidates)

    def see(self, capacity: Capacity) -> Share:
        """Take ``capacity`` as the present one and return the query's share of it."""
        if self._capacity is not None:
            self._lose(self._capacity.lost(capacity))
        self._capacity = capacity
        self.share = Share.of(capacity, self._fraction)
        return self.share

    def _lose(self, fraction: float) -> None:
        """Count what nodes have taken along of running stages whose tasks exchange rows: these are on the nodes'
        disks, while slices and what native tasks write is in the store."""
        for stage in self.execution.running if fraction > 0.0 else ():
            if stage.slicing is None:
                self.execution.on_loss(stage.output_fp, fraction)

    def begin(
        self, found: Mapping[str, StageOutput], now: float, sliced: Mapping[str, float] | None = None
    ) -> list[Action]:
        """Begin on the present share.

        Args:
            found: what earlier runs have finished, by output fingerprint.
            now: s since the Unix epoch, here and below.
            sliced: fractions of stages that they have left in slices.
        """
        self._speed.seen(self.share, now)
        for fp, fraction in (sliced or {}).items():
            self.execution.on_slices(fp, fraction)
        return self._answer(self.execution.begin(self.share, found, now))

    def on_capacity(self, change: str, now: float) -> list[Action]:
        """Plan anew for the present share; ``change`` says for people what has happened."""
        self._speed.seen(self.share, now)
        plans = self._anew(now)
        return self._answer(self.execution.on_share(self.share, now, change, plans or None))

    def on_tier(self, tier: Tier | None, now: float) -> list[Action]:
        """Plan anew where stage outputs are kept elsewhere from now on, or take a multiple of the time there.

        Args:
            tier: as measured; ``None``: the planner's rates hold all that it takes.
            now: s since the Unix epoch.
        """
        before, self.planner.tier = self.planner.tier, tier
        if not tier_changed(before, tier):
            return []
        self._refresh(now)
        plans = self._anew(now)
        trigger = f"stage outputs are kept in {tier.name if tier is not None else 'the store'}"
        return self._answer(self.execution.on_candidates(plans, now, trigger)) if plans else []

    def on_finished(
        self,
        stage: Stage,
        output: StageOutput,
        now: float,
        *,
        late: bool = False,
        measured: Measured | None = None,
        more: bool = False,
    ) -> list[Action]:
        """Continue from a finished stage, with other plans where its rows were not as estimated.

        ``late`` is as in ``Execution.on_finished``; ``measured`` are the figures of a stage that was computed as a
        whole. ``more``: other finished stages are told of next, and what follows from all of them is decided then.
        """
        surprising = deviates(stage, output.rows)
        if surprising:
            self._surprises.append(f"{stage.name}: {output.rows:,} rows, {stage.rows:,.0f} expected")
        if measured is not None and not self._misjudged(stage.inputs):
            if measured.engine == self._costs.of(stage).engine and not surprising:
                self._speed.finished(stage, measured)
            self.measured.append(with_rows(measured, stage, output.rows))
        self._refresh(now, measured.task_seconds if measured is not None else 0.0)
        # what can start now starts in the form that fits its input: a stage of one task may have millions of rows
        anew = bool(self._surprises) and self.execution.policy.replans and self.share.total.cores > 0
        actions = list[Action](self.execution.on_finished(output, now, late=late, starts=not (anew or more)))
        if not more:
            trigger, self._surprises = "; ".join(self._surprises), []
            if anew and not self.execution.finished:
                actions += self.execution.on_candidates(self._anew(now, worthwhile=True), now, trigger)
        return self._answer(actions)

    def planned(self, seconds: float) -> None:
        """Note how long it took to come to the newest decision."""
        if self._enumerated:
            self._planning, self._enumerated = seconds, False

    def remedy(self, stage: Stage, failure: StageFailure) -> str:
        """Tell what another run would do about a failure, as a sentence's end; empty if it would fail too."""
        if failure.kind == "cancelled":
            return "was cancelled from outside; running it again"
        if failure.lost:  # what is volatile would be another when computed again, and others may have read it
            return "" if self._volatile & failure.lost else "has lost what it reads, which is computed again"
        if failure.kind == "broadcast" and self._hinted(stage):
            return "has a broadcast that did not fit; running it again with shuffled joins"
        if failure.kind in ("broadcast", "statement") and failure.moved:
            return f"failed while capacity changed; trying again ({failure.message})"
        return ""

    def on_failed(self, stage: Stage, failure: StageFailure, now: float) -> list[Action] | None:
        """Run a failed stage again, with what it has lost; ``None``: another run would not mend it."""
        fp = stage.output_fp
        remedy = self.remedy(stage, failure)
        self._failures[fp] += 1
        if failure.kind == "broadcast" and not failure.lost and self._hinted(stage):
            self._unfit.add(stage.physical_key)
        if not remedy or self._failures[fp] >= _MAX_FAILURES:
            return None
        again = [a for one in (fp, *failure.held) for a in self.execution.on_failed(one, now, failure.gone)]
        return self._answer([Notify(f"{stage.name} {remedy}"), *again])

    def on_progress(
        self, stage: Stage, total: int, done: int, running: int | None, now: float, *, native: bool = False
    ) -> None:
        """Note the engine's task counts of a running stage; ``native``: of DuckDB's tasks, whatever was planned."""
        if total:
            # Spark's adaptive execution submits a statement bit by bit: what it counts now is not all there will be.
            # Native tasks are not those that Spark SQL would have.
            submitted = 0 if native else math.ceil(stage.work.tasks)
            total = max(total, submitted, done + 1)
            self.execution.on_progress(stage.output_fp, total, done, now, running, native=native)

    def on_slices(self, output_fp: str, fraction: float) -> None:
        """Note that ``fraction`` of a running stage exists in slices."""
        if fraction > self._fractions.get(output_fp, 0.0):
            self._fractions[output_fp] = fraction
            self._failures[output_fp] = 0  # a run that gets on is not one that cannot be mended
        self.execution.on_slices(output_fp, fraction)

    # --- planning -----------------------------------------------------------------------------------------

    def _execution(self) -> Execution:
        plans = candidates(self.planner, self._policy, self._first)
        replanner = Replanner(plans, self._hysteresis)
        return Execution(plans, None, self._policy, replanner, MAX_PARALLEL_STAGES)

    def _anew(self, now: float, *, worthwhile: bool = False) -> Sequence[QueryExecutionPlan]:
        """Return candidates for the present share from actual sizes, the current plan among them, with rates
        fitted to this run; none for a policy that never re-plans or a share without cores.

        ``worthwhile``: the current plan alone where no other could be sooner by more than the risk's margin.
        """
        if not self.execution.policy.replans:
            return ()
        self.planner.keep_divided(self._divided)
        self._costs.fit(self.measured, self._speed.comparable)
        self._costs.slow(self._drift(now))
        if self.share.total.cores <= 0:
            return ()
        # what a stage waits beside its tasks is known no better than other times: neither are times as short
        margin = self._planning + self._speed.error * self._costs.latency
        self.execution.doubt(Risk(self._speed.error, _CANCELLING, margin))
        known = self.execution.checkpoints
        plans: Sequence[QueryExecutionPlan] = ()
        if worthwhile:
            again = self.planner.again(self.plan.id, self.share, known)
            left = self.execution.expected(now, again)
            joins = any(r.stage.joins for r in left.remaining.stages)
            seconds = left.estimate.seconds - self._costs.latency  # which any plan needs
            if seconds <= margin or (not joins and math.isfinite(seconds)):
                plans = (again,)
        if not plans:
            plans = self.planner.candidates(self.share, known, also=(self.plan.id,), contrasts=not worthwhile)
            self._enumerated = True
        self._learn(plans)
        return plans

    def _misjudged(self, inputs: Collection[str]) -> bool:
        """Tell whether the current plan expects other rows than there are of what a stage has read."""
        plan, known = self.plan.by_fp, self.execution.checkpoints
        return any(fp in plan and fp in known and deviates(plan[fp], known[fp].rows) for fp in inputs)

    def _drift(self, now: float) -> float:
        """Return how many times slower than by the planner's costs the stages run that run now.

        Their estimates are as old as the last planning, and count how slow things were then already.
        """
        running = [
            repriced(r, self._costs.of(r.stage).core_seconds(r.stage.work) + r.stage.waiting)
            for r in self.execution.state(now).running.values()
        ]
        return self._speed.drift(running, now)

    def cold_since(self, since: float) -> float:
        """Return how many cores at most were cold at a time from ``since`` (s) on."""
        return self._speed.cold_since(since)

    def _refresh(self, now: float, task_seconds: float = 0.0) -> None:
        """Count with what has become of the newest share's cores: some have come, and tasks have warmed them."""
        arrival = self._speed.arrival(now)
        absent = self.share.absent if arrival > 0.0 else 0.0
        self.share = replace(self.share.after(task_seconds), absent=absent, arrival=arrival)
        self._speed.warmed(self.share, now)
        self.execution.refresh(self.share)

    def _learn(self, plans: Sequence[QueryExecutionPlan]) -> None:
        """Remember new plans, and which versions of which tables their stages are computed from."""
        for plan in plans:
            if plan.id not in self.plans:
                self.plans[plan.id] = plan
                self._unrendered.extend(stage.statement for stage in plan.stages)
            for stage in plan.stages:
                names = [t.lower() for t in stage.tables]
                sources = {t: self._versions[t] for t in names if t in self._versions}
                for fp in stage.inputs:
                    sources |= self._sources[fp]
                self._sources[stage.output_fp] = sources
                if stage.volatile:
                    self._volatile.add(stage.output_fp)

    def _hinted(self, stage: Stage) -> bool:
        """Tell whether the stage has broadcasts that can be left out."""
        return not self.fallback(stage) and stage.statement.spark != stage.statement.fallback

    def _answer(self, actions: Collection[Action]) -> list[Action]:
        """Return the decisions made meanwhile, then ``actions``."""
        for action in actions:
            if isinstance(action, Start) and action.stage.slicing is not None:
                slicing = action.stage.slicing
                self._divided[action.stage.output_fp] = (slicing.grid.name, slicing.slices)
        made = self.execution.decisions[self._reported :]
        self._reported += len(made)
        return [*(Decided(decision) for decision in made), *actions]


def candidates(planner: QueryPlanner, policy: str, share: Share) -> tuple[QueryExecutionPlan, ...]:
    """Return the plans that ``policy`` chooses among at first: for other capacities only if it never makes more."""
    once = not policy_named(policy).replans
    return (planner.single(share),) if policy == "single" else planner.candidates(share, contrasts=once)


def planning_share(capacity: Capacity, fraction: float = 1.0) -> Share:
    """Return the share to plan for; without any node yet, that of one small node."""
    share = Share.of(capacity, fraction)
    small = Share.uniform(1.0, 1.0, 1, revision=share.revision, hazard=share.hazard)
    return share if share.total.cores > 0 else small
