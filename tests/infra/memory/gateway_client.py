"""A gateway in this process, and a client that asks as Hadoop's does."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from ebbflow.infra.memory.files import MemoryTier
from ebbflow.infra.memory.gateway.files import GatewayFiles
from ebbflow.infra.memory.gateway.server import GatewayServer
from ebbflow.infra.storage.places import StorageLocation

KEY = "5ec2e7" * 10


@dataclass
class Answer:
    """What came back."""

    status: int
    reason: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> tuple[int, str]:
        """Return the status and the class of an error."""
        return self.status, self.json["RemoteException"]["exception"]


class Client:
    """Speaks WebHDFS to a port of this machine."""

    def __init__(self, port: int, key: str = KEY) -> None:
        self.port, self.key = port, key

    def raw(
        self, method: str, target: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """Ask once, without following a redirect."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=150)
        try:
            own = {"Authorization": f"Bearer {self.key}"} if self.key else {}
            connection.request(method, target, body, own | (headers or {}), encode_chunked=True)
            response = connection.getresponse()
            return Answer(response.status, response.reason, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    def call(self, method: str, path: str, op: str, body: Any = None, **parameters: object) -> Answer:
        """Ask, and ask again where the answer says so, then with the content."""
        given = {name.rstrip("_"): str(value).lower() if isinstance(value, bool) else str(value)
                 for name, value in parameters.items()}  # fmt: skip
        target = f"/webhdfs/v1{quote(path)}?{urlencode({'op': op, **given, 'user.name': 'ann'})}"
        found = self.raw(method, target)
        if found.status != 307:
            return found
        parts = urlsplit(found.headers["Location"])
        assert (parts.hostname, parts.port) == ("127.0.0.1", self.port)
        chunked = {"Transfer-Encoding": "chunked"} if body is not None else {}
        return self.raw(method, f"{parts.path}?{parts.query}", iter([body]) if body else body, chunked)

    def create(self, path: str, content: bytes, **parameters: object) -> Answer:
        return self.call("PUT", path, "CREATE", content, **{"overwrite": True, **parameters})

    def read(self, path: str, **parameters: object) -> bytes:
        found = self.call("GET", path, "OPEN", **parameters)
        assert found.status == 200, found
        assert int(found.headers["Content-Length"]) == len(found.body)
        return found.body

    def names(self, path: str) -> list[str]:
        found = self.call("GET", path, "LISTSTATUS").json
        return [one["pathSuffix"] for one in found["FileStatuses"]["FileStatus"]]

    def rename(self, path: str, destination: str, **parameters: object) -> Answer:
        return self.call("PUT", path, "RENAME", destination=destination, **parameters)

    def begin(self, target: str, headers: str, body: bytes = b"") -> socket.socket:
        """Send the beginning of a PUT, and return its connection."""
        found = socket.create_connection(("127.0.0.1", self.port), 150)
        found.sendall(
            f"PUT {target} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self.key}\r\n{headers}\r\n\r\n".encode()
        )
        if body:
            found.sendall(body)
        return found


@contextmanager
def served(root: Any, tier: MemoryTier | None = None) -> Iterator[Client]:
    """Serve a directory."""
    with GatewayServer(GatewayFiles(StorageLocation(root), tier), KEY) as server:
        yield Client(server.port)
