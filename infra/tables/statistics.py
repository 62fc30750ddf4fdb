"""Row counts, ranges, distinct counts and selectivities of tables.

Counts, nulls and ranges come from all Parquet footers and are exact; distinct counts and widths come from a
sample, or from all rows of a small table.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import StorageError, TableError
from ebbflow.infra.protocols import Relation
from ebbflow.infra.storage import files
from ebbflow.infra.storage.jsonstore import JsonStore
from ebbflow.infra.tables import distinct
from ebbflow.infra.tables.clustering import grid
from ebbflow.infra.tables.confinement import NOTHING, configuration, lock
from ebbflow.infra.tables.footers import ColumnFooter, column_footers, comparable
from ebbflow.infra.tables.parquet import footer, version
from ebbflow.infra.tables.sampling import Sample, draw, keep, kept, thinned
from ebbflow.planners.model import ColumnStatistics, TableStatistics

_FORMAT = 2  # of cached statistics
_OPEN_SAMPLES = 8  # samples held open in DuckDB


def collect(
    relation: Relation,
    cache: JsonStore | None = None,
    sample_rows: int = 20_000,
    clock: Clock | None = None,
) -> TableStatistics:
    """Return the statistics of a table, from ``cache`` when its files have not changed.

    The sample that distinct counts rest on is kept beside the cache for ``selectivity``. ``clock`` bounds how
    long sampling may take. Raises ``TableError``.
    """
    key = f"statistics/{_FORMAT}/{version(relation)}/{sample_rows}"
    found = _decoded(cache.get(key)) if cache is not None else None
    if found is not None:
        return found
    if relation.external:
        raise TableError(
            f"table {relation.name!r} lives in the engine's own catalogue; its files are not known"
        )
    metadata = files.in_parallel(lambda file: footer(relation.scheme, file), relation.files)
    rows = sum(m.num_rows for m in metadata)
    footers = column_footers(relation, metadata)
    sample = draw(relation, sample_rows, clock)
    columns = {name: _column(name, dtype, footers[name], sample) for name, dtype in relation.columns}
    statistics = TableStatistics(float(rows), float(relation.bytes), columns)
    keep(relation, thinned(sample, sample_rows), cache, sample_rows)
    if cache is not None:
        with suppress(StorageError):  # a cache only
            cache.put(key, asdict(statistics))
    return statistics


def selectivity(
    relation: Relation,
    predicates: Sequence[str],
    cache: JsonStore | None = None,
    sample_rows: int = 20_000,
) -> list[float | None]:
    """Return the fraction of rows for which each predicate is true, as seen in the table's sample.

    Predicates are SQL in DuckDB's dialect over the table's columns. ``None`` stands for one that cannot be
    evaluated. With the entire table as sample the fraction is exact; else it is ``(hits + 1/2) / (n + 1)``,
    never 0: Krichevsky and Trofimov's estimate of a proportion (1981). Raises ``TableError`` when rows cannot
    be read.
    """
    if not predicates:
        return []
    sample = kept(relation, cache, sample_rows)
    n = sample.table.num_rows
    if n == 0:
        return [None] * len(predicates)
    hits = _hits(_opened(relation, sample, sample_rows), _quote(relation.name), predicates)
    return [None if h is None else (h / n if sample.entire else (h + 0.5) / (n + 1)) for h in hits]


# --- distinct counts --------------------------------------------------------------------------------------


def _read_ranges(
    dtype: str, column: Any, footers: ColumnFooter, sample: Sample
) -> dict[int, tuple[float, float] | None]:
    """Return the sampled row groups, with the range that was read where a row group was read in part only."""
    import pyarrow as pa
    import pyarrow.compute as pc

    ranges: dict[int, tuple[float, float] | None] = {}
    start = 0
    for block in sample.blocks:
        ranges[block.row_group] = None
        if block.rows < footers.rows[block.row_group]:
            with suppress(pa.ArrowNotImplementedError):  # a type without order
                ends = pc.min_max(column.slice(start, block.sampled)).as_py()
                low, high = (comparable(ends[end], dtype) for end in ("min", "max"))
                if low is not None and high is not None:
                    ranges[block.row_group] = (footers.place(low), footers.place(high))
        start += block.sampled
    return ranges


def _column(name: str, dtype: str, footers: ColumnFooter, sample: Sample) -> ColumnStatistics:
    column = sample.table.column(name)
    nulls = footers.nulls
    if nulls is None:
        nulls = column.null_count / max(1, len(column))
    values = _distinct(dtype, column, footers, sample, nulls)
    edges, reads = grid(footers, dtype)
    return ColumnStatistics(values, nulls, footers.low, footers.high, _width(dtype, column), edges, reads)


def _distinct(dtype: str, column: Any, footers: ColumnFooter, sample: Sample, nulls: float) -> float | None:
    seen = distinct.frequencies(column)
    if seen is None:
        return None
    if sample.entire:
        return float(len(seen))
    values = sample.rows * (1.0 - nulls)  # in the entire column
    # of a column stored in order, the sample tells about the row groups it came from, and no others
    covered = footers.coverage(_read_ranges(dtype, column, footers, sample))
    guess = distinct.estimate(seen, values * covered) / covered
    return float(max(len(seen), min(guess, values, footers.possible(dtype))))


_WIDTHS = {
    "boolean": 1.0,
    "tinyint": 1.0,
    "smallint": 2.0,
    "int": 4.0,
    "float": 4.0,
    "date": 4.0,
    "bigint": 8.0,
    "double": 8.0,
    "timestamp": 8.0,
    "timestamp_ntz": 8.0,
}


def _width(dtype: str, column: Any) -> float:
    """Return the average bytes of a value: fixed by the type, else measured without offsets and flags."""
    import pyarrow.compute as pc

    if dtype in _WIDTHS:
        return _WIDTHS[dtype]
    if dtype.startswith("decimal"):
        return 8.0 if int(dtype[8:].partition(",")[0]) <= 18 else 16.0
    if len(column) == 0:
        return 8.0
    if dtype in ("string", "binary"):
        try:
            mean = pc.mean(pc.binary_length(column)).as_py()
        except NotImplementedError:  # dictionaries
            mean = None
        return float(mean if mean is not None else column.nbytes / len(column))
    return float(column.nbytes / len(column))


# --- the cache --------------------------------------------------------------------------------------------


def _decoded(raw: Any) -> TableStatistics | None:
    try:
        columns = {name: _decoded_column(values) for name, values in raw["columns"].items()}
        return TableStatistics(float(raw["rows"]), float(raw["bytes"]), columns)
    except (TypeError, KeyError, AttributeError, ValueError):
        return None


def _decoded_column(raw: Any) -> ColumnStatistics:
    return ColumnStatistics(**{**raw, "edges": tuple(raw["edges"]), "reads": tuple(raw["reads"])})


# --- predicates -------------------------------------------------------------------------------------------

_open: OrderedDict[tuple[str, str, int], Any] = OrderedDict()
_open_lock = threading.Lock()


def _opened(relation: Relation, sample: Sample, sample_rows: int) -> Any:
    """Return a DuckDB cursor that sees the sample as a table of the relation's name, and nothing else."""
    key = (relation.name, version(relation), sample_rows)
    with _open_lock:
        connection = _open.get(key)
        if connection is None:
            connection = _open[key] = _connect(relation, sample)
            while len(_open) > _OPEN_SAMPLES:
                # not closed: another thread may be using it
                _open.popitem(last=False)
        _open.move_to_end(key)
        return connection.cursor()


def _connect(relation: Relation, sample: Sample) -> Any:
    import duckdb

    # predicates are the user's text: they must not reach files
    connection = duckdb.connect(":memory:", config={**configuration(), "threads": 1})
    connection.register("ebbflow_sample", sample.table)
    name = _quote(relation.name)
    connection.execute(f"CREATE TABLE {name} AS SELECT * FROM ebbflow_sample")
    connection.unregister("ebbflow_sample")
    lock(connection, NOTHING)
    return connection


def _hits(cursor: Any, table: str, predicates: Sequence[str]) -> list[int | None]:
    """Count the rows that satisfy each predicate, all in one scan unless one of them fails."""
    import duckdb

    counts = ", ".join(f"count(*) FILTER (WHERE ({p}\n))" for p in predicates)
    try:
        row = cursor.execute(f"SELECT {counts} FROM {table}").fetchone()
        return [int(value) for value in row]
    except duckdb.Error:
        if len(predicates) == 1:
            return [None]
        return [_hits(cursor, table, [predicate])[0] for predicate in predicates]


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
