"""A daemon as a process: ``python -m ebbflow.infra.memory.process NAME ...``.

It writes one JSON object, where it listens, and serves until SIGTERM or SIGINT, which drains it first, or until a
client with the token has drained it.
"""

import argparse
import asyncio
import json
import logging
import signal
import sys
from collections.abc import Sequence

from ebbflow.infra.errors import InfraError, MemoryTierError
from ebbflow.infra.memory.daemon import DaemonSettings, MemoryDaemon
from ebbflow.infra.memory.peer import PeerAddress
from ebbflow.infra.memory.registry import MemoryRegistry, check_name

MODULE = "ebbflow.infra.memory.process"
DRAIN_SECONDS = 20.0  # for clients to leave after SIGTERM


def arguments(
    name: str,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    slab_bytes: int = DaemonSettings.slab_bytes,
    max_bytes: int = DaemonSettings.max_bytes,
    headroom: float = DaemonSettings.headroom,
    period: float = DaemonSettings.period,
    drain: float = DRAIN_SECONDS,
) -> list[str]:
    """Return the command line of a daemon; see ``DaemonSettings``. ``drain``: seconds for clients to leave."""
    values = {
        "host": host, "port": port, "slab-bytes": slab_bytes, "max-bytes": max_bytes, "headroom": headroom,
        "period": period, "drain": drain,
    }  # fmt: skip
    return [sys.executable, "-P", "-m", MODULE, name, *(f"--{key}={value}" for key, value in values.items())]


async def serve(settings: DaemonSettings, registry: MemoryRegistry, drain: float) -> None:
    """Run a daemon to its end. Raises ``MemoryTierError`` where it cannot begin.

    Args:
        settings: of the daemon.
        registry: where clients look for it.
        drain: seconds for clients to leave after a signal.
    """
    daemon, loop, ended = MemoryDaemon(settings), asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    try:
        await daemon.start()
        address = PeerAddress(settings.name, settings.host, daemon.port, settings.slab_bytes)
        registry.announce(address)
        sys.stdout.write(
            json.dumps({"name": address.name, "host": address.host, "port": address.port}) + "\n"
        )
        sys.stdout.flush()
        waits = {asyncio.ensure_future(ended.wait()), asyncio.ensure_future(daemon.drained())}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for one in waits:
            one.cancel()
        registry.withdraw(address)
        await daemon.drain(drain)
    finally:
        await daemon.close()


def main(given: Sequence[str] | None = None) -> None:
    """Run a daemon as the command line says."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--slab-bytes", type=int, default=DaemonSettings.slab_bytes)
    parser.add_argument("--max-bytes", type=int, default=DaemonSettings.max_bytes)
    parser.add_argument("--headroom", type=float, default=DaemonSettings.headroom)
    parser.add_argument("--period", type=float, default=DaemonSettings.period)
    parser.add_argument("--drain", type=float, default=DRAIN_SECONDS)
    read = parser.parse_args(given)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    registry = MemoryRegistry()
    try:
        settings = DaemonSettings(
            check_name(read.name),
            registry.token(create=True),
            read.host,
            read.port,
            read.slab_bytes,
            read.max_bytes,
            read.headroom,
            read.period,
        )
        asyncio.run(serve(settings, registry, read.drain))
    except (MemoryTierError, InfraError) as exc:
        raise SystemExit(f"memory daemon {read.name}: {exc}") from exc


if __name__ == "__main__":
    main()
