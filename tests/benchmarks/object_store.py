"""Object storage for benchmarks: as much of S3 as Ebbflow's clients ask for, quick enough that links are what limits.

    with ObjectStore.start("198.18.0.1", {"tables": Path("~/tables").expanduser()}) as store:
        os.environ.update(store.environment)    # s3://tables has the folder's files, s3://store is empty

The emulator of ``tests.aws`` takes one request at a time and a copy of the whole object for each range of it. Here a
process of its own answers each connection in a thread, and the kernel sends files. Tables are read from where they
are; what is written is kept in a folder that goes with the server. No signature is looked at.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from operator import itemgetter
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

_STARTS_WITHIN = 60.0  # s
_PIECE = 1 << 20  # bytes


@dataclass(frozen=True)
class ObjectStore:
    """A running server."""

    url: str

    @classmethod
    @contextmanager
    def start(cls, host: str, folders: Mapping[str, Path]) -> Iterator["ObjectStore"]:
        """Serve at ``host`` until the block ends: a bucket for each of ``folders``, with their files, and one called
        ``store``. Raises ``RuntimeError`` where the server does not start."""
        told = {name: str(folder.resolve()) for name, folder in folders.items()}
        command = [sys.executable, "-m", "tests.benchmarks.object_store", host, json.dumps(told)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            assert server.stdin is not None
            watch = threading.Timer(_STARTS_WITHIN, server.kill)
            watch.start()
            try:
                port = server.stdout.readline().strip()
                watch.cancel()
                if not port:
                    raise RuntimeError(f"object storage did not start at {host}")
                yield cls(f"http://{host}:{port}")
            finally:
                watch.cancel()
                server.stdin.close()  # which it waits for; so it ends with us, too
                try:
                    server.wait(10)
                except subprocess.TimeoutExpired:
                    server.kill()

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables by which clients find it."""
        return {"AWS_ENDPOINT_URL": self.url, "AWS_REGION": "us-east-1", **CREDENTIALS}


CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""What clients must be told before they know where the server is."""


@dataclass(frozen=True)
class Object:
    """An object: the file that has its content."""

    path: Path
    size: int
    tag: str
    changed: float  # s since the Unix epoch


class Buckets:
    """All objects by bucket and key. Safe for several threads."""

    def __init__(self, folder: Path, folders: Mapping[str, str]) -> None:
        self._folder = folder
        self.lock = threading.Lock()
        self._numbers = iter(range(1 << 62))
        self.objects: dict[str, dict[str, Object]] = {"store": {}}
        self.uploads: dict[str, dict[int, Object]] = {}
        for name, root in folders.items():
            found = self.objects.setdefault(name, {})
            for path in (path for path in Path(root).rglob("*") if path.is_file()):
                status = path.stat()
                tag = hashlib.md5(f"{path}-{status.st_mtime_ns}".encode()).hexdigest()
                key = str(path.relative_to(root))
                found[key] = Object(path, status.st_size, tag, status.st_mtime)

    def file(self) -> Path:
        """Return a path for new content."""
        with self.lock:
            return self._folder / str(next(self._numbers))

    def listed(
        self, bucket: str, prefix: str, delimiter: str, after: str, most: int
    ) -> tuple[list[tuple[str, Object | None]], bool]:
        """Return keys with their objects, and prefixes that end in ``delimiter``, after ``after``, and whether there
        are more."""
        found: list[tuple[str, Object | None]] = []
        for key, one in sorted(self.objects[bucket].items(), key=itemgetter(0)):
            if not key.startswith(prefix):
                continue
            end = key.find(delimiter, len(prefix)) if delimiter else -1
            name = key if end < 0 else key[: end + 1]
            if name <= after or (found and name == found[-1][0]):
                continue
            if len(found) == most:
                return found, True
            found.append((name, one if end < 0 else None))
        return found, False


class Server(ThreadingHTTPServer):
    """Takes many connections, and says nothing of those that end."""

    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Say only what is no connection's end."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 300.0  # s of a connection without a request
    buckets: Buckets  # of the class that is made for a server

    def do_HEAD(self) -> None:
        bucket, key, _ = self._asked()
        if not key:
            self._answer(200 if bucket in self.buckets.objects else 404)
        elif (found := self._found(bucket, key)) is None:
            self._answer(404)
        else:
            self._answer(200, size=found.size, headers=_described(found))

    def do_GET(self) -> None:
        bucket, key, query = self._asked()
        if not key:
            self._list(bucket, query)
            return
        found = self._found(bucket, key)
        if found is None:
            self._refuse(404, "NoSuchKey")
            return
        first, last = 0, found.size - 1
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if asked and asked[1]:
            first, last = int(asked[1]), min(int(asked[2] or last), last)
        elif asked:
            first = max(found.size - int(asked[2]), 0)
        if asked and first > last:
            self._refuse(416, "InvalidRange")
            return
        headers = _described(found)
        if asked:
            headers["Content-Range"] = f"bytes {first}-{last}/{found.size}"
        self._answer(206 if asked else 200, size=last - first + 1, headers=headers)
        if first <= last:
            with found.path.open("rb") as file:
                self.connection.sendfile(file, first, last - first + 1)

    def do_PUT(self) -> None:
        bucket, key, query = self._asked()
        source = self.headers.get("x-amz-copy-source")
        body = None if source else self._body()
        if not key:
            self.buckets.objects.setdefault(bucket, {})
            self._answer(200)
            return
        if source:
            of, _, its = unquote(source).lstrip("/").partition("/")
            body = self._found(of, its)
        if body is None or bucket not in self.buckets.objects:
            self._refuse(404, "NoSuchKey" if source else "NoSuchBucket")
            return
        if "uploadId" in query:
            self.buckets.uploads[query["uploadId"]][int(query["partNumber"])] = body
        elif not self._put(bucket, key, body):
            self._refuse(412, "PreconditionFailed")
            return
        if source:
            text = f"<ETag>&quot;{body.tag}&quot;</ETag><LastModified>{_moment(body)}</LastModified>"
            self._xml("CopyObjectResult", text)
        else:
            self._answer(200, headers={"ETag": f'"{body.tag}"'})

    def do_POST(self) -> None:
        bucket, key, query = self._asked()
        body = self._body().path.read_bytes()
        if "delete" in query:
            keys = [node.text or "" for node in ElementTree.fromstring(body).iter() if _local(node) == "Key"]
            self._delete(bucket, keys)
            self._xml("DeleteResult", "")
        elif "uploads" in query:
            upload = self.buckets.file().name
            self.buckets.uploads[upload] = {}
            self._xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")
        else:
            whole = self._joined(self.buckets.uploads.pop(query["uploadId"]))
            if self._put(bucket, key, whole):
                self._xml("CompleteMultipartUploadResult", f"<ETag>&quot;{whole.tag}&quot;</ETag>")
            else:
                self._refuse(412, "PreconditionFailed")

    def do_DELETE(self) -> None:
        bucket, key, query = self._asked()
        if "uploadId" in query:
            self.buckets.uploads.pop(query["uploadId"], None)
        else:
            self._delete(bucket, [key])
        self._answer(204)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of each request."""

    def _asked(self) -> tuple[str, str, dict[str, str]]:
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        return bucket, key, query

    def _found(self, bucket: str, key: str) -> Object | None:
        return self.buckets.objects.get(bucket, {}).get(key)

    def _put(self, bucket: str, key: str, content: Object) -> bool:
        """Set an object, unless the request's condition does not hold."""
        with self.buckets.lock:
            before = self.buckets.objects[bucket].get(key)
            if self.headers.get("If-None-Match") == "*" and before is not None:
                return False
            asked = self.headers.get("If-Match")
            if asked is not None and (before is None or asked.strip('"') != before.tag):
                return False
            self.buckets.objects[bucket][key] = content
            return True

    def _delete(self, bucket: str, keys: Iterable[str]) -> None:
        with self.buckets.lock:
            for key in keys:
                self.buckets.objects.get(bucket, {}).pop(key, None)

    def _list(self, bucket: str, query: Mapping[str, str]) -> None:
        if bucket not in self.buckets.objects:
            self._refuse(404, "NoSuchBucket")
            return
        prefix, most = query.get("prefix", ""), int(query.get("max-keys", "1000"))
        after = query.get("continuation-token", query.get("start-after", ""))
        with self.buckets.lock:
            found, more = self.buckets.listed(bucket, prefix, query.get("delimiter", ""), after, most)
        text = f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(found)}</KeyCount>"
        text += f"<MaxKeys>{most}</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>"
        if more:
            text += f"<NextContinuationToken>{escape(found[-1][0])}</NextContinuationToken>"
        for name, one in found:
            if one is None:
                text += f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            else:
                text += (
                    f"<Contents><Key>{escape(name)}</Key><LastModified>{_moment(one)}</LastModified>"
                    f"<ETag>&quot;{one.tag}&quot;</ETag><Size>{one.size}</Size></Contents>"
                )
        self._xml("ListBucketResult", text)

    def _body(self) -> Object:
        """Keep what the request brings, out of the pieces of HTTP and of AWS that it may be in."""
        path, seen = self.buckets.file(), hashlib.md5()
        signed = "aws-chunked" in self.headers.get("Content-Encoding", "") or self.headers.get(
            "x-amz-content-sha256", ""
        ).startswith("STREAMING")
        pieces = self._received()
        with path.open("wb") as file:
            for piece in _unsigned(b"".join(pieces)) if signed else pieces:
                seen.update(piece)
                file.write(piece)
            size = file.tell()
        return Object(path, size, seen.hexdigest(), time.time())

    def _received(self) -> Iterator[bytes]:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline().partition(b";")[0], 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            return
        left = int(self.headers.get("Content-Length") or 0)
        while left and (piece := self.rfile.read(min(left, _PIECE))):
            left -= len(piece)
            yield piece

    def _joined(self, parts: Mapping[int, Object]) -> Object:
        path, seen = self.buckets.file(), hashlib.md5()
        with path.open("wb") as file:
            for _, part in sorted(parts.items()):
                content = part.path.read_bytes()
                seen.update(content)
                file.write(content)
            return Object(path, file.tell(), f"{seen.hexdigest()}-{len(parts)}", time.time())

    def _xml(self, name: str, text: str, status: int = 200) -> None:
        body = f'<?xml version="1.0" encoding="UTF-8"?>\n<{name}>{text}</{name}>'.encode()
        self._answer(status, size=len(body), headers={"Content-Type": "application/xml"})
        self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self._xml("Error", f"<Code>{code}</Code><Message>{code}</Message>", status)

    def _answer(self, status: int, size: int = 0, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(size)}.items():
            self.send_header(name, value)
        self.end_headers()


def _unsigned(data: bytes) -> Iterator[bytes]:
    """Yield the pieces of a body that is signed piece by piece."""
    at = 0
    while True:
        end = data.index(b"\r\n", at)
        size = int(data[at:end].partition(b";")[0], 16)
        if not size:
            return
        yield data[end + 2 : end + 2 + size]
        at = end + 4 + size


def _described(found: Object) -> dict[str, str]:
    changed = formatdate(found.changed, usegmt=True)
    return {"ETag": f'"{found.tag}"', "Last-Modified": changed, "Accept-Ranges": "bytes"}


def _moment(found: Object) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(found.changed))


def _local(node: ElementTree.Element) -> str:
    return node.tag.rpartition("}")[2]


def main() -> None:
    """Serve until standard input ends; the port is written first."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("host")
    parser.add_argument("folders", type=json.loads, help="folders by the names of their buckets, as JSON")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ebbflow-bench-") as folder:
        handler = type("Own", (Handler,), {"buckets": Buckets(Path(folder), given.folders)})
        server = Server((given.host, 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(server.server_address[1], flush=True)
        sys.stdin.read()
        server.shutdown()


if __name__ == "__main__":
    main()
