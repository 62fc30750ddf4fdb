"""Make and remove the bridges and links of a network: by netlink, with pyroute2. All of it may be done twice."""

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ebbflow.infra.errors import ClusterError
from ebbflow.infra.machine.network import namespaces
from ebbflow.infra.machine.network.plan import NetworkPlan, beginning, node_interface, spaces

_NEEDS = "a network of nodes needs"
_ROOT = 0x10000  # handle of the token bucket
CLOSING = 5.0  # s for the connections of ended processes to close
_POLL = 0.02  # s
_OPEN = {
    "01",
    "04",
    "08",
    "09",
    "0B",
}  # established, FIN-WAIT-1, CLOSE-WAIT, LAST-ACK, CLOSING in /proc/net/tcp


def check() -> None:
    """Raise ``ClusterError`` unless this process may make namespaces, bridges and limited links here.

    Tried by making some, in a namespace that goes with its thread.
    """
    _pyroute2()
    try:
        namespaces.aside(_try)
    except (OSError, ClusterError) as error:
        raise ClusterError(
            f"{_NEEDS} the right to make network namespaces (root, or CAP_SYS_ADMIN and CAP_NET_ADMIN) and the "
            f"kernel's bridge, veth and tbf: {error}; leave the network out: nodes are then on loopback"
        ) from error


def _try() -> None:
    with _kernel() as kernel:
        kernel.link("add", ifname="try", kind="bridge")
        kernel.link("add", ifname="try1", kind="veth", peer={"ifname": "try2"})
        index = _index(kernel, "try1")
        kernel.tc("add", "tbf", index=index, handle=_ROOT, rate=10**6, burst=65_536, limit=10**6)


def make_bridges(plan: NetworkPlan) -> None:
    """Make the bridges of a network, each with the machine's own address. Raises ``ClusterError``."""
    with _kernel() as kernel:
        for number, link in enumerate(plan.links):
            name = plan.bridge(number)
            # without one of its own it has that of a member, another one whenever nodes come or go, and whoever knew
            # the one before sends into the void until that is forgotten: some 30 s
            index = _made(kernel, name, kind="bridge", address=link.hardware)
            _without_ipv6(name)
            _addressed(kernel, index, link.host, link.prefix)
            kernel.link("set", index=index, state="up")


def add_node(plan: NetworkPlan, node: str, number: int) -> None:
    """Make a node's namespace with its limited links, whole or not at all. Raises ``ClusterError``."""
    name = plan.namespace(node)
    try:
        namespaces.create(name)
        for place, link in enumerate(plan.links):
            ours, theirs = plan.interface(place, number), node_interface(place)
            with _kernel() as kernel:
                _removed(
                    kernel, ours
                )  # of an earlier node with this number, whose end the kernel has not seen yet
                with (namespaces.FOLDER / name).open() as space:
                    peer = {"ifname": theirs, "net_ns_fd": space.fileno()}
                    kernel.link("add", ifname=ours, kind="veth", peer=peer)
                index = _index(kernel, ours)
                _without_ipv6(ours)
                kernel.link("set", index=index, master=_index(kernel, plan.bridge(place)))
                _limit(kernel, index, plan, place)
                kernel.link("set", index=index, state="up")
            namespaces.within(name, partial(_inside, plan, place, link.address(number)))
    except BaseException:
        with contextlib.suppress(ClusterError):
            remove_node(plan, node, number)
        raise


def _inside(plan: NetworkPlan, place: int, address: str) -> None:
    """Set a node's own end up; called within its namespace."""
    name = node_interface(place)
    with _kernel() as kernel:
        kernel.link("set", index=_index(kernel, "lo"), state="up")
        index = _index(kernel, name)
        _without_ipv6(name)
        _addressed(kernel, index, address, plan.links[place].prefix)
        _limit(kernel, index, plan, place)
        kernel.link("set", index=index, state="up")


def close_connections(plan: NetworkPlan, node: str, timeout: float = CLOSING) -> bool:
    """Wait until the kernel has closed the connections of a node's ended processes; return whether it has.

    Peers learn then that the node is gone, as when a machine is shut down; behind what was still to be sent, this
    takes a moment on a limited link. Without it they would wait for answers until their own limits. ``timeout`` is in
    seconds: a peer that does not answer is not waited for longer. Raises ``ClusterError``.
    """
    name = plan.namespace(node)
    end = time.monotonic() + timeout
    while namespaces.exists(name):
        try:
            if not namespaces.within(name, _connections):
                return True
        except ClusterError:
            if namespaces.exists(name):
                raise
            return True  # another process has removed the node meanwhile
        if time.monotonic() >= end:
            return False
        time.sleep(_POLL)
    return True


def _connections() -> int:
    """Count the TCP connections that are open or on the way to be closed, where the calling thread is."""
    tables = [Path("/proc/thread-self/net", table) for table in ("tcp", "tcp6")]
    lines = [line for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    return sum(line.split()[3] in _OPEN for line in lines)


def remove_node(plan: NetworkPlan, node: str, number: int) -> None:
    """Remove a node's links and the name of its namespace. Raises ``ClusterError``."""
    with _kernel() as kernel:
        for place in range(len(plan.links)):
            _removed(kernel, plan.interface(place, number))
    namespaces.remove(plan.namespace(node))


def remove(tag: str) -> list[str]:
    """Remove all that the network with this tag has, whoever made it; return the names. Raises ``ClusterError``."""
    found = namespaces.names(spaces(tag))
    with _kernel() as kernel:
        ours = [one.get("ifname") for one in kernel.get_links()]
        # the links first: a bridge that goes leaves its members behind
        ours = sorted((one for one in ours if one.startswith(beginning(tag))), key=len, reverse=True)
        for name in ours:
            _removed(kernel, name)
    for name in found:
        namespaces.remove(name)
    return [*ours, *found]


def addresses() -> list[str]:
    """Return the networks that this machine is on or has a way to, but for the way to everywhere."""
    with _kernel() as kernel:
        ways = [(one.get("dst"), one["dst_len"]) for one in kernel.get_routes(family=2)]
    return [f"{address}/{bits}" for address, bits in ways if address and bits]


# --- what the kernel is asked --------------------------------------------------------------------------------


def _pyroute2() -> Any:
    try:
        import pyroute2
    except ImportError as error:
        raise ClusterError(f"{_NEEDS} pyroute2: pip install 'prefect-ebbflow[local-network]'") from error
    return pyroute2


@contextlib.contextmanager
def _kernel() -> Iterator[Any]:
    """Yield a connection to the kernel of the namespace that this thread is in. Raises ``ClusterError``."""
    pyroute2 = _pyroute2()
    try:
        with pyroute2.IPRoute() as kernel:
            yield kernel
    except pyroute2.NetlinkError as error:
        raise ClusterError(f"the kernel refused to change the network: {os.strerror(error.code)}") from error
    except OSError as error:
        raise ClusterError(f"the network cannot be changed: {error.strerror or error}") from error


def _index(kernel: Any, name: str) -> int:
    found = kernel.link_lookup(ifname=name)
    if not found:
        raise ClusterError(f"there is no network interface {name}")
    return int(found[0])


def _made(kernel: Any, name: str, **how: Any) -> int:
    """Return an interface's index; it is made where there is none."""
    with _passed_over(errno.EEXIST):
        kernel.link("add", ifname=name, **how)
    return _index(kernel, name)


def _removed(kernel: Any, name: str) -> None:
    for index in kernel.link_lookup(ifname=name):
        with _passed_over(errno.ENODEV):
            kernel.link("del", index=index)


def _addressed(kernel: Any, index: int, address: str, prefix: int) -> None:
    with _passed_over(errno.EEXIST):
        kernel.addr("add", index=index, address=address, prefixlen=prefix)


def _limit(kernel: Any, index: int, plan: NetworkPlan, place: int) -> None:
    """Hold what leaves an interface to its link's rate."""
    link = plan.links[place]
    how = {"rate": round(link.rate / 8), "burst": link.burst, "limit": link.queue}
    kernel.tc("replace", "tbf", index=index, handle=_ROOT, **how)


def _without_ipv6(name: str) -> None:
    """Keep the kernel from giving an interface addresses by itself, in the namespace of this thread."""
    with contextlib.suppress(OSError):  # a kernel without it gives none
        Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("1")


@contextlib.contextmanager
def _passed_over(*numbers: int) -> Iterator[None]:
    pyroute2 = _pyroute2()
    try:
        yield
    except pyroute2.NetlinkError as error:
        if error.code not in numbers:
            raise
