"""What a full checkpoint says about itself. Without a valid manifest a checkpoint does not exist."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ebbflow.infra.storage.manifest import OtherVersionError, UnusableError
from ebbflow.infra.training.checkpoints.states import Signature
from ebbflow.infra.training.process.agreeing import exchangeable

VERSION = 1
_FILE = re.compile(r"[A-Za-z0-9_.-]{1,200}")
_DIGEST = re.compile(r"[0-9a-f]{64}")

Layout = Literal["replicated", "sharded"]


@exchangeable
@dataclass(frozen=True, slots=True)
class Payload:
    """One file of a checkpoint."""

    name: str
    size: int  # bytes
    sha256: str  # hex


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of ``manifest.json``."""

    step: int  # optimizer steps done
    created: float  # seconds since the Unix epoch
    layout: Layout
    files: tuple[Payload, ...]
    signature: Signature  # of the model
    note: Any  # JSON

    @property
    def size(self) -> int:
        """Return the summed size of the files, bytes."""
        return sum(file.size for file in self.files)

    def encode(self) -> bytes:
        """Return the manifest as JSON with a checksum of its own."""
        content = asdict(self) | {"version": VERSION}
        content["signature"] = {name: [list(shape), kind] for name, (shape, kind) in self.signature.items()}
        text = json.dumps(content, sort_keys=True)
        return json.dumps({"sha256": _sha256(text), "manifest": text}).encode()


def decode(data: bytes) -> Manifest:
    """Read a manifest. Raises ``UnusableError``, saying what is wrong with it."""
    try:
        outer = json.loads(data)
        text = outer["manifest"]
        if outer["sha256"] != _sha256(text):
            raise UnusableError("has a manifest whose checksum does not fit")
        raw = json.loads(text)
        if raw["version"] != VERSION:
            raise OtherVersionError(f"has a manifest of version {raw['version']!r}, not {VERSION}")
        return Manifest(
            int(raw["step"]),
            float(raw["created"]),
            raw["layout"],
            tuple(_payload(file) for file in raw["files"]),
            {name: (tuple(shape), kind) for name, (shape, kind) in raw["signature"].items()},
            raw["note"],
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise UnusableError(f"has a torn manifest ({type(exc).__name__}: {exc})") from exc


def _payload(raw: Mapping[str, Any]) -> Payload:
    name, size, digest = raw["name"], raw["size"], raw["sha256"]
    if (
        not _FILE.fullmatch(name)
        or name in (".", "..")
        or type(size) is not int
        or not _DIGEST.fullmatch(digest)
    ):
        raise UnusableError(f"lists {name!r} with {size!r} bytes and checksum {digest!r}")
    return Payload(name, size, digest)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
