"""Delimited text files read strictly: every bad row is an error with file, line and reason.

Reading spot traces of nodes that are added and removed (Oobleck, SOSP 2023, artefact).
"""

import csv
import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, TextIO

from ebbflow.infra.errors import WorkloadError
from ebbflow.infra.storage import user_files
from ebbflow.planners.model.numbers import is_number

Convert = Callable[[str], Any]
"""Text of one field to its value; ``ValueError`` says what is wrong with it."""

LATEST = 1e13
"""Seconds; beyond it a float cannot tell a hundredth of a second, and a simulation would stand still."""

LARGEST_COUNT = 10**15
"""Of jobs, GPUs, steps; a float knows whole numbers up to there, and products of two stay finite."""


def text(field: str) -> str:
    """Return ``field`` stripped; it must not be empty."""
    field = field.strip()
    if not field:
        raise ValueError("must not be empty")
    return field


def real(field: str) -> float:
    """Return a finite number."""
    if field.strip().lstrip("+-").lower() in ("nan", "inf", "infinity"):
        raise ValueError(f"must be finite; got {field.strip()!r}")
    if not is_number(field):
        raise ValueError(f"must be a number; got {field.strip()!r:.60}")
    return float(field)


def not_negative(field: str) -> float:
    """Return a finite number of at least 0."""
    value = real(field)
    if value < 0:
        raise ValueError(f"must be >= 0; got {field.strip()}")
    return value


def positive(field: str) -> float:
    """Return a finite number above 0."""
    value = real(field)
    if value <= 0:
        raise ValueError(f"must be > 0; got {field.strip()}")
    return value


def instant(field: str) -> float:
    """Return seconds of at least 0 and at most ``LATEST``."""
    return _at_most(LATEST, not_negative(field), field)


def span(field: str) -> float:
    """Return seconds above 0 and at most ``LATEST``."""
    return _at_most(LATEST, positive(field), field)


def _at_most(limit: float, value: float, field: str) -> float:
    if value > limit:
        raise ValueError(f"must be at most {limit:g} s; got {field.strip()}")
    return value


def count(field: str) -> int:
    """Return a whole number from 1 to ``LARGEST_COUNT``."""
    value = real(field)
    if value < 1 or value != int(value):
        raise ValueError(f"must be a whole number >= 1; got {field.strip()}")
    if value > LARGEST_COUNT:
        raise ValueError(f"must be at most {LARGEST_COUNT:,}; got {field.strip()}")
    return int(value)


def read_rows(
    path: Path,
    columns: Mapping[str, Convert],
    optional: Mapping[str, Convert] | None = None,
    *,
    delimiter: str = ",",
    ignore_extra: bool = False,
) -> Iterator[tuple[int, list[Any]]]:
    """Yield (line number, values of ``columns``, then of ``optional``) for each row of a file with a header.

    An optional column that is missing or empty gives ``None``. Lines without any text are skipped. A file called
    ``.gz`` is decompressed.

    Raises:
        WorkloadError: unreadable file, missing or unknown column, wrong number of fields, bad value.
    """
    optional = optional or {}
    try:
        with user_files.opened(path, error=WorkloadError) as binary, _text_of(path, binary) as file:
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            header = [name.strip() for name in next(reader, [])]
            wanted = _positions(path, header, columns, optional, ignore_extra)
            required = len(columns)
            for row in reader:
                if not row or (len(row) == 1 and not row[0].strip()):
                    continue
                if len(row) != len(header):
                    raise _bad(path, reader.line_num, f"has {len(row)} fields; the header has {len(header)}")
                values: list[Any] = []
                for number, (name, position, convert) in enumerate(wanted):
                    field = "" if position is None else row[position]
                    if number >= required and not field.strip():
                        values.append(None)
                        continue
                    try:
                        values.append(convert(field))
                    except ValueError as error:
                        raise _bad(path, reader.line_num, f"{name} {error}") from None
                yield reader.line_num, values
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise WorkloadError(f"{path}: is not a whole gzip file: {error}") from error
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path}: is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except csv.Error as error:
        raise WorkloadError(f"{path}: is not delimited text: {error}") from error


def _text_of(path: Path, binary: BinaryIO) -> TextIO:
    source = gzip.GzipFile(fileobj=binary) if path.suffix == ".gz" else binary
    return io.TextIOWrapper(source, newline="", encoding="utf-8-sig")


def _positions(
    path: Path,
    header: list[str],
    columns: Mapping[str, Convert],
    optional: Mapping[str, Convert],
    ignore_extra: bool,
) -> list[tuple[str, int | None, Convert]]:
    missing = [name for name in columns if name not in header]
    if missing:
        raise _bad(path, 1, f"the header lacks {', '.join(missing)}; it must have {', '.join(columns)}")
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise _bad(path, 1, f"the header has {', '.join(twice)} twice")
    extra = [name for name in header if name not in columns and name not in optional]
    if extra and not ignore_extra:
        known = ", ".join([*columns, *optional])
        raise _bad(path, 1, f"the header has unknown columns {', '.join(extra)}; known are {known}")
    return [
        (name, header.index(name) if name in header else None, convert)
        for name, convert in [*columns.items(), *optional.items()]
    ]


def _bad(path: Path, line: int, reason: str) -> WorkloadError:
    return WorkloadError(f"{path}, line {line}: {reason}")


_MILLISECONDS = re.compile(r"[0-9]{1,16}")


class SpotRow(NamedTuple):
    """One row of a spot trace."""

    at: int  # ms
    kind: Literal["add", "remove"]
    node: str


def read_spot_rows(path: Path) -> list[SpotRow]:
    """Return the rows of a headerless ``time_ms,add|remove,node`` file, in its order.

    Raises ``WorkloadError`` with file, line and reason: malformed row, time going back, a node added twice or removed
    while absent.
    """
    lines = user_files.read_text(path, max_bytes=user_files.MAX_TEXT_BYTES, error=WorkloadError).splitlines()
    rows: list[SpotRow] = []
    present: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        fields = [field.strip() for field in line.split(",")]
        if not (
            len(fields) == 3
            and _MILLISECONDS.fullmatch(fields[0])
            and fields[1] in ("add", "remove")
            and fields[2]
        ):
            raise WorkloadError(f"{path}, line {number}: must be time_ms,add|remove,node; got {line!r}")
        at, kind, node = int(fields[0]), fields[1], fields[2]
        if rows and at < rows[-1].at:
            raise WorkloadError(f"{path}, line {number}: time goes back from {rows[-1].at} to {at} ms")
        if (kind == "add") == (node in present):
            state = "added while present" if kind == "add" else "removed while absent"
            raise WorkloadError(f"{path}, line {number}: node {node} is {state}")
        present ^= {node}
        rows.append(SpotRow(at, "add" if kind == "add" else "remove", node))
    if not rows:
        raise WorkloadError(f"{path}: has no events")
    return rows
