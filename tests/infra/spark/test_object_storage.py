"""Where Spark's client for S3 is looked for, without a JVM."""

from pathlib import Path

import pytest

from ebbflow.infra.errors import EngineUnavailableError
from ebbflow.infra.spark.failures import translate
from ebbflow.infra.spark.object_storage import installed_client


@pytest.fixture(name="home")
def _home(tmp_path: Path) -> Path:
    (tmp_path / "jars").mkdir()
    (tmp_path / "jars" / "hadoop-client-api-3.5.0.jar").touch()
    return tmp_path


def test_without_a_jar_the_remedy_names_its_version(home: Path) -> None:
    found, remedy = installed_client(home, {})
    assert not found
    assert "spark.jars.packages=org.apache.hadoop:hadoop-aws:3.5.0 " in remedy
    assert "software.amazon.awssdk" in remedy


def test_a_jar_of_sparks_own_is_found(home: Path) -> None:
    (home / "jars" / "hadoop-aws-3.5.0.jar").touch()
    assert installed_client(home, {}) == (f"hadoop-aws-3.5.0.jar in {home / 'jars'}", "")


@pytest.mark.parametrize(
    ("line", "known"),
    [
        ("spark.jars.packages org.apache.hadoop:hadoop-aws:3.5.0", True),
        ("spark.jars=/opt/hadoop-aws-3.5.0.jar,/opt/bundle.jar", True),
        ("# spark.jars.packages org.apache.hadoop:hadoop-aws:3.5.0", False),
        ("spark.app.name hadoop-aws", False),
    ],
)
def test_the_users_defaults_may_name_it(home: Path, line: str, known: bool) -> None:
    (home / "conf").mkdir()
    (home / "conf" / "spark-defaults.conf").write_text(f"spark.master local\n{line}\n")
    found, remedy = installed_client(home, {})
    assert (bool(found), not remedy) == (known, known)
    assert installed_client(home, {"SPARK_CONF_DIR": str(home / "jars")})[0] == ""


@pytest.mark.parametrize(
    "text",
    [
        "Class org.apache.hadoop.fs.s3a.S3AFileSystem not found",
        "java.lang.NoClassDefFoundError: software/amazon/awssdk/core/exception/SdkException",
    ],
)
def test_a_stage_that_meets_no_client_says_what_is_missing(text: str) -> None:
    error = translate([("RuntimeException", text)], stage="the stage", sql="SELECT 1")
    assert isinstance(error, EngineUnavailableError)
    assert "org.apache.hadoop:hadoop-aws:" in str(error)
