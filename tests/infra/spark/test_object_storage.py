"""Where Spark's client for S3 is looked for, without a JVM."""

from pathlib import Path

import pytest

from ebbflow.infra.errors import EngineUnavailableError
from ebbflow.infra.spark.failures import translate
from ebbflow.infra.spark.object_storage import installed_client, missing_client

CLIENT, SDK = "hadoop-aws-3.5.0.jar", "bundle-2.35.4.jar"


@pytest.fixture(name="home")
def _home(tmp_path: Path) -> Path:
    for folder in ("jars", "conf", "lib"):
        (tmp_path / folder).mkdir()
    (tmp_path / "jars" / "hadoop-client-api-3.5.0.jar").touch()
    return tmp_path


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).touch()


def test_without_a_jar_the_remedy_names_its_version(home: Path) -> None:
    found, remedy = installed_client(home, {})
    assert not found
    assert "spark.jars.packages=org.apache.hadoop:hadoop-aws:3.5.0 " in remedy
    assert "software.amazon.awssdk" in remedy


@pytest.mark.parametrize(
    ("jars", "remedy"),
    [
        ((CLIENT, SDK), ""),
        ((CLIENT, "sdk-core-2.35.4.jar"), ""),
        ((CLIENT,), "hadoop-aws-3.5.0.jar without the bundle of software.amazon.awssdk"),
        ((SDK,), "Spark has no client for s3://"),
        (("hadoop-aws-3.3.1.jar", SDK), "hadoop-aws 3.3.1 does not fit Spark's Hadoop 3.5.0"),
    ],
)
def test_jars_of_sparks_own_are_a_client_and_its_bundle_in_versions_that_fit(
    home: Path, jars: tuple[str, ...], remedy: str
) -> None:
    put(home / "jars", *jars)
    found, said = installed_client(home, {})
    assert found == ("" if remedy else f"{CLIENT} in {home / 'jars'}")
    assert remedy in said
    assert bool(said) == bool(remedy)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("spark.jars.packages org.apache.hadoop:hadoop-aws:3.5.0", "hadoop-aws:3.5.0, named in"),
        ("spark.jars.packages a:b:1,org.apache.hadoop:hadoop-aws:3.5.0", "hadoop-aws:3.5.0, named in"),
        (
            "spark.jars.packages=org.apache.spark:spark-hadoop-cloud_2.13:4.3.0",
            "spark-hadoop-cloud, named in",
        ),
        ("spark.jars=LIB/hadoop-aws-3.5.0.jar,LIB/bundle-2.35.4.jar", "hadoop-aws-3.5.0.jar in"),
        ("spark.jars file://LIB/*.jar", "hadoop-aws-3.5.0.jar in"),
        ("spark.jars hdfs://h/hadoop-aws-3.5.0.jar,hdfs://h/bundle-2.35.4.jar", "hadoop-aws-3.5.0.jar in"),
        ("spark.driver.extraClassPath LIB/*", "hadoop-aws-3.5.0.jar in"),
        (
            "spark.driver.extraClassPath LIB/hadoop-aws-3.5.0.jar:LIB/bundle-2.35.4.jar",
            "hadoop-aws-3.5.0.jar in",
        ),
        ("spark.jars LIB/hadoop-aws-3.5.0.jar", ""),
        ("spark.jars /absent/hadoop-aws-3.5.0.jar,/absent/bundle-2.35.4.jar", ""),
        ("spark.jars.packages org.apache.hadoop:hadoop-aws:3.3.1", ""),
        ("spark.jars.excludes org.apache.hadoop:hadoop-aws", ""),
        (
            "spark.jars.packages org.apache.hadoop:hadoop-aws:3.5.0\n"
            "spark.jars.excludes org.apache.hadoop:hadoop-aws",
            "",
        ),
        ("# spark.jars.packages org.apache.hadoop:hadoop-aws:3.5.0", ""),
        ("spark.app.name hadoop-aws", ""),
    ],
)
def test_the_users_defaults_may_name_it(home: Path, lines: str, told: str) -> None:
    put(home / "lib", CLIENT, SDK)
    (home / "conf" / "spark-defaults.conf").write_text(
        "spark.master local\n" + lines.replace("LIB", str(home / "lib")) + "\n"
    )
    found, remedy = installed_client(home, {})
    assert (told in found, bool(found), bool(remedy)) == (True, bool(told), not told)
    assert installed_client(home, {"SPARK_CONF_DIR": str(home / "jars")})[0] == ""


def test_a_class_path_of_the_environment_counts_and_one_that_a_script_sets_is_not_known(home: Path) -> None:
    put(home / "lib", CLIENT, SDK)
    found, remedy = installed_client(home, {"SPARK_DIST_CLASSPATH": f"/absent:{home / 'lib'}/*"})
    assert (found, remedy) == (f"{CLIENT} in {home / 'lib'}", "")
    (home / "conf" / "spark-env.sh").write_text("export SPARK_DIST_CLASSPATH=$(hadoop classpath)\n")
    found, remedy = installed_client(home, {})
    assert (found.partition(":")[0], remedy) == ("not known", "")


def test_a_driver_that_has_gone_away_is_not_one_without_a_client() -> None:
    from py4j.protocol import Py4JNetworkError

    class Gone:
        @property
        def _jvm(self) -> None:
            raise Py4JNetworkError("Answer from Java side is empty")

    with pytest.raises(EngineUnavailableError, match=r"driver went away.*Answer from Java side is empty"):
        missing_client(Gone())


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
