"""The data of an elastic job: an ``.npz`` file or a table, read whole and checked before it starts."""

import io
from typing import Any

import numpy as np

from ebbflow.infra.elastic.apps.arrays import opened
from ebbflow.infra.storage import private, user_files
from ebbflow.infra.storage.filesystems import resolve, translated
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError

_INPUT = "input.npz"  # in the run's directory
_ARRAYS = {"mlr": ("x", "y"), "kmeans": ("x", "start"), "lda": ("document", "word")}


def check_data(path: str, app: str, groups: int) -> None:
    """Raise ``OptionError`` unless the file ``path`` has what ``app`` needs.

    Args:
        path: an ``.npz`` file, or its address.
        app: ``mlr`` (x: rows of numbers, y: a class below ``groups`` for each), ``kmeans`` (x, and ``groups`` rows
            of as many columns as start), or ``lda`` (document and word: whole numbers >= 0, one a token).
        groups: classes, clusters or topics.
    """
    try:
        arrays = _arrays(path, _ARRAYS[app])
        _check(arrays, app, groups)
    except ValueError as error:
        raise OptionError(f"{path} cannot serve {app}: {error}") from error


def _arrays(path: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the arrays of a file at a path or an address. Raises ``ValueError``."""
    if "://" not in path:
        user_files.require_file(path, "the data")
    try:
        with opened(path) as file:
            found = {name: file[name] for name in names if name in file}
    except Exception as error:  # whatever numpy, zip and zlib make of such bytes
        detail = getattr(error, "strerror", None) or error
        raise ValueError(f"it is no .npz file that can be read ({type(error).__name__}: {detail})") from error
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"it lacks the arrays {', '.join(missing)}; it must have {', '.join(names)}")
    return found


def _check(arrays: dict[str, Any], app: str, groups: int) -> None:
    if app == "lda":
        document, word = _whole(arrays, "document"), _whole(arrays, "word")
        if len(document) != len(word):
            raise ValueError(f"document and word must be as long; got {len(document)} and {len(word)}")
        return
    x = _table(arrays, "x")
    if app == "kmeans":
        start = _table(arrays, "start")
        if start.shape != (groups, x.shape[1]):
            raise ValueError(f"start must have the shape ({groups}, {x.shape[1]}); got {start.shape}")
        return
    y = _whole(arrays, "y")
    if len(y) != len(x):
        raise ValueError(f"x and y must be as long; got {len(x)} and {len(y)}")
    if y.max() >= groups:
        raise ValueError(f"y must be below the {groups} classes of the job; got {y.max()}")


def _table(arrays: dict[str, Any], name: str) -> Any:
    found = arrays[name]
    if found.ndim != 2 or not found.size or found.dtype.kind not in "fiu" or not np.isfinite(found).all():
        raise ValueError(f"{name} must be rows of finite numbers; got {found.dtype} of shape {found.shape}")
    return found


def _whole(arrays: dict[str, Any], name: str) -> Any:
    found = arrays[name]
    if found.ndim != 1 or not found.size or found.dtype.kind not in "iu" or found.min() < 0:
        raise ValueError(f"{name} must be whole numbers >= 0; got {found.dtype} of shape {found.shape}")
    return found


def stored_input(source: str, app: str, groups: int, label: str, place: StorageLocation) -> str:
    """Return the address of ``source`` as an ``.npz`` file that all nodes reach, checked.

    A table, or an ``.npz`` file of this machine for nodes elsewhere, is written to ``place`` once: a job that is
    resumed reads the same rows in the same order.

    Args:
        source: an ``.npz`` file, or a Parquet file or directory of them; each a path or an address.
        app, groups: see ``check_data``. Of a table, mlr and kmeans take all columns of numbers as x, in their order;
            kmeans starts at its first ``groups`` different rows; lda takes the columns document and word.
        label: column of the class of each row, for mlr.
        place: the run's directory.

    Raises ``OptionError``, ``StorageError``.
    """
    named = source.lower().endswith(".npz")
    if named and "://" not in source and place.local:
        check_data(source, app, groups)
        return source
    with translated(f"look for {_INPUT} in {place.uri}"):
        kept = place.is_file(_INPUT)
    if kept:
        check_data(_address(place), app, groups)
        return _address(place)
    try:
        arrays = _arrays(source, _ARRAYS[app]) if named else _of_table(source, app, groups, label)
        _check(arrays, app, groups)
    except (ValueError, OSError) as error:
        raise OptionError(f"{source} cannot serve {app}: {error}") from error
    packed = io.BytesIO()
    np.savez(packed, **arrays)
    with translated(f"write {_INPUT} to {place.uri}"):
        private.folder_maker(place.fs(), place.scheme)(place.root)
        place.write(_INPUT, packed.getvalue())
    return _address(place)


def _address(place: StorageLocation) -> str:
    return place.path(_INPUT) if place.local else place.uri_of(_INPUT)


def _of_table(source: str, app: str, groups: int, label: str) -> dict[str, Any]:
    """Return the arrays of a Parquet table. Raises ``ValueError``."""
    from pyarrow import ArrowException, parquet, types

    try:
        files, path = resolve(source)
        table = parquet.read_table(path, filesystem=files)
    except ArrowException as error:
        raise ValueError(f"it is no Parquet table that can be read ({error})") from error
    columns = {name: table.column(name) for name in table.column_names}
    needed = {"mlr": (label,), "lda": ("document", "word"), "kmeans": ()}[app]
    if missing := [name for name in needed if name not in columns]:
        raise ValueError(f"it lacks the columns {', '.join(missing)}; it has {', '.join(columns)}")
    if holes := [name for name, column in columns.items() if column.null_count]:
        raise ValueError(f"no value may be NULL; the columns {', '.join(holes)} have some")
    if app == "lda":
        return {name: columns[name].to_numpy() for name in ("document", "word")}
    numbers = [
        name
        for name, column in columns.items()
        if any(of(column.type) for of in (types.is_integer, types.is_floating, types.is_decimal))
        and name not in needed
    ]
    if not numbers or not table.num_rows:
        raise ValueError(
            f"it has {table.num_rows} rows and {len(numbers)} columns of numbers beside the label"
        )
    x = np.column_stack([columns[name].to_numpy().astype(np.float64) for name in numbers])
    if app == "mlr":
        return {"x": x, "y": columns[label].to_numpy()}
    _, first = np.unique(x, axis=0, return_index=True)
    if len(first) < groups:
        raise ValueError(f"it has {len(first)} different rows, fewer than the {groups} clusters")
    return {"x": x, "start": x[np.sort(first)[:groups]]}
