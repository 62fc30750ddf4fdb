"""Row counts, ranges, distinct counts and selectivities of tables.

Counts, nulls and ranges come from all Parquet footers and are exact; distinct counts and widths come from a
sample, or from all rows of a small table.

How many distinct values a column has, judged by a random sample of it.

The hybrid of Haas, Naughton, Seshadri and Stokes, "Sampling-Based Estimation of the Number of Distinct Values
of an Attribute" (VLDB 1995): a chi-squared test tells whether the sample's frequencies are skewed, and then
Shlosser's estimator is used, else a jackknife.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import StorageError, TableError
from ebbflow.infra.protocols import Relation
from ebbflow.infra.storage.jsonstore import JsonStore
from ebbflow.infra.tables import partitions
from ebbflow.infra.tables.clustering import grid
from ebbflow.infra.tables.confinement import opened_on
from ebbflow.infra.tables.footers import ColumnFooter, column_footers, comparable
from ebbflow.infra.tables.logs.snapshots import read_footers
from ebbflow.infra.tables.parquet import version
from ebbflow.infra.tables.sampling import Sample, draw, keep, kept, thinned
from ebbflow.planners.model import ColumnStatistics, TableStatistics

Frequencies = npt.NDArray[np.int64]  # how often each distinct value was sampled, all >= 1


_NORMAL_QUANTILE = 1.96  # of 0.975


def frequencies(column: Any) -> Frequencies | None:
    """Return how often each value of a ``pyarrow.ChunkedArray`` occurs; ``None`` for nested types."""
    import pyarrow as pa

    if isinstance(column.type, pa.BaseExtensionType):  # JSON is text, a UUID bytes
        column = column.cast(column.type.storage_type)
    if pa.types.is_nested(column.type) or pa.types.is_null(column.type):
        return None
    if len(column) == 0:  # without a chunk there is no dictionary to make one of, for most types
        return np.zeros(0, np.int64)
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    encoded = encoded.unify_dictionaries()
    codes = encoded.combine_chunks() if encoded.num_chunks != 1 else encoded.chunk(0)
    indices = codes.indices.drop_null().to_numpy(zero_copy_only=False)
    counts = np.bincount(indices).astype(np.int64) if len(indices) else np.zeros(0, np.int64)
    return counts[counts > 0]


def estimate(counts: Frequencies, population: float) -> float:
    """Return the estimated distinct values among ``population`` values; ``counts`` is of a random sample.

    Not less than ``len(counts)`` nor more than ``population``.
    """
    if len(counts) == 0:
        return 0.0
    population = max(population, float(counts.sum()))
    raw = shlosser(counts, population) if skewed(counts) else jackknife(counts, population)
    return min(population, max(float(len(counts)), raw))


def skewed(counts: Frequencies) -> bool:
    """Tell whether the frequencies are unlikely to come from equally frequent values.

    Compares ``sum((c - mean)^2 / mean)`` with the 0.975 quantile of chi-squared with ``d - 1`` degrees of
    freedom (by Wilson and Hilferty's approximation).
    """
    freedom = len(counts) - 1
    if freedom < 1:
        return False
    mean = counts.mean()
    spread = float(((counts - mean) ** 2 / mean).sum())
    step = 2.0 / (9.0 * freedom)
    return spread > freedom * (1.0 - step + _NORMAL_QUANTILE * math.sqrt(step)) ** 3


def jackknife(counts: Frequencies, population: float) -> float:
    """Estimate for values of about equal frequency: ``n d / (n - f1 + f1 n / N)``.

    With n sampled values, d distinct, f1 of them seen once, N values in all: the first-order unsmoothed
    jackknife D_uj1 of Haas and Stokes, "Estimating the Number of Classes in a Finite Population", JASA
    93(444), 1998. Exact for keys.
    """
    n, once = float(counts.sum()), float((counts == 1).sum())
    return n * len(counts) / (n - once + once * n / population)


def shlosser(counts: Frequencies, population: float) -> float:
    """Estimate for skewed frequencies: ``d + f1 sum_i (1-q)^i f_i / sum_i i q (1-q)^(i-1) f_i``.

    With f_i the number of values seen i times and q = n / N: A. Shlosser, "On estimation of the size of the
    dictionary of a long text on the basis of a sample", Engineering Cybernetics 19, 1981.
    """
    q = min(1.0, float(counts.sum()) / population)
    times, seen = np.unique(counts, return_counts=True)
    once = float(seen[0]) if times[0] == 1 else 0.0
    if once == 0.0 or q >= 1.0:
        return float(len(counts))
    missed = float(((1.0 - q) ** times * seen).sum())
    kept = float((times * q * (1.0 - q) ** (times - 1.0) * seen).sum())
    return len(counts) + once * missed / kept


_FORMAT = 3  # of cached statistics
_OPEN_SAMPLES = 8  # samples held open in DuckDB


def collect(
    relation: Relation,
    cache: JsonStore | None = None,
    sample_rows: int = 20_000,
    clock: Clock | None = None,
    names: Collection[str] | None = None,
    at_once: int = 1,
) -> TableStatistics:
    """Return the statistics of a table and of its columns ``names`` (all): what ``cache`` has of the same files is
    not read again, and is returned as well.

    The sample that distinct counts rest on is kept beside the cache for ``selectivity``. ``clock`` bounds how
    long sampling may take, ``at_once`` says of how many tables at the same time. Raises ``TableError``.
    """
    wanted = _chosen(relation, names)
    key = f"statistics/{_FORMAT}/{version(relation)}/{sample_rows}"
    found = _decoded(cache.get(key)) if cache is not None else None
    missing = [name for name in wanted if found is None or name not in found.columns]
    if found is not None and not missing:
        return found
    if relation.external:
        raise TableError(
            f"table {relation.name!r} lives in the engine's own catalogue; its files are not known"
        )
    told = read_footers(relation, missing)
    rows = sum(sum(file.rows) for file in told)
    columns = {}
    if missing:
        ranges = column_footers(relation, told, missing)
        sample = draw(relation, sample_rows, clock, missing, at_once)
        columns = {n: _column(n, dtype, ranges[n], sample) for n, dtype in relation.columns if n in ranges}
        keep(relation, thinned(sample, sample_rows), cache, sample_rows)
    for name, count in partitions.distinct(relation).items():
        if name in columns:
            columns[name] = replace(columns[name], distinct=float(count))
    known = found.columns if found is not None else {}
    statistics = TableStatistics(float(rows), float(relation.bytes), {**known, **columns})
    if cache is not None:
        with suppress(StorageError):  # a cache only
            cache.put(key, asdict(statistics))
    return statistics


def _chosen(relation: Relation, names: Collection[str] | None) -> list[str]:
    """Return the columns of the relation that are among ``names``, which are in lower case."""
    return [name for name, _ in relation.columns if names is None or name.lower() in names]


def selectivity(
    relation: Relation,
    predicates: Sequence[str],
    cache: JsonStore | None = None,
    sample_rows: int = 20_000,
    names: Collection[str] | None = None,
) -> list[float | None]:
    """Return the fraction of rows for which each predicate is true, as seen in the table's sample.

    Predicates are SQL in DuckDB's dialect over the table's columns ``names`` (all, in lower case). ``None`` stands
    for one that cannot be evaluated. With the entire table as sample the fraction is exact; else it is
    ``(hits + 1/2) / (n + 1)``, never 0: Krichevsky and Trofimov's estimate of a proportion (1981). Raises
    ``TableError`` when rows cannot be read.
    """
    if not predicates:
        return []
    sample = kept(relation, cache, sample_rows, _chosen(relation, names))
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
    seen = frequencies(column)
    if seen is None:
        return None
    if sample.entire:
        return float(len(seen))
    values = sample.rows * (1.0 - nulls)  # in the entire column
    # of a column stored in order, the sample tells about the row groups it came from, and no others
    covered = footers.coverage(_read_ranges(dtype, column, footers, sample))
    guess = estimate(seen, values * covered) / covered
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

_open: OrderedDict[tuple[str, str, int, tuple[str, ...]], Any] = OrderedDict()
_open_lock = threading.Lock()


def _opened(relation: Relation, sample: Sample, sample_rows: int) -> Any:
    """Return a DuckDB cursor that sees the sample as a table of the relation's name, and nothing else."""
    key = (relation.name, version(relation), sample_rows, tuple(sample.table.column_names))
    with _open_lock:
        connection = _open.get(key)
        if connection is None:
            connection = _open[key] = opened_on(relation.name, sample.table)
            while len(_open) > _OPEN_SAMPLES:
                # not closed: another thread may be using it
                _open.popitem(last=False)
        _open.move_to_end(key)
        return connection.cursor()


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
