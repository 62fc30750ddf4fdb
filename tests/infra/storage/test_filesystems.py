"""Paths, URIs and what errors of storage become."""

import errno
import os
import socket
import time
from typing import Any

import boto3
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow.fs import LocalFileSystem

from ebbflow.infra.errors import StorageError, StorageFullError, TableError
from ebbflow.infra.storage import filesystems
from ebbflow.infra.storage.files import write_atomic, write_once
from ebbflow.infra.storage.filesystems import resolve, split, to_uri, translated
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("/a b/c", ("file", "/a b/c")),
        ("/a/./b/../c/", ("file", "/a/c")),
        ("file:///a%20b", ("file", "/a b")),
        ("file:/a", ("file", "/a")),
        ("file://localhost/a", ("file", "/a")),
        ("s3://bucket", ("s3", "bucket")),
        ("s3://bucket/a/b/", ("s3", "bucket/a/b")),
        ("s3a://bucket//a", ("s3", "bucket/a")),
    ],
)
def test_paths_and_uris_are_split_into_scheme_and_path(uri: str, expected: tuple[str, str]) -> None:
    assert split(uri) == expected


def test_relative_paths_start_at_the_working_directory(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert split("x/y") == ("file", f"{tmp_path}/x/y")
    assert split("~/x") == ("file", "/home/someone/x")


@pytest.mark.parametrize(
    "uri", ["", "  ", "gs://b/x", "https://x/y", "s3://", "s3://b/../c", "file://h/x", "a\0b"]
)
def test_what_is_neither_a_path_nor_file_nor_s3_is_refused(uri: str) -> None:
    with pytest.raises(OptionError):
        split(uri)


@given(st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1))
def test_a_path_survives_becoming_a_uri(name: str) -> None:
    if name in (".", ".."):
        return
    assert split(to_uri(f"/data/{name}")) == ("file", f"/data/{name}")


def test_errors_become_ours_and_say_what_to_do() -> None:
    cases: list[tuple[Exception, type[Exception], str]] = [
        (OSError(errno.ENOSPC, "No space left on device"), StorageFullError, "free some space"),
        (OSError("[Errno 28] Error writing: No space left on device"), StorageFullError, "free some space"),
        (PermissionError(errno.EACCES, "Permission denied"), TableError, "permission denied"),
        (FileNotFoundError(errno.ENOENT, "No such file"), TableError, "does not exist"),
        (OSError("When x: AWS Error ACCESS_DENIED during HeadObject"), TableError, "AWS_ACCESS_KEY_ID"),
        (OSError("When x: AWS Error NO_SUCH_BUCKET during PutObject"), TableError, "no such bucket"),
        (OSError("When x: AWS Error NETWORK_CONNECTION during PutObject"), TableError, "AWS_ENDPOINT_URL"),
        (
            OSError("When x: AWS Error NETWORK_CONNECTION during HeadBucket operation"),
            TableError,
            "AWS_ENDPOINT_URL",
        ),
        (
            OSError("When x: AWS Error ACCESS_DENIED during HeadBucket operation"),
            TableError,
            "AWS_ACCESS_KEY_ID",
        ),
        (
            OSError("When x: AWS Error RESOURCE_NOT_FOUND during HeadBucket operation"),
            TableError,
            "no such bucket",
        ),
    ]
    for error, kind, told in cases:
        with pytest.raises(kind, match=told) as caught, translated("read x", TableError):
            raise error
        assert str(caught.value).startswith("cannot read x: ")
        assert caught.value.__cause__ is error


def test_our_own_errors_and_mistakes_in_code_pass_untouched() -> None:
    for error in (TableError("mine"), ZeroDivisionError()):
        with pytest.raises(type(error)) as caught, translated("read x"):
            raise error
        assert caught.value is error


def test_an_s3_server_that_never_answers_is_given_up_in_bounded_time(s3: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(filesystems, "REQUEST_TIMEOUT", 1.0)
    monkeypatch.setattr(filesystems, "MAX_ATTEMPTS", 1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{silent.getsockname()[1]}")
        fs, path = resolve("s3://bucket/key")
        start = time.monotonic()
        with pytest.raises(StorageError, match="cannot be reached"), translated("look"):
            fs.get_file_info(path)
        assert time.monotonic() - start < 150


def test_the_environment_decides_the_s3_endpoint_anew_each_time(s3: Any, monkeypatch: Any) -> None:
    uri = s3()
    fs, path = resolve(uri)
    fs.create_dir(f"{path}/there")
    assert resolve(uri)[0] is fs
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    assert resolve(uri)[0] is not fs


def test_files_without_a_folder_go_where_the_process_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_atomic(LocalFileSystem(), "file", "new.txt", b"1")
    assert (tmp_path / "new.txt").read_bytes() == b"1"
    assert write_once("once.txt", b"2")
    assert not write_once("once.txt", b"3")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new.txt", "once.txt"]


def test_where_s3_is_may_be_told_to_other_processes_and_no_credentials(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = {
        "AWS_ENDPOINT_URL_S3": "http://user:secret@store:9000",
        "AWS_ENDPOINT_URL": "http://store:9000",
        "AWS_REGION": "eu-west-1",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }
    said = filesystems.public_settings(environment)
    assert said == {"AWS_ENDPOINT_URL": "http://store:9000", "AWS_REGION": "eu-west-1"}

    for name in (*filesystems.ENDPOINTS, *filesystems.REGIONS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    monkeypatch.setattr(filesystems, "_own", {"AWS_DEFAULT_REGION": "us-west-2"})
    with filesystems.following(said):
        assert filesystems.public_settings() == {
            "AWS_ENDPOINT_URL": "http://store:9000",
            "AWS_DEFAULT_REGION": "us-west-2",
        }
    assert filesystems.public_settings() == {"AWS_DEFAULT_REGION": "us-west-2"}

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://another:9000")
    with pytest.raises(OSError, match="of a task"), filesystems.following({}):
        _fails_where({"AWS_DEFAULT_REGION": "us-west-2"})
    assert filesystems.public_settings()["AWS_ENDPOINT_URL"] == "http://another:9000"


def _fails_where(said: dict[str, str]) -> None:
    assert filesystems.public_settings() == said
    raise OSError("of a task")


def test_a_small_file_on_s3_takes_one_request(s3: Any) -> None:
    place = StorageLocation(f"{s3()}/store")
    place.write("key", b"value")
    (file,) = place.entries()
    bucket, _, key = file.path.partition("/")
    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"], region_name="us-east-1")
    tag = client.head_object(Bucket=bucket, Key=key)["ETag"]
    assert "-" not in tag, "as of an upload in several parts"
