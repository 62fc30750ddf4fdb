"""What queries keep and share outside of any engine: outputs of stages, and claims on a cluster.

An author of a place for stages' outputs implements ``CheckpointStore``: an ``Attempt`` becomes a ``Checkpoint`` whole
or not at all. One of a place where queries find each other implements ``ShareRegistry``, whose ``join`` returns a
``ShareHandle`` with the query's own ``Claim``. Both serve several processes at once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ebbflow.infra.protocols.engine import Relation
from ebbflow.infra.storage.places import StorageLocation

# --- checkpoints ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A durable, complete stage output."""

    fingerprint: str
    uri: str  # directory with its Parquet files
    relation: Relation  # named "ckpt_<fingerprint>"
    rows: int
    bytes: int
    seconds: float  # that the stage took
    created: float  # seconds since the Unix epoch
    sources: Mapping[str, str] = field(default_factory=dict)  # table name -> version


@dataclass(frozen=True, slots=True)
class Attempt:
    """A directory that one run of a stage may write into; nobody reads it until it is committed."""

    fingerprint: str
    id: str
    place: StorageLocation


class CheckpointStore(Protocol):
    """Durable stage outputs, by fingerprint. Safe for several processes at once."""

    place: StorageLocation

    def begin(self, fingerprint: str) -> Attempt:
        """Make a new directory to write into. Raises ``StorageError``."""
        ...

    def commit(
        self,
        attempt: Attempt,
        *,
        rows: int,
        columns: Sequence[tuple[str, str]],
        seconds: float,
        sources: Mapping[str, str],
    ) -> Checkpoint:
        """Write the manifest, last and atomically; from then on the checkpoint exists.

        If another process has committed a valid one first, that one is returned and this attempt dropped.
        """
        ...

    def discard(self, attempt: Attempt) -> None:
        """Drop an attempt's files; never raises for missing ones, or for those that cannot be deleted now."""
        ...

    def find(
        self, fingerprint: str, sources: Mapping[str, str] | None = None, *, verified: bool = True
    ) -> Checkpoint | None:
        """Return the checkpoint if it is whole and of these source versions, else ``None``.

        ``verified=False`` compares only names and sizes of its files with the manifest, which is quick: ``verify``
        must then be called before the first use. What cannot be used is noted in ``problems``; what is damaged is
        set aside as well, so that nobody meets it again.
        """
        ...

    def verify(self, checkpoint: Checkpoint, *, anew: bool = False) -> bool:
        """Tell whether the checkpoint's files are what was written, to the byte; set aside what is not.

        A file is hashed once, until its size or time changes; ``anew`` hashes it again. Raises ``StorageError``
        for files that cannot be read.
        """
        ...

    def problems(self) -> list[str]:
        """Return and forget what ``find`` had to ignore, as sentences for people."""
        ...

    def collect(self, budget: int, keep: frozenset[str] = frozenset()) -> int:
        """Delete least recently used checkpoints beyond ``budget`` bytes, never ``keep``; return bytes freed.

        Attempts abandoned for over a day are deleted too.
        """
        ...


# --- shares -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Claim:
    """One active query's claim on a cluster."""

    id: str
    weight: float  # > 0; shares are proportional to it
    limit: float = math.inf  # cores that the query can use at most now
    application: str = ""  # of the engine that runs it, such as Spark's application id


class ShareHandle(Protocol):
    """One's own claim, kept alive until ``leave``."""

    claim: Claim

    def limit(self, cores: float) -> None:
        """Say that the query can use ``cores`` at most from now on."""
        ...

    def leave(self) -> None:
        """Give the claim up. May be called twice; never raises."""
        ...


class ShareRegistry(Protocol):
    """The active queries of one cluster, seen by all that run on it."""

    def join(self, weight: float, *, limit: float = math.inf, application: str = "") -> ShareHandle:
        """Enter a query. Raises ``StorageError``."""
        ...

    def claims(self) -> Sequence[Claim]:
        """Return the claims of all active queries in the order of their arrival.

        A claim whose holder has ended without leaving disappears within seconds. Raises ``StorageError``.
        """
        ...
