"""What Spark's processes are told of secrets, without starting any."""

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.spark import session
from ebbflow.infra.spark.cluster.authentication import (
    PROTECTED,
    READ_ONLY,
    SECRET,
    authenticated,
    daemon_properties,
    is_sensitive,
    new_secret,
    properties_text,
)
from ebbflow.infra.spark.cluster.state import ClusterState, StateFile
from ebbflow.infra.storage import private


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterState:
    monkeypatch.setenv("EBBFLOW_HOME", str(tmp_path / "home"))
    return ClusterState(
        name="a", uid="u1", directory="/d", host="127.0.0.1", port=7, ui_port=8, cores=1, memory=512, owner=0,
        secret=new_secret(),
    )  # fmt: skip


def read(text: str) -> dict[str, str]:
    """Read Java's notation of properties as java.util.Properties does, as far as it is used here."""
    found = {}
    for line in text.splitlines():
        assert line.isascii()
        name, value = line.split("=")
        found[plain(name)] = plain(value)
    return found


def plain(text: str) -> str:
    units, i = b"", 0
    while i < len(text):
        number = int(text[i + 2 : i + 6], 16) if text[i] == "\\" else ord(text[i])
        units += number.to_bytes(2, "big")
        i += 6 if text[i] == "\\" else 1
    return units.decode("utf-16-be")


@given(st.dictionaries(st.text(min_size=1), st.text()))
def test_properties_survive_javas_notation(properties: dict[str, str]) -> None:
    assert read(properties_text(properties)) == properties


def test_secrets_are_long_and_differ() -> None:
    made = {new_secret() for _ in range(100)}
    assert len(made) == 100
    assert {len(secret) for secret in made} == {64}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (SECRET, True),
        ("spark.hadoop.fs.s3a.secret.key", True),
        ("spark.hadoop.fs.s3a.access.key", True),
        ("spark.hadoop.fs.s3a.session.token", True),
        ("spark.ssl.keyPassword", True),
        ("spark.authenticate", False),
        ("spark.network.crypto.cipher", False),
        ("spark.sql.shuffle.partitions", False),
    ],
)
def test_names_that_speak_of_secrets_are_known(name: str, expected: bool) -> None:
    assert is_sensitive(name) == expected


def test_what_daemons_share_is_all_that_protects_them() -> None:
    made = daemon_properties("x")
    assert made == {**PROTECTED, **READ_ONLY, SECRET: "x"}
    assert made["spark.network.crypto.saslFallback"] == "false"
    assert made["spark.network.crypto.cipher"] == "AES/GCM/NoPadding"
    assert made["spark.master.rest.enabled"] == made["spark.ui.killEnabled"] == "false"
    assert made["spark.master.ui.decommission.allow.mode"] == "DENY"


def test_an_application_on_local_spark_is_protected_whatever_its_settings_say() -> None:
    assert authenticated({"spark.master": "local[2]", "spark.authenticate": "false"}) == {
        "spark.master": "local[2]",
        **PROTECTED,
    }


def test_the_secret_of_a_local_cluster_is_found_by_its_master(
    state: ClusterState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClusterState, "alive", property(lambda self: True))
    StateFile.of("a").write(state)
    found = authenticated({"spark.master": state.master_url, SECRET: "of somebody else"})
    assert found == {"spark.master": state.master_url, **PROTECTED, SECRET: state.secret}
    other = {"spark.master": "spark://127.0.0.1:9", SECRET: "mine"}
    assert authenticated(other) == other  # the user's own settings know


def test_files_with_a_secret_are_for_their_user_alone_even_in_a_group(
    state: ClusterState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EBBFLOW_SHARE", "group")
    file, before = StateFile.of("a"), os.umask(0)
    try:
        file.write(state)
        file.write_properties("x")
    finally:
        os.umask(before)
    for path in (file.path, file.properties):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {path.name for path in file.folder.iterdir()} == {
        "state.json",
        "spark.conf",
    }  # nothing half-written
    file.remove()
    assert not list(file.folder.iterdir())


def test_a_secret_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret"
    private.write_secret(path, "old")

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="No space"):
        private.write_secret(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_state_says_its_secret_to_nobody_who_prints_it(state: ClusterState) -> None:
    assert state.secret not in repr(replace(state, name="b"))


# --- where the pages of a driver are ----------------------------------------------------------------------


@pytest.fixture
def _bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SPARK_LOCAL_IP", "SPARK_PUBLIC_DNS", "SPARK_HOME", "PYSPARK_SUBMIT_ARGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))


@pytest.mark.usefixtures("_bare")
def test_pages_of_a_driver_are_on_loopback_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert session._pages("local[2]") == {"SPARK_LOCAL_IP": "127.0.0.1"}
    remote = {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_PUBLIC_DNS": "127.0.0.1"}
    assert session._pages("spark://192.0.2.1:7077") == remote
    assert session._pages("yarn") == {}
    monkeypatch.setenv("SPARK_LOCAL_IP", "192.0.2.9")
    assert session._pages("spark://192.0.2.1:7077") == {}


@pytest.mark.usefixtures("_bare")
def test_the_driver_is_reached_where_this_machine_speaks_to_the_master(tmp_path: Path) -> None:
    chosen = {"spark.master": "spark://127.0.0.2:7077"}
    there = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    assert session._reached_at(chosen) == there
    assert session._reached_at({**chosen, "spark.driver.host": "192.0.2.9"}) == {}
    (tmp_path / "spark-defaults.conf").write_text("spark.driver.host 192.0.2.9\n")
    assert session._reached_at(chosen) == {}


@pytest.mark.usefixtures("_bare")
def test_the_file_of_secrets_is_given_before_what_the_user_submits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert session._submit_arguments("/f", {}) == {}
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--jars a.jar pyspark-shell")
    assert session._submit_arguments("/a b/f", {SECRET: "x"}) == {
        "PYSPARK_SUBMIT_ARGS": "--properties-file '/a b/f' --load-spark-defaults --jars a.jar pyspark-shell"
    }
