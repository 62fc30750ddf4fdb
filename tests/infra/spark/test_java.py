"""Finding Java and Spark, with fake Javas."""

import os
from pathlib import Path

import pytest

from ebbflow.infra.errors import EngineUnavailableError
from ebbflow.infra.spark import java
from ebbflow.infra.spark.java import find_java, major_version, parse_version, spark_home


def fake_java(folder: Path, version: str, *, whole: bool = True) -> Path:
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    refuse = "" if whole else 'case "$1" in --add-modules*) echo no module >&2; exit 1;; esac\n'
    program.write_text(f"#!/bin/sh\n{refuse}echo 'openjdk version \"{version}\" 2025-01-01' >&2\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize(
    ("text", "version", "major"),
    [
        ('openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime Environment', "17.0.15", 17),
        ('java version "1.8.0_392"\nJava(TM) SE', "1.8.0_392", 8),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "25-ea" 2025-09-16', "25-ea", 25),
        ('openjdk version "21" 2023-09-19', "21", 21),
        ("command not found", "", 0),
    ],
)
def test_versions_are_read_as_each_release_writes_them(text: str, version: str, major: int) -> None:
    assert parse_version(text) == version
    assert major_version(version) == major


def test_java_home_is_preferred_to_path(tmp_path: Path) -> None:
    home, path = fake_java(tmp_path / "a", "21.0.1"), fake_java(tmp_path / "b", "17.0.1")
    found = find_java({"JAVA_HOME": str(tmp_path / "a"), "PATH": f"{path.parent}:{os.environ['PATH']}"})
    assert (found.path, found.version, found.major) == (home, "21.0.1", 21)
    assert found.home == tmp_path / "a"


@pytest.mark.parametrize("unfit", [{"version": "11.0.2"}, {"version": "25", "whole": False}])
def test_an_unfit_java_home_is_passed_over_for_a_fit_one_in_path(
    tmp_path: Path, unfit: dict[str, str]
) -> None:
    fake_java(tmp_path / "unfit", **unfit)  # type: ignore[arg-type]
    path = fake_java(tmp_path / "fit", "17.0.1")
    assert find_java({"JAVA_HOME": str(tmp_path / "unfit"), "PATH": str(path.parent)}).path == path


def test_no_java_says_in_one_line_what_to_install() -> None:
    with pytest.raises(EngineUnavailableError, match="apt-get install openjdk-17-jre-headless") as error:
        find_java({"PATH": ""})
    assert "\n" not in str(error.value)


def test_an_old_java_is_named(tmp_path: Path) -> None:
    old = fake_java(tmp_path / "old", "11.0.2")
    with pytest.raises(EngineUnavailableError, match=f"{old} is Java 11.0.2"):
        find_java({"PATH": str(old.parent)})


def test_a_reduced_java_is_named_with_the_module_it_lacks(tmp_path: Path) -> None:
    reduced = fake_java(tmp_path / "reduced", "25.0.1", whole=False)
    with pytest.raises(EngineUnavailableError, match=r"jdk\.incubator\.vector"):
        find_java({"JAVA_HOME": str(tmp_path / "reduced"), "PATH": str(reduced.parent)})


def test_a_missing_pyspark_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EngineUnavailableError, match=r"pip install 'prefect-ebbflow\[spark\]'"):
        spark_home()
