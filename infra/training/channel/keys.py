"""Keys of the channel between a launcher and its nodes (CURVE25519): made here, kept nowhere longer than needed.

- The launcher makes a pair for each run. The secret half is in its memory only; a launcher that resumes a run makes
  another one.
- Each start of a node has a pair of its own. On this machine the launcher's pool makes it and hands the secret half
  down in the environment of the node's process, which the kernel shows to the same user only. On other machines the
  node makes it (``python -m ebbflow.infra.training.channel.keys FILE``), keeps the secret half in a file of its user
  alone and tells the public half.

So there is nothing to rotate: a key lives as long as what it was made for. Keys are written as 64 hexadecimal digits.
"""

import re
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Self

from ebbflow.infra.errors import TrainingError
from ebbflow.infra.machine.encrypted_router import CurveKeys
from ebbflow.infra.storage import private

SERVER_KEY = (
    "EBBFLOW_CHANNEL_KEY"  # public key of the launcher; in the environment of a node and its processes
)
NODE_SECRET = "EBBFLOW_NODE_SECRET"  # noqa: S105 - a name; secret key of the node, there, too, and nowhere else
NODE_SECRET_FILE = "EBBFLOW_NODE_SECRET_FILE"  # noqa: S105 - a name; the file that holds it instead
ANNOUNCED = "public-key"  # word before the key in what this program prints
_KEY = re.compile(r"[0-9a-f]{64}")


class KeyPair(CurveKeys):
    """A pair of keys of a node."""

    @classmethod
    def of(cls, secret: str) -> Self:
        """Return the pair of a secret key. Raises ``TrainingError``."""
        from zmq.backend import curve_public
        from zmq.utils import z85

        return cls(z85.decode(curve_public(z85.encode(raw(secret)))).hex(), secret)


def raw(key: str) -> bytes:
    """Return a key's 32 bytes. Raises ``TrainingError``, which does not tell the key."""
    if not is_key(key):
        raise TrainingError(f"a key must be 64 hexadecimal digits; got {len(key)} characters of another form")
    return bytes.fromhex(key)


def is_key(text: object) -> bool:
    """Return whether a text has the form of a key."""
    return isinstance(text, str) and _KEY.fullmatch(text) is not None


def own(environment: MutableMapping[str, str]) -> KeyPair:
    """Return a node's pair, from its environment or the file that it names.

    What comes from a file is put into ``environment``, for the processes that the node starts. Raises
    ``TrainingError`` where there is none.
    """
    if NODE_SECRET not in environment:
        path = environment.get(NODE_SECRET_FILE)
        if not path:
            raise TrainingError(f"a node needs a key: {NODE_SECRET} and {NODE_SECRET_FILE} are not set")
        try:
            environment[NODE_SECRET] = Path(path).read_text(encoding="ascii").strip()
        except (OSError, ValueError) as exc:
            raise TrainingError(f"the node's key in {path} cannot be read: {type(exc).__name__}") from exc
    return KeyPair.of(environment[NODE_SECRET])


def handed_down(environment: Mapping[str, str]) -> tuple[str, KeyPair]:
    """Return the launcher's public key and this process' pair, as its node handed them down.

    Raises ``TrainingError`` where one is missing.
    """
    for name in (SERVER_KEY, NODE_SECRET):
        if not environment.get(name):
            raise TrainingError(f"a training process needs the keys of its node: {name} is not set")
    raw(environment[SERVER_KEY])
    return environment[SERVER_KEY], KeyPair.of(environment[NODE_SECRET])


def make_file(path: Path) -> str:
    """Make a new pair, write the secret half to ``path`` (mode 0600, replaced) and return the public one."""
    pair = KeyPair.make()
    private.write_secret(path, pair.secret)
    private.write_text(path.with_name(f"{path.name}.public"), announcement(pair.public))
    return pair.public


def announcement(public: str) -> str:
    """Return the line that tells a public key."""
    return f"{ANNOUNCED} {public}\n"


def announced(output: str) -> str:
    """Return the public key that a node has told in ``output``; empty without one."""
    found = re.findall(rf"^{ANNOUNCED} ([0-9a-f]{{64}})$", output, re.MULTILINE)
    return str(found[-1]) if found else ""


def main() -> None:
    """Make a key file and tell the public half."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m ebbflow.infra.training.channel.keys FILE")
    sys.stdout.write(announcement(make_file(Path(sys.argv[1]))))


if __name__ == "__main__":
    main()
