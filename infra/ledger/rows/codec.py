"""Changes, reports and states as the ledger stores them: JSON with the number of its format."""

import json
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, NamedTuple, TypeVar

from ebbflow.infra.errors import LedgerError
from ebbflow.infra.storage.values import Form
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.ledger import CHANGES, Change

T = TypeVar("T")

FORMAT = 2
LARGEST = 16 * 1024 * 1024  # characters of one change
VALUES = Form(strict=True, sparse=True, named=True)
_NAMES: Mapping[type, str] = {kind: name for name, kind in CHANGES.items()}
FORMER: Mapping[str, str] = {
    "loop-began": "leader-elected",
    "app-entered": "app-registered",
    "app-moved": "app-phase-changed",
    "granted": "lease-granted",
    "extended": "lease-extended",
    "recalled": "lease-revoked",
    "ended": "lease-ended",
    "saved": "checkpoint-saved",
}
"""Names under which ledgers of schema version 0001 have stored kinds of changes -> names of today.

They are translated when read. A migration that rewrote them would have to make new checksums, which cover the kind,
and a change that a disk has damaged before would pass for a right one from then on.
"""


class StoredChange(NamedTuple):
    """A change as it is stored."""

    kind: str
    body: str  # JSON
    change: Change  # as reading ``body`` gives it


def kind_of(change: type[Change] | str) -> str:
    """Return the stored name of a kind of change: ``Granted``, ``"Granted"`` and ``"lease-granted"`` are one.

    Raises ``OptionError``.
    """
    if isinstance(change, str):
        for name, kind in CHANGES.items():
            if change in (name, kind.__name__) or FORMER.get(change) == name:
                return name
    elif change in _NAMES:
        return _NAMES[change]
    raise OptionError(f"there is no kind of change {change!r}; there are {', '.join(CHANGES)}")


def stored_kinds(change: type[Change] | str) -> tuple[str, ...]:
    """Return all names under which a kind of change may be stored, today's first. Raises ``OptionError``."""
    name = kind_of(change)
    return name, *(former for former, today in FORMER.items() if today == name)


def pack(change: Change) -> StoredChange:
    """Return ``change`` as it is stored, and as it will be read.

    Characters that no database stores (NUL, lone surrogates) become U+FFFD. Raises ``OptionError`` for a value of
    another type than its field's, one that is no plain JSON value, or NaN in a number.
    """
    kind = _NAMES.get(type(change))
    if kind is None:
        raise OptionError(f"{type(change).__name__} is not a kind of change; there are {', '.join(CHANGES)}")
    body, again = _through(type(change), change)
    return StoredChange(kind, body, again)


def unpack(kind: str, version: int, body: str) -> Change:
    """Return the change that ``pack`` stored. Raises ``LedgerError`` for one that this Ebbflow cannot read."""
    known = CHANGES.get(FORMER.get(kind, kind))
    if known is None or version > FORMAT:
        raise LedgerError(
            f"the ledger holds changes of kind {kind!r}, format {version}, which a newer Ebbflow wrote: "
            "upgrade this one"
        )
    found: Change = load(known, version, body)
    return found


def dump(value: Any) -> str:
    """Return a report or state as JSON. Raises ``OptionError`` as ``pack`` does."""
    return _through(type(value), value)[0]


def dump_known(value: Any) -> str:
    """Return as JSON what was made of values that have been through ``pack``, without looking at them again."""
    return json.dumps(VALUES.to_plain(value), allow_nan=False, separators=(",", ":"))


def load(kind: type[T], version: int, body: str) -> T:
    """Return what ``dump`` stored. Raises ``LedgerError``."""
    if version > FORMAT:
        raise LedgerError(
            f"the ledger holds a {kind.__name__} of format {version}, which a newer Ebbflow wrote; upgrade this one"
        )
    try:
        return VALUES.from_plain(kind, VALUES.parse(body))
    except (ValueError, RecursionError) as error:
        raise LedgerError(
            f"a {kind.__name__} in the ledger cannot be read: {error}; a newer Ebbflow may have written it"
        ) from error


def encode(value: Any) -> Any:
    """Return ``value`` as dictionaries, lists, strings, numbers, booleans and ``None``."""
    return VALUES.to_plain(value) if is_dataclass(value) else VALUES.plain(value)


def _through(kind: type[T], value: T) -> tuple[str, T]:
    name = kind.__name__
    try:
        body = json.dumps(VALUES.to_plain(value), allow_nan=False, separators=(",", ":"))
        if len(body) > LARGEST:
            raise OptionError(f"a {name} may have {LARGEST:,} characters of JSON; this one has {len(body):,}")
        return body, VALUES.from_plain(kind, VALUES.parse(body))
    except RecursionError:
        raise OptionError(f"a {name} cannot be stored in the ledger: it is nested too deeply") from None
    except ValueError as error:
        raise OptionError(f"a {name} cannot be stored in the ledger: {error}") from None
