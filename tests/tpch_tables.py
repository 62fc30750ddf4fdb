"""TPC-H tables for tests, kept for the next time: to make them takes a second of CPU, however few they are."""

import fcntl
from importlib.metadata import version
from pathlib import Path

from ebbflow.infra.tables.benchmark_data import tpch

_CACHE = Path(__file__).parents[1] / ".cache"


def tpch_tables(scale: float) -> Path:
    """Return a folder with the tables of a scale factor, which tests must leave as they are."""
    made = _CACHE / f"tpch-{version('tpchgen-cli')}"
    made.mkdir(parents=True, exist_ok=True)
    with (made / "lock").open("w") as lock:  # another part of the suite may be making them
        fcntl.flock(lock, fcntl.LOCK_EX)
        return tpch(scale, made / f"sf{scale:g}", print)
