"""What a job's statement is on DuckDB: views of its relations, and columns of types that Spark knows."""

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from ebbflow.infra.protocols import FileLayout, Relation, StageJob
from ebbflow.infra.query.duckdbtypes import JSON, quoted, restorable, to_duckdb, to_spark
from ebbflow.infra.storage import private
from ebbflow.infra.storage.filesystems import filesystem
from ebbflow.infra.tables.confinement import AllowedAccess, configuration, lock
from ebbflow.infra.tables.datatypes import arrow_type
from ebbflow.infra.tables.filefooters import footer
from ebbflow.infra.tables.logs import deletions
from ebbflow.planners.model.tables import distinct_names

BATCH = 1 << 17  # rows
BY_NAME = "union_by_name = true"  # of ``scan``, for several files
OWN_TYPES = "ebbflow_types"  # key in the metadata of a stage's file
_FILE = "__ebbflow_file"  # the column of a row's file
_PATTERN = frozenset("*?[]{}\\")  # in a path, read_parquet takes these for a pattern


def register_view(cursor: Any, relation: Relation, test: str = "true", *, own: bool = False) -> None:
    """Make ``relation`` a temporary view of exactly its declared columns and types, of rows that pass ``test``.

    ``own``: columns of a stage of DuckDB's have the types that they had there, though Spark has none for them.
    """
    if relation.external:
        return
    columns = selected(relation, own_types(relation) if own else {})
    if not relation.files:
        kinds = ((n, JSON if n in relation.json else to_duckdb(t)) for n, t in relation.columns)
        columns = ", ".join(f"CAST(NULL AS {kind}) AS {quoted(n)}" for n, kind in kinds)
        source = "(SELECT 1 WHERE false)"
    elif relation.scheme == "file" and not any(_PATTERN & set(f.path) for f in relation.files):
        register_deleted(cursor, relation)
        source = scan(relation, [f.path for f in relation.files], BY_NAME)
    else:
        from ebbflow.infra.tables.logs.scans import live  # local files need none of it

        source = quoted(f"__files_of_{relation.name}")
        cursor.register(f"__files_of_{relation.name}", live(dataset(relation), deletions.of(relation)))
    rows = f"(SELECT {columns} FROM {source})"  # ``test`` is of the declared names
    cursor.execute(f"CREATE TEMP VIEW {quoted(relation.name)} AS SELECT * FROM {rows} WHERE {test}")


def selected(relation: Relation, own: Mapping[str, str] | None = None) -> str:
    """Return what is selected of ``scan`` to have exactly the declared columns and types, or those of ``own``; JSON
    is as it is stored."""
    types = {name: to_duckdb(kind) for name, kind in relation.columns} | dict(own or {})
    return ", ".join(
        f"{quoted(relation.stored(n))} AS {quoted(n)}"
        if n in relation.json
        else f"CAST({quoted(relation.stored(n))} AS {types[n]}) AS {quoted(n)}"
        for n, _ in relation.columns
    )


def own_types(relation: Relation) -> dict[str, str]:
    """Return the DuckDB types that columns of a stage's output had before they were stored, by name: of those that
    were cast, as ``storable`` tells them. Raises ``TableError``."""
    if not relation.files or not relation.name.startswith("ckpt_"):
        return {}
    told = (footer(relation.scheme, relation.files[0]).metadata or {}).get(OWN_TYPES.encode())
    known = {name for name, _ in relation.columns}
    types = json.loads(told) if told is not None else {}
    return {name: kind for name, kind in types.items() if name in known}


def register_deleted(cursor: Any, relation: Relation) -> None:
    """Make the deleted rows of ``relation`` known to the connection, for ``scan``."""
    gone = deletions.of(relation)
    if not gone:
        return
    import numpy as np
    import pyarrow as pa

    rows = [deletions.numbers(content) for content in gone.values()]
    files = np.repeat(np.arange(len(rows), dtype=np.int32), [len(one) for one in rows])
    cursor.register(_deleted(relation, "rows"), pa.table({"file": files, "row": np.concatenate(rows)}))
    cursor.register(
        _deleted(relation, "files"),
        pa.table({"path": list(gone), "file": np.arange(len(rows), dtype=np.int32)}),
    )


def _deleted(relation: Relation, what: str) -> str:
    return f"__deleted_{what}_of_{relation.name}"


def scan(relation: Relation, paths: Sequence[str], *options: str) -> str:
    """Return what reads ``paths``, files of ``relation``, by ``read_parquet``, with its partition columns.

    Deleted rows are left out: the connection must know them by ``register_deleted``.
    """
    gone = deletions.of(relation)
    touched = [path for path in paths if path in gone]
    whole = [path for path in paths if path not in gone]
    arms = [f"FROM {_read(relation, whole, *options)}"] if whole else []
    if touched:
        numbered = _read(relation, touched, *options, f"filename = {_text(_FILE)}", "file_row_number = true")
        rows, names = (quoted(_deleted(relation, what)) for what in ("rows", "files"))
        # a path that DuckDB tells otherwise than it was given would bring deleted rows back
        arms.append(
            f"SELECT r.* EXCLUDE ({quoted(_FILE)}, file_row_number) FROM {numbered} AS r "
            f"LEFT JOIN {names} AS n ON r.{quoted(_FILE)} = n.path ANTI JOIN {rows} AS d "
            f"ON coalesce(n.file, CAST(error('a file has another name') AS INTEGER)) = d.file "
            f"AND r.file_row_number = d.row"
        )
    if relation.log is None or (relation.log.ids and not touched):
        return arms[0].removeprefix("FROM ")
    if not relation.log.ids:
        # columns that none of the files has; the optimiser drops the arm without rows
        nulls = ", ".join(
            f"CAST(NULL AS {to_duckdb(t)}) AS {quoted(relation.stored(n))}" for n, t in relation.columns
        )
        arms.append(f"SELECT {nulls} WHERE false")
    return f"({' UNION ALL BY NAME '.join(arms)})"


def _read(relation: Relation, paths: Sequence[str], *options: str) -> str:
    listed = ", ".join(map(_text, paths))
    if relation.log is not None and relation.log.ids:
        kinds = dict(relation.columns)
        columns = ", ".join(
            f"{number}: {{name: {_text(name)}, type: {_text(to_duckdb(kinds[name]))}, default_value: NULL}}"
            for name, number in relation.log.ids
        )
        said = [*options, "hive_partitioning = false", f"schema = MAP {{{columns}}}"]
        return f"read_parquet([{listed}], {', '.join(o for o in said if o != BY_NAME)})"
    said = [*options, f"hive_partitioning = {str(bool(relation.partitions)).lower()}"]
    if relation.partitions:
        kinds = dict(relation.columns)
        types = ", ".join(f"{quoted(name)}: {_text(to_duckdb(kinds[name]))}" for name in relation.partitions)
        said.append(f"hive_types = {{{types}}}")
    return f"read_parquet([{listed}], {', '.join(said)})"


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def refusal(sql: str, relations: Sequence[Relation], everything: bool = False) -> str:
    """Return why DuckDB cannot run a statement over tables such as ``relations``; empty if it can.

    No file of theirs is opened. ``everything``: the user has allowed functions that read files.
    """
    import duckdb

    with _binding(everything) as cursor:
        try:
            _bound(cursor, sql, relations)
        except duckdb.Error as error:
            _leave_broken(error)
            return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    return ""


def output_names(sql: str, relations: Sequence[Relation], everything: bool = False) -> tuple[str, ...] | None:
    """Return the names that DuckDB gives to the columns of a query's result; ``None`` if it cannot run the query.

    No file of the tables is opened. ``everything``: the user has allowed functions that read files.
    """
    import duckdb

    with _binding(everything) as cursor:
        try:
            return tuple(name for name, *_ in _bound(cursor, sql, relations).description)
        except duckdb.Error as error:
            _leave_broken(error)
            return None


def _bound(cursor: Any, sql: str, relations: Sequence[Relation]) -> Any:
    for relation in relations:
        register_view(cursor, replace(relation, files=(), external=False))
    return cursor.sql(sql)  # binds, does not run


def _binding(everything: bool) -> Any:
    """Return a cursor with temporary views of its own, to be closed, of a database that stays: opening one takes
    several times as long as binding a statement does."""
    with _handing_out:  # a connection serves one call at a time
        return _binder(os.getpid(), everything).cursor()


def _leave_broken(error: Exception) -> None:
    """Have the next statement bound in another database where, as of ``error``, this one refuses all."""
    import duckdb

    if isinstance(error, duckdb.FatalException | duckdb.InternalException):
        _binder.cache_clear()


_handing_out = threading.Lock()


@cache
def _binder(process: int, everything: bool) -> Any:  # a child cannot use its parent's
    import duckdb

    connection = duckdb.connect(config={**configuration(), "threads": "1"})
    lock(connection, AllowedAccess(everything=everything))
    return connection


def dataset(relation: Relation) -> Any:
    """Return the files of ``relation``, with deleted rows, as a ``pyarrow.dataset.Dataset``, for DuckDB to scan."""
    import pyarrow as pa
    import pyarrow.dataset as ds

    kinds = dict(relation.columns)
    keys = pa.schema([(name, arrow_type(kinds[name])) for name in relation.partitions])
    declared = pa.schema([(relation.stored(name), arrow_type(kind)) for name, kind in relation.columns])
    return ds.dataset(
        [f.path for f in relation.files],
        schema=None if relation.log is None else declared,
        filesystem=filesystem(relation.scheme),
        format=ds.ParquetFileFormat(coerce_int96_timestamp_unit="us"),  # nanoseconds end in 2262
        partitioning=ds.partitioning(keys, flavor="hive") if relation.partitions else None,
    )


def storable(cursor: Any, job: StageJob) -> tuple[str, tuple[tuple[str, str], ...], dict[str, str]]:
    """Return the job's statement with a cast of every column that Spark has no type for, its columns, and the types
    by name that a later stage can cast columns back to. No two columns have one name, of which a file holds one."""
    sql = job.sql.strip().rstrip(";")
    plan = cursor.sql(sql)  # binds, does not run
    names = distinct_names(plan.columns)
    renamed = names != tuple(plan.columns)
    kinds = [to_spark(dtype) for dtype in plan.types]
    columns = tuple((name, spark) for name, (spark, _) in zip(names, kinds, strict=True))
    if not renamed and all(cast is None for _, cast in kinds):
        return sql + "\n", columns, {}
    own = {
        name: str(dtype)
        for name, dtype, (_, cast) in zip(names, plan.types, kinds, strict=True)
        if cast and restorable(dtype)
    }
    chosen = ", ".join(
        f"CAST({quoted(name)} AS {cast}) AS {quoted(name)}" if cast else quoted(name)
        for name, (_, cast) in zip(names, kinds, strict=True)
    )
    called = f" AS r({', '.join(map(quoted, names))})" if renamed else ""
    return f"SELECT {chosen} FROM (\n{sql}\n){called}", columns, own


def copied(
    statement: str, target: str, layout: FileLayout | None, own: Mapping[str, str] | None = None
) -> str:
    """Return the statement that writes a statement's rows as Parquet to ``target``: a file, or where ``layout`` has
    keys a directory. ``own`` are types of columns that the file tells, for ``own_types``."""
    options = ["FORMAT parquet"]
    if own and layout is None:
        options += [f"KV_METADATA {{{OWN_TYPES}: {_text(json.dumps(own))}}}"]
    if layout is not None and layout.keys:
        options += [f"PARTITION_BY ({', '.join(map(quoted, layout.keys))})"]
    if layout is not None and layout.ids:
        ids = ", ".join(f"{quoted(name)}: {number}" for name, number in layout.ids)
        options += [f"FIELD_IDS {{{ids}}}"]
    return f"COPY ({statement}) TO {_text(target)} ({', '.join(options)})"


def written(
    cursor: Any,
    statement: str,
    scheme: str,
    path: str,
    check: Callable[[], None],
    *,
    group: int = 0,
    own: Mapping[str, str] | None = None,
) -> int:
    """Write a statement's rows to ``path`` through pyarrow, whose S3 client follows the environment; return their
    number. ``check`` is called between batches, and ends it by an error. Row groups have at most ``group`` rows, if
    it is given. ``own``: as of ``copied``."""
    import pyarrow.parquet as pq

    rows = 0
    reader = cursor.sql(statement).to_arrow_reader(group or BATCH)
    with (
        private.output_stream(filesystem(scheme), scheme, path) as out,
        pq.ParquetWriter(out, reader.schema, compression="snappy") as writer,
    ):
        if own:
            writer.add_key_value_metadata({OWN_TYPES: json.dumps(dict(own))})
        for batch in reader:
            check()
            writer.write_batch(batch)
            rows += batch.num_rows
    return rows


def streamed(
    reader: Any, output: str, layout: FileLayout, fs: Any, check: Callable[[], None], stem: str = "part"
) -> tuple[int, tuple[str, ...]]:
    """Write the rows of a ``pyarrow.RecordBatchReader`` as files of ``layout`` into the directory ``output``; return
    their number and the files' paths. ``check`` is called between batches, and ends it by an error."""
    import pyarrow as pa
    import pyarrow.dataset as ds

    ids = dict(layout.ids)
    schema = pa.schema(
        [
            field.with_metadata({"PARQUET:field_id": str(ids[field.name])}) if field.name in ids else field
            for field in reader.schema
        ]
    )
    rows, made = 0, []

    def batches() -> Iterator[Any]:
        nonlocal rows
        for batch in reader:
            check()
            rows += batch.num_rows
            yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)

    ds.write_dataset(
        batches(),
        output,
        schema=schema,
        filesystem=fs,
        format="parquet",
        partitioning=ds.partitioning(pa.schema([(key, pa.string()) for key in layout.keys]), flavor="hive")
        if layout.keys
        else None,
        basename_template=f"{stem}-{{i}}.parquet",
        existing_data_behavior="overwrite_or_ignore",
        file_visitor=lambda file: made.append(str(file.path)),
    )
    return rows, tuple(made)
