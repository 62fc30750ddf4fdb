"""Whether two results are the same rows, whatever their order, the engine's types and its rounding."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]
_MATCHED_PAIRS = 4_000_000  # candidate pairs of one group of alike rows that are still matched exactly


@dataclass(frozen=True, slots=True)
class Difference:
    """Why two tables are not the same rows."""

    kind: Literal["columns", "types", "row count", "values"]
    message: str
    left: tuple[Any, ...] | None = None  # a row that only the first table has
    right: tuple[Any, ...] | None = None  # a row that only the second table has

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class _Column:
    """Both tables' values of one column, the first table's rows before the second's.

    Equal codes are necessary for two values to match; unless ``loose``, they are sufficient.
    """

    codes: Codes
    loose: npt.NDArray[np.bool_] | None = None  # per row: the code alone does not decide
    matches: Callable[[Codes, Codes], npt.NDArray[np.bool_]] | None = None  # of rows, elementwise


def same_rows(a: Any, b: Any, rel: float = 1e-9, absolute: float = 1e-12) -> Difference | None:
    """Compare two ``pyarrow.Table`` as multisets of rows; ``None`` when they are the same.

    Columns are compared by position, names in any case. Text, dates, booleans, integers and decimals of one
    scale must be equal; decimals of two scales may differ by the rounding of the coarser, a decimal and a
    float by the decimal's; floats by ``rel`` of the larger, or ``absolute`` near zero. Nulls equal each
    other, and so do NaNs. A date equals the timestamp of its midnight, and a timestamp one with a time zone
    at the same instant in UTC.

    Within one tolerance values are matched one to one, so near ties in floats cannot hide or invent a
    difference.
    """
    names = [name.lower() for name in a.column_names], [name.lower() for name in b.column_names]
    if names[0] != names[1]:
        return Difference("columns", f"columns differ: {', '.join(names[0])} and {', '.join(names[1])}")
    if a.num_rows != b.num_rows:
        return Difference("row count", f"{a.num_rows} rows and {b.num_rows} rows")
    columns = []
    for i, name in enumerate(a.column_names):
        column = _column(a.column(i), b.column(i), rel, absolute)
        if column is None:
            types = f"{a.column(i).type} and {b.column(i).type}"
            return Difference("types", f"column {name!r} has types that cannot be compared: {types}")
        columns.append(column)
    if a.num_rows == 0 or not columns:
        return None
    found = _compare(columns, a.num_rows)
    if found is None:
        return None
    left, right = (
        tuple(t.slice(int(r), 1).to_pylist()[0].values()) for t, r in zip((a, b), found, strict=True)
    )
    return Difference("values", f"only the first has {left}; only the second has {right}", left, right)


def _compare(columns: list[_Column], rows: int) -> tuple[int, int] | None:
    """Return a row of each table that has no partner in the other, or ``None``."""
    groups = columns[0].codes
    for column in columns[1:]:
        groups = _combined(groups, column.codes)
    groups = np.unique(groups, return_inverse=True)[1].astype(np.int64)
    size = int(groups.max()) + 1
    balance = np.bincount(groups[:rows], minlength=size) - np.bincount(groups[rows:], minlength=size)
    if balance.any():
        surplus, deficit = int(balance.argmax()), int(balance.argmin())
        return int((groups[:rows] == surplus).argmax()), int((groups[rows:] == deficit).argmax())
    judged = [c for c in columns if c.loose is not None and c.loose.any()]
    if not judged:
        return None
    loose = np.zeros(size, bool)
    for column in judged:
        assert column.loose is not None
        loose[groups[column.loose]] = True
    order_a = np.argsort(groups[:rows], kind="stable")
    order_b = np.argsort(groups[rows:], kind="stable") + rows
    starts = np.concatenate(([0], np.cumsum(np.bincount(groups[:rows], minlength=size))))
    for group in np.flatnonzero(loose):
        inside = slice(starts[group], starts[group + 1])
        unmatched = _match(judged, order_a[inside], order_b[inside])
        if unmatched is not None:
            return unmatched[0], unmatched[1] - rows
    return None


def _match(columns: list[_Column], left: Codes, right: Codes) -> tuple[int, int] | None:
    """Pair rows one to one so that every column matches; return a pair of rows left over, or ``None``."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_bipartite_matching

    if len(left) ** 2 > _MATCHED_PAIRS:
        # very many near ties: pair them in the order of the columns' values, which is exact for one column
        keys = [c.matches.values for c in columns if isinstance(c.matches, _Tolerance)]
        left, right = (r[np.lexsort([k[r] for k in reversed(keys)])] for r in (left, right))
        fits = np.ones(len(left), bool)
        for column in columns:
            assert column.matches is not None
            fits &= column.matches(left, right)
        bad = np.flatnonzero(~fits)
        return (int(left[bad[0]]), int(right[bad[0]])) if len(bad) else None
    x, y = np.repeat(left, len(right)), np.tile(right, len(left))
    fits = np.ones(len(x), bool)
    for column in columns:
        assert column.matches is not None
        fits &= column.matches(x, y)
    graph = csr_array(fits.reshape(len(left), len(right)))
    partner = maximum_bipartite_matching(graph, perm_type="column")
    alone = np.flatnonzero(partner < 0)
    if not len(alone):
        return None
    free = np.setdiff1d(np.arange(len(right)), partner)
    return int(left[alone[0]]), int(right[free[0]])


def _combined(a: Codes, b: Codes) -> Codes:
    """Return codes of pairs of codes."""
    dense = np.unique(a, return_inverse=True)[1].astype(np.int64)
    return dense * (int(b.max()) + 1) + b


# --- columns ----------------------------------------------------------------------------------------------


def _column(a: Any, b: Any, rel: float, absolute: float) -> _Column | None:
    """Return both columns' values as codes; ``None`` when their types cannot be compared."""
    import pyarrow as pa

    kind = pa.types
    a, b = _decoded(a), _decoded(b)
    if kind.is_null(a.type):
        a = a.cast(b.type)
    if kind.is_null(b.type):
        b = b.cast(a.type)
    if _is_number(a.type) and _is_number(b.type):
        if kind.is_floating(a.type) or kind.is_floating(b.type) or _scales_differ(a.type, b.type):
            return _approximate(a, b, rel, max(absolute, _rounding(a.type, b.type)))
        return _exact(*(_exact_number(column, a.type, b.type) for column in (a, b)))
    if kind.is_temporal(a.type) and kind.is_temporal(b.type):
        a, b = _instants(a), _instants(b)
        return _exact(a, b) if a.type == b.type else None
    if kind.is_nested(a.type) and kind.is_nested(b.type):
        return _exact(_texts(a), _texts(b))
    return _exact(a, b) if a.type == b.type else None


def _decoded(column: Any) -> Any:
    """Return the column without dictionaries, and with one type for all kinds of strings and of binaries."""
    import pyarrow as pa

    kind = pa.types
    if kind.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if column.type in (pa.string(), pa.string_view()):
        return column.cast(pa.large_string())
    if column.type in (pa.binary(), pa.binary_view()) or kind.is_fixed_size_binary(column.type):
        return column.cast(pa.large_binary())
    return column


def _is_number(dtype: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(dtype) or pa.types.is_floating(dtype) or pa.types.is_decimal(dtype))


def _scales_differ(a: Any, b: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_decimal(a) and pa.types.is_decimal(b) and a.scale != b.scale)


def _rounding(a: Any, b: Any) -> float:
    """Return by how much rounding to the coarser decimal scale may move a value."""
    import pyarrow as pa

    scales = [float(t.scale) for t in (a, b) if pa.types.is_decimal(t)]
    if not scales:
        return 0.0
    return 0.5 * math.pow(10.0, -min(scales)) * (1 + 1e-9)


def _exact_number(column: Any, a: Any, b: Any) -> Any:
    """Return integers and decimals of one scale as one type that holds both."""
    import pyarrow as pa

    scales = [t.scale for t in (a, b) if pa.types.is_decimal(t)]
    if scales or pa.types.is_uint64(a) or pa.types.is_uint64(b):
        return column.cast(pa.decimal256(76, scales[0] if scales else 0))
    return column.cast(pa.int64())


def _instants(column: Any) -> Any:
    """Return dates and timestamps as timestamps in microseconds, in UTC."""
    import pyarrow as pa

    kind = pa.types
    if kind.is_date(column.type):
        return column.cast(pa.timestamp("us"))
    if kind.is_timestamp(column.type):
        # the cast to no zone keeps the instant in UTC; what is finer than microseconds is cut off
        plain = column.cast(pa.timestamp(column.type.unit))
        return plain.cast(pa.timestamp("us"), safe=False)
    return column


def _texts(column: Any) -> Any:
    """Return nested values as text, their floats with nine digits."""
    import pyarrow as pa

    return pa.chunked_array(
        [[None if v is None else _text(v) for v in column.to_pylist()]], pa.large_string()
    )


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{k.lower()}:{_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_text(item) for item in value) + "]"
    return f"{value:.9g}" if isinstance(value, float) else repr(value)


def _exact(a: Any, b: Any) -> _Column:
    import pyarrow as pa

    both = pa.chunked_array([*a.chunks, *b.chunks], a.type)
    encoded = both.combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = pa.concat_arrays(encoded.chunks)
    indices = encoded.dictionary_encode().indices
    return _Column(indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64) + 1)


# --- numbers within a tolerance ---------------------------------------------------------------------------


class _Tolerance:
    """Compares values by row number."""

    def __init__(self, values: Numbers, rel: float, absolute: float) -> None:
        self.values, self.rel, self.absolute = values, rel, absolute

    def allowed(self, x: Numbers, y: Numbers) -> Numbers:
        return np.maximum(self.absolute, self.rel * np.maximum(np.abs(x), np.abs(y)))

    def __call__(self, rows: Codes, others: Codes) -> npt.NDArray[np.bool_]:
        x, y = self.values[rows], self.values[others]
        with np.errstate(invalid="ignore"):
            same: npt.NDArray[np.bool_] = (
                (np.abs(x - y) <= self.allowed(x, y)) | (x == y) | (np.isnan(x) & np.isnan(y))
            )
        return same


def _approximate(a: Any, b: Any, rel: float, absolute: float) -> _Column:
    """Chain values that are within tolerance of the next; a chain longer than the tolerance is loose."""
    import pyarrow as pa

    both = pa.chunked_array([*a.cast(pa.float64()).chunks, *b.cast(pa.float64()).chunks], pa.float64())
    nulls = both.is_null().to_numpy().astype(bool)
    values = both.to_numpy().astype(np.float64)
    codes = np.zeros(len(values), np.int64)  # 0: null
    codes[np.isnan(values) & ~nulls] = 1
    codes[np.isposinf(values)] = 2
    codes[np.isneginf(values)] = 3
    finite = np.flatnonzero(np.isfinite(values))
    order = finite[np.argsort(values[finite], kind="stable")]
    ordered = values[order]
    tolerance = _Tolerance(values, rel, absolute)
    loose = np.zeros(len(values), bool)
    if len(ordered):
        breaks = np.diff(ordered) > tolerance.allowed(ordered[1:], ordered[:-1])
        chain = np.concatenate(([0], np.cumsum(breaks)))
        codes[order] = chain + 4
        first = np.concatenate(([0], np.flatnonzero(breaks) + 1))
        last = np.concatenate((np.flatnonzero(breaks), [len(ordered) - 1]))
        long = ordered[last] - ordered[first] > tolerance.allowed(ordered[last], ordered[first])
        loose[order] = long[chain]
    return _Column(codes, loose, tolerance)
