"""``SharedAggregators``: the aggregators of a cluster's service, as one training's launcher uses them."""

import json
import logging
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ebbflow.infra.aggregation.frames import AggregatorAddress
from ebbflow.infra.aggregation.registry import AggregatorRecord, ServiceRegistry, ServiceView, TrainingRecord
from ebbflow.infra.errors import AggregationError, InfraError
from ebbflow.infra.ledger.ledger import Ledger
from ebbflow.infra.training.service.joining import AGGREGATORS

_LOOK = 0.5  # seconds between two looks at the ledger
_BEAT = 2.0  # seconds between two signs of life
_SHOW = 2.5  # seconds in which an aggregator that serves shows it, whatever its node's clock says
_PROVISION = 600.0  # seconds that a run waits for aggregators which a capacity loop is to launch
_CLOSING = 10.0  # seconds for the ledger to be told that the run is over; else the service finds it out

log = logging.getLogger(__name__)


class SharedAggregators:
    """Registers a run's generations with a service; see ``AggregatorSet``. Used by one thread.

    A thread of its own talks to the ledger, so that a ledger which does not answer holds nobody up.

    Args:
        cluster: whose service it is, in the ledger.
        run: ID of the run; others may have the same.
        servers: aggregators that the run would have of its own.
        mirrors: further aggregators that hold each tensor.
        timeout_s: seconds in which aggregators must be there, and admit workers.
        ledger: its address; ``None``: that of ``$EBBFLOW_LEDGER``.

    Raises ``LedgerError``, where there is no such ledger too.
    """

    def __init__(
        self,
        cluster: str,
        run: str,
        servers: int,
        mirrors: int = 0,
        *,
        timeout_s: float = 60.0,
        ledger: str | None = None,
    ) -> None:
        self._cluster, self._servers, self._mirrors = cluster, servers, mirrors
        self._app = run
        self._run = f"{run}-{secrets.token_hex(4)}"  # IDs of runs are unique in their directory only
        self._timeout = timeout_s
        self._ledger = Ledger.open(ledger, cluster=cluster, create=False)  # a new one has no aggregators
        self._registry = ServiceRegistry(self._ledger.records)
        self._trainings: dict[str, TrainingRecord] = {}
        self._unwritten: set[str] = set()  # trainings whose records are to be written, or removed
        self._view: ServiceView | None = None  # that was read last
        self._reads = 0
        self._problem: InfraError | None = None  # of the ledger, since the last read
        self._addresses: dict[str, AggregatorAddress] = {}
        self._holding: dict[str, bool] = {}  # by aggregator that was seen: whether it has tensors of this run
        self._lost: list[str] = []
        self._followed = 0  # reads
        self._asks = False  # whether the run's demand is to be written
        self._begun = False
        self._ended = threading.Event()
        self._wake = threading.Event()
        self._changed = threading.Condition()  # of what both threads use
        self._thread = threading.Thread(target=self._serve, name="ebbflow-aggregation", daemon=True)
        self._thread.start()

    def start(self) -> None:
        """Choose aggregators to begin with, idle ones first; those of a run that has begun are waited for.

        So are those that a capacity loop is to launch.

        Raises ``AggregationError`` for too few, and ``LedgerError`` where it does not answer in time.
        """
        count = max(self._servers, self._mirrors + 1)
        began = time.monotonic()
        while len(there := self._staying()) < count:
            waited = time.monotonic() - began
            launched = self._launched()
            patience = _PROVISION if launched > len(there) else self._timeout if self._begun else _SHOW
            if waited >= (min(patience, self._timeout) if len(there) > self._mirrors else patience):
                break
            if len(there) > self._mirrors and launched <= len(there):
                break  # no more of them will come
            if self._ended.wait(_LOOK / 2):
                break
        if len(there) <= self._mirrors:
            raise AggregationError(
                f"cluster {self._cluster} must have at least {self._mirrors + 1} aggregators, and has {len(there)}:"
                f" ebbflow aggregation serve NAME --cluster {self._cluster}"
            )
        load = {
            name: sum(held.bytes for own in one.held.values() for held in own.values())
            for name, one in there.items()
        }
        chosen = sorted(there, key=lambda name: (load[name], name))[:count]
        self._addresses = {name: there[name].where for name in chosen}
        self._holding, self._lost = dict.fromkeys(chosen, True), []
        self._begun = True

    @property
    def environment(self) -> dict[str, str]:
        """Return what workers need to find them."""
        found = [
            {"name": name, "address": where.address, "public": where.public}
            for name, where in self._addresses.items()
        ]
        return {AGGREGATORS: json.dumps(found)}

    def ended(self) -> list[str]:
        """Return those that are lost with tensors of this run. A ledger that does not answer tells of none."""
        with self._changed:
            view, reads = self._view, self._reads
        if view is not None and reads != self._followed:
            self._followed = reads
            self._follow(view)
        return list(self._lost)

    def admit(self, job_id: str, peers: Mapping[str, str]) -> None:
        """Admit nodes of a generation by their public keys, at all aggregators of the service.

        Raises ``AggregationError`` where they do not in time.
        """
        end = time.monotonic() + self._timeout
        while not self.admits(job_id, peers):
            if time.monotonic() > end:
                with self._changed:
                    late = ", ".join(self._late(self._job(job_id))) or self._problem or "nobody"
                raise AggregationError(
                    f"aggregators must admit a training's workers within {self._timeout:g} s, and {late} did not"
                )
            time.sleep(0.05)

    def admits(self, job_id: str, peers: Mapping[str, str]) -> bool:
        """Ask for their admission, and return at once whether all aggregators have admitted them."""
        job = self._job(job_id)
        with self._changed:
            old = self._trainings.get(job, TrainingRecord(self._servers))
            if job not in self._trainings or peers.items() - old.peers.items():
                self._trainings[job] = replace(old, peers={**old.peers, **peers}, revision=old.revision + 1)
                self._unwritten.add(job)
                self._wake.set()
            there = self._view is not None and bool(self._view.aggregators())
            return there and not self._late(job)

    def remove(self, job_id: str) -> None:
        """Let the service forget a generation's tensors and nodes."""
        job = self._job(job_id)
        with self._changed:
            if self._trainings.pop(job, None) is not None:
                self._unwritten.add(job)
                self._wake.set()

    def held(self) -> dict[str, dict[str, Any]]:
        """Return nothing: the ledger has what they hold."""
        return {}

    def close(self) -> None:
        """Leave the service. May be called twice."""
        self._ended.set()
        self._wake.set()
        self._thread.join(_CLOSING)

    def _staying(self) -> dict[str, AggregatorRecord]:
        """Return the aggregators that are there to stay, as the ledger says. Raises ``LedgerError``."""
        with self._changed:
            before = self._reads
            self._wake.set()
            if not self._changed.wait_for(lambda: self._reads > before, self._timeout):
                raise self._problem or AggregationError(
                    f"the ledger of cluster {self._cluster} must answer within {self._timeout:g} s, and did not"
                )
            assert self._view is not None
            return {name: one for name, one in self._view.aggregators().items() if one.leaving is None}

    def _launched(self) -> int:
        with self._changed:
            return self._view.provisions() if self._view is not None else 0

    def _late(self, job: str) -> list[str]:
        found = self._view.aggregators() if self._view is not None else {}
        revision = self._trainings[job].revision
        return [name for name, one in found.items() if one.admitted.get(job, 0) < revision]

    def _follow(self, view: ServiceView) -> None:
        there, drained = view.aggregators(), view.drained()
        wanted = {host for (job, _), host in view.intended().items() if job in self._trainings}
        if not wanted:  # workers have not handed over anything yet
            wanted = set(self._addresses)
        for name in self._holding.keys() - there.keys():
            if self._holding.pop(name) and name not in drained:
                self._lost.append(name)
        for name, one in there.items():
            mine = any(job in self._trainings for job in one.held)
            self._holding[name] = mine or name in wanted

    # --- in the thread of its own ---------------------------------------------------------------------------

    def _serve(self) -> None:
        beaten = float("-inf")
        while not self._ended.is_set():
            if time.monotonic() - beaten >= _BEAT:
                beaten = time.monotonic()
                with self._changed:
                    self._unwritten |= self._trainings.keys()
                self._asks = True
            self._talk()
            self._wake.wait(_LOOK)
            self._wake.clear()
        with self._changed:
            self._unwritten |= self._trainings.keys()
            self._trainings = {}
        try:
            self._write()
            self._registry.drop_demand(self._run)
        except InfraError as exc:
            log.warning("the aggregation service finds out by itself that run %s is over: %s", self._run, exc)
        self._ledger.close()

    def _talk(self) -> None:
        try:
            self._write()
            view = self._registry.read()
        except InfraError as exc:  # it is tried again
            with self._changed:
                if self._problem is None:
                    log.warning("run %s continues without the ledger: %s", self._run, exc)
                self._problem = exc
            return
        with self._changed:
            self._view, self._problem = view, None
            self._reads += 1
            self._changed.notify_all()

    def _write(self) -> None:
        with self._changed:
            due = {job: self._trainings.get(job) for job in self._unwritten}
        if self._asks:
            self._registry.put_demand(self._run, self._app, max(self._servers, self._mirrors + 1))
            self._asks = False
        for job, record in due.items():
            if record is None:
                self._registry.drop_training(job)
            else:
                self._registry.put_training(job, record)
            with self._changed:
                if self._trainings.get(job) is record:
                    self._unwritten.discard(job)

    def _job(self, job_id: str) -> str:
        return f"{self._run}/{job_id}"
