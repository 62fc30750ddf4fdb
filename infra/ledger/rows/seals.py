"""Checksums in the JSON texts of the ledger: no database that keeps them has to find out that a disk changed a byte.

SQLite has no checksums, and PostgreSQL has them only where its cluster was made with them. A text carries the XXH64
of itself and of what else tells of it (an event's number, time and kind) as its last key; it stays a JSON object. One
that carries none was written before there were any, and is read as it is.
"""

import re

from ebbflow.infra.errors import LedgerError
from ebbflow.infra.storage import checksums

_KEY = '"xxh64":"'
_SEAL = re.compile(rf',?{_KEY}([0-9a-f]{{{checksums.DIGITS}}})"}}')
_LENGTH = len(_KEY) + checksums.DIGITS + len('"}')


def seal(body: str, *about: object) -> str:
    """Return ``body``, a JSON object, with a last key that is the checksum of it and of ``about``."""
    head = body[:-1]
    return f'{head}{"," if len(head) > 1 else ""}{_KEY}{_digest(body, about)}"}}'


def unseal(body: str, *about: object) -> str:
    """Return what ``seal`` was given. Raises ``LedgerError`` where it, or what it is about, has changed since."""
    found = _SEAL.fullmatch(body, max(0, len(body) - _LENGTH - (body[-_LENGTH - 1 : -_LENGTH] == ",")))
    if found is None:
        return body
    head = body[: found.start()] + "}"
    if _digest(head, about) != found[1]:
        raise LedgerError(
            "a text in the ledger is damaged (checksum mismatch): restore a backup; "
            "run ebbflow ledger verify for details"
        )
    return head


def _digest(body: str, about: tuple[object, ...]) -> str:
    return checksums.of_bytes("\0".join([*map(repr, about), body]).encode())
