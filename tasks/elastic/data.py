"""The data of an elastic job from the command line: an ``.npz`` file, read whole and checked before it starts."""

from typing import Any

import numpy as np

from ebbflow.infra.storage import user_files
from ebbflow.planners.errors import OptionError

_ARRAYS = {"mlr": ("x", "y"), "kmeans": ("x", "start"), "lda": ("document", "word")}


def check_data(path: str, app: str, groups: int) -> None:
    """Raise ``OptionError`` unless the file ``path`` has what ``app`` needs.

    Args:
        path: an ``.npz`` file.
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
    user_files.require_file(path, "the data")
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in names if name in file.files}
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
        raise ValueError(f"y must be below the {groups} classes of --groups; got {y.max()}")


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
