"""Whether the tasks of a stage exchange what they join, and by which keys.

Either each task reads a slice of one relation and all that it needs of the others, or tasks write the rows of several
in the order of a hash of a key, for others to join a range of hashes each.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ebbflow.infra.protocols import Relation
from ebbflow.infra.spark.native.exchange.hashes import Exchange
from ebbflow.infra.spark.native.slices import KeyBounds
from ebbflow.infra.tables.filefooters import read_footers

PAYS = 0.8  # of the costs of slices that an exchange may have at most: what it leaves of a table is a guess
_WRITTEN = 4.0  # what writing a byte and reading it again costs over reading it once: it is sorted, too
WAVE = 16 << 20  # bytes that could be read while tasks wait for those that write what they join
_FEWER = 0.5  # of the rows that tasks write, the groups that there may be for these to be written
_KEPT = 16  # a relation of less than such a part of a task's memory is read by each task, not exchanged
_ROW = 16  # bytes that a task holds of a row besides its values...
_VALUE = 8  # ...and for each value of a fixed size
_PACKED = 4.0  # times that the pages of a file may have of its bytes, before they are compressed
_ALIKE = 1.1  # times the least costs that count as the same
_SPARK_SQL = 6.0  # times the time of a core that Spark SQL takes for what DuckDB does: 6 to 13 were measured


class Size(NamedTuple):
    """The size of a scan, in bytes."""

    read: float  # of the columns that a statement needs, encoded
    held: float  # that a task may hold of them


def scan_sizes(
    scans: Mapping[int, Relation], used: Mapping[int, Sequence[str]], memory: int
) -> dict[int, Size]:
    """Return the sizes of scans of which a statement needs some columns; those of small ones are their files'.

    Raises ``TableError``.
    """
    found = {}
    for number, relation in scans.items():
        whole = float(relation.bytes)
        found[number] = Size(whole, whole)
        several = relation.log is not None and relation.log.ids  # a column may have another one's old name
        if number in used and whole * _KEPT >= memory and not several:
            read, rows = column_bytes(relation, used[number])
            kinds = {name.lower(): kind for name, kind in relation.columns}
            texts = sum(kinds.get(name.lower()) in ("string", "binary") for name in used[number])
            held = rows * (_ROW + _VALUE * len(used[number])) + (read if texts else 0.0)
            found[number] = Size(min(read, whole * _PACKED), min(held, whole))
    return found


def bytes_read(sizes: Mapping[int, Size]) -> float:
    """Return the bytes that reading all of some scans takes."""
    return sum(size.read for size in sizes.values())


def alone(sizes: Mapping[int, Size], memory: int, cores: int) -> bool:
    """Tell whether one task that reads all of some scans, and spills what it cannot hold of all but the largest, is
    done sooner than Spark SQL on all ``cores``."""
    held, whole = sorted(size.held for size in sizes.values()), bytes_read(sizes)
    spilled = max(sum(held[:-1]) - memory, 0.0)
    return sooner(whole + _WRITTEN * spilled, whole, cores)


def sooner(cost: float, whole: float, cores: int) -> bool:
    """Tell whether tasks each of which costs as much as reading ``cost`` bytes are done sooner than Spark SQL on all
    ``cores`` with ``whole`` bytes."""
    return cost * cores <= _SPARK_SQL * whole


def spillable(sliced: float, whole: float, tasks: int, cores: int) -> float:
    """Return the bytes that each of ``tasks`` may spill where they read a slice of ``sliced`` bytes each and all else
    of the ``whole``, and still are done sooner than Spark SQL on all ``cores``."""
    at_once = min(tasks, cores)
    read = shared_cost(sliced, (whole - sliced) * tasks, at_once)
    return max(_SPARK_SQL * whole / cores - read, 0.0) * at_once / (_WRITTEN * tasks)


def column_bytes(relation: Relation, names: Sequence[str]) -> tuple[float, int]:
    """Return the bytes of columns, encoded but not compressed, and the rows. Raises ``TableError``."""
    if relation.log is not None and relation.log.ids:  # a column may have another one's old name
        return float(relation.bytes), 0
    told = read_footers(relation, [relation.stored(name) for name in names])
    stored = {relation.stored(name) for name in names}
    read = sum(size for one in told for name, size in one.unpacked.items() if name in stored)
    return float(read), sum(sum(one.rows) for one in told)


class Written(NamedTuple):
    """What is exchanged of a scan, in bytes."""

    read: float
    kept: float
    untested: float  # what would be kept if all rows passed its tests


def written(exchange: Exchange, relation: Relation, tasks: int) -> Written:
    """Return what ``tasks`` exchange of a scan. Raises ``TableError``."""
    read, _ = column_bytes(relation, exchange.read)
    kept, rows = column_bytes(relation, exchange.columns)
    kept += rows * _VALUE * len(exchange.calls)
    return Written(read, kept * _part(exchange, relation, tasks), kept)


def _part(exchange: Exchange, relation: Relation, tasks: int) -> float:
    """Return how many rows are written for each of a scan. Raises ``TableError``."""
    groups = groups_of(relation, exchange.columns, exchange.part, tasks) if exchange.groups else 1.0
    return exchange.part * groups


def sorted_size(exchange: Exchange, relation: Relation, tasks: int) -> tuple[float, float]:
    """Return what one of ``tasks`` that sorted all of what is exchanged of a scan would hold, in bytes, and the rows.

    Raises ``TableError``.
    """
    kept, rows = column_bytes(relation, exchange.columns)
    kinds = {name.lower(): kind for name, kind in relation.columns}
    texts = any(kinds.get(name.lower()) in ("string", "binary") for name in exchange.columns)
    part = _part(exchange, relation, tasks)
    values = len(exchange.columns) + len(exchange.calls) + 1  # and the hash
    return part * (rows * (_ROW + _VALUE * values) + (kept if texts else 0.0)), part * rows


def groups_of(relation: Relation, names: Sequence[str], part: float, tasks: int) -> float:
    """Return how many groups by some columns ``tasks`` may find for each row, where such a ``part`` of all rows is in
    no order; 1 where footers do not tell. Raises ``TableError``.

    Of d values that n rows have, those that each task reads have d(1 - (1 - 1/tasks)^(n/d)) (A. Cardenas, CACM 1975).
    """
    rows = part * column_bytes(relation, names)[1]
    values = math.prod(KeyBounds(relation, name).spread() for name in names)
    if not 0 < values < rows:
        return 1.0
    found = values * (1 - math.pow(1 - 1 / tasks, rows / values))
    return min(tasks * found / rows, 1.0)


def shared_cost(sliced: float, others: float, tasks: int) -> float:
    """Return the bytes that one core reads where ``tasks`` read a slice of ``sliced`` each, and ``others`` in all."""
    return (sliced + others) / max(tasks, 1)


def waves_cost(sliced: float, others: float, left: float, waves: int, tasks: int) -> float:
    """Return what a core reads where ``tasks`` read slices of ``sliced`` bytes in all, and ``others`` beside them, in
    so many waves, and one more task what is ``left``."""
    return shared_cost(sliced, others, tasks) + left + waves * WAVE


def exchange_cost(exchanged: Sequence[Written], others: float, tasks: int) -> float:
    """Return what two waves of ``tasks`` cost a core, in bytes that it could read; ``others`` is what each task reads
    of what is not exchanged."""
    return sum(one.read + _WRITTEN * one.kept for one in exchanged) / max(tasks, 1) + others + WAVE


class Statements(NamedTuple):
    """What tasks run on slices, or on ranges of hashes, and what one runs on all that these have written, as
    ``parts``; empty where that is the result already."""

    first: str
    merge: str

    @property
    def file(self) -> str:
        """Return the name of the file that ``first`` writes, for the number of its part."""
        return ".native-{:05d}.parquet" if self.merge else "part-{:05d}.parquet"


class Exchanged(NamedTuple):
    """What writes scans, and the statements over what is written."""

    exchanges: Mapping[int, Exchange]  # by scan
    split: Statements  # where rows of one hash may be in several tasks
    apart: Statements  # where they are not, so that groups by the key are whole in each task
    whole: str  # over all hashes
    read: frozenset[int]  # the scans that these read


class Ways(NamedTuple):
    """How a statement's scans can be exchanged.

    ``keys`` are scans with a column each, the sliced one among them, which are equal where rows meet.
    """

    keys: Sequence[Mapping[int, str]]
    made: Callable[[Mapping[int, str]], Exchanged]  # of scans that are exchanged by a column each
    all: bool = False  # rows that meet none count, too: each of these scans must be exchanged
    early: Callable[[Mapping[int, str], int], Exchanged | None] = lambda keys, number: None
    """As ``made``, of one scan groups; ``None``: something needs each of its rows."""


class ByHash(NamedTuple):
    """Scans that are exchanged, and by which columns."""

    keys: Mapping[int, str]
    made: Exchanged
    others: float  # bytes that each task holds of other scans
    cost: float  # as ``exchange_cost`` has it
    size: float  # bytes that are exchanged, if all rows pass their tests


def by_hash(
    ways: Ways, sizes: Mapping[int, Size], sliced: int, memory: int, tasks: int, scans: Mapping[int, Relation]
) -> ByHash | None:
    """Return the cheapest way to exchange; ``None``: each leaves more for every task to read than it can hold.

    Args:
        ways: those that there are.
        sizes: of all scans.
        sliced: the scan each of whose rows is to be in one task.
        memory: bytes that a task can hold; half of them are for what is exchanged.
        tasks: that write, and that join what is exchanged.
        scans: all of them; of ways that cost about the same, the one whose key may have most values in them is taken.

    Raises ``TableError``.
    """
    found = []
    for columns in ways.keys:
        large = {
            n: c for n, c in columns.items() if ways.all or n == sliced or sizes[n].held * _KEPT >= memory
        }
        if len(large) < 2:
            continue
        for made in (*_early(ways, large, tasks, scans), ways.made(large)):
            others = [size for number, size in sizes.items() if number in made.read - large.keys()]
            left = sum(size.held for size in others)
            if len(made.exchanges) > 1 and sliced in made.exchanges and 2 * left <= memory:
                parts = [written(one, scans[number], tasks) for number, one in made.exchanges.items()]
                asked = sum(sizes[number].read for one in made.exchanges.values() for number in one.others)
                cost = exchange_cost(parts, sum(size.read for size in others) + asked, tasks)
                found.append(ByHash(large, made, left, cost, sum(one.untested for one in parts)))
    least = min((way.cost for way in found), default=0.0)
    cheapest = [way for way in found if way.cost <= _ALIKE * least]
    if len(cheapest) > 1:
        cheapest.sort(key=lambda way: -KeyBounds(scans[sliced], way.keys[sliced]).spread())
    return cheapest[0] if cheapest else None


def _early(
    ways: Ways, columns: Mapping[int, str], tasks: int, scans: Mapping[int, Relation]
) -> Iterator[Exchanged]:
    """Iterate over those that write groups of a scan's rows which are few of them."""
    for number, column in columns.items():
        few = groups_of(scans[number], [column], 1.0, tasks) <= _FEWER
        made = ways.early(columns, number) if few else None
        one = made.exchanges.get(number) if made is not None else None
        if made and one and groups_of(scans[number], one.columns, one.part, tasks) <= _FEWER:
            yield made
