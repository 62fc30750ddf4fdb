"""The state machine of a running query: what to start, cancel and reuse, without doing any of it.

A driver (real or simulated) reports what happens and carries out the returned actions. Every method that
takes ``now`` (seconds since the Unix epoch) returns the actions to take at once, in order.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import Share
from ebbflow.planners.query.plan.qep import QueryExecutionPlan, Stage
from ebbflow.planners.query.plan.state import ExecutionState, ReplanDecision, StageOutput
from ebbflow.planners.query.running.baselines import initial, policy_named
from ebbflow.planners.query.running.packing import simulate
from ebbflow.planners.query.running.progress import Remaining, TrackedStage, propagate
from ebbflow.planners.query.running.replanner import Assessment, Replanner, Risk, check_candidates


@dataclass(frozen=True, slots=True)
class Start:
    """Run ``stage``; all its inputs are checkpointed."""

    stage: Stage


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop running ``stage``. If it finishes nonetheless, report that: the result is kept."""

    stage: Stage
    reason: str


@dataclass(frozen=True, slots=True)
class Reuse:
    """``stage`` of the current plan need not run: ``output`` exists. For reports; there is nothing to do."""

    stage: Stage
    output: StageOutput


@dataclass(frozen=True, slots=True)
class Finish:
    """The query is done: ``output`` is the sink's."""

    output: StageOutput


Action = Start | Cancel | Reuse | Finish


class Execution:
    """A query that runs stage by stage and may change its plan when capacity changes (QOOP, 4 and 5).

    Guarantees, whatever order reports come in: a stage starts only when all its inputs are checkpointed and
    only if the current plan needs it; at most ``max_parallel_stages`` (0: any number) run at once, the
    longest remaining path first; a finished output is never computed again unless it is lost; a late
    result of a cancelled stage is kept; only policy "qoop" changes plans; shares of an older revision than the
    newest seen are dropped; without usable capacity nothing new starts, and what runs is left to the engine.

    ``chosen`` is the plan to begin with; ``None`` lets the policy choose when ``begin`` is called.
    ``candidates`` become the replanner's. Raises ``OptionError`` for an unknown policy or plan.
    """

    def __init__(
        self,
        candidates: Sequence[QueryExecutionPlan],
        chosen: QueryExecutionPlan | None,
        policy: str,
        replanner: Replanner,
        max_parallel_stages: int = 0,
    ) -> None:
        check_candidates(candidates)
        if max_parallel_stages < 0:
            raise OptionError(
                f"max_parallel_stages must be >= 0, 0 meaning no limit; got {max_parallel_stages}"
            )
        if chosen is not None and chosen.id not in {p.id for p in candidates}:
            raise OptionError(f"chosen must be one of the candidates; got {chosen.id}")
        self.policy = policy_named(policy)
        self.decisions: list[ReplanDecision] = []
        self.failures: Counter[str] = Counter()  # by output_fp; bounding retries is up to the driver
        self.max_parallel_stages = max_parallel_stages
        self._candidates = tuple(candidates)
        self._asked = chosen is not None
        self._plan = chosen or candidates[0]
        self._replanner = replanner
        # estimates must know the limit that the execution keeps to
        replanner.max_parallel_stages = max_parallel_stages
        replanner.replace_candidates(candidates)
        self._share = Share.uniform(0, 0, 0, revision=-1)
        self._considered = self._share  # the share of the last decision that weighed the candidates
        self._checkpoints: dict[str, StageOutput] = {}
        self._running: dict[str, TrackedStage] = {}
        self._sliced: dict[str, float] = {}  # fraction of a stage that exists in slices, by output_fp
        self._draining: set[str] = set()  # running, not part of the current plan, nearly done
        self._announced: set[str] = set()
        self._launched = False  # some stage was started
        self._finished = False

    # --- what is known --------------------------------------------------------------------------------

    @property
    def plan(self) -> QueryExecutionPlan:
        """Return the current plan."""
        return self._plan

    @property
    def candidates(self) -> tuple[QueryExecutionPlan, ...]:
        """Return the plans that are weighed now."""
        return self._candidates

    @property
    def share(self) -> Share:
        """Return the newest share seen."""
        return self._share

    @property
    def finished(self) -> bool:
        """Tell whether ``Finish`` was returned."""
        return self._finished

    @property
    def waiting(self) -> bool:
        """Tell whether the last decision was to wait for capacity."""
        return bool(self.decisions) and self.decisions[-1].kind == "wait"

    @property
    def checkpoints(self) -> Mapping[str, StageOutput]:
        """Return finished outputs by output_fp."""
        return dict(self._checkpoints)

    @property
    def running(self) -> tuple[Stage, ...]:
        """Return the stages that run now, oldest first."""
        return tuple(run.stage for run in self._running.values())

    def state(self, now: float) -> ExecutionState:
        """Return what re-planning is told."""
        running = {fp: run.seen(now) for fp, run in self._running.items()}
        return ExecutionState(self._plan, dict(self._checkpoints), running, sliced=dict(self._sliced))

    def expected(self, now: float, plan: QueryExecutionPlan | None = None) -> Assessment:
        """Return how the current plan, or ``plan``, would continue from here on the newest share."""
        return self._replanner.assess(plan or self._plan, self.state(now), self._share, now)

    # --- what happens -----------------------------------------------------------------------------------

    def begin(self, share: Share, checkpoints: Mapping[str, StageOutput], now: float) -> list[Action]:
        """Start on ``share`` with earlier runs' ``checkpoints`` by output_fp; volatile ones are ignored."""
        volatile = {s.output_fp for p in self._candidates for s in p.stages if s.volatile}
        self._checkpoints = {fp: out for fp, out in checkpoints.items() if fp not in volatile}
        self._share = share
        self._launch(now, "the query begins")
        return self._advance(now)

    def doubt(self, risk: Risk) -> None:
        """Count with ``risk`` what switches discard, from now on."""
        self._replanner.risk = risk

    def refresh(self, share: Share) -> None:
        """Note how many cores of the newest share are cold or absent still; no reason to weigh the plans. Those that
        were seen to run tasks are there."""
        busy = sum((run.running or 0) * run.stage.demand.cores for run in self._running.values())
        absent = min(share.absent, self._share.absent, max(share.total.cores - busy, 0.0))
        self._share = replace(self._share, cold=share.cold, absent=absent, arrival=share.arrival)

    def on_share(
        self,
        share: Share,
        now: float,
        trigger: str,
        candidates: Sequence[QueryExecutionPlan] | None = None,
    ) -> list[Action]:
        """Weigh the plans on a new share; ``candidates``, if given, are plans made for it (``on_candidates``)."""
        if candidates is not None:
            self._check_renewed(candidates)
        if share.revision < self._share.revision or self._finished:
            return []
        if self._share.total.cores <= 0 < share.total.cores:
            for run in self._running.values():  # the tasks of before went with their nodes and begin again
                run.wave, run.told = max(run.wave, now), max(run.told, now)
        self._share = share
        if candidates is not None:
            self._renew(candidates)
        actions = self._reconsider(now, trigger, candidates_changed=False)
        return actions + self._advance(now)

    def on_candidates(
        self, candidates: Sequence[QueryExecutionPlan], now: float, trigger: str
    ) -> list[Action]:
        """Weigh re-estimated plans; the current one must be among them under the same id."""
        self._check_renewed(candidates)
        if self._finished:
            return []
        self._renew(candidates)
        actions = self._reconsider(now, trigger, candidates_changed=True)
        return actions + self._advance(now)

    def on_start(self, fp: str, now: float) -> None:
        """Note that a stage's run begins only now, for instance since planning has taken so long."""
        self._running[fp].started, self._running[fp].wave = now, now + self._running[fp].stage.latency

    def on_progress(
        self, fp: str, total: int, done: int, now: float, running: int | None = None, *, native: bool = False
    ) -> None:
        """Note the engine's task counts of a running stage. ``running``: tasks in flight, if it tells. ``native``: of
        DuckDB's tasks; where others follow, those were wasted."""
        run = self._running.get(fp)
        if run is None:
            return
        first_tasks = bool(running) and not run.running and run.done == 0
        if done > run.done or first_tasks:
            run.wave = now
        if done < run.done:  # the engine has begun what was lost again
            run.lost = 0
        run.ran, run.told = run.ran_until(now), now
        if run.native and not native:
            run.ran, run.lost, run.wave = 0.0, 0, now
        run.total, run.done, run.running, run.native = total, done, running, native

    def on_loss(self, fp: str, fraction: float) -> None:
        """Note that nodes went with ``fraction`` of what a running stage's tasks have done on their disks; what
        DuckDB's tasks have done is in the store."""
        run = self._running[fp]
        if not run.native:
            run.lost += ceil((run.done - run.lost) * fraction)
            run.ran *= 1.0 - fraction

    def on_slices(self, fp: str, fraction: float) -> None:
        """Note that ``fraction`` of the stage ``fp`` exists in slices: a later run of it has the rest to do."""
        self._sliced[fp] = fraction

    def on_finished(
        self, output: StageOutput, now: float, *, late: bool = False, starts: bool = True
    ) -> list[Action]:
        """Keep a finished stage's output; without ``starts``, what can start now waits for the next call.

        ``late``: of a run cancelled before; another run of the same stage, started since, is then cancelled.
        """
        fp = output.fingerprint
        late = late or fp not in self._running
        self._draining.discard(fp)
        if not late:
            del self._running[fp]
        if self._finished:
            return []
        actions: list[Action] = []
        if fp not in self._checkpoints:
            self._checkpoints[fp] = output
            self._announced.add(fp)
            if late and fp in self._plan.by_fp:
                actions.append(Reuse(self._plan.by_fp[fp], output))
        return actions + self._advance(now, starts=starts)

    def on_failed(self, fp: str, now: float, lost: Collection[str] = ()) -> list[Action]:
        """Start a failed stage again if it is still needed. Cancelled stages that end are no failures.

        ``lost`` are finished outputs that no longer exist: what is needed of them is computed again.
        """
        for gone in lost:
            self._checkpoints.pop(gone, None)
            self._sliced.pop(gone, None)
            self._announced.discard(gone)
        if self._running.pop(fp, None) is None:
            return []
        self._draining.discard(fp)
        self.failures[fp] += 1
        return self._advance(now)

    def _check_renewed(self, candidates: Sequence[QueryExecutionPlan]) -> None:
        check_candidates(candidates)
        if self._plan.id not in {p.id for p in candidates}:
            raise OptionError(
                f"candidates must include the current plan {self._plan.id}; got none of that id"
            )

    def _renew(self, candidates: Sequence[QueryExecutionPlan]) -> None:
        """Take newly estimated plans in place of the old ones, the current and the running stages included."""
        self._candidates = tuple(candidates)
        self._replanner.replace_candidates(candidates)
        before, self._plan = self._plan, next(p for p in candidates if p.id == self._plan.id)
        # in a plan of the same id a stage may have another number of partitions, and nothing else
        renewed = {s.physical_key: self._plan.by_fp.get(s.output_fp, s) for s in before.stages}
        renewed |= {s.physical_key: s for p in reversed(candidates) for s in p.stages}
        for run in self._running.values():
            run.stage = renewed.get(run.stage.physical_key, run.stage)

    # --- decisions ----------------------------------------------------------------------------------------

    def _launch(self, now: float, trigger: str) -> None:
        """Choose the first plan, or choose it anew when nothing could be started so far."""
        decision = initial(
            self._candidates,
            self._share,
            self.policy.name,
            chosen=self._plan.id if self._asked else None,
            checkpoints=self._checkpoints,
            now=now,
            trigger=trigger,
            max_parallel_stages=self.max_parallel_stages,
        )
        self._plan = next(p for p in self._candidates if p.id == decision.chosen)
        self._considered = self._share
        self.decisions.append(decision)

    def _reconsider(self, now: float, trigger: str, *, candidates_changed: bool) -> list[Action]:
        if self.waiting and not self._launched:
            self._launch(now, trigger)
            return []
        if not self.policy.replans:
            decision = self._fixed(now, trigger)
        elif candidates_changed or self.waiting or self._replanner.significant(self._considered, self._share):
            decision = self._replanner.decide(self.state(now), self._share, now, trigger)
            self._considered = self._share
        else:
            least = 100 * self._replanner.min_share_delta
            decision = self._note(now, trigger, f"stay: the share changed by less than {least:.3g} %")
        self.decisions.append(decision)
        return self._switch(decision, now) if decision.kind == "switch" else []

    def _fixed(self, now: float, trigger: str) -> ReplanDecision:
        """Return the decision of a policy that never changes its plan."""
        assessed = self.expected(now)
        seconds, name = assessed.estimate.seconds, self._plan.id
        if seconds == float("inf"):
            # the replanner, given nothing to switch to, knows how to say why
            alone = Replanner([self._plan], max_parallel_stages=self.max_parallel_stages)
            return alone.decide(self.state(now), self._share, now, trigger)
        reason = f"stay: policy {self.policy.name} keeps {name}, which would finish in {seconds:.1f} s"
        return replace(self._note(now, trigger, reason), estimates=(assessed.estimate,))

    def _note(self, now: float, trigger: str, reason: str) -> ReplanDecision:
        return ReplanDecision(
            "stay", self._share.revision, now, self._plan.id, self._plan.id, reason, trigger
        )

    def _switch(self, decision: ReplanDecision, now: float) -> list[Action]:
        """Change plans: keep shared running stages, let nearly finished ones end, cancel the rest."""
        chosen = next(p for p in self._candidates if p.id == decision.chosen)
        remaining = self._replanner.assess(chosen, self.state(now), self._share, now).remaining
        before, self._plan = self._plan, chosen
        actions: list[Action] = []
        self._draining.clear()
        for fp in [fp for fp in self._running if fp not in remaining.adopted]:
            if self._nearly_done(fp, now):
                self._draining.add(fp)
            else:
                actions.append(self._cancel(fp, f"{before.id} was left for {chosen.id}"))
        return actions

    def _nearly_done(self, fp: str, now: float) -> bool:
        """Tell whether a running stage has less than the switch cost left."""
        run = self._running[fp].seen(now)
        alone = QueryExecutionPlan("", (replace(run.stage, inputs=()),))
        state = ExecutionState(alone, running={fp: replace(run, stage=alone.sink)})
        return simulate(propagate(alone, state, now), self._share).seconds < self._replanner.switch_cost

    # --- actions ------------------------------------------------------------------------------------------

    def _advance(self, now: float, *, starts: bool = True) -> list[Action]:
        """Return what follows from checkpoints, running stages and the current plan."""
        sink = self._checkpoints.get(self._plan.sink.output_fp)
        remaining = propagate(self._plan, self.state(now), now)
        actions = self._reused(remaining)
        if sink is not None:
            self._finished = True
            actions += [self._cancel(fp, "the query has its result") for fp in list(self._running)]
            return [*actions, Finish(sink)]
        for fp in [fp for fp in self._running if fp not in remaining.adopted | self._draining]:
            actions.append(self._cancel(fp, "a checkpoint has made it superfluous"))
        if starts and not self.waiting:
            actions += self._starts(remaining, now)
        return actions

    def _starts(self, remaining: Remaining, now: float) -> list[Action]:
        runnable = (r for r in remaining.needed if all(i in self._checkpoints for i in r.stage.inputs))
        ready = sorted(runnable, key=lambda r: (-r.rank, r.index))
        room = self.max_parallel_stages - len(self._running) if self.max_parallel_stages else len(ready)
        actions: list[Action] = []
        for r in ready[: max(room, 0)]:
            self._running[r.stage.output_fp] = TrackedStage(
                r.stage, now, r.stage.tasks, now + r.stage.latency
            )
            self._launched = True
            actions.append(Start(r.stage))
        return actions

    def _cancel(self, fp: str, reason: str) -> Cancel:
        self._draining.discard(fp)
        return Cancel(self._running.pop(fp).stage, reason)

    def _reused(self, remaining: Remaining) -> list[Action]:
        """Return reuses not announced so far: checkpoints at which the current plan's work begins."""
        fresh = [fp for fp in remaining.inputs if fp not in self._announced and fp in self._plan.by_fp]
        self._announced.update(fresh)
        return [Reuse(self._plan.by_fp[fp], self._checkpoints[fp]) for fp in fresh]
