"""Read and check the options of local clusters."""

import random
import re
import socket

import psutil

from ebbflow.infra.errors import ClusterError
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import names
from ebbflow.planners.model.numbers import UNSIGNED

_UNITS = {"k": 1.0 / 1024, "m": 1.0, "g": 1024.0, "t": 1024.0 * 1024}
_MAX_MEMORY = 1024 * 1024.0 * 1024  # MiB
_RANDOM = random.SystemRandom()  # scripts that seed Python's own alike would all choose the same ports


def parse_memory(text: str) -> int:
    """Return a memory size in MiB.

    >>> parse_memory("2g"), parse_memory("512m"), parse_memory("1.5GB")
    (2048, 512, 1536)

    Raises ``OptionError`` for what is no size, or less than 1 MiB.
    """
    found = re.fullmatch(rf"\s*({UNSIGNED})\s*([kmgt])(?:i?b)?\s*", text, re.IGNORECASE)
    mebibytes = float(found.group(1)) * _UNITS[found.group(2).lower()] if found else 0.0
    if not 1 <= mebibytes <= _MAX_MEMORY:
        raise OptionError(f"memory must be a size such as '2g' or '512m', at most 1024t; got {text!r:.60}")
    return int(mebibytes)


def check(name: str, workers: int, cores: int, cpus: float | None = None) -> None:
    """Raise ``OptionError`` unless the options are in their range."""
    names.CLUSTER.check(name)
    if workers < 0:
        raise OptionError(f"workers must be >= 0; got {workers}")
    if cores < 1:
        raise OptionError(f"cores must be >= 1; got {cores}")
    if cpus is not None and not 0.0 < cpus <= cores:
        raise OptionError(f"cpus must be in (0, {cores}], the cores of a worker; got {cpus}")


def loopback(number: int) -> str:
    """Return the ``number``-th loopback address after 127.0.0.1; all of 127/8 is this machine."""
    high, low = divmod(number, 254)  # leaves out .255; the first of all is the master's
    return f"127.0.{high}.{low + 1}"


def choose_port(host: str, asked: int | None, avoid: int = 0) -> int:
    """Return ``asked`` if it is free, else a free port, which others may take before it is used.

    Raises ``OptionError`` for a number that is no port, ``ClusterError`` for one that is taken.
    """
    if asked is not None:
        if not 1 <= asked <= 65535:
            raise OptionError(f"a port must be from 1 to 65535; got {asked}")
        if asked == avoid or not _free(host, asked):
            raise ClusterError(f"port {asked} on {host} is taken; choose another, or none to have a free one")
        return asked
    for _ in range(200):
        # Below the range from which the system serves outgoing connections, which could take it meanwhile.
        port = _RANDOM.randint(20_000, 32_000)
        if port != avoid and _free(host, port):
            return port
    raise ClusterError(f"no free port between 20000 and 32000 on {host}")


def _free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed one in TIME_WAIT is free
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def listens(pid: int, *ports: int) -> bool:
    """Tell whether process ``pid`` listens on all of these TCP ports: on one that another took meanwhile somebody
    answers, too."""
    try:
        found = psutil.Process(pid).net_connections("tcp")
    except (psutil.Error, OSError):  # it has ended
        return False
    return {*ports} <= {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}
