"""Daemons that lend memory: they are started, asked what they lend to whom, and drained."""

import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import MemoryTierError
from ebbflow.infra.memory import control
from ebbflow.infra.memory.lending import process
from ebbflow.infra.memory.lending.daemon import DaemonSettings
from ebbflow.infra.memory.peer import PeerAddress
from ebbflow.infra.memory.registry import MemoryRegistry, check_name
from ebbflow.planners.errors import OptionError

_AT_ONCE = 16  # daemons that are asked at a time

LenderState = Literal["lends", "drains", "does not answer"]


@dataclass(frozen=True, slots=True)
class LenderStatus:
    """A node that lends memory.

    Args:
        name: of the node.
        host: address that its daemon listens on.
        port: number.
        state: whether it lends.
        problem: why it does not answer; else empty.
        max_bytes: most that it lends.
        lent_bytes: in slabs that clients have mapped, or that hold entries.
        free_bytes: in slabs that are ready to be mapped.
        clients: connections of clients.
        reads: that it has answered.
        writes: that it has taken.
        evictions: slabs that it took back.
        entries: that any client may read: samples of data sets.
        gets: questions for entries.
        get_hits: of these, those that it had.
    """

    name: str
    host: str
    port: int
    state: LenderState
    problem: str = ""
    max_bytes: int = 0
    lent_bytes: int = 0
    free_bytes: int = 0
    clients: int = 0
    reads: int = 0
    writes: int = 0
    evictions: int = 0
    entries: int = 0
    gets: int = 0
    get_hits: int = 0


@dataclass(frozen=True, slots=True)
class ClientStatus:
    """A process that keeps blocks on nodes, as it told their daemons last; of those that have ended the newest.

    Args:
        client: what it calls itself.
        connected: whether it is there.
        peer_reads: that nodes have answered.
        store_reads: that the store behind has answered.
        fallbacks: of these, reads that a node should have answered and did not.
        evictions: slabs that nodes took back from it.
        lost_peers: nodes whose connection ended.
    """

    client: str
    connected: bool
    peer_reads: int
    store_reads: int
    fallbacks: int
    evictions: int
    lost_peers: int

    @property
    def hit_rate(self) -> float | None:
        """Return the fraction of reads that nodes have answered; ``None`` without reads."""
        reads = self.peer_reads + self.store_reads
        return self.peer_reads / reads if reads else None


@dataclass(frozen=True, slots=True)
class MemoryStatus:
    """The nodes that lend memory, by name, and who uses it."""

    folder: str  # in which daemons and clients find each other
    lenders: tuple[LenderStatus, ...]
    clients: tuple[ClientStatus, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as values that JSON can hold."""
        clients = [{**asdict(one), "hit_rate": one.hit_rate} for one in self.clients]
        return {"folder": self.folder, "lenders": [asdict(one) for one in self.lenders], "clients": clients}


def own_name() -> str:
    """Return this machine's name as that of a node."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip("._-")[:64] or "node"


def settings_of(
    registry: MemoryRegistry,
    name: str,
    *,
    host: str = DaemonSettings.host,
    port: int = DaemonSettings.port,
    max_bytes: int = DaemonSettings.max_bytes,
    headroom: float = DaemonSettings.headroom,
) -> DaemonSettings:
    """Return the settings of a daemon on this machine; the cluster's token is made where there is none.

    Args:
        registry: of the cluster.
        name: of the node.
        host: address to listen on.
        port: number; 0: any free one.
        max_bytes: most that is lent, at least a slab.
        headroom: fraction of the memory that stays free.

    Raises ``OptionError`` or ``MemoryTierError`` for values outside their rules, and where the name is taken.
    """
    check_name(name)
    if host in ("0.0.0.0", "::"):  # noqa: S104
        raise OptionError(
            f"the host must be one address, at which clients find the node; got {host}: all of them"
        )
    if max_bytes < DaemonSettings.slab_bytes:
        raise OptionError(
            f"the limit must be at least one slab, {DaemonSettings.slab_bytes >> 20} MiB; got "
            f"{max_bytes / (1 << 20):.4g} MiB"
        )
    settings = DaemonSettings(
        name, registry.token(create=True), host, port, max_bytes=max_bytes, headroom=headroom
    )
    known = registry.find(name)
    if known is not None and _status(known, settings.token).state != "does not answer":
        raise MemoryTierError(
            f"{name} lends memory already, at {known.host}:{known.port}; stop it, or give another name"
        )
    return settings


def lend(registry: MemoryRegistry, settings: DaemonSettings, drain: float) -> PeerAddress:
    """Start a daemon that survives this process, and return where it listens.

    Args:
        registry: of the cluster.
        settings: of the daemon.
        drain: seconds for clients to leave at its end.

    Raises ``MemoryTierError`` and ``ClusterError`` where it does not start.
    """
    command = process.arguments(
        settings.name,
        host=settings.host,
        port=settings.port,
        slab_bytes=settings.slab_bytes,
        max_bytes=settings.max_bytes,
        headroom=settings.headroom,
        period=settings.period,
        drain=drain,
    )
    log = registry.folder / "logs" / f"{settings.name}.log"
    address, child = process.launch(registry, command, settings.name, log, mark=f"memory-{settings.name}")
    child.returncode = 0  # Popen warns of children that it has not waited for; this one survives us
    return address


def status(registry: MemoryRegistry) -> MemoryStatus:
    """Ask all daemons what they lend to whom. Raises ``MemoryTierError`` without a token to ask with."""
    addresses = registry.addresses()
    if not addresses:
        return MemoryStatus(registry.where, (), ())
    token, told = registry.token(), list[Mapping[str, Any]]()
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="memory-status") as pool:
        lenders = tuple(pool.map(lambda one: _status(one, token, told), addresses))
    return MemoryStatus(registry.where, lenders, _clients(told))


@dataclass(frozen=True, slots=True)
class Stopped:
    """How a daemon has ended; ``problem``: it was gone before, and how that showed."""

    name: str
    problem: str = ""


def stop(
    registry: MemoryRegistry, names: Sequence[str], within: float, clock: Clock | None = None
) -> tuple[Stopped, ...]:
    """Drain daemons and wait for their end; one that does not answer is forgotten.

    Args:
        registry: of the cluster.
        names: of nodes; none: all.
        within: seconds for clients to leave.
        clock: of the wait.

    Raises ``OptionError`` for a node that lends nothing, ``MemoryTierError`` where a daemon does not end.
    """
    known = {one.name: one for one in registry.addresses()}
    for name in names:
        if name not in known:
            there = ", ".join(known) or "none"
            raise OptionError(f"a node must lend memory to be stopped (there are: {there}); got {name!r:.80}")
    chosen = [known[name] for name in dict.fromkeys(names)] or list(known.values())
    token = registry.token() if chosen else b""
    clock = clock or SystemClock()

    def end(address: PeerAddress) -> Stopped:
        if problem := _status(address, token).problem:
            registry.remove(address.name)
            return Stopped(address.name, problem)
        control.drain(address, token, within, clock)
        return Stopped(address.name)

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="memory-stop") as pool:
        return tuple(pool.map(end, chosen))


def _status(
    address: PeerAddress, token: bytes, sessions: list[Mapping[str, Any]] | None = None
) -> LenderStatus:
    """Return what a daemon tells of itself; what it tells of clients is added to ``sessions``."""
    try:
        told = control.status(address, token)
    except MemoryTierError as exc:
        return LenderStatus(address.name, address.host, address.port, "does not answer", str(exc))

    def count(key: str) -> int:
        value = told.get(key)
        return value if isinstance(value, int) else 0

    if sessions is not None and isinstance(told.get("sessions"), list):
        sessions += [one for one in told["sessions"] if isinstance(one, dict)]
    return LenderStatus(
        address.name,
        address.host,
        address.port,
        "drains" if told.get("draining") else "lends",
        max_bytes=count("max_bytes"),
        lent_bytes=count("mapped") * count("slab_bytes"),
        free_bytes=count("unmapped") * count("slab_bytes"),
        clients=max(0, count("clients") - 1),  # but for this one
        reads=count("reads"),
        writes=count("writes"),
        evictions=count("evictions"),
        entries=count("entries"),
        gets=count("gets"),
        get_hits=count("get_hits"),
    )


def _clients(told: Iterable[Mapping[str, Any]]) -> tuple[ClientStatus, ...]:
    """Return each client once: what it told last of all that daemons were told."""
    newest: dict[object, Mapping[str, Any]] = {}

    def operations(row: Mapping[str, Any]) -> float:
        return sum(value for value in row.values() if isinstance(value, int | float))

    for row in told:
        known = newest.get(row.get("session"))
        if known is None or operations(row) > operations(known):
            newest[row.get("session")] = row
    found = (
        ClientStatus(
            str(row.get("client", "")),
            bool(row.get("connected")),
            *(int(row.get(name, 0)) for name in _COUNTED),
        )
        for row in newest.values()
    )
    return tuple(sorted(found, key=lambda one: (not one.connected, one.client)))


_COUNTED = ("remote_hits", "store_hits", "fallbacks", "evictions", "lost_hosts")  # of ``TierMetrics``
