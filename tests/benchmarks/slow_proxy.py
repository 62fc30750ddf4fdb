"""A proxy of an HTTP service that makes it as slow as an object store far away."""

import contextlib
import socket
import socketserver
import threading
import time

PIECE = 64 << 10  # bytes


class SlowProxy(contextlib.AbstractContextManager["SlowProxy"]):
    """Passes connections on. Every request waits for its first byte, and all bytes share one bandwidth.

    Args:
        host: of the service.
        port: of the service.
        first_byte: seconds that a request waits.
        bandwidth: bytes/s of all connections together, both ways.
    """

    def __init__(self, host: str, port: int, first_byte: float = 0.020, bandwidth: float = 50e6) -> None:
        self._first_byte, self._bandwidth = first_byte, bandwidth
        self._lock = threading.Lock()
        self._free = 0.0  # when the link has passed what it was given
        outer = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with socket.create_connection((host, port), timeout=60) as inner:
                    back = threading.Thread(target=outer._pump, args=(inner, self.request, 0.0), daemon=True)
                    back.start()
                    outer._pump(self.request, inner, outer._first_byte)
                    back.join(60)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _pump(self, source: socket.socket, sink: socket.socket, wait: float) -> None:
        last = 0.0
        with contextlib.suppress(OSError):
            while piece := source.recv(PIECE):
                if wait and time.monotonic() - last > wait / 4:  # the first bytes of a request
                    time.sleep(wait)
                self._pass(len(piece))
                sink.sendall(piece)
                last = time.monotonic()
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def _pass(self, size: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._free = max(now, self._free) + size / self._bandwidth
            left = self._free - now
        time.sleep(max(0.0, left))
