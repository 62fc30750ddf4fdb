"""When a cluster's nodes began and ended: what EC2 tells, kept in a file, for EC2 forgets within an hour or so."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any

from ebbflow.infra.aws.clients import Clients, calling
from ebbflow.infra.aws.naming import MANAGED_BY_LOOP, TAG_CLUSTER, TAG_MANAGED, TAG_POOL, Names
from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import StorageError
from ebbflow.infra.storage import private
from ebbflow.infra.storage.files import locked, write_atomic
from ebbflow.planners.model.capacity import Node

KEEP = 90 * 86400.0
"""Seconds after its end for which a stay is kept; EC2 tells no spot prices from before."""

_FORMAT = 1
_PAGE = 1000
_ENDED = ("shutting-down", "terminated")
_BY_EC2 = "Server.SpotInstanceTermination"
# "User initiated (2026-11-21 22:00:00 GMT)"
_WHEN = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)")


@dataclass(frozen=True, slots=True)
class NodeUsage:
    """One node from its start to its end. Times in seconds since the Unix epoch."""

    id: str
    pool: str
    instance_type: str
    zone: str
    spot: bool
    start: float
    end: float | None = None  # None: it is there yet
    interrupted: bool = False  # EC2 took it back
    exact: bool = True  # False: it ended before ``end``, after a look that still found it

    @property
    def node(self) -> Node:
        """The node, for its price; cores and memory are not kept."""
        return Node(
            self.id,
            0,
            0.0,
            instance_type=self.instance_type,
            market="spot" if self.spot else "on-demand",
            zone=self.zone,
        )


@dataclass(frozen=True, slots=True)
class UsageLog:
    """All stays that are known, sorted by start and id, and since when somebody looks."""

    since: float  # seconds since the Unix epoch: of the first look
    stays: tuple[NodeUsage, ...] = ()

    @property
    def begin(self) -> float:
        """Return from when on what is known is whole: the first look, or the start of a node that it found."""
        return min((self.since, *(stay.start for stay in self.stays)))

    def merged(self, found: Iterable[NodeUsage], now: float) -> "UsageLog":
        """Return the book after a look at ``now`` that found these nodes, ended ones too.

        A node that EC2 does not tell of any more has ended before ``now``.
        """
        known = {stay.id: stay for stay in self.stays}
        told = {stay.id: stay for stay in found}
        for stay in told.values():
            old = known.get(stay.id)
            # the first word about an end is the nearest to it, but a look that left a node out was no word at all
            if old is None or old.end is None or stay.end is None or (stay.exact and not old.exact):
                known[stay.id] = stay
        for stay in self.stays:
            if stay.end is None and stay.id not in told:
                known[stay.id] = replace(stay, end=max(now, stay.start), exact=False)
        kept = [stay for stay in known.values() if (inf if stay.end is None else stay.end) > now - KEEP]
        since = self.since if len(kept) == len(known) else max(self.since, now - KEEP)
        return UsageLog(since, tuple(sorted(kept, key=lambda stay: (stay.start, stay.id))))


class UsageStore:
    """Keeps the book of one cluster in a local file. Safe for several processes of a machine."""

    def __init__(self, clients: Clients, names: Names, path: str | Path, clock: Clock | None = None) -> None:
        self._clients = clients
        self._names = names
        self._path = Path(path)
        self._clock = clock or SystemClock()

    def look(self) -> UsageLog:
        """Ask EC2, keep what it tells, and return all that is known. Raises ``AwsError`` and ``StorageError``."""
        now = self._clock.now()
        found = self._ask(now)
        try:
            private.make_folder(self._path.parent)
            with locked(f"{self._path}.lock", self._clock):
                book = self.read(now).merged(found, now)
                write_atomic(None, "file", str(self._path), _encoded(book))
        except OSError as error:
            raise StorageError(f"cannot write {self._path}: {error.strerror}") from error
        return book

    def read(self, now: float) -> UsageLog:
        """Return what is kept; a book that begins at ``now`` where nothing is. Raises ``StorageError``."""
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            if content["format"] != _FORMAT:
                raise ValueError(f"format must be {_FORMAT}; got {content['format']!r}")
            return UsageLog(float(content["since"]), tuple(NodeUsage(**row) for row in content["stays"]))
        except FileNotFoundError:
            return UsageLog(now)
        except OSError as error:
            raise StorageError(f"cannot read {self._path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StorageError(
                f"{self._path} is no record of instance usage ({type(error).__name__}: {error}); delete"
                f" it: costs are then "
                "counted from the nodes that are there"
            ) from error

    def _ask(self, now: float) -> list[NodeUsage]:
        filters = [
            {"Name": f"tag:{TAG_CLUSTER}", "Values": [self._names.cluster]},
            {"Name": f"tag:{TAG_MANAGED}", "Values": [MANAGED_BY_LOOP]},
        ]
        pages = self._clients.client("ec2").get_paginator("describe_instances")
        with calling("describe the cluster's instances"):
            return [
                _stay(one, now)
                for page in pages.paginate(Filters=filters, PaginationConfig={"PageSize": _PAGE})
                for reservation in page["Reservations"]
                for one in reservation["Instances"]
            ]


def _stay(one: Mapping[str, Any], now: float) -> NodeUsage:
    launched = one["LaunchTime"]
    start = (launched if launched.tzinfo else launched.replace(tzinfo=UTC)).timestamp()
    stay = NodeUsage(
        one["InstanceId"],
        {tag["Key"]: tag["Value"] for tag in one.get("Tags", ())}.get(TAG_POOL, ""),
        one["InstanceType"],
        one.get("Placement", {}).get("AvailabilityZone", ""),
        one.get("InstanceLifecycle") == "spot",
        start,
    )
    if one["State"]["Name"] not in _ENDED:
        return stay
    said = _WHEN.search(one.get("StateTransitionReason", ""))
    end = datetime.fromisoformat(f"{said[1]}+00:00").timestamp() if said else now
    interrupted = one.get("StateReason", {}).get("Code") == _BY_EC2
    return replace(stay, end=max(end, start), interrupted=interrupted, exact=said is not None)


def _encoded(book: UsageLog) -> bytes:
    rows = [{name: getattr(stay, name) for name in NodeUsage.__slots__} for stay in book.stays]
    return (json.dumps({"format": _FORMAT, "since": book.since, "stays": rows}, indent=1) + "\n").encode()
