"""JVMs of tests live for seconds: an archive of Spark's classes halves the processor time that each starts in.

A JVM that finds the archive unfit (another Java, other jars) goes on without it and says nothing.
"""

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parents[1] / ".cache"
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"  # the first compiler and the serial collector do
_SILENT = "-Xlog:disable -Xlog:all=error:stderr"
_LIMIT = 240.0  # s to make an archive in

# What most tests have Spark do, so that its classes are in the archive.
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


def java_options() -> str:
    """Return options of every JVM that tests start (``JDK_JAVA_OPTIONS``), and make the archive once."""
    archive = FOLDER / f"spark-{_key()}.jsa"
    if not archive.exists():
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # slower, but the same, without it
            _make(archive)
    return f"{QUICK} -XX:SharedArchiveFile={archive} {_SILENT}" if archive.exists() else QUICK


def _key() -> str:
    """Name what an archive is good for: this Java and these jars."""
    import pyspark

    version = subprocess.run(["java", "-version"], capture_output=True, timeout=60.0, check=False).stderr
    jars = Path(pyspark.__file__).parent / "jars"
    return hashlib.sha256(f"{version!r} {jars} {jars.stat().st_mtime_ns} {QUICK}".encode()).hexdigest()[:12]


def _make(archive: Path) -> None:
    archive.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="spark-archive-", dir=archive.parent) as folder:
        subprocess.run(
            [sys.executable, "-c", _JOB, folder],
            env={**os.environ, "JDK_JAVA_OPTIONS": QUICK, "SPARK_LOCAL_IP": "127.0.0.1"},
            capture_output=True,
            timeout=_LIMIT,
            check=True,
        )
        made = Path(folder) / "spark.jsa"
        for other in archive.parent.glob("spark-*.jsa"):
            other.unlink()
        made.replace(archive)
