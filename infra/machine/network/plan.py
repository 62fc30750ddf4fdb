"""What the network of one run looks like: names, addresses, rates. Pure.

All nodes of a run are on one bridge, or on two: each link of a node leads to a bridge of its own, and holds what the
node sends and what it receives to the link's rate. The machine itself is on each bridge with one address, which only
the nodes of the run can reach. Addresses are of 198.18.0.0/15, which is set aside for measurements of networks (RFC
2544) and leads nowhere else; names hold the run's uid, so that what a crash has left can be told from all else.
"""

import ipaddress
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ebbflow.infra.errors import ClusterError
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.numbers import parse_bit_rate

SPACE = ipaddress.IPv4Network("198.18.0.0/15")
LINKS = 2  # of a node at most
NODES = 1000  # addresses for nodes on one bridge
_PREFIX = 22  # bits of a bridge's network
_FIRST = 11  # of a node, within its network; the machine itself has 1
_LEAST, _MOST = 1e5, 1e10  # bit/s
_LETTERS = "ab"
_BURST = 0.01  # s of the rate that may go at once
_LEAST_BURST = 65_536  # bytes; a veth hands over segments of up to 64 KiB
_LATENCY = 0.1  # s that a packet may wait for its turn


@dataclass(frozen=True, slots=True)
class Link:
    """One link of each node.

    Args:
        rate: bit/s, each way.
        subnet: the addresses of its bridge.
    """

    rate: float
    subnet: str

    @property
    def host(self) -> str:
        """Return the machine's own address on the bridge."""
        return str(ipaddress.IPv4Network(self.subnet)[1])

    @property
    def hardware(self) -> str:
        """Return the hardware address of the bridge: one of those that everybody may choose, by its own."""
        return "02:eb:" + ":".join(f"{byte:02x}" for byte in ipaddress.IPv4Address(self.host).packed)

    @property
    def prefix(self) -> int:
        return ipaddress.IPv4Network(self.subnet).prefixlen

    def address(self, number: int) -> str:
        """Return the address of the node with this number, from 1; numbers that are ``NODES`` apart share one."""
        return str(ipaddress.IPv4Network(self.subnet)[_FIRST + (number - 1) % NODES])

    @property
    def burst(self) -> int:
        """Return the bytes that may go at once."""
        return max(_LEAST_BURST, round(self.rate / 8 * _BURST))

    @property
    def queue(self) -> int:
        """Return the bytes that may wait, those that go at once among them."""
        return self.burst + round(self.rate / 8 * _LATENCY)


@dataclass(frozen=True, slots=True)
class NetworkPlan:
    """The network of one run."""

    tag: str  # 8 characters of the run's uid, in the names of all that belongs to it
    links: tuple[Link, ...]

    @property
    def host(self) -> str:
        """Return the address at which nodes reach the machine itself, by their first link."""
        return self.links[0].host

    @property
    def megabytes(self) -> float:
        """Return what a node's first link carries, by which it reaches the others: MB/s each way."""
        return self.links[0].rate / 8e6

    def bridge(self, link: int) -> str:
        return f"{beginning(self.tag)}{_LETTERS[link]}"

    def interface(self, link: int, number: int) -> str:
        """Return the name of the bridge's end of a node's link; the node calls its own ``eth0`` or ``eth1``."""
        return f"{self.bridge(link)}{1 + (number - 1) % NODES}"

    def namespace(self, node: str) -> str:
        return f"{spaces(self.tag)}{node}"

    def inside(self, address: str) -> int:
        """Return the number of the node whose first link has this address. Raises ``ClusterError``."""
        first = self.links[0]
        network, found = ipaddress.IPv4Network(first.subnet), ipaddress.IPv4Address(address)
        number = int(found) - int(network[_FIRST]) + 1
        if not 1 <= number <= NODES:
            raise ClusterError(f"{address} is no node's address on {first.subnet}")
        return number


def node_interface(link: int) -> str:
    """Return what a node calls its end of a link."""
    return f"eth{link}"


def beginning(tag: str) -> str:
    """Return what the names of a run's interfaces begin with; a name has 15 characters at most."""
    return f"eb{tag}"


def spaces(tag: str) -> str:
    """Return what the names of a run's namespaces begin with."""
    return f"ebbflow-{tag}-"


def tag_of(uid: str) -> str:
    """Return the part of a run's uid that is in names."""
    return uid[:8]


def free_number(first: int, links: Sequence[Link], used: Collection[str]) -> int:
    """Return the number from ``first`` on whose address no node has. Raises ``ClusterError``."""
    for number in range(first, first + NODES):
        if links[0].address(number) not in used:
            return number
    raise ClusterError(f"the network of these nodes has no more than {NODES} addresses")


def free_subnets(count: int, used: Collection[str]) -> tuple[str, ...]:
    """Return ``count`` networks for bridges that overlap with none in ``used``. Raises ``ClusterError``."""
    taken = [ipaddress.ip_network(one, strict=False) for one in used]
    found = [
        str(one)
        for one in SPACE.subnets(new_prefix=_PREFIX)
        if not any(one.overlaps(other) for other in taken)
    ]
    if len(found) < count:
        raise ClusterError(
            f"{count} networks are needed for nodes, and {len(found)} of {SPACE} are free; take other fleets "
            "down: ebbflow local list"
        )
    return tuple(found[:count])


def parse_rates(text: str) -> tuple[float, ...]:
    """Return the rates of a node's links in bit/s.

    >>> parse_rates("200mbit"), parse_rates("200mbit,50mbit")
    ((200000000.0,), (200000000.0, 50000000.0))

    Raises ``OptionError`` for what are no rates, or more than a node can have links.
    """
    parts = text.split(",")
    if len(parts) > LINKS:
        raise OptionError(f"a node has at most {LINKS} links; got {len(parts)} rates: {text!r:.60}")
    return tuple(_rate(part) for part in parts)


def _rate(text: str) -> float:
    try:
        rate = parse_bit_rate(text, "a link's rate")
    except OptionError:
        rate = 0.0
    if not _LEAST <= rate <= _MOST:
        raise OptionError(
            f"a link's rate must be such as '200mbit', from 100kbit to 10gbit; got {text!r:.60}"
        )
    return rate


def rate_text(rate: float) -> str:
    """Return a rate as people write it.

    >>> rate_text(2e8), rate_text(1.5e6)
    ('200 Mbit/s', '1.5 Mbit/s')
    """
    return f"{rate / 1e6:g} Mbit/s"
