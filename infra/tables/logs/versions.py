"""What the log of a table says of one version: its files, their rows and the bounds of their columns.

``delta`` and ``iceberg`` read such logs; ``snapshots`` keeps what they find.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from ebbflow.infra.errors import TableError
from ebbflow.infra.protocols import Relation
from ebbflow.infra.storage.filesystems import CONNECT_TIMEOUT, REQUEST_TIMEOUT
from ebbflow.infra.tables.filefooters import Bounds
from ebbflow.planners.errors import OptionError

EXTRA = "lake"  # of this package, which brings the libraries
_VERSION = re.compile(r"[0-9]{1,19}")


@dataclass(frozen=True)
class Snapshot:
    """One version of a table, and what its log says of each file of ``relation``, in their order."""

    relation: Relation  # with ``log``
    newest: str  # the table's newest version when it was opened
    rows: tuple[int | None, ...]  # where it is told
    bounds: Callable[[str, str], tuple[Bounds, ...]]  # of a column, by its name and Spark SQL type
    keys: Mapping[str, tuple[Any, ...]] = field(
        default_factory=dict
    )  # values of columns that have one in each file


def moment(at: str) -> int | datetime:
    """Return the version or the time that ``at`` names: digits, or ISO 8601, in UTC unless it says otherwise.

    Raises ``OptionError``.
    """
    if _VERSION.fullmatch(at):
        return int(at)
    try:
        found = datetime.fromisoformat(at)
    except ValueError as error:
        raise OptionError(
            f"at (--at) must be a version (digits) or a time such as 2026-11-26T08:00 (in UTC unless it says "
            f"otherwise); got {at!r:.80}"
        ) from error
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def shown(milliseconds: int) -> str:
    """Return a time of a log, in ms since the Unix epoch, as people write it."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(" ", "milliseconds")


def refused(table: str, kind: str, feature: str, instead: str) -> TableError:
    """Return the error of a table that uses ``feature``, which nothing here can honour, with what to do."""
    return TableError(f"the {kind} table {table!r} {feature}, which is not supported; {instead}")


def s3_settings() -> dict[str, str]:
    """Return endpoint, region and credentials of S3 as the environment says them, by the names of variables."""
    env = os.environ
    endpoint = env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL") or ""
    if endpoint and "://" not in endpoint:
        endpoint = f"https://{endpoint}"
    region = env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or ("us-east-1" if endpoint else "")
    said = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_REGION": region,
        "AWS_ALLOW_HTTP": "true" if urlsplit(endpoint).scheme == "http" else "",
        **{
            name: env.get(name, "")
            for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
        },
    }
    return {name: value for name, value in said.items() if value}


TIMEOUTS = (f"{CONNECT_TIMEOUT:g}", f"{REQUEST_TIMEOUT:g}")  # seconds, of connecting and of a request
