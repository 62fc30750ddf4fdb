"""A daemon as a process: ``python -m ebbflow.infra.memory.lending.process NAME ...``.

It writes one JSON object, where it listens, and serves until SIGTERM or SIGINT, which drains it first, until a client
with the token has drained it, or until the process that it follows has ended.
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import InfraError, MemoryTierError
from ebbflow.infra.machine import processes
from ebbflow.infra.memory.lending.daemon import DaemonSettings, MemoryDaemon
from ebbflow.infra.memory.peer import PeerAddress
from ebbflow.infra.memory.registry import AGAIN, DIRECTORY, MemoryRegistry, check_name

MODULE = "ebbflow.infra.memory.lending.process"
DRAIN_SECONDS = 20.0  # for clients to leave after SIGTERM
_START = 60.0  # s in which a daemon must be announced, on a machine that is very busy
_POLL = 0.02  # s between looks for that

log = logging.getLogger(__name__)


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
    follow: int = 0,
) -> list[str]:
    """Return the command line of a daemon.

    Args:
        name: of the node.
        host: address to listen on.
        port: number; 0: any free one.
        slab_bytes: as in ``DaemonSettings``, like the next three.
        max_bytes: most that is lent.
        headroom: fraction of the memory that stays free.
        period: seconds between two looks at the memory.
        drain: seconds for clients to leave.
        follow: id of a process whose end ends the daemon at once; 0: none.
    """
    values = {
        "host": host, "port": port, "slab-bytes": slab_bytes, "max-bytes": max_bytes, "headroom": headroom,
        "period": period, "drain": drain, "follow": follow,
    }  # fmt: skip
    return [sys.executable, "-P", "-m", MODULE, name, *(f"--{key}={value}" for key, value in values.items())]


def launch(
    registry: MemoryRegistry,
    command: Sequence[str],
    name: str,
    log: Path,
    *,
    mark: str,
    namespace: str = "",
    clock: Clock | None = None,
) -> tuple[PeerAddress, subprocess.Popen[bytes]]:
    """Start a daemon that survives this process, and return once clients can find it.

    Args:
        registry: where they do; what it has of an earlier daemon of this name is removed.
        command: as ``arguments`` returns it.
        name: of the node.
        log: file that takes what the daemon prints.
        mark: by which its process is found; see ``infra.machine.processes``.
        namespace: of the network that it listens in; empty: that of this process.
        clock: of the wait.

    Raises ``ClusterError`` where it cannot be started, ``MemoryTierError`` where it ends or is not up in time.
    """
    clock = clock or SystemClock()
    registry.remove(name)
    environment = {**processes.inherited(), DIRECTORY: registry.where}
    child = processes.spawn(command, environment, mark, log, namespace=namespace)
    end = clock.now() + _START
    while (address := registry.find(name)) is None:
        if child.poll() is not None:
            raise MemoryTierError(f"the memory daemon {name} has ended; {log} ends:\n{processes.tail(log)}")
        if clock.now() > end:
            child.kill()
            child.wait(10)
            raise MemoryTierError(f"the memory daemon {name} was not up within {_START:g} s; see {log}")
        clock.sleep(_POLL)
    return address, child


async def serve(settings: DaemonSettings, registry: MemoryRegistry, drain: float, follow: int = 0) -> None:
    """Run a daemon to its end. Raises ``MemoryTierError`` where it cannot begin.

    Args:
        settings: of the daemon.
        registry: where clients look for it.
        drain: seconds for clients to leave after a signal.
        follow: id of a process whose end ends the daemon at once; 0: none.
    """
    daemon, loop, ended, alone = (
        MemoryDaemon(settings),
        asyncio.get_running_loop(),
        asyncio.Event(),
        asyncio.Event(),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    followed = _watch(follow, loop, alone) if follow else -1
    again: asyncio.Task[None] | None = None
    try:
        await daemon.start()
        address = PeerAddress(settings.name, settings.host, daemon.port, settings.slab_bytes)
        registry.announce(address)
        sys.stdout.write(
            json.dumps({"name": address.name, "host": address.host, "port": address.port}) + "\n"
        )
        sys.stdout.flush()
        if registry.remote:
            again = loop.create_task(_announce_again(registry, address))
        waits = {asyncio.ensure_future(one) for one in (ended.wait(), alone.wait(), daemon.drained())}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if again is not None:
            again.cancel()
        registry.withdraw(address)
        if not alone.is_set():
            await daemon.drain(drain)
        if again is not None:  # an announcement that was under way came after the first
            registry.withdraw(address)
    finally:
        if again is not None:
            again.cancel()
        await daemon.close()
        if followed >= 0:
            loop.remove_reader(followed)
            os.close(followed)


async def _announce_again(registry: MemoryRegistry, address: PeerAddress) -> None:
    while True:
        await asyncio.sleep(AGAIN)
        try:
            await asyncio.to_thread(registry.announce, address)
        except MemoryTierError as exc:
            log.warning("%s", exc)


def _watch(pid: int, loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> int:
    """Have ``ended`` set once a process has ended; return the descriptor to close."""
    try:
        found = os.pidfd_open(pid)
    except OSError as exc:
        raise MemoryTierError(f"process {pid} cannot be followed: {exc.strerror}") from exc
    loop.add_reader(found, ended.set)
    return found


def run(settings: DaemonSettings, registry: MemoryRegistry, drain: float, follow: int = 0) -> None:
    """Run a daemon in this process, to its end; see ``serve``."""
    asyncio.run(serve(settings, registry, drain, follow))


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
    parser.add_argument("--follow", type=int, default=0)
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
        run(settings, registry, read.drain, read.follow)
    except (MemoryTierError, InfraError) as exc:
        raise SystemExit(f"memory daemon {read.name}: {exc}") from exc


if __name__ == "__main__":
    main()
