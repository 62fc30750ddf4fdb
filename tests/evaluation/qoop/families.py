"""The TPC-DS plan families that come with the package, and how they are made anew."""

import gzip
import json
from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from statistics import median

from pyarrow.fs import LocalFileSystem

from ebbflow.infra.errors import TableError
from ebbflow.infra.storage import files
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables import parquet as tables
from ebbflow.infra.tables import statistics
from ebbflow.planners.errors import OptionError, PlanningError
from ebbflow.planners.model import Catalogue, Table
from tests.evaluation.qoop.tpcds import at_scale
from tests.evaluation.qoop.workloads import Family, Testbed, Variety, decode, encode, family

STORED = "tpcds-sf500.json.gz"
SCALE = 500.0  # QOOP, section 8
ABSURD = 20.0  # times the median: a family whose plans take longer rests on a cardinality gone wrong


def stored() -> tuple[Family, ...]:
    """Return the families that come with the package, in the order of their queries."""
    packed = (Path(__file__).parent / "data" / STORED).read_bytes()
    return decode(json.loads(gzip.decompress(packed)))


def chosen(families: Sequence[Family], count: int = 50, testbed: Testbed | None = None) -> tuple[Family, ...]:
    """Return the ``count`` families with the most alternative plans, in their own order (QOOP, section 8).

    Left out are families of one plan and those whose plans take over 20 times the median on the whole
    testbed. Ties go to more joins, then to the order given.
    """
    bed = testbed or Testbed()
    if count < 1:
        raise OptionError(f"count must be >= 1; got {count}")
    several = [f for f in families if len(f.plans) > 1]
    times = {f.name: f.best_seconds(bed.share(bed.containers)) for f in several}
    middle = median(times.values()) if times else 0.0
    usual = [f for f in several if isfinite(times[f.name]) and times[f.name] <= ABSURD * middle]
    best = sorted(usual, key=lambda f: (-f.alternatives, -f.joins))[:count]
    return tuple(f for f in usual if f in best)


def plan(
    folder: Path,
    *,
    variety: Variety | None = None,
    scale: float = SCALE,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> tuple[Family, ...]:
    """Plan every query of ``folder``/queries/q*.sql over the tables of ``folder``.

    Their statistics, of scale factor 1, are taken to ``scale``. Queries that our planner refuses are left out.
    Raises ``TableError`` when there are none.
    """
    queries = sorted((folder / "queries").glob("q*.sql"), key=lambda p: (len(p.stem), p.stem))
    if not queries:
        raise TableError(
            f"{folder} must hold queries/q1.sql, ... beside TPC-DS's tables; no query was found: "
            "make it with ebbflow data tpcds --scale 1"
        )
    known = {
        r.name.lower(): Table(r.name, r.columns, "sf1", statistics.collect(r))
        for r in tables.discover(StorageLocation(folder))
    }
    catalogue = at_scale(Catalogue(known), scale)
    out: list[Family] = []
    for number, path in enumerate(queries):
        progress(path.stem, number, len(queries))
        try:
            out.append(family(path.stem, path.read_text(), catalogue, variety=variety))
        except PlanningError:
            continue
    return tuple(out)


def save(families: Sequence[Family], path: Path) -> None:
    """Write families as ``stored`` reads them; equal families give equal bytes."""
    text = json.dumps(encode(families), separators=(",", ":"))
    files.write_atomic(LocalFileSystem(), "file", str(path), gzip.compress(text.encode(), 9, mtime=0))
