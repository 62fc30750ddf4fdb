"""A page for the people of this machine: a small read-only HTTP server, by default on the loopback interface.

It answers GET and HEAD. On the loopback interface it answers only where the request names this very machine: a page
of somebody else's that had its name point here (DNS rebinding) is refused by its ``Host``.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

from ebbflow.infra.errors import InfraError
from ebbflow.planners.errors import OptionError

HOST = "127.0.0.1"
_SILENT = 30.0  # s without a word after which a connection is closed
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Permissions-Policy": "interest-cohort=()",
}
_POLICY = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True, slots=True)
class PageResponse:
    """What one address holds."""

    body: str
    kind: str = "text/html; charset=utf-8"
    status: int = 200
    policy: str = _POLICY  # Content-Security-Policy


Answerer = Callable[[str, Mapping[str, str]], PageResponse | None]
"""Path and query in, answer out; ``None`` where there is nothing. Called from several threads."""


class BackgroundServer:
    """An HTTP server that answers in threads of its own, from ``start`` or the beginning of a ``with`` block on.

    Args:
        server: bound to its port.
        poll_s: seconds after which it sees that it is to end.
    """

    def __init__(self, server: ThreadingHTTPServer, poll_s: float = 0.2) -> None:
        self._http = server
        self._thread = threading.Thread(target=server.serve_forever, args=(poll_s,), daemon=True)

    def start(self) -> None:
        """Answer from now on, in threads of its own."""
        self._thread.start()

    def close(self) -> None:
        """Stop, and free the port. May be called twice."""
        if self._thread.is_alive():
            self._http.shutdown()
            self._thread.join()
        self._http.server_close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class PageServer(BackgroundServer):
    """Serves what ``answer`` gives, from ``start`` until ``close``; a context manager that does both."""

    def __init__(self, answer: Answerer, port: int = 0, host: str = HOST) -> None:
        """Take a port, 0 for any that is free, on the interface of ``host``.

        Raises ``OptionError`` for a port that is none, ``InfraError`` for one that is taken or not allowed.
        """
        if not 0 <= port <= 65535:
            raise OptionError(f"a port is 0 to 65535; got {port}")
        try:
            self._server = _Server((host, port), _Handler)
        except OSError as error:
            where = f"port {port}" if host == HOST else f"port {port} of {host}"
            raise InfraError(f"{where} cannot be used: {error.strerror or error}; name another") from error
        self._server.answer = answer
        self._server.own = host in (HOST, "localhost")
        super().__init__(self._server)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://{self._server.server_address[0]!s}:{self.port}/"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a silent browser does not hold up the end
    answer: Answerer
    own: bool  # for this machine alone

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of browsers that went away."""


class _Handler(BaseHTTPRequestHandler):
    server_version = "ebbflow"
    sys_version = ""
    timeout = _SILENT
    server: _Server

    def do_GET(self) -> None:
        self._send(self._answer(), body=True)

    def do_HEAD(self) -> None:
        self._send(self._answer(), body=False)

    def _refuse(self) -> None:
        self.close_connection = True  # what the request carries is not read
        self._send(
            PageResponse("This page is to be read only.\n", "text/plain; charset=utf-8", 405), body=True
        )

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _refuse

    def _answer(self) -> PageResponse:
        port = self.server.server_address[1]
        names = {f"{name}:{port}" for name in (HOST, "localhost")} | (
            {HOST, "localhost"} if port == 80 else set()
        )
        if self.server.own and self.headers.get("Host", "").lower() not in names:
            return PageResponse(
                "This server answers to this machine's own name only.\n", "text/plain; charset=utf-8", 421
            )
        parts = urlsplit(self.path)
        found = self.server.answer(parts.path, dict(parse_qsl(parts.query)))
        return found or PageResponse("There is nothing here.\n", "text/plain; charset=utf-8", 404)

    def _send(self, answer: PageResponse, *, body: bool) -> None:
        content = answer.body.encode("utf-8", "replace")
        self.send_response(answer.status)
        headers = {
            "Content-Type": answer.kind,
            "Content-Length": str(len(content)),
            "Content-Security-Policy": answer.policy,
            **_HEADERS,
        }
        if answer.status == 405:
            headers["Allow"] = "GET, HEAD"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Write no line for each request: the page asks every two seconds."""
