"""``MemoryRegistry``: which nodes lend memory, and the token that they and their clients share.

A directory: ``token``, readable by its user alone, and ``peers/NAME.json`` for each daemon. Where nodes are on
several machines it has to be on a file system that they share, at the place that ``EBBFLOW_MEMORY_DIR`` names.
"""

import json
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

from ebbflow.infra.errors import MemoryTierError
from ebbflow.infra.memory.peer import PeerAddress
from ebbflow.infra.storage import files, private

DIRECTORY = "EBBFLOW_MEMORY_DIR"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TOKEN = re.compile(r"[0-9a-f]{64}")


class MemoryRegistry:
    """The daemons of one cluster.

    Args:
        folder: that holds it; by default that of ``EBBFLOW_MEMORY_DIR``, or ``memory/`` in Ebbflow's own.
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = Path(folder or os.environ.get(DIRECTORY) or files.home() / "memory")

    def token(self, *, create: bool = False) -> bytes:
        """Return the token; ``create`` makes one where there is none. Raises ``MemoryTierError``."""
        path = self.folder / "token"
        try:
            if create and not path.exists():
                private.make_folder(self.folder)
                files.write_once(str(path), secrets.token_hex(32).encode())
            text = path.read_text(encoding="ascii").strip()
        except (OSError, ValueError) as exc:
            raise MemoryTierError(
                f"the token of the memory tier cannot be read ({exc}); start a daemon: ebbflow memory lend"
            ) from exc
        if not _TOKEN.fullmatch(text):
            raise MemoryTierError(
                f"{path} must hold 64 hexadecimal digits; delete it and restart all daemons"
            )
        return bytes.fromhex(text)

    def announce(self, address: PeerAddress) -> None:
        """Let clients find a daemon. Raises ``MemoryTierError``."""
        values = {
            "name": address.name,
            "host": address.host,
            "port": address.port,
            "slab_bytes": address.slab_bytes,
        }
        try:
            files.write_atomic(None, "file", str(self._file(address.name)), json.dumps(values).encode())
        except OSError as exc:
            raise MemoryTierError(f"cannot announce {address.name} in {self.folder}: {exc}") from exc

    def withdraw(self, address: PeerAddress) -> None:
        """Let clients no longer find a daemon, unless another one has taken its name."""
        with suppress(OSError):
            if self._read(self._file(address.name)) == address:
                self._file(address.name).unlink()

    def remove(self, name: str) -> None:
        """Let clients no longer find a daemon that is gone."""
        with suppress(OSError):
            self._file(name).unlink(missing_ok=True)

    def find(self, name: str) -> PeerAddress | None:
        """Return the daemon of this name, which may be gone; ``None``: none was announced."""
        return self._read(self._file(name))

    def addresses(self) -> tuple[PeerAddress, ...]:
        """Return the daemons that were announced, by name; some of them may be gone."""
        found = (self._read(path) for path in sorted((self.folder / "peers").glob("*.json")))
        return tuple(one for one in found if one is not None)

    def _file(self, name: str) -> Path:
        return self.folder / "peers" / f"{check_name(name)}.json"

    @staticmethod
    def _read(path: Path) -> PeerAddress | None:
        try:
            values = json.loads(path.read_bytes())
            name, host, port, size = values["name"], values["host"], values["port"], values["slab_bytes"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        sound = isinstance(name, str) and isinstance(host, str) and type(port) is int and 0 < port < 65536
        sound = sound and type(size) is int and size > 0
        return PeerAddress(name, host, port, size) if sound and path.stem == name else None


def check_name(name: str) -> str:
    """Return the name of a node. Raises ``MemoryTierError`` for one that is no file's name."""
    if not _NAME.fullmatch(name):
        raise MemoryTierError(
            f"a node's name must have 1 to 64 letters, digits, dots, hyphens or underscores; got {name[:80]!r}"
        )
    return name
