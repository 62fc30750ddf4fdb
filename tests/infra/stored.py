"""Checkpoints for the tests of stores, as an engine would write them."""

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ebbflow.infra.protocols import Attempt, Checkpoint
from ebbflow.infra.query.checkpoints import ParquetCheckpointStore
from ebbflow.infra.storage import checksums
from ebbflow.infra.storage.filesystems import resolve

COLUMNS = (("k", "bigint"), ("name", "string"))
FP = "ab12" * 8
OTHER = "cd34" * 8
DAY = 86_400.0


def table(rows: int, start: int = 0) -> pa.Table:
    return pa.table(
        {"k": pa.array(range(start, start + rows), pa.int64()), "name": [f"row {i}" for i in range(rows)]}
    )


def write(attempt: Attempt, *parts: pa.Table) -> None:
    fs, folder = resolve(attempt.place.uri)
    for i, part in enumerate(parts):
        with fs.open_output_stream(f"{folder}/part-{i:05d}.parquet") as out:
            pq.write_table(part, out)


def put(uri: str, data: bytes) -> None:
    fs, path = resolve(uri)
    with fs.open_output_stream(path) as out:
        out.write(data)


def save(store: ParquetCheckpointStore, fp: str = FP, rows: int = 5, **sources: str) -> Checkpoint:
    attempt = store.begin(fp)
    write(attempt, table(rows))
    return store.commit(attempt, rows=rows, columns=COLUMNS, seconds=1.5, sources=sources)


def edit(store: ParquetCheckpointStore, **changes: Any) -> None:
    """Change a manifest as somebody would who knows its checksum."""
    uri = f"{store.place.uri}/manifests/{FP}.json"
    fs, path = resolve(uri)
    with fs.open_input_file(path) as file:
        raw = checksums.unsealed(file.read())
    put(uri, checksums.sealed(raw | changes))
