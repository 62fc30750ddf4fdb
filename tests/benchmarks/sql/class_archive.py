"""An archive of Spark's classes that JVMs share, so that a new one is of use sooner (class data sharing, JEP 350).

A JVM loads and verifies thousands of classes before its first task is done; from the archive it maps them. One
that finds the archive unfit (another Java, other jars) goes on without it and says nothing.
"""

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ebbflow.infra.spark.java import find_java, spark_home
from ebbflow.infra.storage import private

_LIMIT = 900.0  # seconds to make an archive in; ten where the cores are free
_KEPT = 7 * 86_400.0  # seconds after which an archive makes room for others
_SILENT = "-Xlog:disable -Xlog:all=error:stderr"

# What most queries have Spark do, so that its classes are in the archive.
_JOB = """
import sys
from pyspark.sql import SparkSession
builder = SparkSession.builder.master("local[1]")
for key, value in {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.extraJavaOptions": "-XX:ArchiveClassesAtExit=" + sys.argv[1] + "/spark.jsa",
    "spark.sql.warehouse.dir": sys.argv[1],
    "spark.sql.shuffle.partitions": "2",
}.items():
    builder = builder.config(key, value)
session = builder.getOrCreate()
session.range(1000).selectExpr("id", "id % 7 AS k", "cast(id AS string) AS word").write.parquet(sys.argv[1] + "/t")
session.read.parquet(sys.argv[1] + "/t").createOrReplaceTempView("t")
for hint in ("", "/*+ MERGE(b) */"):
    session.sql(
        f"SELECT {hint} a.k, count(*) AS n, sum(b.id) AS s, max(b.word) AS w FROM t a JOIN t b ON a.id = b.id "
        "WHERE a.word LIKE '%1%' GROUP BY a.k ORDER BY n"
    ).write.mode("overwrite").parquet(sys.argv[1] + "/out")
session.stop()
"""


def java_options(folder: Path, options: str = "") -> str:
    """Return ``options`` of a JVM with those that let it use the archive in ``folder``, which is made now unless it
    is there. When it cannot be made the JVM is slower and nothing else.

    Raises ``EngineUnavailableError`` without Java or Spark.
    """
    archive = folder / f"spark-{_key(options)}.jsa"
    if not archive.exists():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            _make(archive, options)
    if not archive.exists():
        return options
    return f"{options} -XX:SharedArchiveFile={archive} {_SILENT}".strip()


def _key(options: str) -> str:
    """Name what an archive is good for: this Java, these jars and these options."""
    jars = spark_home() / "jars"
    text = f"{find_java().version} {jars} {jars.stat().st_mtime_ns} {options}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _make(archive: Path, options: str) -> None:
    private.make_folder(archive.parent)
    with tempfile.TemporaryDirectory(prefix="spark-archive-", dir=archive.parent) as folder:
        subprocess.run(
            [sys.executable, "-c", _JOB, folder],
            env={**os.environ, "JDK_JAVA_OPTIONS": options, "SPARK_LOCAL_IP": "127.0.0.1"},
            capture_output=True,
            timeout=_LIMIT,
            check=True,
        )
        made = Path(folder) / "spark.jsa"
        made.replace(archive)
    _tidy(archive.parent)


def _tidy(folder: Path) -> None:
    """Delete old archives: another environment may share the folder and be starting JVMs with its own."""
    for other in folder.glob("spark-*.jsa"):
        with contextlib.suppress(FileNotFoundError):  # somebody else tidies, too
            if time.time() - other.stat().st_mtime > _KEPT:
                other.unlink()
