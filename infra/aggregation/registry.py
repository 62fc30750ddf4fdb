"""``ServiceRegistry``: a cluster's shared aggregation service as the ledger has it.

There are records of aggregators (where they listen and what they hold), of trainings (whose workers they admit), of
profiles (what was measured of a training), of placements (where its tensors are to be) and of the manager. All but
the first two are written by the manager alone, in transactions that another one's record ends: so whoever takes over
continues with what is there.
"""

import secrets
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from ebbflow.infra.aggregation.frames import AggregatorAddress
from ebbflow.infra.aggregation.timing import HeldTensor
from ebbflow.infra.errors import LedgerError
from ebbflow.infra.ledger.records import RecordKey, Records, ServiceRecords
from ebbflow.planners.aggregation.model import AggregationTask, JobProfile

HEARTBEAT = 1.0  # seconds between two records of an aggregator
TIMEOUT = 6.0  # seconds without one after which it counts as lost
_GAP = 3.0  # seconds in which nobody has written, after which the ledger counts as out of reach
_RETURN = 15.0  # seconds that others may take to reach it again, as a dead connection to PostgreSQL does
MANAGER = RecordKey("aggregation-manager", "manager")
AGGREGATOR, TRAINING = "aggregator", "aggregated-training"
PROFILE, PLACEMENT = "aggregation-profile", "aggregation-placement"
DRAIN = "aggregation-drain"
DEMAND = "aggregation-demand"  # of runs, also of those for which no aggregator is there yet
PROVISIONING = RecordKey("aggregation-provisioning", "loop")  # what the capacity loop may launch
ACCOUNTS = RecordKey("aggregation-accounts", "accounts")
ABANDONED = 60.0  # seconds without a sign of life of its launcher after which a training is forgotten


@dataclass(frozen=True, slots=True)
class AggregatorRecord:
    """An aggregator.

    Args:
        address: host:port on which it listens.
        public: its key.
        peer: key by which it proves itself to other aggregators.
        held: its tensors, by training.
        admitted: revision of each training whose workers it admits.
        leaving: when it ends, seconds since the Unix epoch; ``None``: not known.
        ended: whether it has ended with nothing left on it.
        moved: tensors that it has given to others so far.
        waited: seconds for which whole rounds of gradients waited for copies of tensors that came here, so far.
        updates: of tensors so far.
        node: ID of the node that it is on, as the capacity loop knows it; empty: not known.
    """

    address: str
    public: str
    peer: str
    held: Mapping[str, Mapping[str, HeldTensor]] = field(default_factory=dict)
    admitted: Mapping[str, int] = field(default_factory=dict)
    leaving: float | None = None
    ended: bool = False
    moved: int = 0
    waited: float = 0.0
    updates: int = 0
    node: str = ""

    @property
    def where(self) -> AggregatorAddress:
        """Return where it listens."""
        return AggregatorAddress(self.address, self.public)

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """Return the record of its plain values."""
        held = {
            job: {name: HeldTensor.of(one) for name, one in tensors.items()}
            for job, tensors in body["held"].items()
        }
        known = {one.name for one in fields(cls)}  # a newer version's may have more
        return cls(**{name: value for name, value in body.items() if name in known} | {"held": held})


@dataclass(frozen=True, slots=True)
class TrainingRecord:
    """A training that the service serves.

    Args:
        servers: private servers that it would have.
        peers: public key of each worker.
        revision: rises with each change of ``peers``.
    """

    servers: int
    peers: Mapping[str, str] = field(default_factory=dict)
    revision: int = 0


class SilenceClock:
    """Tells for how long records were not written although they could have been. Safe for several threads.

    Time counts only where this process could read and somebody wrote: while the ledger is out of reach nobody can
    show a sign of life. It is this process's time, in which it has seen a record's date change: other nodes' clocks
    may differ. Only at the first look is a date all that is known.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._looked: float | None = None
        self._counted = 0.0  # seconds so far
        self._written = 0.0  # when the latest change was seen
        self._settled = float("-inf")  # when the others have had the time to reach the ledger again
        self._seen: dict[
            RecordKey, tuple[float, float]
        ] = {}  # each record's date, and the count at its change

    def miss(self, now: float) -> None:
        """Take note that the ledger could not be read.

        Args:
            now: seconds since the Unix epoch, by this process's clock.
        """
        with self._lock:
            self._settled = now + _RETURN

    def look(self, records: Records, now: float) -> dict[RecordKey, float]:
        """Return the seconds of silence of each record.

        Args:
            records: as they were read.
            now: seconds since the Unix epoch, by this process's clock.
        """
        with self._lock:
            changed = [key for key, one in records.items() if self._date(key) != one.at]
            first = self._looked is None
            step = 0.0 if self._looked is None else now - self._looked
            if changed or first:
                self._written = now
            elif now - self._written > _GAP:
                self._settled = now + _RETURN
            if step <= _GAP and now >= self._settled:
                self._counted += step
            self._looked = now
            for key in changed:
                at = records[key].at
                self._seen[key] = at, self._counted - (max(0.0, now - at) if first else 0.0)
            self._seen = {key: one for key, one in self._seen.items() if key in records}
            return {key: self._counted - since for key, (_, since) in self._seen.items()}

    def _date(self, key: RecordKey) -> float | None:
        found = self._seen.get(key)
        return None if found is None else found[0]


def incarnation(name: str) -> str:
    """Return the name under which a process serves as this aggregator: another one has other keys, and no tensors."""
    return f"{name}@{secrets.token_hex(4)}"


def plain_name(name: str) -> str:
    """Return the name that people gave an aggregator."""
    return name.partition("@")[0]


class ServiceRegistry:
    """Reads and writes the records of a service. Safe for several threads.

    Args:
        records: of the cluster's ledger.
    """

    def __init__(self, records: ServiceRecords) -> None:
        self._records = records
        self._silences = SilenceClock()

    @property
    def now(self) -> float:
        """Return the time by which records are dated, seconds since the Unix epoch."""
        return self._records.clock.now()

    def read(self) -> "ServiceView":
        """Return what is there. Raises ``LedgerError``."""
        try:
            found = self._records.read()
        except LedgerError:
            self._silences.miss(self.now)
            raise
        return self.view(found)

    def view(self, records: Records) -> "ServiceView":
        """Return what records say that were read in a transaction."""
        now = self.now
        return ServiceView(records, now, self._silences.look(records, now))

    def put_aggregator(self, name: str, record: AggregatorRecord) -> None:
        """Write an aggregator's record, which is its sign of life. Raises ``LedgerError``."""
        self._records.put(RecordKey(AGGREGATOR, name), asdict(record))

    def put_training(self, job: str, record: TrainingRecord) -> None:
        """Write a training's record, which is its launcher's sign of life. Raises ``LedgerError``."""
        self._records.put(RecordKey(TRAINING, job), asdict(record))

    def drop_training(self, job: str) -> None:
        """Remove a training. Raises ``LedgerError``."""
        self._records.write(lambda _: {RecordKey(TRAINING, job): None})

    def put_demand(self, run: str, app: str, servers: int) -> None:
        """Write what a run needs of the service, which is its sign of life. Raises ``LedgerError``.

        Args:
            run: of it, unique.
            app: its ID as others know it.
            servers: aggregators that it begins on, mirrors included.
        """
        self._records.put(RecordKey(DEMAND, run), {"app": app, "servers": servers})

    def drop_demand(self, run: str) -> None:
        """Remove what a run needs. Raises ``LedgerError``."""
        self._records.write(lambda _: {RecordKey(DEMAND, run): None})

    def put_provisioning(self, max_nodes: int) -> None:
        """Write how many nodes for aggregators the capacity loop may launch. Raises ``LedgerError``."""
        self._records.put(PROVISIONING, {"max_nodes": max_nodes})

    def drain(self, name: str, deadline: float) -> None:
        """Ask an aggregator to end by a time, seconds since the Unix epoch. Raises ``LedgerError``."""
        self._records.put(RecordKey(DRAIN, name), {"deadline": deadline})

    def drop_aggregator(self, name: str) -> None:
        """Remove an aggregator. Raises ``LedgerError``."""
        self._records.write(lambda _: {RecordKey(AGGREGATOR, name): None, RecordKey(DRAIN, name): None})

    @property
    def records(self) -> ServiceRecords:
        """Return the records themselves."""
        return self._records


@dataclass(frozen=True, slots=True)
class ServiceView:
    """A service at one moment.

    Args:
        records: of it.
        now: when they were read, seconds since the Unix epoch.
        silences: seconds for which each was not written; see ``SilenceClock``.
    """

    records: Records
    now: float
    silences: Mapping[RecordKey, float]

    def kind(self, kind: str) -> dict[str, Mapping[str, Any]]:
        """Return the bodies of records of a kind, by name."""
        return {key.name: one.body for key, one in sorted(self.records.items()) if key.kind == kind}

    def aggregators(self) -> dict[str, AggregatorRecord]:
        """Return the aggregators that show signs of life, by name."""
        return {
            key.name: AggregatorRecord.of(one.body)
            for key, one in sorted(self.records.items())
            if key.kind == AGGREGATOR and self.silence(*key) < TIMEOUT and not one.body["ended"]
        }

    def drained(self) -> set[str]:
        """Return the aggregators that have ended with nothing left on them."""
        return {name for name, body in self.kind(AGGREGATOR).items() if body["ended"]}

    def trainings(self) -> dict[str, TrainingRecord]:
        """Return the trainings, by id."""
        return {name: TrainingRecord(**body) for name, body in self.kind(TRAINING).items()}

    def provisions(self) -> int:
        """Return how many aggregators a capacity loop can have at most; 0: none works on that."""
        found = self.kind(PROVISIONING.kind).get(PROVISIONING.name)
        if found is None or self.silence(*PROVISIONING) > ABANDONED:
            return 0
        return int(found["max_nodes"])

    def demands(self) -> dict[str, Mapping[str, Any]]:
        """Return what runs need of the service, by run."""
        return {
            name: body for name, body in self.kind(DEMAND).items() if self.silence(DEMAND, name) <= ABANDONED
        }

    def drain_of(self, name: str) -> float | None:
        """Return by when an aggregator was asked to end, seconds since the Unix epoch."""
        found = self.kind(DRAIN).get(name)
        return None if found is None else float(found["deadline"])

    def silence(self, kind: str, name: str) -> float:
        """Return the seconds for which a record was not written; infinite where there is none."""
        return self.silences.get(RecordKey(kind, name), float("inf"))

    def profiles(self) -> dict[str, JobProfile]:
        """Return the profiles of trainings that were measured, by id."""
        return {
            job: JobProfile(
                job,
                body["iteration_us"],
                tuple(AggregationTask(job, name, us, size) for name, (us, size) in body["tensors"].items()),
                body["servers"],
            )
            for job, body in self.kind(PROFILE).items()
        }

    def hosts(self) -> dict[tuple[str, str], str]:
        """Return the aggregator of each tensor, mirrors and incomplete copies left out."""
        return {
            (job, tensor): name
            for name, one in self.aggregators().items()
            for job, tensors in one.held.items()
            for tensor, held in tensors.items()
            if not held.incomplete and not held.mirror
        }

    def mirrors(self) -> dict[tuple[str, str], set[str]]:
        """Return the aggregators that mirror each tensor."""
        found: dict[tuple[str, str], set[str]] = {}
        for name, one in self.aggregators().items():
            for job, tensors in one.held.items():
                for tensor in (tensor for tensor, held in tensors.items() if held.mirror):
                    found.setdefault((job, tensor), set()).add(name)
        return found

    def placement(self) -> dict[tuple[str, str], str]:
        """Return where tensors are to be, as far as that is decided."""
        return {
            (job, tensor): host
            for job, body in self.kind(PLACEMENT).items()
            for tensor, host in body["hosts"].items()
        }

    def intended(self) -> dict[tuple[str, str], str]:
        """Return where tensors are or, where they move to an aggregator that is there, will be.

        One is nowhere else between the end of its old copy and the first record that has the new one.
        """
        there = self.aggregators()
        wanted = {key: host for key, host in self.placement().items() if host in there}
        return {**self.hosts(), **wanted}


def savings(view: ServiceView) -> dict[str, Any]:
    """Return what sharing saves: private servers, aggregators with tensors, and the fraction saved."""
    private = sum(one.servers for one in view.trainings().values())
    used = sum(1 for one in view.aggregators().values() if one.held)
    return {"private": private, "used": used, "saved": 1 - used / private if private else 0.0}
