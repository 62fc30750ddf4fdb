"""The archive of classes is made once, and a machine that cannot make one goes without."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.sql import class_archive
from tests.benchmarks.sql.class_archive import java_options


def test_it_is_made_once_and_is_another_for_other_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def make(archive: Path, options: str) -> None:
        made.append(archive)
        archive.write_bytes(b"classes")

    monkeypatch.setattr(class_archive, "_make", make)
    first, again = java_options(tmp_path, "-Xint"), java_options(tmp_path, "-Xint")
    assert first == again
    assert first.startswith(f"-Xint -XX:SharedArchiveFile={made[0]} ")
    assert java_options(tmp_path).startswith("-XX:SharedArchiveFile=")
    assert len(set(made)) == len(made) == 2


@pytest.mark.parametrize(
    "failure",
    [OSError("no space"), subprocess.TimeoutExpired("java", 1.0), subprocess.CalledProcessError(1, "java")],
)
def test_without_an_archive_the_options_are_those_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def make(archive: Path, options: str) -> None:
        raise failure

    monkeypatch.setattr(class_archive, "_make", make)
    assert java_options(tmp_path, "-Xint") == "-Xint"
    assert java_options(tmp_path) == ""


def test_only_old_archives_make_room(tmp_path: Path) -> None:
    old, young = tmp_path / "spark-0.jsa", tmp_path / "spark-1.jsa"
    for file in (old, young):
        file.write_bytes(b"classes")
    os.utime(old, (0, 0))
    class_archive._tidy(tmp_path)
    assert [old.exists(), young.exists()] == [False, True]


@pytest.mark.spark
def test_spark_loads_its_classes_from_the_archive(tmp_path: Path) -> None:
    log = tmp_path / "classes.log"
    options = f"{os.environ['JDK_JAVA_OPTIONS']} -Xlog:class+load:file={log}"
    script = (
        "from pyspark.sql import SparkSession\nSparkSession.builder.master('local[1]').getOrCreate().stop()"
    )
    subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "JDK_JAVA_OPTIONS": options, "SPARK_LOCAL_IP": "127.0.0.1"},
        cwd=tmp_path,
        capture_output=True,
        timeout=120.0,
        check=True,
    )
    (line,) = [
        line for line in log.read_text().splitlines() if " org.apache.spark.SparkContext source:" in line
    ]
    assert "shared objects file (top)" in line
