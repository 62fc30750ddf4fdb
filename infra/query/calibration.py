"""A short measured run of an engine, from which the cost model learns what work costs on this machine.

Bytes are logical (rows times column widths in memory, before encoding and compression), since that is what
a planner can estimate. Each case mixes few kinds of work, in different proportions, so that a non-negative
least squares fit can tell them apart.
"""

import logging
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from ebbflow.infra.protocols import Relation, SqlEngine, StageJob, StageResult
from ebbflow.infra.storage import private
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.model import Measured, Work

ROWS = {"spark": 250_000, "duckdb": 1_000_000}  # of the table "fact"; both take a fraction of a second a case
FORMAT = 1  # of cached values; raise it when cases change
_FILES = 8
_PART = _FILES // 4  # files of "part", a quarter of "fact"
_DIM = 50_000  # rows of "dim"
_GROUPS = 100
_TEXT = 24  # characters of column s
_TASKS = 32  # of the case that measures what a task costs
_WIDTH = {"k": 8, "g": 4, "d": 8, "v": 8, "s": _TEXT, "w": 8}
_FACT = (("k", "bigint"), ("g", "int"), ("d", "bigint"), ("v", "double"), ("s", "string"))
_DIMENSION = (("d", "bigint"), ("w", "double"))
_WARM_UP = ("start", "scan wide", "aggregate many", "broadcast join", "merge join")
_JOIN = "fact.k FROM fact JOIN part ON fact.k = part.k WHERE part.v < fact.v"
_log = logging.getLogger(__name__)


class Cache(Protocol):
    """Where calibrations are kept; ``JsonStore`` is one."""

    def get(self, key: str) -> Any | None: ...

    def put(self, key: str, value: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Case:
    """A statement and the work that it is known to do, apart from its number of tasks."""

    name: str
    sql: str
    work: Callable[[int], Work]  # of the rows of "fact", on Spark
    partitions: int = 0
    tables: tuple[str, ...] = ("fact",)


def _bytes(rows: float, columns: str) -> float:
    return rows * sum(_WIDTH[c] for c in columns)


CASES: tuple[Case, ...] = (
    Case("start", "SELECT * FROM tiny", lambda n: Work(scanned_rows=1, scanned_bytes=8), tables=("tiny",)),
    Case(
        "scan narrow",
        "SELECT k FROM fact WHERE sqrt(v) + g > 99.9995",
        lambda n: Work(scanned_rows=n, scanned_bytes=_bytes(n, "kgv")),
    ),
    Case(
        "scan wide",
        "SELECT k FROM fact WHERE length(s) + g + sqrt(v) + d % 2 > 124.9995",
        lambda n: Work(scanned_rows=n, scanned_bytes=_bytes(n, "kgdvs")),
    ),
    Case(
        "scan part",
        "SELECT k FROM part WHERE sqrt(v) + g > 99.9995",
        lambda n: Work(scanned_rows=n / 4, scanned_bytes=_bytes(n / 4, "kgv")),
        tables=("part",),
    ),
    Case(
        "aggregate few",
        "SELECT g, sum(v) AS t, count(*) AS c FROM fact GROUP BY g",
        lambda n: Work(
            scanned_rows=n,
            scanned_bytes=_bytes(n, "gv"),
            aggregated_rows=n,
            shuffled_bytes=_FILES * _GROUPS * 20,
            written_bytes=_GROUPS * 20,
        ),
        partitions=4,
    ),
    Case(
        "aggregate many",
        "SELECT k, sum(v) AS t FROM fact GROUP BY k HAVING sum(v) < 0",
        lambda n: Work(
            scanned_rows=n,
            scanned_bytes=_bytes(n, "kv"),
            aggregated_rows=n,
            shuffled_bytes=_bytes(n, "kv"),
        ),
        partitions=4,
    ),
    Case(
        "broadcast join",
        "SELECT /*+ BROADCAST(dim) */ count(*) AS c, sum(w) AS t FROM fact JOIN dim ON fact.d = dim.d",
        lambda n: Work(
            scanned_rows=n + _DIM,
            scanned_bytes=_bytes(n, "d") + _bytes(_DIM, "dw"),
            built_rows=_DIM,
            probed_rows=n,
            joined_rows=n,
            broadcast_bytes=_bytes(_DIM, "dw"),
            aggregated_rows=n,
        ),
        partitions=4,
        tables=("fact", "dim"),
    ),
    Case(
        "broadcast part",
        f"SELECT /*+ BROADCAST(part) */ {_JOIN}",
        lambda n: Work(
            scanned_rows=1.25 * n,
            scanned_bytes=_bytes(1.25 * n, "kv"),
            built_rows=n / 4,
            probed_rows=n,
            joined_rows=n / 4,
            broadcast_bytes=_bytes(n / 4, "kv"),
        ),
        tables=("fact", "part"),
    ),
    Case(
        "shuffle hash join",
        f"SELECT /*+ SHUFFLE_HASH(part) */ {_JOIN}",
        lambda n: Work(
            scanned_rows=1.25 * n,
            scanned_bytes=_bytes(1.25 * n, "kv"),
            built_rows=n / 4,
            probed_rows=n,
            joined_rows=n / 4,
            shuffled_bytes=_bytes(1.25 * n, "kv"),
        ),
        partitions=4,
        tables=("fact", "part"),
    ),
    Case(
        "merge join",
        f"SELECT /*+ MERGE(fact, part) */ {_JOIN}",
        lambda n: Work(
            scanned_rows=1.25 * n,
            scanned_bytes=_bytes(1.25 * n, "kv"),
            joined_rows=n / 4,
            sorted_rows=1.25 * n,
            shuffled_bytes=_bytes(1.25 * n, "kv"),
        ),
        partitions=4,
        tables=("fact", "part"),
    ),
    Case(
        "sort",
        "SELECT k, v FROM part ORDER BY v",
        lambda n: Work(
            scanned_rows=n / 4,
            scanned_bytes=_bytes(n / 4, "kv"),
            sorted_rows=n / 4,
            shuffled_bytes=_bytes(n / 4, "kv"),
            written_bytes=_bytes(n / 4, "kv"),
        ),
        partitions=4,
        tables=("part",),
    ),
    Case(
        "write",
        "SELECT k, g, d, v, s FROM fact",
        lambda n: Work(scanned_rows=n, scanned_bytes=_bytes(n, "kgdvs"), written_bytes=_bytes(n, "kgdvs")),
    ),
    Case(
        "many tasks",
        f"SELECT /*+ REPARTITION({_TASKS}) */ k FROM part",
        lambda n: Work(
            scanned_rows=n / 4,
            scanned_bytes=_bytes(n / 4, "k"),
            shuffled_bytes=_bytes(n / 4, "k"),
            written_bytes=_bytes(n / 4, "k"),
        ),
        tables=("part",),
    ),
)


def calibrate(
    engine: SqlEngine,
    cores: float,
    *,
    folder: StorageLocation | None = None,
    rows: int | None = None,
    cache: Cache | None = None,
    machine: str = "",
) -> list[Measured]:
    """Measure ``engine`` on ``cores`` cores, or return what was measured before.

    ``folder`` is one that all its workers can read and write, and is left as it was; ``None``
    takes a temporary one, which suits engines on this machine. ``machine`` distinguishes cached values, such
    as by instance type. Raises the engine's errors.
    """
    rows = rows or ROWS[engine.name]
    key = f"calibration {FORMAT} {engine.name} {machine} cores={cores:g} rows={rows}"
    if cache is not None:
        known = _decoded(cache.get(key))
        if known:
            return known
    measured = list(measure(engine, cores, folder=folder, rows=rows).values())
    if cache is not None:
        cache.put(key, [asdict(m) for m in measured])
    return measured


def measure(
    engine: SqlEngine, cores: float, *, folder: StorageLocation | None = None, rows: int | None = None
) -> Mapping[str, Measured]:
    """Run every case once on a warm engine and return its figures by name.

    A JVM needs some work of each kind before it is as fast as it will be. Beyond that nothing is repeated: a
    real stage also compiles its own code once.
    """
    rows = rows or ROWS[engine.name]
    with _scratch(folder) as place:
        tables = _write_tables(place, rows)
        for case in CASES:
            if case.name in _WARM_UP:
                _run(engine, case, tables, place)
        found = {}
        for case in CASES:
            result = _run(engine, case, tables, place)
            found[case.name] = _measured(engine.name, case.work(rows), result, cores)
            _log.debug("%s: %.3f s wall, %.3f s of tasks", case.name, result.seconds, result.task_seconds)
        return found


def _measured(engine: str, work: Work, result: StageResult, cores: float) -> Measured:
    work = work.plus(Work(tasks=result.tasks))
    if engine == "duckdb":
        work = _in_one_process(work)
    return Measured(engine, work, result.task_seconds, result.seconds, result.tasks, cores)


def _in_one_process(work: Work) -> Work:
    """Return the work without exchanges: one process moves nothing and always joins by hashing."""
    merged = (
        work.joined_rows > 0 and work.built_rows == 0
    )  # a merge join: builds the small, probes the large side
    return replace(
        work,
        shuffled_bytes=0.0,
        broadcast_bytes=0.0,
        built_rows=work.sorted_rows / 5 if merged else work.built_rows,
        probed_rows=work.sorted_rows * 4 / 5 if merged else work.probed_rows,
        sorted_rows=0.0 if merged else work.sorted_rows,
    )


def _run(
    engine: SqlEngine, case: Case, tables: Mapping[str, Relation], place: StorageLocation
) -> StageResult:
    identity = f"calibration-{uuid.uuid4().hex}"
    output = place.under(identity)
    private.folder_maker(output.fs(), output.scheme)(output.root)
    relations = tuple(tables[name] for name in case.tables)
    try:
        return engine.run(
            StageJob(identity, f"calibration: {case.name}", case.sql, relations, output, case.partitions)
        )
    finally:
        output.fs().delete_dir(output.root)


@contextmanager
def _scratch(folder: StorageLocation | None) -> Iterator[StorageLocation]:
    """Give a new directory below ``folder`` and remove it afterwards."""
    import tempfile

    if folder is None:
        with tempfile.TemporaryDirectory(prefix="ebbflow-calibration-") as made:
            yield StorageLocation(made)
        return
    place = folder.under(f"calibration-{uuid.uuid4().hex}")
    private.folder_maker(place.fs(), place.scheme)(place.root)
    try:
        yield place
    finally:
        with suppress(OSError):
            place.fs().delete_dir(place.root)


def _write_tables(place: StorageLocation, rows: int) -> dict[str, Relation]:
    import numpy as np
    import pyarrow as pa

    random = np.random.default_rng(20)
    keys = random.permutation(rows)
    pieces = []
    for chunk in np.array_split(keys, _FILES):
        size = len(chunk)
        letters = random.integers(97, 123, size=(size, _TEXT), dtype=np.uint8)
        pieces.append(
            pa.table(
                {
                    "k": pa.array(chunk, pa.int64()),
                    "g": pa.array(random.integers(0, _GROUPS, size), pa.int32()),
                    "d": pa.array(random.integers(0, _DIM, size), pa.int64()),
                    "v": pa.array(random.random(size)),
                    "s": pa.array(letters.view(f"S{_TEXT}").ravel().astype(str)),
                }
            )
        )
    dim = pa.table({"d": pa.array(random.permutation(_DIM), pa.int64()), "w": random.random(_DIM)})
    fact = _write(place, "fact", pieces, _FACT)
    return {
        "fact": fact,
        "part": Relation("part", fact.scheme, fact.files[:_PART], _FACT),
        "dim": _write(place, "dim", [dim], _DIMENSION),
        "tiny": _write(place, "tiny", [pa.table({"k": pa.array([1], pa.int64())})], _FACT[:1]),
    }


def _write(
    place: StorageLocation, name: str, pieces: list[Any], columns: tuple[tuple[str, str], ...]
) -> Relation:
    import pyarrow.parquet as pq

    entries = []
    for number, piece in enumerate(pieces):
        filesystem, path = place.fs(), place.path(f"{name}-{number}.parquet")
        with private.output_stream(filesystem, place.scheme, path) as out:
            pq.write_table(piece, out)
        entries.append(FileEntry(path, filesystem.get_file_info(path).size or 0, 0.0))
    return Relation(name, place.scheme, tuple(entries), columns)


def _decoded(value: Any) -> list[Measured] | None:
    """Return cached measurements, or ``None`` when there are none or another version wrote them."""
    if not isinstance(value, list):
        return None
    try:
        return [Measured(**(entry | {"work": Work(**entry["work"])})) for entry in value]
    except (TypeError, KeyError):
        return None
