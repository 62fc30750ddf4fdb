"""The work of a stage in units that an engine can be calibrated in."""

from dataclasses import dataclass, fields, replace
from operator import add, attrgetter
from typing import Any


@dataclass(frozen=True, slots=True)
class Work:
    """How much of each kind of work a statement does. Rows and bytes are totals over all tasks."""

    scanned_rows: float = 0.0  # rows decoded from Parquet
    scanned_bytes: float = 0.0  # bytes decoded from Parquet, only the columns read
    built_rows: float = 0.0  # rows put into hash tables (a broadcast counts once per node)
    probed_rows: float = 0.0  # rows looked up in hash tables
    joined_rows: float = 0.0  # rows that joins emit
    sorted_rows: float = 0.0  # rows sorted, by sort-merge joins, windows or ORDER BY
    shuffled_bytes: float = 0.0  # bytes written to and read from shuffle files
    broadcast_bytes: float = 0.0  # bytes collected by the driver and sent, times nodes
    aggregated_rows: float = 0.0  # rows fed to aggregates
    written_bytes: float = 0.0  # bytes encoded into checkpoints
    tasks: float = 0.0  # tasks launched

    def plus(self, other: "Work") -> "Work":
        """Return the sum, kind by kind."""
        return Work(*map(add, _amounts(self), _amounts(other)))

    def vector(self) -> tuple[float, ...]:
        """Return the amounts in the order of the fields."""
        return _amounts(self)


_amounts = attrgetter(*(f.name for f in fields(Work)))


@dataclass(frozen=True, slots=True)
class Measured:
    """One finished stage: the history that calibration learns from."""

    engine: str
    work: Work  # estimated with the actual input and output sizes
    task_seconds: float  # summed run time of all tasks
    wall_seconds: float
    tasks: int
    cores: float  # cores available while it ran
    cold: float = 0.0  # of these, those whose first tasks it ran; parts of cores that were warming up still

    def values(self) -> dict[str, Any]:
        """Return what ``dataclasses.asdict`` does, sooner: a history has hundreds of stages."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return {**found, "work": {one.name: getattr(self.work, one.name) for one in fields(self.work)}}

    def slower(self, factor: float) -> "Measured":
        """Return the same stage with all its times multiplied by ``factor``."""
        if factor == 1.0:
            return self
        times = self.task_seconds * factor, self.wall_seconds * factor
        return replace(self, task_seconds=times[0], wall_seconds=times[1])
