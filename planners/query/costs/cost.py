"""What operators cost, and what memory they take.

The work itself is counted in ``operators``, whose functions are offered here too; ``fitting`` corrects the rates by
measurements.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from ebbflow.planners.model import Share, Work
from ebbflow.planners.query.costs.links import (
    broadcast_seconds,
    elapsed_seconds,
    shuffle_seconds,
    spilled_bytes,
    store_seconds,
)
from ebbflow.planners.query.costs.operators import (
    Size,
    SlicedJoin,
    aggregate,
    broadcast_join,
    cartesian_join,
    join_work,
    partitions,
    scan,
    sliced_join,
    sort,
    sort_merge_join,
    splits,
    write,
)
from ebbflow.planners.query.plan.slicing import AT_ONCE
from ebbflow.planners.query.plan.trees import JoinMethod

__all__ = [
    "DEFAULTS",
    "DUCKDB",
    "GIB",
    "NATIVE",
    "SPARK",
    "CostModel",
    "JoinCost",
    "JoinCostModel",
    "Size",
    "aggregate",
    "broadcast_join",
    "cartesian_join",
    "join_work",
    "partitions",
    "scan",
    "sort",
    "sort_merge_join",
    "splits",
    "write",
]

GIB = float(2**30)


@dataclass(frozen=True)
class CostModel:
    """Seconds of one core per unit of each kind of work, and what a task's memory is made of."""

    engine: str
    rates: Work  # seconds per row, byte or task
    latency: float  # seconds per statement outside its tasks
    task_memory: float = 0.25  # GiB that any task takes
    hash_factor: float = 2.5  # bytes of a hash table per byte hashed
    broadcast_fraction: float = 0.3  # of the largest node's memory that broadcast tables may fill
    hash_fraction: float = 0.5  # of it that the hash tables of its concurrent tasks may fill
    broadcast_limit: float = 4.0  # GiB that one broadcast may have, whatever the node
    shuffled_wire: float = 0.5  # bytes on the links per byte shuffled, as they are in memory
    broadcast_wire: float = 1.25  # likewise per byte broadcast: of a hash table, compressed
    table_wire: float = 0.0  # likewise per stored byte of tables that is read; 0: no link is in between
    store_wire: float = 0.0  # likewise of stages' outputs, per byte that is written or read
    spill_rate: float = 1.5e-8  # seconds of a core per byte that is spilled and read again
    exchanges: bool = True  # by shuffles; else tasks build all that they join, or ``sliced_join`` says
    embedded: bool = (
        False  # slices of a stage run in one process, one by one, and share what all of them read
    )
    warm_up: float = 0.0  # seconds that a stage's first tasks on a core take longer until its process is warm
    wide_key: float = 1.0  # rows that one counts for in a hash join whose key is no single machine word

    def behind_links(self, tables: float, store: float) -> "CostModel":
        """Return this model for nodes that have a part of the tables' bytes, and of stages' outputs, over their links
        only."""
        return replace(self, table_wire=tables, store_wire=store)

    @property
    def slices_at_once(self) -> int:
        """Return how many slices of a stage run side by side."""
        return 1 if self.embedded else AT_ONCE

    def keys(self, size: float) -> float:
        """Return how many rows a row of a hash join counts for whose key has ``size`` bytes."""
        return self.wide_key if size > 8.0 else 1.0

    def builders(self, share: Share) -> float:
        """Return how many times a broadcast table is built on ``share``."""
        return float(max(share.nodes, 1)) if self.exchanges else max(share.total.cores, 1.0)

    def task_room(self, share: Share) -> float:
        """Return the bytes of rows that one task of the largest node can hold to hash or sort them."""
        part = share.largest.memory * GIB * self.hash_fraction / max(share.largest.cores, 1.0)
        return part / self.hash_factor

    @cached_property
    def vector(self) -> tuple[float, ...]:
        """Return the rates in the order of ``Work``'s fields."""
        return self.rates.vector()

    def core_seconds(self, work: Work) -> float:
        """Return the core-seconds that ``work`` takes, summed over tasks."""
        return sum(rate * amount for rate, amount in zip(self.vector, work.vector(), strict=True))

    def slower(self, factor: float) -> "CostModel":
        """Return this model with every rate, the latency and the warm-up times ``factor``."""
        slow = self.with_rates(Work(*(r * factor for r in self.vector)), self.latency * factor)
        return replace(slow, warm_up=self.warm_up * factor)

    def with_rates(self, rates: Work, latency: float) -> "CostModel":
        """Return this model with other rates."""
        return replace(self, rates=rates, latency=latency)


# First figures for one core; ``calibrate`` fits them to finished stages. Spark's rates are those of a young JVM,
# about twice a warm one's, since a query usually has a driver and executors of its own; first tasks are slower still.
SPARK = CostModel(
    engine="spark",
    rates=Work(
        scanned_rows=2.0e-7,
        scanned_bytes=2.4e-8,
        built_rows=8.0e-7,
        probed_rows=3.0e-7,
        joined_rows=3.0e-7,
        sorted_rows=1.0e-6,
        shuffled_bytes=6.0e-8,
        broadcast_bytes=8.0e-8,
        aggregated_rows=4.5e-7,
        written_bytes=4.0e-8,
        tasks=5.0e-2,
    ),
    latency=0.5,
    warm_up=0.7,
    wide_key=1.6,  # a composite key is a row, a whole number itself
)
DUCKDB = CostModel(
    engine="duckdb",
    rates=Work(
        scanned_rows=1.5e-8,
        scanned_bytes=1.0e-9,
        built_rows=6.0e-8,
        probed_rows=3.0e-8,
        joined_rows=1.5e-8,
        sorted_rows=1.5e-7,
        shuffled_bytes=1.0e-10,
        broadcast_bytes=1.0e-10,
        aggregated_rows=4.0e-8,
        written_bytes=1.0e-8,
        tasks=1.0e-3,
    ),
    latency=0.02,
    task_memory=0.1,
    hash_factor=1.5,
    broadcast_fraction=0.6,
    hash_fraction=0.8,
    broadcast_limit=math.inf,
    spill_rate=4.0e-9,
    embedded=True,
)
# Spark's tasks with DuckDB in them: its rates, but what slices compute again, and Spark's latency. A stage that turns
# out to be Spark SQL's has the join methods of the same plan, so that broadcasts are held to Spark's limits.
NATIVE = replace(
    DUCKDB,
    engine="native",
    rates=Work(*(1.5 * rate for rate in DUCKDB.rates.vector())),
    latency=0.4,
    warm_up=0.5,  # a Python worker that imports DuckDB, beside a JVM that runs little
    broadcast_fraction=SPARK.broadcast_fraction,
    hash_fraction=SPARK.hash_fraction,
    broadcast_limit=SPARK.broadcast_limit,
    shuffled_wire=0.0,  # a slice reads all that it joins from the store
    broadcast_wire=0.0,
    exchanges=False,
    embedded=False,
)
DEFAULTS = {model.engine: model for model in (SPARK, DUCKDB, NATIVE)}


class JoinCost(NamedTuple):
    """A join without its inputs."""

    core_seconds: float  # those that wait for links or spill among them
    serial: float  # seconds after the build side's end and before the first probe, that no core can shorten
    tail: float  # seconds of one task after both sides are there, with unbounded cores
    resident: float  # GiB on every node until the statement ends (a broadcast table)
    task: float  # GiB of one task (its part of a shuffled hash table)
    waiting: float = 0.0  # of core_seconds: in which tasks wait for a shuffle's bytes, or spill
    network: float = 0.0  # seconds on the links: of serial for a broadcast, of waiting for a shuffle


class JoinCostModel:
    """Prices joins for one model on one share: the arithmetic of :func:`join_work` and
    :meth:`CostModel.core_seconds` on plain floats, because enumeration asks tens of thousands of times."""

    def __init__(self, model: CostModel, share: Share) -> None:
        self.model = model
        self.share = share
        self._rates = model.rates
        self._builders = model.builders(share)
        self._cores = share.total.cores
        memory = share.largest.memory * GIB
        self._most_broadcast = min(memory * model.broadcast_fraction, model.broadcast_limit * GIB)
        self._most_hashed = memory * model.hash_fraction / max(share.largest.cores, 1.0)
        self._room = model.task_room(share)
        # seconds of the links per byte in memory
        self._shuffled = shuffle_seconds(model.shuffled_wire, share)
        self._broadcast = broadcast_seconds(model.broadcast_wire, share)
        self.crossing = store_seconds(1.0, share) * self._cores
        """Core-seconds in which tasks wait for a byte that nodes read from a store or write to it."""

    @property
    def most_resident(self) -> float:
        """Return how many GiB of broadcast tables one node may hold."""
        return self.share.largest.memory * self.model.broadcast_fraction

    def price(
        self,
        method: JoinMethod,
        left: Size,
        right: Size,
        out: Size,
        *,
        equality: bool = True,
        keys: float = 1.0,
        read: float = 0.0,
    ) -> JoinCost:
        """Return the cost of ``left`` joined with ``right``, the build side; ``keys`` is as in ``join_work``.

        ``read`` are the bytes on links of reading all that the build side is made of once.
        """
        rates = self._rates
        (left_rows, left_bytes), (right_rows, right_bytes), (out_rows, out_bytes) = left, right, out
        emitted = out_rows * rates.joined_rows
        table = right_bytes * self.model.hash_factor / GIB
        if not self.model.exchanges:
            return self._sliced(left, right, out, equality=equality, read=read)
        if method == "broadcast":
            serial = right_bytes * rates.broadcast_bytes
            probed = left_rows
            if equality:
                serial += right_rows * keys * rates.built_rows
                probed *= keys
            else:
                probed *= max(right_rows, 1.0)
            parallel = probed * rates.probed_rows + emitted
            tail = parallel / splits(max(left_bytes, out_bytes))
            network = right_bytes * self._broadcast
            # for half of the time on the links another part of the statement runs, as Search.seconds has it
            waiting = 0.5 * network * self._cores
            seconds = parallel + serial * self._builders + waiting
            return JoinCost(seconds, serial + network, tail, table, 0.0, waiting, network)
        if not equality:
            work = join_work(method, left, right, out, self.share, equality=False)
            waiting = work.shuffled_bytes * self._shuffled * self._cores
            seconds = self.model.core_seconds(work) + waiting
            n, m = splits(left_bytes), splits(right_bytes)
            return JoinCost(
                seconds, 0.0, seconds / (n * m), 0.0, 0.0, waiting, waiting / max(self._cores, 1e-9)
            )
        both = left_bytes + right_bytes
        count = partitions(both, self._cores)
        seconds = both * rates.shuffled_bytes + emitted
        network = both * self._shuffled
        waiting = network * self._cores
        if method == "shuffle_hash":
            seconds += keys * (right_rows * rates.built_rows + left_rows * rates.probed_rows)
        else:
            seconds += (left_rows + right_rows) * rates.sorted_rows
            waiting += spilled_bytes(both, count, self._room) * self.model.spill_rate
            table = 0.0
        seconds += waiting
        tail = seconds / splits(both) + rates.tasks
        return JoinCost(seconds + count * rates.tasks, 0.0, tail, 0.0, table / count, waiting, network)

    def _sliced(self, probe: Size, build: Size, out: Size, *, equality: bool, read: float) -> JoinCost:
        """Price a join whose tasks each hold all of the build side, or spill it."""
        tasks, rates = self._builders, self._rates
        work, waiting, exchanged, crossing = self.sliced(probe, build, out, equality=equality, read=read)
        seconds = self.model.core_seconds(work) + waiting
        own = build.bytes * rates.broadcast_bytes + build.rows * rates.built_rows + waiting / tasks
        own = 0.0 if exchanged else own
        tail = own + (seconds - own * tasks) / splits(max(probe.bytes, out.bytes))
        held = min(build.bytes, self._room) * self.model.hash_factor / GIB
        network = crossing / max(self._cores, 1e-9)
        return JoinCost(seconds, 0.0, max(tail, 0.0), 0.0, held, waiting, network)

    def sliced(self, probe: Size, build: Size, out: Size, *, equality: bool, read: float = 0.0) -> SlicedJoin:
        """Return how a native stage joins; ``read`` is as in ``price``."""
        model, tasks = self.model, self._builders
        return sliced_join(
            probe,
            build,
            out,
            tasks,
            self._room,
            model.spill_rate,
            model.core_seconds,
            equality=equality,
            again=self.crossing * read,
            kept=self.crossing * model.store_wire,
        )

    def work(
        self,
        method: JoinMethod,
        left: Size,
        right: Size,
        out: Size,
        *,
        equality: bool,
        keys: float,
        read: float = 0.0,
    ) -> Work:
        """Return the work that ``price`` prices."""
        if not self.model.exchanges:
            return self.sliced(left, right, out, equality=equality, read=read).work
        builders = self._builders
        return join_work(
            method, left, right, out, self.share, equality=equality, builders=builders, keys=keys
        )

    def seconds(
        self, method: JoinMethod, left: Size, right: Size, out: Size, *, equality: bool = True
    ) -> float:
        """Return how long the join takes on the share, in whole waves of its tasks, once its inputs are there."""
        cost = self.price(method, left, right, out, equality=equality)
        if not self.model.exchanges:
            return elapsed_seconds(cost.core_seconds, int(self._builders), self._cores)
        if method == "broadcast":
            tasks = splits(max(left.bytes, out.bytes))
            busy = cost.core_seconds - cost.waiting - (cost.serial - cost.network) * self._builders
            return cost.serial + elapsed_seconds(busy, tasks, self._cores)
        tasks = partitions(left.bytes + right.bytes, self._cores)
        waited = cost.waiting / max(self._cores, 1.0)
        return waited + elapsed_seconds(cost.core_seconds - cost.waiting, tasks, self._cores)

    def allows(self, method: JoinMethod, left: Size, right: Size, *, equality: bool = True) -> bool:
        """Tell whether the build side fits: broadcast, the largest node's part for broadcasts; shuffled, the
        part of one of its concurrent tasks. A sort-merge join spills, so it always may run."""
        if method == "sort_merge":
            return True
        table = right.bytes * self.model.hash_factor
        if method == "broadcast":
            return table <= self._most_broadcast
        if not equality:
            return False
        return table / partitions(left.bytes + right.bytes, self._cores) <= self._most_hashed
