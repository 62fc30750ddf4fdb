"""``MemoryRegistry``: which nodes lend memory, and the token that they and their clients share.

A directory: the token, readable by its user alone, and ``peers/NAME.json`` for each daemon. Where nodes are on
several machines it has to be one that they share, on a file system or on S3, at the place that ``EBBFLOW_MEMORY_DIR``
names. On S3 a daemon announces itself again and again: what a node that vanished has left there counts no longer
after a while.
"""

import hashlib
import hmac
import json
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import MemoryTierError
from ebbflow.infra.memory.peer import PeerAddress
from ebbflow.infra.storage import files, private
from ebbflow.infra.storage.lease_files import lease_file
from ebbflow.infra.storage.places import StorageLocation

DIRECTORY = "EBBFLOW_MEMORY_DIR"
AGAIN = 60.0  # s between two announcements on S3
_FORGOTTEN = 5 * AGAIN  # s after the last one
_LIST = 10.0  # s for which a listing of S3 is used
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LOCAL_TOKEN, _REMOTE_TOKEN = "token", "token.json"
_TOKEN = re.compile(r"[0-9a-f]{64}")


class MemoryRegistry:
    """The daemons of one cluster.

    Args:
        folder: that holds it, or its URI on S3; by default that of ``EBBFLOW_MEMORY_DIR``, or ``memory/`` in
            Ebbflow's own.
        clock: of what is on S3.

    Raises ``OptionError`` for what is no place.
    """

    def __init__(self, folder: Path | str | None = None, clock: Clock | None = None) -> None:
        own = files.home() / "memory"
        self._place = StorageLocation(folder or os.environ.get(DIRECTORY) or own)
        self._clock = clock or SystemClock()
        self._listed: tuple[float, tuple[PeerAddress, ...]] | None = None
        self.remote = not self._place.local
        self.folder = own if self.remote else Path(self._place.root)  # with daemons' logs in any case
        self.where = self._place.uri if self.remote else self._place.root

    def token(self, *, create: bool = False) -> bytes:
        """Return the token; ``create`` makes one where there is none. Raises ``MemoryTierError``."""
        try:
            text = self._remote_token(create) if self.remote else self._local_token(create)
        except (OSError, ValueError) as exc:
            raise MemoryTierError(
                f"the token of the memory tier cannot be read ({exc}); start a daemon: ebbflow memory lend"
            ) from exc
        if not _TOKEN.fullmatch(text):
            raise MemoryTierError(
                f"{self.where}/{_LOCAL_TOKEN} must hold 64 hexadecimal digits; delete it and restart all daemons"
            )
        return bytes.fromhex(text)

    def gateway_key(self) -> str:
        """Return what clients of this cluster's gateways send: made from the token, which it does not give away.

        Raises ``MemoryTierError``.
        """
        return hmac.new(self.token(create=True), b"ebbflow memory gateway", hashlib.sha256).hexdigest()

    def _local_token(self, create: bool) -> str:
        path = self.folder / _LOCAL_TOKEN
        if create and not path.exists():
            private.make_folder(self.folder)
            files.write_once(str(path), secrets.token_hex(32).encode())
        return path.read_text(encoding="ascii").strip()

    def _remote_token(self, create: bool) -> str:
        file = lease_file(self._place, _REMOTE_TOKEN, self._clock)
        if create and file.read() is None:  # of several that make one, one does
            file.write({"token": secrets.token_hex(32), "beat": 0.0, "ttl": 1.0}, None)
        found = file.read()
        if found is None:
            raise FileNotFoundError(f"{self.where}/{_REMOTE_TOKEN} does not exist")
        return str(found[0]["token"])

    def announce(self, address: PeerAddress) -> None:
        """Let clients find a daemon. Raises ``MemoryTierError``."""
        values = {
            "name": address.name,
            "host": address.host,
            "port": address.port,
            "slab_bytes": address.slab_bytes,
        }
        try:
            self._place.write(self._file(address.name), json.dumps(values).encode())
        except OSError as exc:
            raise MemoryTierError(f"cannot announce {address.name} in {self.where}: {exc}") from exc

    def withdraw(self, address: PeerAddress) -> None:
        """Let clients no longer find a daemon, unless another one has taken its name."""
        if self.find(address.name) == address:
            self.remove(address.name)

    def remove(self, name: str) -> None:
        """Let clients no longer find a daemon that is gone."""
        with suppress(OSError):
            self._place.remove(self._file(name))

    def find(self, name: str) -> PeerAddress | None:
        """Return the daemon of this name, which may be gone; ``None``: none was announced."""
        return self._read(self._file(name))

    def addresses(self) -> tuple[PeerAddress, ...]:
        """Return the daemons that were announced, by name; some of them may be gone."""
        now = self._clock.now()
        if self.remote and self._listed is not None and 0 <= now - self._listed[0] < _LIST:
            return self._listed[1]
        try:
            infos = self._place.entries("peers")
        except OSError:
            infos = []
        names = [f"peers/{info.base_name}" for info in infos if self._counts(info, now)]
        read = files.in_parallel(self._read, names) if self.remote else map(self._read, names)
        found = tuple(one for one in read if one is not None)
        self._listed = now, found
        return found

    def _counts(self, info: Any, now: float) -> bool:
        recent = not self.remote or now - (info.mtime_ns or 0) / 1e9 < _FORGOTTEN
        return bool(info.is_file) and info.base_name.endswith(".json") and recent

    def _file(self, name: str) -> str:
        return f"peers/{check_name(name)}.json"

    def _read(self, file: str) -> PeerAddress | None:
        try:
            values = json.loads(self._place.read(file))
            name, host, port, size = values["name"], values["host"], values["port"], values["slab_bytes"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        sound = isinstance(name, str) and isinstance(host, str) and type(port) is int and 0 < port < 65536
        sound = sound and type(size) is int and size > 0
        return PeerAddress(name, host, port, size) if sound and file == f"peers/{name}.json" else None


def check_name(name: str) -> str:
    """Return the name of a node. Raises ``MemoryTierError`` for one that is no file's name."""
    if not _NAME.fullmatch(name):
        raise MemoryTierError(
            f"a node's name must have 1 to 64 letters, digits, dots, hyphens or underscores; got {name[:80]!r}"
        )
    return name
