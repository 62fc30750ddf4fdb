"""Which networks of nodes there are on this machine: what a crash leaves is found here, and by nobody's memory.

One small file for each, in a directory that all users of this machine who may make networks share. It is written
before anything is made, and removed after the last of it.
"""

import contextlib
import fcntl
import ipaddress
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ebbflow.infra.errors import ClusterError
from ebbflow.infra.machine.network import links
from ebbflow.infra.machine.network.plan import Link, NetworkPlan, free_subnets, tag_of

FOLDER = Path("/run/ebbflow-networks")
_YOUNG = 60.0  # s for a run whose network was reserved to show that it lives


@dataclass(frozen=True, slots=True)
class Entry:
    """One network: whose it is, and which addresses it has."""

    uid: str  # of the run
    owner: str  # the run's directory
    subnets: tuple[str, ...]

    @property
    def tag(self) -> str:
        return tag_of(self.uid)


def reserve(uid: str, owner: str, rates: tuple[float, ...]) -> NetworkPlan:
    """Return the network of a run, with addresses that nothing on this machine has; they are its until ``release``.

    Raises ``ClusterError``.
    """
    with _locked():
        used = [*links.addresses(), *(one for entry in entries() for one in entry.subnets)]
        subnets = free_subnets(len(rates), used)
        entry = {"uid": uid, "owner": owner, "subnets": subnets}
        beside = FOLDER / f".{tag_of(uid)}"
        beside.write_text(json.dumps(entry))
        beside.replace(FOLDER / tag_of(uid))
    return NetworkPlan(tag_of(uid), tuple(Link(rate, net) for rate, net in zip(rates, subnets, strict=True)))


def entries() -> list[Entry]:
    """Return all networks that were reserved and not released; files that cannot be read are passed over."""
    found = []
    for path in sorted(FOLDER.glob("[0-9a-f]*")) if FOLDER.is_dir() else []:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            row = json.loads(path.read_text())
            subnets = tuple(str(ipaddress.ip_network(one)) for one in row["subnets"])
            found.append(Entry(str(row["uid"]), str(row["owner"]), subnets))
    return found


def contains(address: str) -> bool:
    """Tell whether an address belongs to a network of nodes on this machine."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    return any(found in ipaddress.ip_network(one) for entry in entries() for one in entry.subnets)


def release(tag: str) -> list[str]:
    """Remove a network, and with the last of it its entry; return what there was. Raises ``ClusterError``."""
    found = links.remove(tag)
    with contextlib.suppress(OSError):
        (FOLDER / tag).unlink(missing_ok=True)
    return found


def remove_leftovers(lives: Callable[[Entry], bool]) -> list[str]:
    """Remove the networks of runs that do not live; return the names of what was there. Raises ``ClusterError``."""
    found = []
    for entry in entries():
        if not _young(entry) and not lives(entry):
            found += release(entry.tag)
    return found


def _young(entry: Entry) -> bool:
    with contextlib.suppress(OSError):
        return time.time() - (FOLDER / entry.tag).stat().st_mtime < _YOUNG
    return False


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Keep two runs from choosing the same addresses."""
    try:
        FOLDER.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = (FOLDER / ".lock").open("a")
    except OSError as error:
        raise ClusterError(
            f"{FOLDER} cannot be used: {error.strerror}; a network of nodes needs root"
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
