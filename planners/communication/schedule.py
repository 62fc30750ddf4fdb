"""When each motif runs: a list scheduler over the unrolled DAG (Pseudocode 4, lines 10-24, made event-driven)."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from ebbflow.planners.communication.dag import TrainingDag
from ebbflow.planners.errors import OptionError

ITERATIONS = 6  # that are unrolled to see the steady state
_FIRST, _LAST = 2, 4  # whose ends give the period, counted from 1


@dataclass(frozen=True, slots=True)
class PlannedMotif:
    """A motif with what the scheduler needs of it.

    Args:
        seconds: duration; motifs are not preempted.
        channels: that it has for itself while it runs.
        after: positions of motifs of the same collective that must have ended.
    """

    seconds: float
    channels: tuple[int, ...] = (0,)
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ExecutionOption:
    """One way to carry out a collective: its motifs.

    Args:
        name: unique among the options of a collective.
        motifs: what is scheduled.
        algorithm: of the whole, such as ring or tree; options of one algorithm differ in how finely they are cut.
    """

    name: str
    motifs: tuple[PlannedMotif, ...]
    algorithm: str = "whole"

    @property
    def channels(self) -> frozenset[int]:
        """Return all channels that its motifs use."""
        return frozenset(channel for motif in self.motifs for channel in motif.channels)

    @property
    def seconds(self) -> float:
        """Return the duration on idle channels, one motif at a time on each."""
        ends: list[float] = []
        free: dict[int, float] = {}
        for motif in self.motifs:
            start = max(
                [ends[i] for i in motif.after] + [free.get(channel, 0.0) for channel in motif.channels],
                default=0.0,
            )
            ends.append(start + motif.seconds)
            free.update(dict.fromkeys(motif.channels, ends[-1]))
        return max(ends, default=0.0)


Plan = Mapping[str, ExecutionOption]
"""Name of a collective -> how it is carried out."""


class Node(NamedTuple):
    """A motif of an iteration, or a block of compute (``motif`` -1)."""

    iteration: int
    op: str
    motif: int


class Waiting(NamedTuple):
    """A motif that is ready, as a rule of order sees it."""

    node: Node
    submitted: int  # position of its collective in the order of submission
    path: float  # s from its beginning to the end along the longest path
    ready: float  # s at which it could first begin


Rule = Callable[[Waiting], tuple[float, ...]]
"""Key of a ready motif; on each channel the smallest key begins first."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """What ran when, s from the beginning of the first iteration."""

    starts: Mapping[Node, float]
    ends: Mapping[Node, float]
    period: float  # s of an iteration in the steady state
    makespan: float  # s of all iterations
    idle: float  # fraction of the period in which the compute stream waits

    def order(self, iteration: int) -> tuple[Node, ...]:
        """Return the motifs of an iteration by their beginnings, ties as the scheduler has broken them."""
        return tuple(node for node in self.starts if node.iteration == iteration and node.motif >= 0)


def critical_path(waiting: Waiting) -> tuple[float, ...]:
    """Order by the longest path to the end; ties: earlier iteration, earlier submission, earlier motif."""
    return (-waiting.path, waiting.node.iteration, waiting.submitted, waiting.node.motif)


def fifo(waiting: Waiting) -> tuple[float, ...]:
    """Order by submission."""
    return (waiting.node.iteration, waiting.submitted, waiting.node.motif)


def lifo(waiting: Waiting) -> tuple[float, ...]:
    """Order by submission, the latest first (ByteScheduler's rule as the thesis emulates it)."""
    return (-waiting.node.iteration, -waiting.submitted, waiting.node.motif)


def by_priority(*names: str) -> Rule:
    """Return the rule that takes collectives in this order of their names, whatever their iteration."""
    rank = {name: i for i, name in enumerate(names)}

    def rule(waiting: Waiting) -> tuple[float, ...]:
        return (rank[waiting.node.op], waiting.node.iteration, waiting.node.motif)

    return rule


Strict = Literal["no", "channel", "start"]
"""Whether ready motifs may overtake: freely, or in the rule's order on each channel, or in that of all beginnings."""


def schedule(
    dag: TrainingDag,
    plan: Plan,
    rule: Rule = critical_path,
    *,
    strict: Strict = "no",
    iterations: int = ITERATIONS,
) -> Timeline:
    """Return when everything runs if whatever is ready begins as soon as its channels are free.

    Args:
        dag: one iteration.
        plan: an option for each of its collectives.
        rule: which ready motif begins first.
        strict: ``channel``: a motif begins only when all those before it on its channels by ``rule`` have begun, as
            where they are enqueued in order; ``start``: when all those before it on any channel have.
        iterations: how often the DAG is unrolled; at least 4 for a period, else the makespan's share stands for it.

    Raises ``OptionError`` for a plan that does not fit the DAG, and for a strict order that contradicts it.
    """
    if missing := {op.name for op in dag.comm} - plan.keys():
        raise OptionError(f"the plan has no option for {missing.pop()!r}")
    return _Run(dag, plan, rule, strict, iterations).run()


class _Run:
    """One pass of the scheduler. Nodes are numbers in here; there are many of them, and few kinds."""

    def __init__(self, dag: TrainingDag, plan: Plan, rule: Rule, strict: Strict, iterations: int) -> None:
        self._dag, self._rule, self._iterations = dag, rule, iterations
        self._nodes: list[Node] = []
        self._seconds: list[float] = []
        self._channels: list[tuple[int, ...]] = []  # empty: the compute stream
        first: dict[tuple[int, str], list[int]] = {}  # motifs that begin an op
        last: dict[tuple[int, str], list[int]] = {}
        self._after: list[list[int]] = []
        for i in range(iterations):
            for block in dag.compute:
                first[i, block.name] = last[i, block.name] = [
                    self._add(Node(i, block.name, -1), block.seconds, ())
                ]
            for op in dag.comm:
                motifs = plan[op.name].motifs
                ids = [
                    self._add(Node(i, op.name, k), motif.seconds, motif.channels)
                    for k, motif in enumerate(motifs)
                ]
                followed = {j for motif in motifs for j in motif.after}
                for k, motif in enumerate(motifs):
                    for j in motif.after:
                        self._after[ids[j]].append(ids[k])
                first[i, op.name] = [ids[k] for k, motif in enumerate(motifs) if not motif.after]
                last[i, op.name] = [ids[k] for k in range(len(motifs)) if k not in followed]
        for edge in dag.edges:
            for i in range(edge.lag, iterations):
                for before in last[i - edge.lag, edge.before]:
                    self._after[before] += first[i, edge.after]
        self._missing = [0] * len(self._nodes)
        for successors in self._after:
            for node in successors:
                self._missing[node] += 1
        self._path = self._paths()
        self._submitted = {op.name: k for k, op in enumerate(dag.comm)}
        self._queues = self._strict_queues(strict == "start") if strict != "no" else {}

    def _add(self, node: Node, seconds: float, channels: tuple[int, ...]) -> int:
        self._nodes.append(node)
        self._seconds.append(seconds)
        self._channels.append(channels)
        self._after.append([])
        return len(self._nodes) - 1

    def _paths(self) -> list[float]:
        """Return the seconds of the longest path from each node's beginning to the end."""
        missing, ready, order = self._missing.copy(), [], []
        ready = [node for node, count in enumerate(missing) if not count]
        while ready:
            order.append(node := ready.pop())
            for successor in self._after[node]:
                missing[successor] -= 1
                if not missing[successor]:
                    ready.append(successor)
        path = [0.0] * len(self._nodes)
        for node in reversed(order):
            path[node] = self._seconds[node] + max((path[one] for one in self._after[node]), default=0.0)
        return path

    def _strict_queues(self, one: bool) -> dict[int, list[int]]:
        """Return the motifs of each channel, or of all as ``one`` channel, in falling order of the rule."""
        order = sorted(
            (node for node, channels in enumerate(self._channels) if channels),
            key=lambda node: self._rule(self._waiting(node, 0.0)),
            reverse=True,
        )
        queues: dict[int, list[int]] = {}
        for node in order:
            for channel in (-1,) if one else self._channels[node]:
                queues.setdefault(channel, []).append(node)
        return queues

    def _waiting(self, node: int, ready: float) -> Waiting:
        return Waiting(self._nodes[node], self._submitted[self._nodes[node].op], self._path[node], ready)

    def run(self) -> Timeline:
        """Return what ran when."""
        starts, ends = [0.0] * len(self._nodes), [0.0] * len(self._nodes)
        started: list[int] = []
        running: list[tuple[float, int]] = []
        compute: deque[int] = deque()
        ready: dict[tuple[int, ...], list[tuple[tuple[float, ...], int]]] = {}  # by channels, each a heap
        busy: set[int] = set()
        stream_busy = False
        now = 0.0

        def release(node: int) -> None:
            if channels := self._channels[node]:
                heappush(ready.setdefault(channels, []), (self._rule(self._waiting(node, now)), node))
            else:
                compute.append(node)

        def begin(node: int) -> None:
            started.append(node)
            starts[node], ends[node] = now, now + self._seconds[node]
            heappush(running, (ends[node], node))

        for node, count in enumerate(self._missing):
            if not count:
                release(node)
        while True:
            if compute and not stream_busy:
                stream_busy = True
                begin(compute.popleft())
            while tops := [
                heap[0]
                for channels, heap in ready.items()
                if heap and busy.isdisjoint(channels) and self._is_next(heap[0][1], channels)
            ]:
                _, node = min(tops)
                channels = self._channels[node]
                heappop(ready[channels])
                busy.update(channels)
                begin(node)
                for queue in self._queues_of(channels):
                    queue.pop()
            if not running:
                break
            now = running[0][0]
            while running and running[0][0] <= now:
                _, node = heappop(running)
                if self._channels[node]:
                    busy.difference_update(self._channels[node])
                else:
                    stream_busy = False
                for successor in self._after[node]:
                    self._missing[successor] -= 1
                    if not self._missing[successor]:
                        release(successor)
        if len(started) < len(self._nodes):
            begun = set(started)
            stuck = next(node for k, node in enumerate(self._nodes) if k not in begun)
            raise OptionError(f"a strict order must not contradict the DAG; {stuck.op} can never begin")
        return self._timeline(started, starts, ends)

    def _is_next(self, node: int, channels: tuple[int, ...]) -> bool:
        return all(queue[-1] == node for queue in self._queues_of(channels))

    def _queues_of(self, channels: tuple[int, ...]) -> list[list[int]]:
        """Return the queues that a motif on these channels stands in; none where motifs may overtake."""
        return [self._queues[one] for one in (*channels, -1) if one in self._queues]

    def _timeline(self, started: list[int], starts: list[float], ends: list[float]) -> Timeline:
        last = self._dag.compute[-1].name
        done = {self._nodes[node].iteration: ends[node] for node in started if self._nodes[node].op == last}
        makespan = max(ends, default=0.0)
        period = (
            (done[_LAST - 1] - done[_FIRST - 1]) / (_LAST - _FIRST)
            if self._iterations >= _LAST
            else makespan / self._iterations
        )
        return Timeline(
            {self._nodes[node]: starts[node] for node in started},
            {self._nodes[node]: ends[node] for node in started},
            period,
            makespan,
            1 - self._dag.compute_seconds / period if period > 0 else 0.0,
        )
