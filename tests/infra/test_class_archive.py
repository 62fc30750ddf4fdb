"""The archive of classes is made once, and a machine that cannot make one goes without."""

import subprocess
from pathlib import Path

import pytest

from ebbflow.infra.spark import class_archive
from ebbflow.infra.spark.class_archive import java_options


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


@pytest.mark.spark
def test_spark_runs_on_its_archive(tmp_path: Path) -> None:
    options = java_options(tmp_path, "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    (archive,) = tmp_path.glob("*.jsa")
    done = subprocess.run(
        ["java", *options.split(), "-Xshare:on", "-version"],
        capture_output=True, text=True, timeout=60.0, check=False,
    )  # fmt: skip
    assert f"={archive} " in options
    assert done.returncode == 0, done.stderr
