"""Relations as Spark's temporary views."""

import logging
import re
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

from ebbflow.infra.errors import EngineUnavailableError, TableError
from ebbflow.infra.protocols import Relation, StageJob
from ebbflow.infra.spark.failures import chain, first_line, is_driver_gone
from ebbflow.infra.tables import partitions
from ebbflow.infra.tables.logs import deletions
from ebbflow.planners.model.tables import distinct_names

# where rows are deleted: a file, its number, a row, 64 rows of a file in one number, and the bits of these
_FILE, _NUMBER, _ROW, _WORD, _BITS = (
    f"__ebbflow_{name}" for name in ("file", "number", "row", "word", "bits")
)
_WORDS = 2**40  # more than a file has of 64 rows
_NO_TABLE = ("TABLE_OR_VIEW_NOT_FOUND", "SCHEMA_NOT_FOUND", "REQUIRES_SINGLE_PART_NAMESPACE")
_POLL = 0.2  # s after which whoever waits for views sees that it was cancelled
_log = logging.getLogger(__name__)
_HADOOP_SCHEME = {"s3": "s3a", "file": "file"}


def quoted(name: str) -> str:
    """Return ``name`` as a Spark identifier.

    >>> quoted("a`b")
    '`a``b`'
    """
    return "`" + name.replace("`", "``") + "`"


def qualified(name: str) -> str:
    """Return a name with dots between its parts as Spark's identifier.

    >>> qualified("sales.orders")
    '`sales`.`orders`'
    """
    return ".".join(map(quoted, name.split(".")))


def schema(columns: Sequence[tuple[str, str]]) -> str:
    """Return columns as Spark's DDL."""
    return ", ".join(f"{quoted(name)} {kind}" for name, kind in columns)


def hadoop_uri(uri: str) -> str:
    """Return ``uri`` with the scheme that Hadoop has an implementation for."""
    scheme, separator, rest = uri.partition("://")
    return f"{_HADOOP_SCHEME.get(scheme, scheme)}{separator}{rest}" if separator else uri


def paths(relation: Relation) -> list[str]:
    """Return the URIs of a relation's files."""
    return [location(relation.scheme, entry.path) for entry in relation.files]


def location(scheme: str, path: str) -> str:
    """Return the address of a file, whose path is in pyarrow's terms, as Hadoop takes it: not percent-encoded."""
    return f"{_HADOOP_SCHEME.get(scheme, scheme)}://{path}"


def register(session: Any, relation: Relation) -> None:
    """Make ``relation`` visible to ``session``'s statements; Spark's own tables are visible already."""
    if relation.external:
        if "." in relation.name:  # of another database: statements have its whole name as one of one part
            session.table(qualified(relation.name)).createOrReplaceTempView(quoted(relation.name))
        return
    if relation.files:
        # exact files with a known schema: no directory is listed, no footer read, no name taken for a pattern
        reader = (
            session.read.schema(_declared(session, relation))
            .option("__globPaths__", "false")
            # a session may be one that leaves such files out
            .option("ignoreCorruptFiles", "false")
            .option("ignoreMissingFiles", "false")
            # ranges read ahead by other threads are missing from Spark's input metrics; they gain only on S3
            .option("parquet.hadoop.vectored.io.enabled", str(relation.scheme != "file").lower())
        )
        if relation.partitions:
            reader = reader.option("basePath", location(relation.scheme, partitions.root(relation)))
        elif relation.log is not None:  # no column is read off a directory's name
            reader = reader.option("recursiveFileLookup", "true")
        frame = _decoded(_live(session, reader, relation), relation)
        wanted = [relation.stored(name) for name, _ in relation.columns]
        if relation.log is not None and (relation.log.stored or frame.columns != wanted):
            frame = frame.selectExpr(
                *(f"{quoted(relation.stored(name))} AS {quoted(name)}" for name, _ in relation.columns)
            )
    else:
        nulls = ", ".join(f"CAST(NULL AS {kind}) AS {quoted(name)}" for name, kind in relation.columns)
        frame = session.sql(f"SELECT {nulls} WHERE false")
    frame.createOrReplaceTempView(quoted(relation.name))


def register_columns(session: Any, relation: Relation) -> None:
    """Make ``relation`` visible to ``session`` without its rows, for statements that Spark is to resolve and not to
    run: its JVM need not reach the files, and looks at none."""
    if relation.external or not relation.files:
        register(session, relation)
        return
    # in one call of Spark's, which a thread waits for without the interpreter
    view = f"TEMPORARY VIEW {quoted(relation.name)} ({schema(relation.columns)}) USING parquet"
    session._jsparkSession.sql(f"CREATE OR REPLACE {view}")


class Proving:
    """A session in which statements are resolved of which only the meaning is to be proven, not run.

    Its views have no rows, and are made in a thread, while the query is planned. Safe for several threads.
    """

    def __init__(self, session: Callable[[], Any], known: Sequence[Relation]) -> None:
        """Begin with ``known`` relations in what ``session`` makes."""
        self._session: Any = None
        self._made: dict[str, tuple[object, ...]] = {}  # what views are of, by name
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._begin, args=(session, known), name="ebbflow-proving", daemon=True
        )
        with suppress(RuntimeError):  # there may be no more threads: whoever needs the views makes them
            self._thread.start()

    def _begin(self, session: Callable[[], Any], known: Sequence[Relation]) -> None:
        try:
            with self._lock:
                made = session()
                for relation in (one for one in known if _plain(one) and not one.external):
                    register_columns(made, relation)
                    self._made[relation.name.lower()] = _shown(relation)
                self._session = made
        except Exception as error:  # whoever needs it does it then, and is told why not
            _log.debug("views are not made ahead: %s", first_line(error))

    def frame(self, job: StageJob, cancelled: threading.Event) -> Any | None:
        """Return the data frame of a job's statement, without rows; ``None`` where views of the session cannot be
        the job's relations, or it was ``cancelled``."""
        while self._thread.is_alive() and not cancelled.is_set():
            self._thread.join(_POLL)
        if self._session is None or not all(_plain(one) and not one.external for one in job.relations):
            return None
        with self._lock:
            for relation in job.relations:
                if (shown := self._made.get(relation.name.lower())) is None:
                    register_columns(self._session, relation)
                    self._made[relation.name.lower()] = _shown(relation)
                elif shown != _shown(relation):
                    return None
        return storable(self._session.sql(job.sql))


def _shown(relation: Relation) -> tuple[object, ...]:
    """Return what a view without rows shows of a relation; without files it reads no table."""
    return relation.columns, bool(relation.files)


def _plain(relation: Relation) -> bool:
    """Tell whether what its files have is what it has: nothing needs to be looked at to know its columns."""
    return relation.log is None and not relation.partitions


def frame_of(session: Any, job: StageJob, *, lacking: bool = False, proven: bool = False) -> Any:
    """Return the data frame of a job's statement, with names and types that files can have.

    It has no rows where Spark is ``lacking`` what it needs to read them. Nor has it where what the statement means is
    only to be ``proven``: then no file is looked at, but where columns are not in the files as they are called.
    """
    for relation in job.relations:
        (register_columns if lacking or (proven and _plain(relation)) else register)(session, relation)
    return storable(session.sql(job.sql))


def _live(session: Any, reader: Any, relation: Relation) -> Any:
    """Return the rows of the files of ``relation`` that are not deleted."""
    gone = deletions.of(relation)
    if not gone:
        return _parquet(session, reader, paths(relation))
    import numpy as np
    import pyarrow as pa

    f = _functions(session)
    touched = _parquet(session, reader, [location(relation.scheme, path) for path in gone])
    columns = [quoted(name) for name in touched.columns]
    numbers = pa.array(range(len(gone)), pa.int64())
    names = session.createDataFrame(pa.table({_FILE: list(gone), _NUMBER: numbers}))
    # by one whole number, which takes Spark the least memory
    found = [deletions.words(one) for one in gone.values()]
    words = np.concatenate([at + number * _WORDS for number, (at, _) in enumerate(found)])
    bits = session.createDataFrame(
        pa.table({_WORD: words, _BITS: np.concatenate([bits for _, bits in found])})
    )
    # the address is percent-encoded, in which a plus is one
    file = "url_decode(replace(_metadata.file_path, '+', '%2B'))"
    start, instead = ("file:/+", "/") if relation.scheme == "file" else ("s3a?://", "")
    file = f"regexp_replace({file}, '^{start}', '{instead}') AS {_FILE}"
    numbered = touched.selectExpr(*columns, file, f"_metadata.row_index AS {_ROW}")
    # a path that Spark tells otherwise than it was given would bring deleted rows back
    known = f"CASE WHEN {_NUMBER} IS NULL THEN raise_error('a file has another name') ELSE {_NUMBER} END"
    word = f"CAST({known} AS BIGINT) * {_WORDS} + {_ROW} DIV 64 AS {_WORD}"
    marked = numbered.join(f.broadcast(names), _FILE, "left").selectExpr(*columns, _ROW, word)
    live = (
        marked.join(f.broadcast(bits), _WORD, "left")
        .where(f"coalesce(bit_get({_BITS}, CAST({_ROW} % 64 AS INT)), 0) = 0")
        .selectExpr(*columns)
    )
    whole = [location(relation.scheme, file.path) for file in relation.files if file.path not in gone]
    return live.union(_parquet(session, reader, whole).selectExpr(*columns)) if whole else live


_ESCAPED = re.compile("%([0-9A-Fa-f]{2})")
_PATTERN = re.compile(r"[*?\[\]{}\\]")  # in a path, Hadoop takes these for a pattern


def _decoded(frame: Any, relation: Relation) -> Any:
    """Return ``frame`` with the texts of directories decoded as UTF-8: Spark takes each escaped byte for a character.

    Raises ``TableError`` where two texts are the same to Spark.
    """
    for name, found in partitions.texts(relation).items():
        right: dict[str, str] = {}
        for text in found:
            seen = _ESCAPED.sub(lambda byte: chr(int(byte[1], 16)), text)
            if right.setdefault(seen, unquote(text)) != unquote(text):
                raise TableError(
                    f"directories of table {relation.name!r} give the column {name!r} the values {right[seen]!r} and "
                    f"{unquote(text)!r}, which Spark cannot tell apart; encode all of them, or none"
                )
        if wrong := [(seen, text) for seen, text in sorted(right.items()) if seen != text]:
            f = _functions(frame)
            known = f.create_map(*(f.lit(text) for pair in wrong for text in pair))
            frame = frame.withColumn(name, f.coalesce(known[f.col(quoted(name))], f.col(quoted(name))))
    return frame


def _declared(session: Any, relation: Relation) -> Any:
    """Return the schema that the files of ``relation`` are read with."""
    ddl = schema([(relation.stored(name), kind) for name, kind in relation.columns])
    if relation.log is None or not relation.log.ids:
        return ddl
    from pyspark.sql.types import StructField, StructType

    parsed = session._parse_ddl(ddl) if hasattr(session, "_parse_ddl") else StructType.fromDDL(ddl)
    # of this session: the vectorized reader, and filters on footers, take a column of the name for the one of the id
    for setting, value in (
        ("fieldId.read.enabled", True),
        ("enableVectorizedReader", False),
        ("filterPushdown", False),
    ):
        session.conf.set(f"spark.sql.parquet.{setting}", str(value).lower())
    ids = dict(relation.log.ids)
    return StructType(
        [StructField(f.name, f.dataType, True, {"parquet.field.id": ids[f.name]}) for f in parsed.fields]
    )


def _parquet(session: Any, reader: Any, found: Sequence[str]) -> Any:
    """Return the data frame of exactly these files; a server of Spark Connect does not heed ``__globPaths__``."""
    if _is_connected(session):
        found = [_PATTERN.sub(r"\\\g<0>", path) for path in found]
    return reader.parquet(*found)


def _is_connected(value: Any) -> bool:
    return type(value).__module__.startswith("pyspark.sql.connect.")


def _functions(frame: Any) -> Any:
    """Return PySpark's functions for a data frame: those of Spark Connect are others."""
    if _is_connected(frame):
        from pyspark.sql.connect import functions as connected

        return connected
    from pyspark.sql import functions

    return functions


def storable(frame: Any) -> Any:
    """Return ``frame`` with columns that are only ever null as strings, since Parquet has no such type, and with no
    two columns of one name, of which a file holds one."""
    f = _functions(frame)
    names = distinct_names(frame.columns)
    if names != tuple(frame.columns):
        frame = frame.toDF(*names)
    if all(field.dataType.simpleString() != "void" for field in frame.schema.fields):
        return frame
    return frame.select(
        *(
            f.col(quoted(field.name)).cast("string").alias(field.name)
            if field.dataType.simpleString() == "void"
            else f.col(quoted(field.name))
            for field in frame.schema.fields
        )
    )


def columns(frame: Any) -> tuple[tuple[str, str], ...]:
    """Return (name, Spark SQL type) of a data frame."""
    return tuple((field.name, field.dataType.simpleString()) for field in frame.schema.fields)


def driver_gone(error: Exception) -> EngineUnavailableError | None:
    """Return that Spark's driver is gone, where that is what an error of Py4J means."""
    if not is_driver_gone(chain(error)):
        return None
    return EngineUnavailableError(f"Spark's driver went away during a look for tables: {first_line(error)}")


def tables(
    session: Any,
    names: Collection[str],
    lost: Callable[[Exception], EngineUnavailableError | None] = driver_gone,
) -> list[Relation]:
    """Return those of the named tables that a session's catalogues have, or its temporary views are. No other table
    is looked at, of which there may be thousands.

    Raises ``TableError`` for one that cannot be read, and what ``lost`` returns where that is for want of a driver.
    """
    from pyspark.errors import PySparkException

    found = []
    for name in sorted(names):
        try:
            frame = session.table(qualified(name))
            found.append(Relation(name, "file", (), columns(frame), external=True))
        except Exception as error:  # of a package that a table needs, of a metastore: Py4J's own
            if not isinstance(error, PySparkException) or error.getCondition() not in _NO_TABLE:
                if (without := lost(error)) is not None:
                    raise without from error
                raise TableError(f"table {name!r} cannot be read: {first_line(error)}") from error
    return found


def output_names(session: Any, sql: str, known: Sequence[Relation]) -> tuple[str, ...] | None:
    """Return the names of the columns of a statement over ``known``, which are registered in ``session``; ``None`` if
    Spark cannot run it."""
    from pyspark.errors import PySparkException

    try:
        for relation in known:
            register(session, replace(relation, files=()))
        return tuple(session.sql(sql).columns)
    except PySparkException:
        return None


def write(frame: Any, job: StageJob) -> None:
    """Write the rows of ``frame`` into the directory of the job's output, as its layout wants them."""
    f = _functions(frame)
    if job.layout is None:
        frame.write.mode("append").parquet(hadoop_uri(job.output.uri))
        return
    ids = dict(job.layout.ids)
    frame = frame.select(
        *(
            f.col(quoted(name)).alias(name, metadata={"parquet.field.id": ids[name]})
            if name in ids
            else f.col(quoted(name))
            for name in frame.columns
        )
    )
    if job.layout.keys:  # else each task writes a file for each directory
        frame = frame.repartition(*(f.col(quoted(key)) for key in job.layout.keys))
    writer = frame.write.mode("append").option("compression", "snappy")
    writer.partitionBy(*job.layout.keys).parquet(hadoop_uri(job.output.uri))
