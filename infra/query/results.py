"""Results of queries: read, preview and write them from checkpoints.

Looking at the Parquet files that an engine has written.
"""

import os
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from ebbflow.infra.errors import StageFailedError, StorageError
from ebbflow.infra.protocols import Checkpoint, Relation
from ebbflow.infra.query.comparison import Difference, same_rows
from ebbflow.infra.storage import files, private
from ebbflow.infra.storage.filesystems import filesystem, translated
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables.datatypes import arrow_schema

__all__ = [
    "Difference",
    "is_whole",
    "preview",
    "read_batches",
    "read_checkpoint",
    "result_at",
    "same_rows",
    "write_result",
]

_BATCH = 65_536  # rows


def is_whole(checkpoint: Checkpoint) -> bool:
    """Tell whether all files of the checkpoint are still there, with their sizes. Raises ``StorageError``."""
    wanted = checkpoint.relation.files
    with translated(f"read the checkpoint {checkpoint.uri}"):
        found = filesystem(checkpoint.relation.scheme).get_file_info([f.path for f in wanted])
    return all(info.is_file and info.size == file.size for info, file in zip(found, wanted, strict=True))


def read_checkpoint(checkpoint: Checkpoint) -> Any:
    """Return all rows as a ``pyarrow.Table``, in the order of the part files. Raises ``StorageError``."""
    import pyarrow as pa

    with translated(f"read the checkpoint {checkpoint.uri}"):
        schema = _schema(checkpoint)
        return pa.Table.from_batches(_batches(checkpoint, schema), schema)


def preview(checkpoint: Checkpoint, rows: int) -> Any:
    """Return the first ``rows`` rows as a ``pyarrow.Table``, reading no more than needed."""
    import pyarrow as pa

    taken = []
    with translated(f"read the checkpoint {checkpoint.uri}"):
        schema = _schema(checkpoint)
        missing = rows
        batches = _batches(checkpoint, schema, max(1, min(rows, _BATCH)))
        while missing > 0 and (batch := next(batches, None)) is not None:
            taken.append(batch.slice(0, missing))
            missing -= taken[-1].num_rows
        return pa.Table.from_batches(taken, schema)


def read_batches(checkpoint: Checkpoint, rows: int | None = None) -> tuple[Any, Iterator[Any]]:
    """Return the schema of a result and its rows as record batches, one after another; at most ``rows`` rows.

    Raises ``StorageError``, also while the batches are read.
    """
    with translated(f"read the checkpoint {checkpoint.uri}"):
        schema = _schema(checkpoint)

    def batches() -> Iterator[Any]:
        missing = checkpoint.rows if rows is None else rows
        reading = _batches(checkpoint, schema, max(1, min(missing, _BATCH)))
        while rows is None or missing > 0:
            with translated(f"read the checkpoint {checkpoint.uri}"):
                batch = next(reading, None)
            if batch is None:
                return
            taken = batch if rows is None else batch.slice(0, missing)
            missing -= taken.num_rows
            yield taken

    return schema, batches()


def result_at(place: StorageLocation, columns: Sequence[tuple[str, str]], rows: int) -> Checkpoint:
    """Return the result that is at ``place``: one Parquet file, or a checkpoint's directory of them.

    Args:
        place: as a query's report has it.
        columns: names and Spark SQL types, for a result without files.
        rows: how many the query has found; it is not checked.

    Raises:
        StorageError: nothing is there any more, or it cannot be reached.
    """
    with translated(f"read the result {place}"):
        (found,) = place.fs().get_file_info([place.root])
        parts = [found] if found.is_file else place.entries()
    parts = [one for one in parts if one.is_file and not files.hidden(one.base_name)]
    if not parts and found.type.name != "Directory":
        raise StorageError(
            f"there is no result at {place} any more: run the query again; finished stages are reused"
        )
    entries = tuple(files.entry(one) for one in sorted(parts, key=lambda one: files.natural(one.path)))
    relation = Relation("result", place.scheme, entries, tuple(columns))
    return Checkpoint("", str(place), relation, rows, relation.bytes, seconds=0.0, created=0.0)


def write_result(checkpoint: Checkpoint, place: StorageLocation) -> None:
    """Write all rows as one Parquet file at ``place``.

    Rows stream through, so memory does not grow with the result. The file appears whole or not at all; one
    that is there already is replaced. In a private directory it is private, elsewhere it follows the umask. Raises
    ``StorageError`` or ``StorageFullError``.
    """
    import pyarrow.parquet as pq

    fs = place.fs()
    folder, _, name = place.root.rpartition("/")
    temporary = f"{folder}/.{name}.{uuid.uuid4().hex}.tmp"
    with translated(f"write the result to {place}"):
        schema = _schema(checkpoint)
        if place.local:
            os.makedirs(folder or "/", exist_ok=True)
        try:
            with (
                fs.open_output_stream(temporary) as out,
                pq.ParquetWriter(out, schema, compression="zstd") as writer,
            ):
                for batch in _batches(checkpoint, schema):
                    writer.write_batch(batch)
            if place.local and private.is_private(folder or "/"):
                private.seal(temporary)
            fs.move(temporary, place.root)
        except BaseException:
            with suppress(Exception):  # the first error is the one to tell
                fs.delete_file(temporary)
            raise


def _schema(checkpoint: Checkpoint) -> Any:
    """Return the schema of the first part, whose types the others are cast to, nullable throughout."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = checkpoint.relation.files
    if not files:
        return arrow_schema(checkpoint.relation.columns)
    with filesystem(checkpoint.relation.scheme).open_input_file(files[0].path) as source:
        first = pq.ParquetFile(source).schema_arrow
    return pa.schema([pa.field(field.name, _plain(field.type)) for field in first])


def _plain(dtype: Any) -> Any:
    import pyarrow as pa

    return {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}.get(dtype, dtype)


def _batches(checkpoint: Checkpoint, schema: Any, size: int = _BATCH) -> Iterator[Any]:
    """Yield the rows of each part file in turn as record batches of ``schema``."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    fs = filesystem(checkpoint.relation.scheme)
    for file in checkpoint.relation.files:
        with fs.open_input_file(file.path) as source:
            for batch in pq.ParquetFile(source).iter_batches(size):
                if batch.schema.equals(schema):
                    yield batch
                else:
                    yield pa.RecordBatch.from_arrays(
                        [c.cast(f.type) for c, f in zip(batch.columns, schema, strict=True)], schema=schema
                    )


def count_rows(folder: StorageLocation, *, below: bool = False) -> int:
    """Return the exact number of rows in the Parquet files directly in ``folder``, from their footers; with
    ``below`` also of those in directories of it, of which there may be none.

    Raises ``StageFailedError`` when there is no file or one is unreadable.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    fs = folder.fs()

    def rows(path: str) -> int:
        return int(pq.read_metadata(path, filesystem=fs).num_rows)

    try:
        found = files.listing(fs, folder.root, recursive=below)
        paths = [
            f.path
            for f in found
            if f.is_file and f.path.endswith(".parquet") and not files.hidden(f.base_name)
        ]
        if below and not paths:
            return 0
        if not paths:
            raise StageFailedError(f"the engine reported success but wrote no Parquet file into {folder.uri}")
        with ThreadPoolExecutor(max_workers=min(8, len(paths))) as pool:
            return sum(pool.map(rows, paths))
    except (OSError, pa.ArrowException) as error:
        raise StageFailedError(f"what was written into {folder.uri} cannot be read back: {error}") from error
