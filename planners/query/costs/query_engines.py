"""Which engine runs a query where nobody has named one: the embedded one, or Spark."""

from dataclasses import dataclass
from typing import Literal

from ebbflow.planners.errors import UnsupportedQueryError

EXPANSION = 3.0  # times the bytes that footers give for unpacked columns, which are still encoded
SPILLING = 4.0  # times its memory that the embedded engine may have to hold, the rest of it on disk
_DISK = 0.5  # of the free disk, which other processes need too
_GIB = float(2**30)


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine, and why."""

    engine: Literal["spark", "duckdb"]
    reason: str


@dataclass(frozen=True, slots=True)
class Fit:
    """What a query reads, and what this machine has for it.

    Args:
        read: bytes of the columns that it names, unpacked but encoded, as footers give them.
        memory: GiB that the embedded engine may take. Of the machine rather than what is free just now: the same
            query must get the same engine again to find the stages that it has finished.
        disk: GiB that are free where the embedded engine spills.
        refusal: why the embedded engine cannot run the query; empty if it can.
        without_spark: why Spark cannot run it here; empty if it can.
    """

    read: float
    memory: float
    disk: float
    refusal: str = ""
    without_spark: str = ""

    def choose(self) -> EngineChoice:
        """Return the embedded engine where what is read fits its memory, or it can spill; else Spark, if present.

        Raises ``UnsupportedQueryError`` where neither can run the query.
        """
        held = EXPANSION * self.read / _GIB
        size = f"about {_size(held)} to hold"
        if self.refusal:
            found = EngineChoice("spark", f"DuckDB cannot run it ({self.refusal})")
        elif held <= self.memory:
            return EngineChoice(
                "duckdb", f"no Spark master is named, and {size} fit {_size(self.memory)} of memory"
            )
        elif held <= SPILLING * self.memory and held - self.memory <= _DISK * self.disk:
            return EngineChoice(
                "duckdb",
                f"no Spark master is named, and of {size} what does not fit {_size(self.memory)} of memory fits the "
                "disk",
            )
        else:
            found = EngineChoice(
                "spark", f"{size} are too much for {_size(self.memory)} of memory and the disk"
            )
        if self.without_spark and self.refusal:
            raise UnsupportedQueryError(
                f"no engine can run the query: DuckDB cannot ({self.refusal}), "
                f"and Spark cannot here ({self.without_spark})"
            )
        if self.without_spark:
            return EngineChoice(
                "duckdb", f"Spark cannot run it here ({self.without_spark}), though {found.reason}"
            )
        return found


def _size(gib: float) -> str:
    return f"{gib:.1f} GiB" if gib >= 1 else f"{1024 * gib:.0f} MiB"
