"""Whether Spark's JVM has a client for S3: PySpark brings none, and what it needs is in no Python package."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ebbflow.infra.spark.failures import S3_JARS, first_line

_JARS = re.compile(r"hadoop-aws-[0-9][\w.-]*\.jar")
_HADOOP = re.compile(r"hadoop-client-api-([0-9][\w.]*)\.jar")
_SETTING = re.compile(r"^\s*spark\.(jars|jars\.packages|driver\.extraClassPath)\b.*hadoop-aws", re.MULTILINE)


def missing_client(context: Any) -> str:
    """Return what a running driver lacks to read and write ``s3://``, and what to do; empty if it lacks nothing."""
    try:
        context._jvm.org.apache.hadoop.fs.FileSystem.getFileSystemClass(
            "s3a", context._jsc.hadoopConfiguration()
        )
    except Exception as error:  # Py4J's, of a class that is not there
        version = str(context._jvm.org.apache.hadoop.util.VersionInfo.getVersion())
        return f"{S3_JARS.format(version=version)} ({first_line(error)})"
    return ""


def installed_client(home: Path, environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return where Spark in ``home`` finds a client for S3, and what to do where it finds none; one of them is empty.

    It is looked for among its jars and in ``spark-defaults.conf`` (``SPARK_CONF_DIR``); no JVM is started.
    """
    jars = home / "jars"
    names = sorted(path.name for path in jars.glob("hadoop-*.jar")) if jars.is_dir() else []
    if found := [name for name in names if _JARS.fullmatch(name)]:
        return f"{found[-1]} in {jars}", ""
    defaults = Path(environment.get("SPARK_CONF_DIR") or home / "conf", "spark-defaults.conf")
    try:
        if _SETTING.search(defaults.read_text(encoding="utf-8", errors="replace")):
            return f"named in {defaults}", ""
    except OSError:
        pass
    versions = [match[1] for name in names if (match := _HADOOP.fullmatch(name))]
    return "", S3_JARS.format(version=versions[-1] if versions else "VERSION")
