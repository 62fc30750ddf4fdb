"""How fast a store is, measured, and remembered for a while between processes.

To measure takes a dozen requests: on a store of 20 ms a request a quarter of a second, in each query anew.
"""

import hashlib
import json
import os
import socket
import time
import uuid
from contextlib import suppress
from pathlib import Path

from ebbflow.infra.errors import InfraError
from ebbflow.infra.storage import filesystems
from ebbflow.infra.storage.files import home, write_text
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError
from ebbflow.planners.memory.tiers import Tier

PROBE = 1 << 20  # bytes of a request that tiers are compared by
KEPT = 600.0  # s for which what was measured counts
_NAME = "the store"
_ENDPOINTS = "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"  # where a bucket's name may mean another store


def store_tier(place: StorageLocation) -> Tier:
    """Return latency and bandwidth of reading from a store: as measured in the last ten minutes, or now.

    Raises ``StorageError`` where it cannot be measured.
    """
    return _remembered(_file(place)) or measure_store(place)


def measure_store(place: StorageLocation) -> Tier:
    """Return latency and bandwidth of reading from a store, and remember them; a probe is written and removed.

    Raises ``StorageError``.
    """
    name = f"cache/.probe-{os.getpid()}-{uuid.uuid4().hex[:12]}"
    with filesystems.translated(f"measure the store {place}"):
        place.write(name, bytes(PROBE))
        try:
            small, large = (min(_seconds(place, name, size) for _ in range(3)) for size in (1, PROBE))
        finally:
            with suppress(OSError, InfraError):
                place.remove(name)
    tier = Tier(_NAME, small, PROBE / max(large - small, 1e-9))
    found = {"measured": time.time(), "latency_s": small, "bytes_per_second": tier.bytes_per_second}
    with suppress(OSError, InfraError):  # it is measured again
        write_text(_file(place), json.dumps(found), kept=True)
    return tier


def _file(place: StorageLocation) -> Path:
    root = place.root if place.local else place.root.split("/", 1)[0]  # a bucket is as fast everywhere
    endpoints = (os.environ.get(name, "") for name in _ENDPOINTS)
    which = "\0".join([socket.gethostname(), place.scheme, root, *endpoints])  # homes may be shared
    return home() / "stores" / f"{hashlib.sha256(which.encode()).hexdigest()[:16]}.json"


def _remembered(file: Path) -> Tier | None:
    try:
        found = json.loads(file.read_bytes())
        if not 0 <= time.time() - found["measured"] < KEPT:
            return None
        return Tier(_NAME, float(found["latency_s"]), float(found["bytes_per_second"]))
    except (OSError, ValueError, TypeError, KeyError, OptionError):
        return None


def _seconds(place: StorageLocation, name: str, size: int) -> float:
    began = time.perf_counter()
    place.read_range(name, 0, size)
    return time.perf_counter() - began
