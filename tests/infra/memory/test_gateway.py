"""WebHDFS as Hadoop's client speaks it: what is asked of files, by HDFS' rules, atomically, with the key alone."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.memory.gateway import server
from ebbflow.infra.memory.gateway.files import PARTS, GatewayFiles
from ebbflow.infra.memory.gateway.messages import MAX_BYTES, FileStatus, RefusedError, parse, path_of
from ebbflow.infra.storage.places import StorageLocation
from tests.infra.memory.gateway_client import KEY, Client, served
from tests.infra.memory.lenders import until

DATA = "&op=CREATE&overwrite=true&ebbflow=data"


@pytest.fixture(name="root")
def _root(tmp_path: Path) -> Path:
    found = tmp_path / "root"
    found.mkdir()
    return found


@pytest.fixture(name="client")
def _client(root: Path) -> Iterator[Client]:
    with served(root) as client:
        yield client


def _parts(root: Path) -> list[str]:
    return [one.name for one in (root / PARTS).glob("*")]


def test_a_file_is_written_found_read_in_part_and_replaced(client: Client, root: Path) -> None:
    content = bytes(range(256)) * 3000
    made = client.create("/t/part 1%=ü.parquet", content)
    assert (made.status, made.body) == (201, b"")
    assert (root / "t" / "part 1%=ü.parquet").read_bytes() == content
    assert (root / "t").stat().st_mode & 0o777 == 0o700
    assert client.read("/t/part 1%=ü.parquet") == content
    assert client.read("/t/part 1%=ü.parquet", offset=767_000) == content[767_000:]
    assert client.read("/t/part 1%=ü.parquet", offset=5, length=300_000) == content[5:300_005]
    assert client.read("/t/part 1%=ü.parquet", offset=len(content)) == b""
    assert client.read("/t/part 1%=ü.parquet", offset=1, length=0) == b""
    answer = client.call("GET", "/t/part 1%=ü.parquet", "GETFILESTATUS")
    assert "Content-Type" not in answer.headers, "the client of PySpark 4 cannot read one"
    status = answer.json["FileStatus"]
    assert (status["type"], status["length"], status["owner"], status["pathSuffix"]) == (
        "FILE", len(content), "ann", "",
    )  # fmt: skip
    assert client.create("/t/part 1%=ü.parquet", b"").status == 201
    assert client.read("/t/part 1%=ü.parquet") == b""
    assert client.names("/t") == ["part 1%=ü.parquet"]
    assert client.names("/") == ["t"], "the gateway's own directory is not shown"
    assert _parts(root) == []
    assert client.create("/t/part 1%=ü.parquet", b"x", overwrite=False).error == (
        403, "FileAlreadyExistsException",
    )  # fmt: skip


def test_directories_are_made_listed_summed_and_deleted(client: Client, root: Path) -> None:
    assert client.call("PUT", "/a/b/c", "MKDIRS").json == {"boolean": True}
    assert client.call("PUT", "/a/b", "MKDIRS", permission=755).json == {"boolean": True}
    for number in range(3):
        client.create(f"/a/b/{number}", b"x" * number)
    entries = client.call("GET", "/a/b", "LISTSTATUS").json["FileStatuses"]["FileStatus"]
    assert [(one["pathSuffix"], one["type"], one["length"]) for one in entries] == [
        ("0", "FILE", 0), ("1", "FILE", 1), ("2", "FILE", 2), ("c", "DIRECTORY", 0),
    ]  # fmt: skip
    batch = client.call("GET", "/a/b", "LISTSTATUS_BATCH", startAfter="1").json["DirectoryListing"]
    assert [one["pathSuffix"] for one in batch["partialListing"]["FileStatuses"]["FileStatus"]] == ["2", "c"]
    assert batch["remainingEntries"] == 0
    (alone,) = client.call("GET", "/a/b/2", "LISTSTATUS").json["FileStatuses"]["FileStatus"]
    assert (alone["pathSuffix"], alone["length"]) == ("", 2)
    summary = client.call("GET", "/a", "GETCONTENTSUMMARY").json["ContentSummary"]
    assert (summary["directoryCount"], summary["fileCount"], summary["length"]) == (3, 3, 3)
    whole = client.call("GET", "/", "GETCONTENTSUMMARY").json["ContentSummary"]
    assert (whole["directoryCount"], whole["fileCount"]) == (4, 3)
    locations = client.call("GET", "/a/b/2", "GETFILEBLOCKLOCATIONS", offset=0, length=2).json
    (location,) = locations["BlockLocations"]["BlockLocation"]
    assert (location["offset"], location["length"], location["hosts"]) == (0, 2, [])
    assert client.call("GET", "/", "GETHOMEDIRECTORY").json == {"Path": "/"}
    assert client.call("PUT", "/a", "SETPERMISSION", permission=700).status == 200
    assert client.call("PUT", "/a/b/2", "SETTIMES", modificationtime=1).status == 200
    assert client.call("GET", "/a", "CHECKACCESS", fsaction="rw-").status == 200
    assert client.call("DELETE", "/a", "DELETE").error == (403, "PathIsNotEmptyDirectoryException")
    assert client.call("DELETE", "/a/b/1", "DELETE").json == {"boolean": True}
    assert client.call("DELETE", "/a/b/1", "DELETE").json == {"boolean": False}
    assert client.call("DELETE", "/", "DELETE", recursive=True).json == {"boolean": False}
    assert client.call("DELETE", "/a", "DELETE", recursive=True).json == {"boolean": True}
    assert client.names("/") == []
    assert root.is_dir()


def test_what_comes_into_a_directory_while_it_is_deleted_stays(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served_files = GatewayFiles(StorageLocation(root))
    served_files.make_folders("a")
    listing = served_files.listing

    def listed(path: str) -> list[FileStatus]:
        found = listing(path)
        (root / "a" / "new").write_bytes(b"x")
        return found

    monkeypatch.setattr(served_files, "listing", listed)
    with pytest.raises(RefusedError, match="not empty"):
        served_files.delete("a", recursive=False)
    assert (root / "a" / "new").read_bytes() == b"x"


def test_renames_follow_the_rules_of_hdfs(client: Client, root: Path) -> None:
    for name, content in (("a/1", b"1"), ("a/sub/2", b"2"), ("b/3", b"3"), ("free/x", b"x")):
        client.create(f"/{name}", content)

    def moved(source: str, target: str) -> bool:
        found = client.rename(source, target)
        assert found.status == 200, found
        return bool(found.json["boolean"])

    assert moved("/a/1", "/a/one")
    assert moved("/a/one", "/b"), "into the directory"
    assert (root / "b" / "one").read_bytes() == b"1"
    assert not moved("/b/one", "/b/3"), "a file is not replaced"
    assert (root / "b" / "3").read_bytes() == b"3"
    assert moved("/a", "/c"), "a whole directory"
    assert (root / "c" / "sub" / "2").read_bytes() == b"2"
    assert moved("/c", "/b")
    assert client.names("/b") == ["3", "c", "one"]
    assert moved("/b/3", "/b/3")
    for source, target in (("/none", "/x"), ("/b", "/b/c/d"), ("/b/3", "/none/3"), ("/b/3", "/b/one/3")):
        assert not moved(source, target), (source, target)
    assert client.rename("/b/one", "/b/3", renameoptions="NONE").error == (403, "FileAlreadyExistsException")
    assert client.rename("/none", "/b/4", renameoptions="NONE").error == (404, "FileNotFoundException")
    assert client.rename("/b/3", "/b/one/3", renameoptions="NONE").error == (
        403,
        "ParentNotDirectoryException",
    )
    assert client.rename("/b/one", "/b/c", renameoptions="OVERWRITE").error == (500, "IOException")
    done = client.rename("/b/one", "/b/3", renameoptions="OVERWRITE")
    assert (done.status, done.body) == (200, b"")
    assert (root / "b" / "3").read_bytes() == b"1"
    assert client.rename("/b/3", "/b/../../x").error == (400, "IllegalArgumentException")


@pytest.mark.parametrize(
    ("method", "path", "op", "parameters", "error"),
    [
        ("GET", "/none", "GETFILESTATUS", {}, (404, "FileNotFoundException")),
        ("GET", "/none", "OPEN", {}, (404, "FileNotFoundException")),
        ("GET", "/dir", "OPEN", {}, (404, "FileNotFoundException")),
        ("GET", "/none", "LISTSTATUS", {}, (404, "FileNotFoundException")),
        ("GET", "/dir/file/below", "GETFILESTATUS", {}, (404, "FileNotFoundException")),
        ("PUT", "/dir", "CREATE", {"overwrite": True}, (403, "FileAlreadyExistsException")),
        ("PUT", "/dir/file/below", "CREATE", {}, (403, "ParentNotDirectoryException")),
        ("PUT", "/dir/file/below", "MKDIRS", {}, (403, "ParentNotDirectoryException")),
        ("PUT", "/dir/file", "MKDIRS", {}, (403, "FileAlreadyExistsException")),
        ("PUT", "/new/file", "CREATE", {"createparent": False}, (404, "FileNotFoundException")),
        ("PUT", "/dir/file", "CREATE", {"createflag": "CREATE"}, (403, "FileAlreadyExistsException")),
        ("PUT", "/dir/file", "CREATE", {"createflag": "APPEND"}, (400, "UnsupportedOperationException")),
        ("POST", "/dir/file", "APPEND", {}, (400, "UnsupportedOperationException")),
        ("GET", "/dir/file", "GETFILECHECKSUM", {}, (400, "UnsupportedOperationException")),
        ("GET", "/", "GETDELEGATIONTOKEN", {}, (400, "UnsupportedOperationException")),
        ("GET", "/", "NOTHING", {}, (400, "IllegalArgumentException")),
        ("GET", "/", "", {}, (400, "IllegalArgumentException")),
        ("PUT", "/dir/file", "OPEN", {}, (400, "IllegalArgumentException")),
        ("DELETE", "/dir/file", "RENAME", {}, (400, "IllegalArgumentException")),
        ("PUT", "/dir/file", "RENAME", {}, (400, "IllegalArgumentException")),
        ("PUT", "/dir/file", "CREATE", {"overwrite": "maybe"}, (400, "IllegalArgumentException")),
        ("GET", "/dir/file", "OPEN", {"offset": -1}, (400, "IllegalArgumentException")),
        ("GET", "/dir/file", "OPEN", {"offset": 2**63}, (400, "IllegalArgumentException")),
        ("GET", "/dir/file", "OPEN", {"length": "1e3"}, (400, "IllegalArgumentException")),
        ("GET", "/dir/file", "OPEN", {"offset": 5}, (500, "IOException")),
        ("GET", "/dir/../../secret", "OPEN", {}, (400, "IllegalArgumentException")),
        ("GET", "/./dir", "LISTSTATUS", {}, (400, "IllegalArgumentException")),
        ("GET", "/" + "x" * 256, "GETFILESTATUS", {}, (400, "IllegalArgumentException")),
        ("GET", "/x" * 2500, "GETFILESTATUS", {}, (400, "IllegalArgumentException")),
        ("GET", "/dir\0", "GETFILESTATUS", {}, (400, "IllegalArgumentException")),
        ("GET", f"/{PARTS}", "LISTSTATUS", {}, (403, "AccessControlException")),
        ("PUT", f"/{PARTS}/x", "CREATE", {}, (403, "AccessControlException")),
        ("GET", "/way/secret", "OPEN", {}, (403, "AccessControlException")),
        ("PUT", "/way/new", "CREATE", {}, (403, "AccessControlException")),
        ("DELETE", "/way", "DELETE", {"recursive": True}, (403, "AccessControlException")),
    ],
)
def test_what_breaks_a_rule_is_refused_by_hadoops_class(
    client: Client,
    root: Path,
    method: str,
    path: str,
    op: str,
    parameters: dict[str, Any],
    error: tuple[int, str],
) -> None:
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"s")
    (root / "way").symlink_to(outside)
    (root / "dir").mkdir()
    (root / "dir" / "file").write_bytes(b"abc")
    before = sorted(root.rglob("*"))
    found = client.call(method, path, op, body=b"x" if method == "PUT" else None, **parameters)
    assert found.error == error, found
    said = found.json["RemoteException"]
    assert said["javaClassName"].endswith("." + said["exception"])
    assert str(root) not in said["message"]
    assert [one for one in sorted(root.rglob("*")) if one.name != PARTS] == before
    assert [one.name for one in outside.iterdir()] == ["secret"]


def test_who_has_not_the_key_learns_and_changes_nothing(client: Client, root: Path) -> None:
    (root / "file").write_bytes(b"abc")
    target = "/webhdfs/v1/file?op=OPEN&user.name=ann"
    assert client.raw("GET", target).status == 307
    other = Client(client.port, "")
    for key in ("", "wrong", KEY[:-1], KEY + "0", "%C3%BC"):
        for scheme, query in ((f"Bearer {key}", ""), (f"Basic {KEY}", ""), ("", f"&delegation={key}")):
            found = other.raw("GET", target + query, headers={"Authorization": scheme})
            assert found.status == 401, (scheme, query)
            assert "the key of the gateway is missing or wrong" in found.reason, (
                "all that Hadoop's client shows"
            )
            assert b"abc" not in found.body
            missing = other.raw(
                "GET", target.replace("/file", "/none") + query, headers={"Authorization": scheme}
            )
            assert (missing.status, missing.body) == (found.status, found.body)
        put = other.raw("PUT", f"/webhdfs/v1/new?{DATA}", b"x" * 3_000_000)
        assert put.status == 401
    assert [one.name for one in root.iterdir()] == ["file"]
    by_parameter = Client(client.port, "").raw("GET", f"{target}&delegation={KEY}&ebbflow=data")
    assert by_parameter.body == b"abc"


def test_a_client_of_oauth_2_gets_what_it_sends_from_then_on(client: Client) -> None:
    other = Client(client.port, "")

    def ask(body: str) -> Any:
        return other.raw("POST", "/oauth2/token", body, {"Content-Type": "application/x-www-form-urlencoded"})

    found = ask(f"grant_type=refresh_token&refresh_token={KEY}&client_id=ebbflow")
    assert (found.status, found.json["access_token"]) == (200, KEY)
    assert found.json["expires_in"] > 0
    assert found.headers["Cache-Control"] == "no-store"
    for wrong in ("", "refresh_token=", f"refresh_token={KEY}x", f"refresh_token={KEY}&refresh_token={KEY}"):
        refused = ask(wrong)
        assert (refused.status, refused.json) == (401, {"error": "invalid_grant"})
    assert ask("x" * 100_000).status == 400


def test_who_has_not_sent_the_key_does_not_keep_a_connection(
    client: Client, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(connection: socket.socket) -> bool:
        try:
            return not connection.recv(1 << 16)
        except ConnectionError:
            return True

    chunks = b"1\r\na\r\n"
    with client.begin(f"/webhdfs/v1/file?{DATA}", "Transfer-Encoding: chunked", chunks) as upload:
        until(lambda: len(_parts(root)) == 1)
        with (
            monkeypatch.context() as patch,
            socket.create_connection(("127.0.0.1", client.port), 150) as other,
        ):
            patch.setattr(server, "_WAIT", 0.2)
            other.sendall(b"POST /oauth2/token HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n")
            until(lambda: ended(other))
        with (
            monkeypatch.context() as patch,
            socket.create_connection(("127.0.0.1", client.port), 150) as other,
        ):
            other.sendall(b"GET /webhdfs/v1/file?op=OPEN HTTP/1.1\r\nX: ")
            patch.setattr(server, "_HEADERS", 0.0)
            until(lambda: ended(other))
        upload.sendall(b"0\r\n\r\n")
        assert upload.recv(100).startswith(b"HTTP/1.1 201 "), "with the key it may take its time"


def test_where_all_places_are_taken_one_without_the_key_gives_way(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_CONNECTIONS", 2)
    with served(root) as client:
        begun = [socket.create_connection(("127.0.0.1", client.port), 150) for _ in range(2)]
        for _ in range(4):
            assert client.call("GET", "/", "GETFILESTATUS").status == 200
        for one in begun:
            one.close()


BODIES = [
    ("Transfer-Encoding: chunked", b"8000000000000000\r\n", 400),
    ("Transfer-Encoding: chunked", b"FFFFFFFFFFFFFFFFFFFF\r\n", 400),
    ("Transfer-Encoding: chunked", b"-5\r\n", 400),
    ("Transfer-Encoding: chunked", b"3\r\nabcd\r\n0\r\n\r\n", 400),
    ("Transfer-Encoding: chunked", b"x" * 2000, 400),
    ("Transfer-Encoding: chunked", b"1\r\na\r\n0\r\n" + b"t: x\r\n" * 40, 400),
    ("Transfer-Encoding: chunked\r\nContent-Length: 5", b"0\r\n\r\n", 400),
    ("Transfer-Encoding: gzip, chunked", b"0\r\n\r\n", 400),
    ("Content-Length: 9223372036854775808", b"abc", 400),
    ("Content-Length: -1", b"abc", 400),
    ("Content-Length: 3\r\nContent-Length: 4", b"abcd", 400),
    ("Transfer-Encoding: chunked", b"3\r\nabc\r\n", None),  # cut, in three ways
    ("Transfer-Encoding: chunked", b"10\r\nabc", None),
    ("Content-Length: 10", b"abc", None),
]


@pytest.mark.parametrize(("headers", "body", "status"), BODIES)
def test_a_body_that_is_wrong_or_cut_leaves_what_was_there(
    client: Client, root: Path, headers: str, body: bytes, status: int | None
) -> None:
    (root / "file").write_bytes(b"old")
    with client.begin(f"/webhdfs/v1/file?{DATA}", headers, body) as connection:
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := connection.recv(1 << 16):
            answer += piece
    if status is not None:
        assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer[:200]
        assert b"IllegalArgumentException" in answer
    until(lambda: _parts(root) == [])
    assert (root / "file").read_bytes() == b"old"
    assert client.create("/file", b"new").status == 201, "it serves on"


def test_a_file_appears_when_it_is_whole_and_its_end_discards_what_is_not(root: Path) -> None:
    with served(root) as client:
        (root / "file").write_bytes(b"old")
        chunks = b"100000\r\n" + b"n" * (1 << 20) + b"\r\n"
        with client.begin(f"/webhdfs/v1/file?{DATA}", "Transfer-Encoding: chunked", chunks) as connection:
            until(lambda: len(_parts(root)) == 1)
            assert client.read("/file") == b"old"
            assert client.names("/") == ["file"]
            connection.sendall(b"0\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 201 ")
        assert client.read("/file") == b"n" * (1 << 20)
        unfinished = client.begin(f"/webhdfs/v1/other?{DATA}", "Transfer-Encoding: chunked", chunks)
        until(lambda: len(_parts(root)) == 1)
    assert _parts(root) == []
    assert sorted(one.name for one in root.iterdir()) == [PARTS, "file"]
    unfinished.close()


def test_of_many_that_make_one_file_one_does(client: Client, root: Path) -> None:
    begun = [
        client.begin(
            "/webhdfs/v1/file?&op=CREATE&overwrite=false&ebbflow=data", "Content-Length: 2", b"%d" % number
        )
        for number in range(4)
    ]
    until(lambda: len(_parts(root)) == 4)

    def end(connection: socket.socket) -> bytes:
        with connection:
            connection.sendall(b"!")
            return connection.recv(100).split(b" ")[1]

    with ThreadPoolExecutor(4) as pool:
        statuses = sorted(pool.map(end, begun))
    assert statuses == [b"201", b"403", b"403", b"403"]
    assert (root / "file").read_bytes() in (b"0!", b"1!", b"2!", b"3!")
    assert _parts(root) == []


def test_what_a_killed_process_left_long_ago_is_removed(root: Path) -> None:
    import os

    (root / PARTS).mkdir()
    for name, age in (("old", 100_000), ("new", 10)):
        (root / PARTS / name).write_bytes(b"x")
        modified = (root / PARTS / name).stat().st_mtime - age
        os.utime(root / PARTS / name, (modified, modified))
    GatewayFiles(StorageLocation(root)).remove_abandoned()
    assert _parts(root) == ["new"]


def test_the_same_on_object_storage(s3: Any) -> None:
    root = f"{s3()}/tables"
    with served(root) as client:
        for name in ("1", "deep/2", "deep/3"):
            assert client.create(f"/_temporary/task/{name}", name.encode() * 1000).status == 201
        assert client.create("/_temporary/task/1", b"again").status == 201
        assert client.create("/_temporary/task/1", b"x", overwrite=False).status == 403
        assert client.rename("/_temporary/task", "/t").json == {"boolean": True}
        assert client.names("/t") == ["1", "deep"]
        assert client.rename("/t/1", "/t/deep/1").json == {"boolean": True}
        assert client.names("/t/deep") == ["1", "2", "3"]
        assert client.read("/t/deep/1") == b"again"
        assert client.read("/t/deep/2", offset=7, length=3) == b"eep"
        assert not client.rename("/t/deep/1", "/t/deep/2").json["boolean"]
        with client.begin(f"/webhdfs/v1/t/cut?{DATA}", "Content-Length: 9", b"abc") as connection:
            connection.shutdown(socket.SHUT_WR)
            connection.recv(100)
        assert client.names("/t") == ["deep"]
        assert client.call("DELETE", "/t", "DELETE", recursive=True).json == {"boolean": True}
        assert "t" not in client.names("/")


@given(
    st.lists(
        st.text(st.characters(exclude_characters="/\0", codec="utf-8"), min_size=1, max_size=20), max_size=5
    )
)
def test_a_path_is_read_as_it_was_written_or_refused(parts: list[str]) -> None:
    from urllib.parse import quote

    text = "/" + "/".join(parts)
    if any(part in (".", "..") or len(part.encode()) > 255 for part in parts):
        with pytest.raises(RefusedError, match="must not h"):
            parse(f"/webhdfs/v1{quote(text)}?op=OPEN")
        return
    found = parse(f"/webhdfs/v1{quote(text)}?op=OPEN").path
    assert found == "/".join(parts)
    assert path_of(f"//{found}/") == found
    raw = text.encode().decode("latin-1").replace("%", "%25").replace("?", "%3F")
    assert parse(f"/webhdfs/v1{raw}?op=OPEN").path == found, "not all clients escape what is not ASCII"


def test_numbers_are_bounded() -> None:
    assert parse(f"/webhdfs/v1/x?op=OPEN&length={MAX_BYTES}").number("length") == MAX_BYTES
    with pytest.raises(RefusedError, match="must be 0 to"):
        parse(f"/webhdfs/v1/x?op=OPEN&length={MAX_BYTES + 1}").number("length")
    for target in ("/", "/webhdfs/v2/x", "/webhdfs/v1x", "/webhdfs/v1/%FF", "/webhdfs/v1/?" + "a=1&" * 100):
        with pytest.raises(RefusedError):
            parse(target)
    assert (
        json.loads(json.dumps(RefusedError("IOException", "x").body()))["RemoteException"]["message"] == "x"
    )
