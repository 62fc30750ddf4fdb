"""The result of a query on standard output: data only, whatever else there is to say goes to standard error."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import RawIOBase
from typing import IO, Any

from rich.console import Console
from rich.text import Text

from ebbflow.flows.query.summary import print_result
from ebbflow.flows.query.texts import csv_cells, csv_line, json_object, json_text, json_values, unique
from ebbflow.infra.errors import StorageError
from ebbflow.infra.protocols import Checkpoint
from ebbflow.infra.query.results import preview, read_batches
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.drawing.wording import plural

FORMATS = ("table", "csv", "json", "parquet")
ROWS = 20  # of a table unless asked otherwise
_WIDE = 100_000  # columns of a table that is not for a terminal


def check_format(format: str, *, terminal: bool) -> None:
    """Raise ``OptionError`` for bytes that a terminal would show."""
    if format == "parquet" and terminal:
        raise OptionError(
            "--format parquet writes bytes, which a terminal cannot show: redirect them (> result.parquet), "
            "or use --output FILE"
        )


def show_result(
    result: Checkpoint, messages: Console, *, format: str = "table", limit: int | None = None
) -> None:
    """Write the rows of a result to standard output, and to ``messages`` what of it is not shown.

    A reader that has seen enough and closes the pipe ends the writing, and nothing else.

    Args:
        result: the rows.
        messages: a console on standard error.
        format: one of ``FORMATS``.
        limit: rows at most; 0: all; ``None``: 20 of a table, else all.

    Raises:
        StorageError: the rows cannot be read, or not be written.
    """
    most = limit if limit is not None else ROWS if format == "table" else 0
    hidden = ""
    with until_closed():
        if format == "table":
            hidden = _table(result, most or result.rows)
        else:
            writer = {"csv": _csv, "json": _json, "parquet": _parquet}[format]
            writer(result, most or None, sys.stdout.buffer)
            sys.stdout.buffer.flush()
    if most and result.rows > most:
        _note(messages, f"{most:,} of {plural(result.rows, 'row')}; --limit 0 shows all")
    if hidden:
        _note(messages, f"{hidden}; --format csv has all columns")


@contextmanager
def until_closed() -> Iterator[None]:
    """End the block where the reader of standard output has closed it, as ``head`` does.

    Raises ``StorageError`` where it cannot be written for another reason, such as a full disk.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)  # for what Python still flushes at its end
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
        if error.errno != errno.EPIPE:
            raise StorageError(f"cannot write the result to standard output: {error.strerror}") from error


def _note(messages: Console, text: str) -> None:
    messages.print(Text(text, style="bright_black"), soft_wrap=True)


def _table(result: Checkpoint, most: int) -> str:
    """Print a table; return what is said of columns that a terminal has no room for."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDE)
    with console.capture() as taken:  # Rich ends the process by itself when a pipe is closed
        hidden = print_result(preview(result, most), console)
    sys.stdout.write(taken.get())
    return hidden


def _csv(result: Checkpoint, most: int | None, out: IO[bytes]) -> None:
    schema, batches = read_batches(result, most)
    out.write(csv_line(schema.names).encode())
    for batch in batches:
        rows = zip(*(csv_cells(column) for column in batch.columns), strict=True)
        out.write("".join(map(csv_line, rows)).encode(errors="replace"))


def _json(result: Checkpoint, most: int | None, out: IO[bytes]) -> None:
    """Write an array with a line for each row, so that rows stream through."""
    schema, batches = read_batches(result, most)
    names = [json_text(name) for name in unique(schema.names)]
    between = "["
    for batch in batches:
        for row in zip(*(json_values(column) for column in batch.columns), strict=True):
            out.write(f"{between}\n  {json_object(names, row)}".encode(errors="replace"))
            between = ","
    out.write(b"[]\n" if between == "[" else b"\n]\n")


def _parquet(result: Checkpoint, most: int | None, out: IO[bytes]) -> None:
    import pyarrow.parquet as pq

    schema, batches = read_batches(result, most)
    with pq.ParquetWriter(_Pipe(out), schema, compression="zstd") as writer:
        for batch in batches:
            writer.write_batch(batch)


class _Pipe(RawIOBase):
    """A stream that counts what it has passed on, since a pipe cannot say how far it is."""

    def __init__(self, out: IO[bytes]) -> None:
        super().__init__()
        self._out = out
        self._at = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def write(self, data: Any) -> int:
        self._out.write(data)
        self._at += len(data)
        return len(data)
