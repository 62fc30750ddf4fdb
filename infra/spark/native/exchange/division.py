"""How a stage is divided among tasks: by slices of one relation, by an exchange, or in waves.

Nothing of Spark is needed to decide that.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from ebbflow.infra.protocols import Relation, StageJob
from ebbflow.infra.spark.native.catalyst import NotNativeError
from ebbflow.infra.spark.native.exchange import costs, hashes
from ebbflow.infra.spark.native.exchange.costs import ByHash, Size, sorted_size
from ebbflow.infra.spark.native.exchange.hashes import Exchange
from ebbflow.infra.spark.native.exchange.program import Program, Slice
from ebbflow.infra.spark.native.exchange.ranges import narrowed
from ebbflow.infra.spark.native.exchange.waves import Waves, waves
from ebbflow.infra.spark.native.slices import Cut

_SMALLEST = 8 << 20  # bytes of a slice below which another one costs more than it saves
_SHORTEST = 1.0  # expected core-seconds of a slice, likewise: few bytes may make many rows
_LARGEST = 2 << 30  # bytes of a slice; beyond that there are more of them than cores...
_MOST = 4  # ...up to this many a core, or, where fewer could not hold what they need of other relations, ...
_FILLED = 128 << 20  # ...as many as read so many bytes each...
_EVER = 1024  # ...and no more, for the driver plans each
_SORTED = 2.0  # times what it sorts that a task needs: DuckDB spills before its memory is full
_TOLD = 16  # row groups of what a task sorts, at least: their bounds tell which hashes have many rows
_ALONE = 512 << 20  # bytes that a stage may read in one task

Way: TypeAlias = list[Slice] | ByHash | Waves
"""Slices of the relation that is cut, none: it runs in one task; or what is exchanged; or waves."""


@dataclass(frozen=True, slots=True)
class Division:
    """Divides stages.

    Args:
        room: bytes of tables that each task can hold; of more it spills.
        cores: tasks that run at once.
    """

    room: int
    cores: int

    def way(self, made: Program, job: StageJob) -> Way:
        """Return how a stage is divided.

        Raises ``NotNativeError`` where tasks could not hold what they read, and Spark SQL is done sooner than they
        would be that spill it, or where one task would have too much to do.
        """
        relations = {r.name.lower(): r for r in job.relations}
        scans = {number: relations[name] for number, name in made.scans.items()}
        sizes = costs.scan_sizes(scans, made.used, self.room)
        whole = costs.bytes_read(sizes)
        why: NotNativeError | None = None
        try:
            if found := self._divided(made, job, scans, sizes):
                return found
        except NotNativeError as error:
            why = error
        if why is None and whole <= 2 * costs.WAVE:
            return []
        several = waves(made, scans, self.room, _SMALLEST, lambda one: self._arm(one, job, scans))
        fits = several is not None and (why is None or self._alone(several.left))
        if several is not None and fits and several.pays(sizes, self.cores, divided=why is not None):
            return several
        if why is None:
            return []
        if made.sliced is None or made.ways is None or made.full or made.numbered or made.gathers:
            raise why
        return self._spilling(made, scans, sizes, self.count(scans[made.sliced].bytes, job.expected))

    def _divided(
        self, made: Program, job: StageJob, scans: Mapping[int, Relation], sizes: Mapping[int, Size]
    ) -> list[Slice] | ByHash:
        """Return how one relation's slices, or one exchange, divide a stage; none: it runs in one task."""
        whole = costs.bytes_read(sizes)
        if made.numbered:
            if not self._alone(sizes):
                raise NotNativeError("tasks might choose among equal rows unlike each other")
            return []
        gathered = made.gathers and whole > _ALONE
        if not gathered and self.count(sum(r.bytes for r in scans.values()), job.expected) > 1 and made.arms:
            with suppress(NotNativeError):  # of the whole more may be known
                return [one for arm in made.arms for one in self._arm(arm, job, scans)]
        if made.sliced is not None and made.ways is not None:
            count = self.count(scans[made.sliced].bytes, job.expected)
            # tasks that write are as many as they have bytes for, however few those of the sliced relation are
            tasks = max(count, min(self.cores, self.count(sum(r.bytes for r in scans.values()))))
            exchange = costs.by_hash(made.ways, sizes, made.sliced, self.room, tasks, scans)
            if gathered and exchange is not None and exchange.made.apart is exchange.made.split:
                exchange = None
            found, cost = list[Slice](), whole
            try:
                if gathered:
                    raise NotNativeError("one task would compute all windows, or count all distinct values")
                if not made.full:
                    found = narrowed(made, scans, sizes, made.sliced, count, self._most(whole), self.room)
                    read = sum(one.read for one in found)
                    cost = costs.shared_cost(sizes[made.sliced].read, read, min(len(found), self.cores))
                elif whole > _ALONE and exchange is not None:
                    return exchange
            except NotNativeError:
                if exchange is not None:
                    return exchange
                if gathered or not self._alone(sizes):
                    raise
                return []
            if exchange is not None and exchange.cost < costs.PAYS * cost:
                return exchange
            if len(found) > 1:
                return found
        if not self._alone(sizes):
            raise NotNativeError("it cannot be divided, and one task would read too much")
        return []

    def _spilling(
        self, made: Program, scans: Mapping[int, Relation], sizes: Mapping[int, Size], count: int
    ) -> list[Slice]:
        """Return slices beside which tasks may have to spill what they hold of others, where they are done sooner
        than Spark SQL even so.

        Raises ``NotNativeError`` where they are not.
        """
        assert made.sliced is not None
        sliced, whole = sizes[made.sliced].read, costs.bytes_read(sizes)
        spilled = costs.spillable(sliced, whole, count, self.cores)
        found = narrowed(made, scans, sizes, made.sliced, count, count, self.room + spilled)
        if not spilled or len(found) <= 1:
            raise NotNativeError("tables that each task reads do not fit into its memory")
        return found

    def _arm(self, arm: Program, job: StageJob, scans: Mapping[int, Relation]) -> list[Slice]:
        """Return the slices of a part of a union, or of a statement. Raises ``NotNativeError``."""
        sizes = costs.scan_sizes({number: scans[number] for number in arm.scans}, arm.used, self.room)
        if arm.gathers and (arm.sliced is None or sizes[arm.sliced].read > _ALONE):
            raise NotNativeError("one task would count all distinct values")
        if arm.sliced is not None:
            read, every = scans[arm.sliced].bytes, sum(relation.bytes for relation in scans.values())
            count = self.count(read, job.expected * read / max(every, 1))
            return narrowed(
                arm, scans, sizes, arm.sliced, count, self._most(costs.bytes_read(sizes)), self.room
            )
        if not self._alone(sizes):
            raise NotNativeError("a part of a union cannot be divided, and one task would read too much")
        return [Slice(Cut(()), (), 0.0, arm)]

    def count(self, size: float, expected: float = 0.0) -> int:
        """Return how many slices of a relation, or of several that are exchanged, there are to be."""
        count = min(self.cores, max(math.ceil(size / _SMALLEST), math.ceil(expected / _SHORTEST)))
        return max(min(max(count, math.ceil(size / _LARGEST)), _MOST * self.cores), 1)

    def _most(self, whole: float) -> int:
        """Return how many slices there may be that read the ``whole`` in all."""
        return max(_MOST * self.cores, min(int(whole // _FILLED), _EVER))

    def writers(self, exchange: Exchange, relation: Relation, *, sorts: bool) -> int:
        """Return how many tasks write what is exchanged of a relation; none that sorts it has to spill, as long as
        each has rows enough to tell hashes apart.

        Raises ``TableError``.
        """
        count = self.count(relation.bytes)
        if not sorts:
            return count
        held, rows = sorted_size(exchange, relation, count)
        fitting = min(math.ceil(_SORTED * held / self.room), _EVER)
        return max(count, min(fitting, int(rows // (_TOLD * hashes.GROUP))))

    def _alone(self, sizes: Mapping[int, Size]) -> bool:
        """Tell whether one task may read what there is."""
        whole = costs.bytes_read(sizes)
        return whole <= _ALONE or (whole <= _LARGEST and costs.alone(sizes, self.room, self.cores))
