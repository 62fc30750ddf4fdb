"""Whether Spark's JVM has a client for S3: PySpark brings none, and what it needs is in no Python package."""

import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ebbflow.infra.errors import EngineUnavailableError
from ebbflow.infra.spark.failures import S3_JARS, first_line

_CLIENT = re.compile(r"hadoop-aws-([0-9][\w.-]*)\.jar")
# The SDK in one file, as hadoop-aws asks for it, or in parts; before Hadoop 3.4 it was another.
_SDK = re.compile(r"(bundle|sdk-core|aws-java-sdk-bundle)-[0-9][\w.-]*\.jar")
_HADOOP = re.compile(r"hadoop-(client-api|common)-([0-9][\w.-]*)\.jar")
_SETTING = re.compile(
    r"^\s*spark\.(jars|jars\.packages|jars\.excludes|driver\.extraClassPath)(?:\s*[=:]\s*|\s+)(\S.*?)\s*$",
    re.MULTILINE,
)
_PACKAGE = re.compile(r"org\.apache\.hadoop:hadoop-aws:([0-9][\w.-]*)")
_CLOUD = re.compile(
    r"org\.apache\.spark:spark-hadoop-cloud_[0-9.]+:[0-9][\w.-]*"
)  # brings them in versions that fit
_SDK_PACKAGE = re.compile(r"software\.amazon\.awssdk:bundle:")
_DIST = "SPARK_DIST_CLASSPATH"


def missing_client(context: Any) -> str:
    """Return what a running driver lacks to read and write ``s3://``, and what to do; empty if it lacks nothing.

    Raises ``EngineUnavailableError`` for a driver that has gone away.
    """
    try:
        context._jvm.org.apache.hadoop.fs.FileSystem.getFileSystemClass(
            "s3a", context._jsc.hadoopConfiguration()
        )
    except Exception as error:  # Py4J's, of a class that is not there, or of a JVM that is not
        try:
            version = str(context._jvm.org.apache.hadoop.util.VersionInfo.getVersion())
        except Exception as gone:
            raise EngineUnavailableError(
                f"Spark's driver went away before the first stage: {first_line(gone)}"
            ) from gone
        return f"{S3_JARS.format(version=version)} ({first_line(error)})"
    return ""


def installed_client(home: Path, environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return where Spark in ``home`` finds a client for S3, and what to do where it finds none; one of them is empty.

    It is looked for among its jars, in ``spark-defaults.conf`` (``SPARK_CONF_DIR``) and in ``SPARK_DIST_CLASSPATH``;
    no JVM is started. Where a script sets that variable, what it finds is not known.
    """
    conf = Path(environment.get("SPARK_CONF_DIR") or home / "conf")
    defaults = conf / "spark-defaults.conf"
    settings = dict(_SETTING.findall(_text(defaults)))
    files = [*_class_path(str(home / "jars" / "*")), *_class_path(environment.get(_DIST, ""))]
    files += _class_path(settings.get("driver.extraClassPath", ""))
    files += _jars(settings.get("jars", ""))
    packages = settings.get("jars.packages", "")
    hadoop = _first(_HADOOP, files, group=2)
    client = _first(_CLIENT, files)
    if not client and "hadoop-aws" not in settings.get("jars.excludes", ""):
        if _CLOUD.search(packages):
            return f"spark-hadoop-cloud, named in {defaults}", ""
        if named := _PACKAGE.search(packages):
            if not _fit(named[1], hadoop):
                return "", _other_version(named[1], hadoop)
            return f"hadoop-aws:{named[1]}, named in {defaults}", ""
    if not client:
        if _DIST in _text(conf / "spark-env.sh"):
            return f"not known: {conf / 'spark-env.sh'} sets {_DIST}", ""
        return "", S3_JARS.format(version=hadoop or "VERSION")
    if not _fit(client, hadoop):
        return "", _other_version(client, hadoop)
    if not _first(_SDK, files, group=1) and not _SDK_PACKAGE.search(packages):
        return "", (
            f"Spark has hadoop-aws-{client}.jar without the bundle of software.amazon.awssdk: put "
            "bundle-VERSION.jar, of the version that hadoop-aws asks for, beside it"
        )
    place = next(file for file in files if _CLIENT.fullmatch(Path(file).name))
    return f"{Path(place).name} in {Path(place).parent}", ""


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _class_path(value: str) -> Iterator[str]:
    """Yield the files of a class path of Java's: ``DIRECTORY/*`` is all jars in it."""
    for entry in filter(None, value.split(":")):
        if entry.endswith("*"):
            yield from sorted(str(path) for path in Path(entry[:-1] or ".").glob("*.jar"))
        elif Path(entry).is_file():
            yield entry


def _jars(value: str) -> Iterator[str]:
    """Yield the files of ``spark.jars``, which may have patterns; those of other machines count as there."""
    for entry in filter(None, map(str.strip, value.split(","))):
        scheme, separator, _ = entry.partition(":/")
        if separator and scheme not in ("file", "local"):
            yield entry
        else:
            yield from sorted(glob.glob(re.sub(r"^(file|local):/+", "/", entry)))


def _first(pattern: re.Pattern[str], files: Iterable[str], group: int = 1) -> str:
    return next((match[group] for file in files if (match := pattern.fullmatch(Path(file).name))), "")


def _fit(client: str, hadoop: str) -> bool:
    return not hadoop or client == hadoop


def _other_version(client: str, hadoop: str) -> str:
    return f"hadoop-aws {client} does not fit Spark's Hadoop {hadoop}: {S3_JARS.format(version=hadoop)}"
