"""Who may read what Ebbflow keeps (stores, runs, ledgers, caches, logs): its user alone. The one place that decides.

``$EBBFLOW_SHARE=group`` lets the group in as well, for a store that several accounts use, such as Spark workers under
another user: its directories then keep their group (set-group-ID), and group members may write. What a user names for
himself (a report, a result, a page) is none of this: it follows the umask.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ebbflow.planners.errors import OptionError

SHARE = "EBBFLOW_SHARE"
"""Environment variable: empty for the user alone, ``group`` for the group as well."""

_OWN = (0o700, 0o600)  # of directories and files
_GROUP = (0o2770, 0o660)

AnyPath = str | os.PathLike[str]


def shared() -> bool:
    """Tell whether the group may read and write. Raises ``OptionError`` for a value that is neither."""
    value = os.environ.get(SHARE, "")
    if value not in ("", "group"):
        raise OptionError(f"{SHARE} must be group, or not set (the user alone); got {value!r}")
    return value == "group"


def hadoop_umask() -> str:
    """Return ``fs.permissions.umask-mode``, by which Spark's own files are as ours."""
    return "007" if shared() else "077"


def make_folder(path: AnyPath, *, exist_ok: bool = True) -> None:
    """Make a local directory and its missing parents, private; one that is there stays as it is.

    Raises ``OSError`` as ``os.makedirs`` does, ``FileExistsError`` for a directory unless ``exist_ok``.
    """
    target = os.fspath(path) or "."
    mode = (_GROUP if shared() else _OWN)[0]
    missing, head = [], target
    while head and not os.path.isdir(head):
        missing.append(head)
        head = os.path.dirname(head.rstrip("/"))
    if not missing and not exist_ok:
        raise FileExistsError(17, "File exists", target)
    for folder in reversed(missing):
        try:
            os.mkdir(folder, mode)
        except FileExistsError:
            # another process was faster; where a file is in the way, the last directory or the next one says so
            if folder == missing[0] and not (exist_ok and os.path.isdir(folder)):
                raise
        else:
            if mode == _GROUP[0]:
                os.chmod(folder, mode)  # past the umask, and with the bit that mkdir leaves out


def opener(path: AnyPath, flags: int) -> int:
    """Open as ``os.open`` does; a file that this makes is private. For the ``opener`` of ``open``."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, _OWN[1])
    try:
        if flags & os.O_CREAT and shared():
            found = os.fstat(descriptor)
            if found.st_uid == os.geteuid() and found.st_mode & 0o777 == _OWN[1]:
                os.fchmod(descriptor, _GROUP[1])
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_file(path: AnyPath, mode: str, **options: Any) -> Any:
    """Open as ``open`` does; a file that this makes is private."""
    return open(path, mode, opener=opener, **options)


def write_text(path: AnyPath, text: str) -> None:
    """Write a small private file in place, as ``Path.write_text`` does."""
    with open_file(path, "w", encoding="utf-8") as file:
        file.write(text)


def write_secret(path: AnyPath, text: str) -> None:
    """Replace a small file, at once, by one that its user alone can read, whoever shares the rest.

    Raises ``OSError``.
    """
    target = Path(path)
    make_folder(target.parent)
    handle, temporary = tempfile.mkstemp(
        dir=target.parent, prefix=f".{target.name}-"
    )  # 0600 whatever the umask
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def is_private(folder: AnyPath) -> bool:
    """Tell whether others than user and group may do nothing in a directory."""
    return not os.stat(folder).st_mode & 0o007


def seal(path: AnyPath) -> None:
    """Make a file private that a library has made."""
    os.chmod(path, (_GROUP if shared() else _OWN)[1])


def reserve(path: Path) -> None:
    """Make an empty private file for a library that would make its own; one that is there stays untouched."""
    with contextlib.suppress(FileExistsError):
        os.close(opener(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))


def output_stream(filesystem: Any, scheme: str, path: str) -> Any:
    """Return a new file of ``pyarrow.fs`` to write to; private where it is local."""
    if scheme == "file":
        reserve(Path(path))
    return filesystem.open_output_stream(path)


def folder_maker(filesystem: Any, scheme: str) -> Callable[[str], None]:
    """Return what makes a directory of ``pyarrow.fs``: private where it is local."""
    if scheme == "file":
        return make_folder
    return lambda path: filesystem.create_dir(path, recursive=True)
