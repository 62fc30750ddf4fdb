"""Files that a user names, read strictly: the one place that opens and decodes them.

A message names file, format, rule and position. Only regular files are opened, so that nothing
waits for a pipe or a device; a size, a depth and a number of values bound what a file can cost.
"""

import json
import os
import stat
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO

from ebbflow.planners.errors import EbbflowError, OptionError

AnyPath = str | os.PathLike[str]
ErrorKind = Callable[[str], EbbflowError]

_OF_KERNEL = frozenset({Path("/proc"), Path("/sys")})  # to root they look writable
MAX_CONFIG_BYTES = 16 * 2**20  # of a configuration
MAX_TEXT_BYTES = 2**30  # of a table of text, such as a trace

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


@contextmanager
def opened(
    path: AnyPath, *, max_bytes: int = MAX_TEXT_BYTES, error: ErrorKind = OptionError
) -> Iterator[BinaryIO]:
    """Open a regular file of at most ``max_bytes`` for reading.

    Args:
        path: the file; ``~`` stands for the user's home.
        max_bytes: the largest size that is read.
        error: makes the exception of a message.

    Raises the exception that ``error`` makes: missing, no permission, no regular file, a loop of links, too large.
    """
    try:
        # a FIFO without a writer, or a terminal, would let a plain open or read wait for ever
        descriptor = os.open(expanded(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except (OSError, ValueError) as problem:
        raise error(f"{path} cannot be read: {reason(problem)}") from problem
    with (
        os.fdopen(descriptor, "rb") if _is_regular(descriptor) else _refused(descriptor, path, error) as file
    ):
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise error(f"{path} cannot be read: it has {size:,} bytes; at most {max_bytes:,} are read")
        yield file


def require_file(path: AnyPath, what: str, *, error: ErrorKind = OptionError) -> None:
    """Raise the exception of ``error`` unless ``path`` is a regular file that can be read; ``what`` names it."""
    with opened(path, error=lambda said: error(f"{what} {said}")):
        pass


def read_bytes(path: AnyPath, *, max_bytes: int = MAX_CONFIG_BYTES, error: ErrorKind = OptionError) -> bytes:
    """Return a file's bytes. Raises the exception of ``error`` as ``opened`` does."""
    with opened(path, max_bytes=max_bytes, error=error) as file:
        try:
            return file.read()
        except OSError as problem:
            raise error(f"{path} cannot be read: {reason(problem)}") from problem


def read_text(path: AnyPath, *, max_bytes: int = MAX_CONFIG_BYTES, error: ErrorKind = OptionError) -> str:
    """Return the text of a UTF-8 file, without a byte order mark. Raises the exception of ``error``."""
    data = read_bytes(path, max_bytes=max_bytes, error=error)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise error(_not_utf8(path, data, problem)) from problem
    if "\0" in text:
        raise error(f"{path} is no text: it has a NUL at byte {data.index(0)}")
    return text


def first_line(path: AnyPath, *, error: ErrorKind = OptionError) -> str:
    """Return the first line of a UTF-8 file, of 10,000 bytes at most. Raises the exception of ``error``."""
    with opened(path, error=error) as file:
        data = file.readline(10_000)
    try:
        return data.decode("utf-8-sig", "strict" if data.endswith(b"\n") else "ignore").rstrip("\r\n")
    except UnicodeDecodeError as problem:
        raise error(_not_utf8(path, data, problem)) from problem


def read_json(path: AnyPath, *, error: ErrorKind = OptionError, hint: str = "") -> Any:
    """Return what a JSON file holds; see ``parse_json``."""
    return parse_json(read_text(path, error=error), str(path), error=error, hint=hint)


def parse_json(text: str, source: str, *, error: ErrorKind = OptionError, hint: str = "") -> Any:
    """Return what JSON ``text`` holds. A key given twice, NaN and numbers beyond a float's range are refused.

    Raises the exception of ``error``; ``source`` names the text and ``hint`` ends its message.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
    except json.JSONDecodeError as problem:
        where = f"{problem.msg} at line {problem.lineno}, column {problem.colno}"
        raise error(f"{source} is not JSON: {where}{hint}") from problem
    except ValueError as problem:
        raise error(f"{source} is not JSON that can be used: {problem}{hint}") from problem
    except RecursionError:
        raise error(f"{source} is not JSON that can be used: values are nested too deeply{hint}") from None


def read_toml(path: AnyPath, *, error: ErrorKind = OptionError) -> dict[str, Any]:
    """Return what a TOML file holds. Raises the exception of ``error``."""
    text = read_text(path, error=error)
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, ValueError) as problem:
        raise error(f"{path} is not TOML: {problem}") from problem
    except RecursionError:
        raise error(f"{path} is not TOML that can be used: values are nested too deeply") from None


def output_problem(path: AnyPath, *, directory: bool = False) -> str:
    """Return why a file, or with ``directory`` a directory, cannot be written at ``path``; empty where it can.

    Nothing is made: missing directories are made once there is something to write.
    """
    target = expanded(path)
    try:
        if directory and target.is_dir():
            return _unwritable(target)
        mode = _mode(target)
        if not directory and mode is not None and not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
            return f"it is {_kind(mode)}, in whose place no file can be written"
        if mode is not None and stat.S_ISLNK(mode):
            target.stat()  # a loop of links is an error; one that leads nowhere is replaced
        if directory and mode is not None:
            return f"it is {_kind(_mode(target.resolve()) or mode)}, and no directory"
        above = target.absolute().parent
        while _mode(above) is None:
            above = above.parent
        return _unwritable(above) if above.is_dir() else f"{above} is no directory"
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, RuntimeError) as error:
        return reason(error)


def _mode(path: Path) -> int | None:
    """Return a path's own mode; ``None`` where there is nothing."""
    try:
        return path.lstat().st_mode
    except FileNotFoundError:
        return None


def _kind(mode: int) -> str:
    return next((words for test, words in _KINDS if test(mode)), "a file")


def _unwritable(directory: Path) -> str:
    """Return why nothing can be made in a directory: its rights, or what it is part of. Leaves no trace."""
    if not os.access(directory, os.W_OK | os.X_OK):
        return f"nothing may be written in {directory}"
    if _OF_KERNEL & {directory, *directory.parents}:
        return f"{directory} is the kernel's own, where no file can be made"
    return ""


def reason(error: BaseException) -> str:
    """Return why a file cannot be used, without a number and without the file's name."""
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text: {error.reason} (0x{error.object[error.start]:02x}) at byte {error.start}"
    return str(getattr(error, "strerror", None) or error)


def expanded(path: AnyPath) -> Path:
    """Return ``path`` with the user's home for ``~``; as it is where there is no such home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def _not_utf8(path: AnyPath, data: bytes, problem: UnicodeDecodeError) -> str:
    line = data.count(b"\n", 0, problem.start) + 1
    return (
        f"{path} is not UTF-8 text: {problem.reason} (0x{data[problem.start]:02x}) at byte {problem.start}, "
        f"line {line}"
    )


def _is_regular(descriptor: int) -> bool:
    return stat.S_ISREG(os.fstat(descriptor).st_mode)


def _refused(descriptor: int, path: AnyPath, error: ErrorKind) -> BinaryIO:
    mode = os.fstat(descriptor).st_mode
    os.close(descriptor)
    raise error(f"{path} cannot be read: it is {_kind(mode)}; a regular file is needed")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r:.60} is given twice")
    return found


def _no_constant(text: str) -> float:
    raise ValueError(f"numbers must be finite; got {text}")


def _finite(text: str) -> float:
    if not isfinite(value := float(text)):
        raise ValueError(f"numbers must be finite; got {text:.60}")
    return value
