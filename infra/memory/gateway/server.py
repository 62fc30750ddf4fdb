"""``GatewayServer``: WebHDFS over HTTP, as Hadoop's client speaks it.

Every request carries the gateway's key: ``Authorization: Bearer KEY``, which stock Hadoop clients send when OAuth 2
is set up for WebHDFS, or ``delegation=KEY``, which fsspec sends. ``/oauth2/token`` is what such clients ask first.
"""

import hmac
import json
import logging
import math
import re
import socket
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote

from ebbflow.infra.errors import InfraError
from ebbflow.infra.machine.page_server import BackgroundServer
from ebbflow.infra.memory.gateway import body, operations
from ebbflow.infra.memory.gateway.files import GatewayFiles
from ebbflow.infra.memory.gateway.messages import RefusedError, Request, parse, to_bytes
from ebbflow.infra.storage.filesystems import translated
from ebbflow.planners.errors import OptionError

TOKEN_PATH = "/oauth2/token"  # noqa: S105
_HEADERS = 60.0  # s after which a connection that has not sent the key is ended
_IDLE = (
    3600.0  # s without a byte: writers compute between two pieces, readers do so while they hold a file open
)
_CONNECTIONS = 256  # at a time
_WAIT = 5.0  # s that a further one waits
_END = 10.0  # s for requests to end when the server does
_LATE = 8 << 20  # bytes of a refused body that are read, so that the client reads the answer
_REFUSED = 30.0  # s in which they must come
_FORM = 8192  # bytes of a question for a token
_LIFETIME = 3600  # s for which a client keeps what it was given
_KEEPALIVE = (
    ("TCP_KEEPIDLE", 60),
    ("TCP_KEEPINTVL", 15),
    ("TCP_KEEPCNT", 4),
)  # a machine that is gone is noticed
_HOST = re.compile(r"[A-Za-z0-9._-]{1,255}(:\d{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:\d{1,5})?")
_DATA = "ebbflow"  # parameter of the second request for a file's content
_UNKNOWN = (
    "the key of the gateway is missing or wrong: set dfs.webhdfs.oauth2.* as ebbflow memory gateway says"
)

log = logging.getLogger(__name__)


class GatewayServer(BackgroundServer):
    """Serves files from ``start`` until ``close``; a context manager that does both.

    Args:
        files: what is served.
        key: what clients must send.
        host: address to listen on.
        port: number; 0: any free one.

    Raises ``OptionError`` for a port that is none, ``InfraError`` for one that is taken or not allowed.
    """

    def __init__(self, files: GatewayFiles, key: str, host: str = "127.0.0.1", port: int = 0) -> None:
        if not 0 <= port <= 65535:
            raise OptionError(f"a port is 0 to 65535; got {port}")
        try:
            self._server = _Server((host, port), _Handler)
        except OSError as error:
            raise InfraError(
                f"port {port} of {host} cannot be used: {error.strerror or error}; name another"
            ) from error
        self._server.files, self._server.key = files, key
        self.host, self.port = host, int(self._server.server_address[1])
        super().__init__(self._server, 0.05)

    def close(self) -> None:
        """End all connections; what is not written to its end is discarded. May be called twice."""
        super().close()
        self._server.end()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    files: GatewayFiles
    key: str

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._slots = threading.BoundedSemaphore(_CONNECTIONS)
        self._changed = threading.Condition()
        self._open: dict[socket.socket, float] = {}  # since when each waits for the key; inf: not any more
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False) and not self._acquire_from_unknown():
            log.warning("%d connections are open: another one was refused", _CONNECTIONS)
            with suppress(OSError):
                request.sendall(
                    b"HTTP/1.1 503 too many connections\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                )
            self.shutdown_request(request)
            return
        with self._changed:
            self._open[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._ended(request)
            raise

    def _acquire_from_unknown(self) -> bool:
        """Wait for a place; who has waited longest without sending the key gives way."""
        with self._changed:
            one = min(self._open, key=self._open.__getitem__, default=None)
            if one is not None and self._open[one] < math.inf:
                self._shut(one)
        return self._slots.acquire(timeout=_WAIT)

    def _shut(self, request: socket.socket) -> None:
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)
        self._open[request] = math.inf

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._ended(request)

    def _ended(self, request: socket.socket) -> None:
        self._slots.release()
        with self._changed:
            self._open.pop(request, None)
            self._changed.notify_all()

    def known(self, request: socket.socket) -> None:
        """Let a connection take its time: it has sent the key."""
        with self._changed:
            if request in self._open:
                self._open[request] = math.inf

    def service_actions(self) -> None:
        """End connections that are open for long without having sent the key, whatever they do."""
        late = time.monotonic() - _HEADERS
        with self._changed:
            for one, since in self._open.items():
                if since < late:
                    self._shut(one)

    def end(self) -> None:
        """End connections, and wait until what they wrote is discarded."""
        with self._changed:
            for one in self._open:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            self._changed.wait_for(lambda: not self._open, _END)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that went away."""
        log.debug("a connection has failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "ebbflow"
    sys_version = ""
    timeout = _HEADERS
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            self.connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def handle_expect_100(self) -> bool:
        """Have the body come only where it is read."""
        return True

    def _handle(self) -> None:
        self.close_connection = True  # one request each: a client may leave in the middle of a file
        self._begun = False
        try:
            with translated("use the store"):
                self._answer()
        except RefusedError as error:
            self._refuse(error)
        except InfraError as error:
            cause = error.__cause__
            missing = isinstance(cause, FileNotFoundError)
            self._refuse(RefusedError("FileNotFoundException" if missing else "IOException", str(error)))
        except Exception as error:  # a defect of ours is no reason for a client to wait
            log.exception("a request of %s has failed", self.command)
            self._refuse(RefusedError("IOException", f"the gateway has failed: {error!r:.200}"))

    do_GET = do_PUT = do_POST = do_DELETE = _handle

    def _answer(self) -> None:
        if self.command == "POST" and self.path.partition("?")[0] == TOKEN_PATH:
            self._give_token()
            return
        request = parse(self.path)
        if not self._knows(request):
            self._send(401, b"{}", {"WWW-Authenticate": "Bearer"}, reason=_UNKNOWN)
            self._discard()
            return
        self.server.known(self.connection)
        self.connection.settimeout(_IDLE)
        method, answer = operations.find(request.op)
        if method != self.command:
            raise RefusedError(
                "IllegalArgumentException", f"{request.op} is asked by {method}; got {self.command}"
            )
        if request.op == "CREATE":
            self._create(request)
        elif request.op == "OPEN":
            self._open(request)
        else:
            found = answer(self.server.files, request)
            self._send(200, b"" if found is None else to_bytes(found))

    def _knows(self, request: Request) -> bool:
        kind, _, sent = self.headers.get("Authorization", "").partition(" ")
        if kind.lower() != "bearer":
            sent = request.parameters.get("delegation", "")
        return hmac.compare_digest(sent.strip().encode("utf-8", "replace"), self.server.key.encode())

    def _give_token(self) -> None:
        """Answer a client of OAuth 2, which sends the key, with the key as its token."""
        self.connection.settimeout(_WAIT)
        form = b""
        for piece in body.pieces(self.headers, self.rfile):
            form += piece
            if len(form) > _FORM:
                raise RefusedError("IllegalArgumentException", f"a form must have at most {_FORM} bytes")
        fields = parse_qs(form.decode("latin-1"), max_num_fields=16)
        sent = [*fields.get("refresh_token", ()), *fields.get("client_secret", ())]
        if len(sent) != 1 or not hmac.compare_digest(sent[0].encode(), self.server.key.encode()):
            self._send(401, json.dumps({"error": "invalid_grant"}).encode(), reason=_UNKNOWN)
            return
        self._send(
            200,
            to_bytes({"access_token": self.server.key, "expires_in": _LIFETIME, "token_type": "Bearer"}),
            {"Cache-Control": "no-store"},
        )

    # --- content ------------------------------------------------------------------------------------------

    def _open(self, request: Request) -> None:
        if _DATA not in request.parameters:
            self.server.files.check_file(request.path)
            self._redirect()
            return
        offset, length = request.number("offset") or 0, request.number("length")
        opened = self.server.files.open(request.path)
        if offset > opened.size:
            opened.close()
            raise RefusedError("IOException", f"Offset={offset} out of the range [0, {opened.size}]")
        rest = opened.size - offset
        length = rest if length is None else min(length, rest)
        pieces = opened.pieces(offset, length)
        first = next(pieces, b"")  # an error is told while it can be
        self._send(200, None, {"Content-Type": "application/octet-stream", "Content-Length": str(length)})
        if self._give(first):
            for piece in pieces:
                if not self._give(piece):
                    break
        pieces.close()

    def _give(self, piece: bytes) -> bool:
        """Send some of a file; tell whether the client is there: it leaves once it has what it needs."""
        try:
            self.wfile.write(piece)
        except OSError:
            return False
        return True

    def _create(self, request: Request) -> None:
        overwrite, parents = operations.create_flags(request)
        if _DATA not in request.parameters:
            self.server.files.check_create(request.path, overwrite=overwrite, parents=parents)
            self._redirect()
            self._discard()
            return
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        with self.server.files.create(request.path, overwrite=overwrite) as out:
            for piece in body.pieces(self.headers, self.rfile):
                out.write(piece)
        self._send(201, b"", {"Location": f"webhdfs://{self._host()}/{quote(request.path)}"})

    def _redirect(self) -> None:
        """Have the client ask again for the content, as HDFS has it ask a data node."""
        # a client reads a header as Latin-1 and writes it as UTF-8: only ASCII comes back as it was
        target = "".join(one if " " < one < "\x7f" else f"%{ord(one):02X}" for one in self.path)
        self._send(307, b"", {"Location": f"http://{self._host()}{target}&{_DATA}=data"})

    def _host(self) -> str:
        host = self.headers.get("Host", "")
        own = f"{self.server.server_address[0]!s}:{self.server.server_address[1]}"
        return host if _HOST.fullmatch(host) else own

    # --- answers ------------------------------------------------------------------------------------------

    def _send(
        self,
        status: int,
        content: bytes | None,
        headers: dict[str, str] | None = None,
        reason: str | None = None,
    ) -> None:
        """Send an answer; without ``content`` its headers alone."""
        self._begun = True
        self.send_response(status, reason)
        # JSON has no type: to read one, the client in PySpark 4 needs a class of Jersey's that it does not bring
        found = {"Connection": "close", "X-Content-Type-Options": "nosniff"}
        if content is not None:
            found["Content-Length"] = str(len(content))
        for name, value in (found | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if content:
            self.wfile.write(content)

    def _refuse(self, error: RefusedError) -> None:
        if self._begun:  # the connection ends before the content does, which is how the client notices
            log.warning("a file's content was cut: %s", error)
            return
        with suppress(OSError):
            self._send(error.status, to_bytes(error.body()))
            self._discard()

    def _discard(self) -> None:
        """Read some of a body that is not used: a connection that ends with unread bytes takes the answer along."""
        left, end = _LATE, time.monotonic() + _REFUSED
        with suppress(OSError, RefusedError):
            self.connection.shutdown(socket.SHUT_WR)
            if not self.headers.get("Transfer-Encoding") and self.headers.get("Content-Length", "0") == "0":
                return
            while left > 0 and (seconds := end - time.monotonic()) > 0:
                self.connection.settimeout(min(_WAIT, seconds))
                piece = self.rfile.read1(1 << 16)
                if not piece:
                    return
                left -= len(piece)

    def log_message(self, format: str, *args: Any) -> None:
        """Write no line for each request: it may hold the key."""
