"""Places: read once from a path or URI, told to people as they were named, and what is below them."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ebbflow.infra.storage.locks import RunLock
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError


def test_what_is_below_a_place_needs_no_reading_again(monkeypatch: pytest.MonkeyPatch) -> None:
    place, bucket = StorageLocation("/data/a b"), StorageLocation("s3a://bucket//runs/")
    monkeypatch.delattr("ebbflow.infra.storage.places.split")
    below = place.under("x/y.json")
    assert (below.scheme, below.root, below.uri) == (
        "file",
        "/data/a b/x/y.json",
        "file:///data/a%20b/x/y.json",
    )
    below = bucket.under("one")
    assert (below.scheme, below.root, below.uri) == ("s3", "bucket/runs/one", "s3://bucket/runs/one")
    assert not below.local
    assert place.under("") is place


def test_a_place_is_told_as_it_was_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    place = StorageLocation("~/runs/")
    assert str(place) == "~/runs/"
    assert place.root == f"{tmp_path}/runs"
    assert str(place.under("one")) == "~/runs/one"
    assert place.under("one").path("lock") == f"{tmp_path}/runs/one/lock"
    assert repr(place) == "StorageLocation('~/runs/')"


def test_a_relative_place_stays_where_it_was_when_it_was_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    place = StorageLocation("store")
    monkeypatch.chdir("/")
    assert place.root == f"{tmp_path}/store"
    assert pickle.loads(pickle.dumps(place)).root == place.root


def test_places_are_equal_however_they_were_named(tmp_path: Path) -> None:
    assert (
        StorageLocation(tmp_path)
        == StorageLocation(tmp_path.as_uri())
        == StorageLocation(tmp_path.parent).under(tmp_path.name)
    )
    assert (
        len(
            {
                StorageLocation(tmp_path),
                StorageLocation(f"{tmp_path}/"),
                StorageLocation("s3://b/k"),
                StorageLocation("s3a://b/k/"),
            }
        )
        == 2
    )
    assert StorageLocation("/") != StorageLocation("/x")
    assert StorageLocation("/").under("x") == StorageLocation("/x")
    assert StorageLocation("/x") != "file:///x"


@pytest.mark.parametrize("text", ["", " ", "ftp://host/x", "s3://", "s3://b/../c", "file://host/x", "a\0b"])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(OptionError):
        StorageLocation(text)


def test_files_of_a_place(tmp_path: Path) -> None:
    place = StorageLocation(tmp_path)
    assert not place.is_file("a")
    place.write("a", b"1")
    assert place.is_file("a")
    assert place.under("a").is_file()
    assert not place.is_file()
    assert place.under("a").read("") == b"1"


def test_a_dead_holders_lock_lingers_only_where_it_is_a_lease(tmp_path: Path) -> None:
    assert RunLock(StorageLocation(tmp_path), "a", ttl=60).lingers == 0
    assert RunLock(StorageLocation("s3://bucket/a"), "a", ttl=60).lingers == 75


@pytest.mark.parametrize("other", [b'{"a": 1}', b'{"a": 1234567}'])
def test_a_file_that_is_replaced_while_it_is_read_is_of_one_version(
    s3: Callable[[], str], monkeypatch: pytest.MonkeyPatch, other: bytes
) -> None:
    """S3 tells a length first: what came then was cut, or had what memory held after its end."""
    place, left = StorageLocation(f"{s3()}/a"), [other]
    place.write("x", b'{"a": 1234}')
    fs = place.fs()

    class Replaced:
        def open_input_file(self, path: str) -> Any:
            file = fs.open_input_file(path)
            if left:
                with fs.open_output_stream(path) as out:
                    out.write(left.pop())
            return file

    monkeypatch.setattr(StorageLocation, "fs", lambda self: Replaced())
    assert place.read("x") == other
    left += [b"%d" % i for i in range(100)]
    with pytest.raises(OSError, match="changed whenever it was read"):
        place.read("x")
