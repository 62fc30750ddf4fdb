"""A gateway: a store, with nodes' memory before it, that stock Spark reads and writes over WebHDFS."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ebbflow.infra.memory.gateway.files import PARTS, GatewayFiles
from ebbflow.infra.memory.gateway.server import TOKEN_PATH, GatewayServer
from ebbflow.infra.memory.registry import MemoryRegistry
from ebbflow.infra.storage import filesystems, private
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.memory.tier import MemoryUse, OpenTier, memory_tier

_PROVIDER = "org.apache.hadoop.hdfs.web.oauth2.ConfRefreshTokenBasedAccessTokenProvider"
_HADOOP = "spark.hadoop."


@dataclass(frozen=True, slots=True)
class OpenGateway:
    """A gateway that serves.

    Args:
        host: address that it listens on.
        port: number.
        key: what clients send.
        settings: file with Spark's settings, readable by its user alone.
        tier: nodes' memory before the store; ``None``: the store has no ``memory+`` before it.
    """

    host: str
    port: int
    key: str
    settings: Path
    tier: OpenTier | None

    @property
    def url(self) -> str:
        """Return the root for Spark."""
        return f"webhdfs://{self.host}:{self.port}/"


def spark_settings(host: str, port: int, key: str) -> dict[str, str]:
    """Return the settings by which stock Spark sends a gateway's key, without ``spark.hadoop.`` before their names.

    Hadoop's client sends it as OAuth 2 has it, in a header: neither in paths nor in URLs, which plans, event logs and
    error messages show.

    Args:
        host: address of the gateway.
        port: number.
        key: of the gateway; Spark's pages and logs do not show a setting whose name has "token" in it.
    """
    oauth2 = {
        "enabled": "true",
        "access.token.provider": _PROVIDER,
        "client.id": "ebbflow",
        "refresh.url": f"http://{host}:{port}{TOKEN_PATH}",
        "refresh.token": key,
        "refresh.token.expires.ms.since.epoch": "0",
    }
    found = {f"dfs.webhdfs.oauth2.{name}": value for name, value in oauth2.items()}
    return {**found, "dfs.webhdfs.socket.read-timeout": "600s"}  # of a large directory that is renamed on S3


@contextmanager
def gateway(
    store: str,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    use: MemoryUse = "auto",
    notify: Callable[[str], None],
    registry: MemoryRegistry | None = None,
) -> Iterator[OpenGateway]:
    """Serve a directory of a store within the block; at its end the store has everything.

    Args:
        store: directory, or its URI on S3, made where it is missing; ``memory+`` before it: with nodes' memory.
        host: address to listen on.
        port: number; 0: any free one.
        use: ``auto``: memory only where it is measured to be faster; ``always``: wherever a daemon is there.
        notify: told whether memory is used, and why.
        registry: of the daemons; that of this user by default.

    Raises ``OptionError`` for a host or store that is none, ``InfraError`` for a port that cannot be used,
    ``StorageError`` where the store cannot be, ``MemoryTierError`` where its token cannot be read.
    """
    if host in ("0.0.0.0", "::", ""):  # noqa: S104
        raise OptionError(
            f"the host must be one address, at which clients reach the gateway; got {host!r}: all of them"
        )
    place = StorageLocation(store)
    registry = registry or MemoryRegistry()
    with filesystems.translated(f"use the store {place}"):
        if place.behind.is_file():
            raise OptionError(f"the store must be a directory; {place} is a file")
        private.folder_maker(place.behind.fs(), place.behind.scheme)(place.root)
    key = registry.gateway_key()
    with memory_tier(place.under(PARTS), use, notify, registry) as tier:
        files = GatewayFiles(place.behind, None if tier is None else tier.files)
        with filesystems.translated(f"use the store {place}"):
            files.remove_abandoned()
        with GatewayServer(files, key, host, port) as server:
            # nodes may share a registry, and each has a loopback
            settings = registry.folder / f"gateway-{socket.gethostname()}-{host}-{server.port}.conf"
            lines = spark_settings(host, server.port, key).items()
            private.write_secret(settings, "".join(f"{_HADOOP}{name} {value}\n" for name, value in lines))
            try:
                yield OpenGateway(host, server.port, key, settings, tier)
            finally:
                with suppress(OSError):
                    settings.unlink()


def wait(stopped: threading.Event) -> None:
    """Wait until SIGINT, SIGTERM or ``stopped``. For a process' main thread."""
    import signal

    handlers = {
        number: signal.signal(number, lambda *_: stopped.set()) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        stopped.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
