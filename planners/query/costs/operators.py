"""The work that operators do, from the sizes of their inputs and outputs."""

import math
from collections.abc import Callable
from math import inf, sqrt
from typing import NamedTuple

from ebbflow.planners.model import Share, Work
from ebbflow.planners.query.plan.trees import JoinMethod

STORED = 0.4  # bytes stored per byte in memory (dictionary, run-length and snappy encoding)
_KEPT = 16.0  # a build side of less than such a part of a task's memory is not exchanged by native stages
SPLIT = 32.0 * 2**20  # bytes that one task reads or shuffles when there is enough of both
LARGEST_READ = 128.0 * 2**20  # bytes that one task reads where nodes stay; more leaves cores idle at the end
SMALLEST_SPLIT = 2.0**20  # less than this is not worth a task of its own
SMALLEST_READ = 4.0 * 2**20  # bytes that are worth a task of their own to read
SPLIT_STEP = 2.0**20  # splits are whole mebibytes
MOST_PARTITIONS = 4096
_START = 0.025  # seconds of a core that a task costs before and after its work
_READ_RATE = 32.0 * 2**20  # bytes of Parquet that a core reads and filters in a second, about


class Size(NamedTuple):
    """A relation's or an intermediate result's size."""

    rows: float
    bytes: float  # in memory


def splits(size: float) -> int:
    """Return how many tasks ``size`` bytes make at most: the parallelism with unbounded cores."""
    return math.ceil(size / SPLIT) or 1


def partitions(size: float, cores: float) -> int:
    """Return the number of shuffle partitions for ``size`` bytes on ``cores``.

    Enough that none exceeds ``SPLIT``, in whole rounds of the cores; fewer than the cores if the partitions
    would be smaller than ``SMALLEST_SPLIT``.
    """
    whole = int(cores) or 1
    wanted = math.ceil(size / SPLIT)
    if wanted <= whole:
        return min(whole, math.ceil(size / SMALLEST_SPLIT)) or 1
    return min(math.ceil(wanted / whole) * whole, MOST_PARTITIONS)


def scan(size: Size) -> Work:
    """Return the work of reading ``size`` (rows before predicates, stored bytes of the columns read)."""
    return Work(scanned_rows=size.rows, scanned_bytes=size.bytes, tasks=splits(size.bytes))


def broadcast_join(probe: Size, build: Size, out: Size, builders: float) -> Work:
    """Return the work of a broadcast hash join: each of ``builders`` builds the table, nothing is shuffled."""
    count = max(builders, 1)
    return Work(
        built_rows=build.rows * count,
        broadcast_bytes=build.bytes * count,
        probed_rows=probe.rows,
        joined_rows=out.rows,
    )


def shuffle_hash_join(probe: Size, build: Size, out: Size, count: int) -> Work:
    """Return the work of a hash join over ``count`` partitions of both sides."""
    return Work(
        built_rows=build.rows,
        shuffled_bytes=probe.bytes + build.bytes,
        probed_rows=probe.rows,
        joined_rows=out.rows,
        tasks=count,
    )


def sort_merge_join(left: Size, right: Size, out: Size, count: int) -> Work:
    """Return the work of a sort-merge join over ``count`` partitions of both sides."""
    return Work(
        sorted_rows=left.rows + right.rows,
        shuffled_bytes=left.bytes + right.bytes,
        joined_rows=out.rows,
        tasks=count,
    )


def nested_loop_join(probe: Size, build: Size, out: Size, builders: float) -> Work:
    """Return the work of comparing every pair, with ``build`` broadcast to each of ``builders``."""
    count = max(builders, 1)
    return Work(
        broadcast_bytes=build.bytes * count,
        probed_rows=probe.rows * max(build.rows, 1.0),
        joined_rows=out.rows,
    )


def cartesian_join(left: Size, right: Size, out: Size) -> Work:
    """Return the work of comparing every pair of partitions, when neither side can be broadcast."""
    n, m = splits(left.bytes), splits(right.bytes)
    return Work(
        shuffled_bytes=left.bytes * m + right.bytes * n,
        probed_rows=left.rows * max(right.rows, 1.0),
        joined_rows=out.rows,
        tasks=float(min(n * m, MOST_PARTITIONS)),
    )


def aggregate(source: Size, groups: Size, count: int) -> Work:
    """Return the work of a two-phase aggregate: partial groups of each input split are shuffled into
    ``count`` partitions."""
    partial = min(groups.bytes * splits(source.bytes), source.bytes)
    return Work(aggregated_rows=source.rows, shuffled_bytes=partial, tasks=count)


def sort(source: Size, count: int) -> Work:
    """Return the work of a range-partitioned sort."""
    return Work(sorted_rows=source.rows, shuffled_bytes=source.bytes, tasks=count)


def write(output: Size) -> Work:
    """Return the work of writing a checkpoint."""
    return Work(written_bytes=output.bytes)


class SlicedJoin(NamedTuple):
    """A join of a native stage: its work, the core-seconds that tasks spill, and the bytes that are exchanged."""

    work: Work
    waiting: float = 0.0
    exchanged: float = 0.0  # as stored: they are written to the store, and read
    crossing: float = 0.0  # core-seconds, of those that wait: for links


def sliced_join(
    probe: Size,
    build: Size,
    out: Size,
    tasks: float,
    room: float,
    spill_rate: float,
    seconds: Callable[[Work], float],
    *,
    equality: bool,
    again: float = 0.0,
    kept: float = 0.0,
) -> SlicedJoin:
    """Return the cheaper way of a native stage to join: each of ``tasks`` builds the whole table, or, where that is
    no small part of a task's ``room``, both sides are sorted by a hash, written to the store, and joined range by
    range.

    Args:
        probe: the side that tasks divide.
        build: the other side.
        out: the result.
        tasks: that join.
        room: bytes of rows that a task can hold.
        spill_rate: core-seconds a byte that is spilled.
        seconds: core-seconds of work.
        equality: whether some equality joins the sides.
        again: core-seconds in which tasks wait for links until one of them more has read the build side.
        kept: likewise for a byte, as stored, that is written to the store or read there.
    """
    way = broadcast_join if equality else nested_loop_join
    spilled, read = max(build.bytes - room, 0.0) * spill_rate * tasks, again * (tasks - 1.0)
    shared = SlicedJoin(way(probe, build, out, tasks), spilled + read, crossing=read)
    if not equality or build.bytes * _KEPT < room:
        return shared
    rows, stored = probe.rows + build.rows, STORED * (probe.bytes + build.bytes)
    exchange = Work(
        scanned_rows=rows,
        scanned_bytes=stored,
        built_rows=build.rows,
        probed_rows=probe.rows,
        joined_rows=out.rows,
        sorted_rows=rows,
        written_bytes=stored,
        tasks=2.0 * tasks,
    )
    crossing = 2.0 * kept * stored
    dearer = seconds(exchange) + crossing >= seconds(shared.work) + shared.waiting
    return shared if dearer else SlicedJoin(exchange, crossing, stored, crossing)


def join_work(
    method: JoinMethod,
    left: Size,
    right: Size,
    out: Size,
    share: Share,
    *,
    equality: bool = True,
    builders: float | None = None,
    keys: float = 1.0,
) -> Work:
    """Return the work of one join, its inputs not included. ``right`` is the build side; ``equality`` tells
    whether some equality joins the sides (:meth:`Cardinalities.has_equality`). ``builders`` is how many times a
    broadcast table is built, once a node unless given; ``keys`` is how many rows a row of a hash join
    counts for, more than 1 where its keys are expensive."""
    copies = float(share.nodes) if builders is None else builders
    if not equality:
        if method == "broadcast":
            return nested_loop_join(left, right, out, copies)
        return cartesian_join(left, right, out)
    if method == "broadcast":
        return broadcast_join(_keyed(left, keys), _keyed(right, keys), out, copies)
    count = partitions(left.bytes + right.bytes, share.total.cores)
    if method == "shuffle_hash":
        return shuffle_hash_join(_keyed(left, keys), _keyed(right, keys), out, count)
    return sort_merge_join(left, right, out, count)


def _keyed(size: Size, keys: float) -> Size:
    return size if keys == 1.0 else Size(size.rows * keys, size.bytes)


def split_bytes(largest: float, cores: float, hazard: float = inf) -> int:
    """Return how many bytes of a file one task is to read where ``largest`` bytes are the largest relation read.

    A task costs a little to start and its whole work when its node is lost: at ``hazard`` losses per node-hour the
    sum is least for tasks of sqrt(2 · start / hazard) seconds (Young, CACM 17(9), 1974, for checkpoints). Between
    ``SPLIT`` and ``LARGEST_READ``, such that the tasks make whole rounds of the cores, and never so little that
    starting a task costs more than its work.

    >>> split_bytes(230e6, 3) / 2**20  # two rounds of three tasks
    36.0
    >>> split_bytes(230e6, 3, hazard=0.05) / 2**20  # one
    74.0
    """
    seconds = sqrt(2 * _START * 3600 / hazard) if hazard > 0 else inf
    aim = min(max(seconds * _READ_RATE, SPLIT), LARGEST_READ)
    whole = int(cores) or 1
    rounds = max(round(largest / (aim * whole)), 1)
    wanted = math.ceil(largest / (rounds * whole) / SPLIT_STEP) * SPLIT_STEP
    return int(max(wanted, SMALLEST_READ))
