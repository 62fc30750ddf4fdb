"""From a recorded training and measured links to a plan: the whole search, as ranks and commands call it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ebbflow.planners.communication.baselines import PREFETCHING, SYSTEMS, Comparison, Problem, System
from ebbflow.planners.communication.costs import Choice, CostModel, options_of
from ebbflow.planners.communication.dag import CommOp, Kind, TrainingDag
from ebbflow.planners.communication.measured import MeasuredLinks, choice_of
from ebbflow.planners.communication.order import LaunchOrder, MotifQueue
from ebbflow.planners.communication.plan import CommunicationPlan, plan_of
from ebbflow.planners.communication.recorded import RecordedTraining
from ebbflow.planners.communication.search import Options
from ebbflow.planners.errors import OptionError

SEGMENTS = (1, 2, 4, 8)  # into which an all-reduce may be cut
INDISTINCT = (
    0.005  # share of an iteration that no prediction tells: what gains less takes the library's own way
)
MIN_SEGMENT = 64 * 1024  # bytes; a smaller segment only costs its launch


def choices_of(kind: Kind, ranks: int, channels: int, largest: float = float("inf")) -> tuple[Choice, ...]:
    """Return every way in which collectives of a kind are tried, the library's own first.

    Args:
        kind: ``all-reduce`` or ``all-to-all``; of others only the library's own.
        ranks: processes.
        channels: that may carry them.
        largest: bytes of the largest collective of the kind; segments below 64 KiB are left out.
    """
    cuts = [n for n in SEGMENTS if n == 1 or largest / n >= MIN_SEGMENT]
    found = []
    for channel in range(channels):
        if kind == "all-reduce":
            names = ("whole", "ring", "tree") if ranks > 2 else ("whole", "ring")
            found += [Choice(name, n, channel) for name in names for n in cuts]
        elif kind == "all-to-all":
            found.append(Choice("whole", 1, channel))
            widths = {-(-ranks // w): w for w in SEGMENTS[1:] if 1 < w <= ranks}
            found += [Choice("spline", -(-ranks // n), channel) for n in sorted(widths, reverse=True)]
        else:
            found.append(Choice("whole", 1, channel))
    return tuple(dict.fromkeys(found))


def problem_of(
    recorded: RecordedTraining,
    links: MeasuredLinks,
    *,
    rng: np.random.Generator,
    clock: Callable[[], float],
    seconds: float = 10.0,
    hand_order: Sequence[str] = (),
) -> Problem:
    """Return the planning problem of a training on measured links.

    Args:
        recorded: the training.
        links: what its gang's channels do.
        rng: what a random walk is drawn from.
        clock: s, for its bound.
        seconds: that bound.
        hand_order: names of collectives, the most urgent first, for the system ``HO``.

    Raises ``OptionError`` where the links are of another gang, or lack a kind of collective.
    """
    if links.ranks != recorded.ranks:
        raise OptionError(
            f"the links were measured among {links.ranks} ranks, the training has {recorded.ranks}"
        )
    names = [op.name for op in recorded.dag.comm]
    if unknown := [name for name in hand_order if name not in names]:
        raise OptionError(f"an order by hand must name collectives of the training; got {unknown[0]!r}")
    order = (*hand_order, *(name for name in names if name not in hand_order)) if hand_order else ()
    return Problem(recorded.dag, _options(recorded.dag.comm, links), rng, clock, order, seconds)


def _options(comm: Sequence[CommOp], links: MeasuredLinks) -> Options:
    models: dict[int, CostModel] = dict.fromkeys(range(links.channels), links.table)
    return {op.name: options_of(op, links.choices(op.kind), models) for op in comm}


@dataclass(frozen=True, slots=True)
class PlanSearch:
    """What a search found.

    Args:
        plan: the best.
        plain: how the training runs without one.
        best: how it runs with it.
    """

    plan: CommunicationPlan
    plain: Comparison
    best: Comparison

    @property
    def gain(self) -> float:
        """Return the predicted share of the iteration that the plan saves; below 0: it costs more."""
        before = self.plan.plain_seconds
        return 1 - self.plan.seconds / before if before > 0 else 0.0


def search_plan(problem: Problem, *, version: int, system: System = "Syndicate") -> PlanSearch:
    """Return the plan of a problem, and how the training runs without and with it.

    Args:
        problem: what is planned.
        version: of the plan, above those of all earlier ones of the run.
        system: the scheduler that plans.

    Raises ``OptionError`` for a training without collectives, or an unknown system.
    """
    if not problem.dag.comm:
        raise OptionError("a training without collectives has nothing to plan")
    if system not in SYSTEMS:
        raise OptionError(f"a system must be one of {', '.join(SYSTEMS)}; got {system!r}")
    plain, best = problem.solve("FIFO"), problem.simplified(problem.solve(system), INDISTINCT)
    planned = problem.dag.prefetched() if system in PREFETCHING else problem.dag
    plan = plan_of(
        planned,
        best.plan,
        {name: choice_of(option.name) for name, option in best.plan.items()},
        best.timeline,
        version=version,
        plain_seconds=plain.timeline.period,
    )
    if not plan.order.ahead and stuck_at(problem.dag, plan.order):
        submitted = [
            (name, k, one.choice.channel)
            for name, one in plan.collectives.items()
            for k in range(len(plan.pieces[name]))
        ]
        plan = replace(plan, order=LaunchOrder.in_order(submitted))
    return PlanSearch(plan, plain, best)


def stuck_at(dag: TrainingDag, order: LaunchOrder, iterations: int = 4) -> str:
    """Return the block at which a training would wait for ever if it launched in this order; empty if nowhere.

    A piece waits for those before it in the order. Where one of those belongs to a collective that the training
    submits only after a block that waits for the piece, nothing moves any more.

    Args:
        dag: the training, as it submits and waits.
        order: of its pieces.
        iterations: that are gone through.
    """
    queue, launched = MotifQueue(order), dict.fromkeys(order.ops, 0)
    names = {op.name for op in dag.comm}

    def submit(op: str) -> None:
        for one in queue.submit(op):
            launched[one.op] += 1

    last = dag.compute[-1].name
    for iteration in range(iterations):
        for op in dag.comm:
            if any(e.after == op.name and e.before == last and e.lag == 1 for e in dag.dependencies):
                submit(op.name)
        for block in dag.compute:
            for edge in dag.dependencies:
                if edge.after == block.name and edge.before in names and iteration >= edge.lag:
                    done = (iteration - edge.lag + 1) * order.ops.get(edge.before, 0)
                    if launched.get(edge.before, 0) < done:
                        return block.name
            for op in dag.comm:
                if any(
                    e.before == block.name and e.after == op.name and e.lag == 0 for e in dag.dependencies
                ):
                    submit(op.name)
    return ""


class Bar(NamedTuple):
    """Something that runs in an iteration: on ``compute`` or ``channel K``, times in s from its beginning."""

    lane: str
    name: str
    start: float
    end: float


def bars_of(comparison: Comparison, dag: TrainingDag) -> tuple[Bar, ...]:
    """Return what runs in an iteration of the steady state, from one iteration's last block to the next one's.

    Args:
        comparison: a system's plan and timeline.
        dag: the training.
    """
    timeline, last = comparison.timeline, dag.compute[-1].name
    ends = {node.iteration: end for node, end in timeline.ends.items() if node.op == last}
    begin, end = ends[2], ends[3]
    found = []
    for node, start in timeline.starts.items():
        stop = timeline.ends[node]
        if stop <= begin or start >= end:
            continue
        low, high = max(start, begin) - begin, min(stop, end) - begin
        if node.motif < 0:
            found.append(Bar("compute", node.op, low, high))
        else:
            for channel in comparison.plan[node.op].motifs[node.motif].channels:
                found.append(Bar(f"channel {channel}", node.op, low, high))
    return tuple(sorted(found, key=lambda bar: (bar.lane != "compute", bar.lane, bar.start)))
