"""Relations as Spark's temporary views."""

from collections.abc import Sequence
from typing import Any

from ebbflow.infra.protocols import Relation
from ebbflow.infra.tables import partitions

_HADOOP_SCHEME = {"s3": "s3a", "file": "file"}


def quoted(name: str) -> str:
    """Return ``name`` as a Spark identifier.

    >>> quoted("a`b")
    '`a``b`'
    """
    return "`" + name.replace("`", "``") + "`"


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
        return
    if relation.files:
        # exact files with a known schema: no directory is listed, no footer read, no name taken for a pattern
        reader = (
            session.read.schema(schema(relation.columns))
            .option("__globPaths__", "false")
            # ranges read ahead by other threads are missing from Spark's input metrics; they gain only on S3
            .option("parquet.hadoop.vectored.io.enabled", str(relation.scheme != "file").lower())
        )
        if relation.partitions:
            reader = reader.option("basePath", location(relation.scheme, partitions.root(relation)))
        frame = reader.parquet(*paths(relation))
    else:
        nulls = ", ".join(f"CAST(NULL AS {kind}) AS {quoted(name)}" for name, kind in relation.columns)
        frame = session.sql(f"SELECT {nulls} WHERE false")
    frame.createOrReplaceTempView(quoted(relation.name))


def storable(frame: Any) -> Any:
    """Return ``frame`` with columns that are only ever null as strings, since Parquet has no such type."""
    from pyspark.sql import functions as f

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
