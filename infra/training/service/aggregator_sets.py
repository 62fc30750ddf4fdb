"""The aggregators of a launcher's run: its own, or those of a cluster.

Its own are processes beside the launcher, which is not interrupted as workers' nodes are. They outlive a generation;
one that has ended is replaced before the next.
"""

import contextlib
import json
from collections.abc import Mapping
from typing import Any, Protocol

from ebbflow.infra.aggregation.process import AggregatorProcess
from ebbflow.infra.errors import AggregationError
from ebbflow.infra.training.service.joining import AGGREGATORS
from ebbflow.planners.model.trainings import RunSettings

_TOLD = 2.0  # seconds in which an aggregator must say what it holds
_LINGER = 30.0  # seconds that aggregators outlive a launcher that is gone, in which workers save


class AggregatorSet(Protocol):
    """The aggregators that a run uses."""

    def start(self) -> None:
        """Have what a generation needs. Raises ``AggregationError``."""

    @property
    def environment(self) -> dict[str, str]:
        """Return what workers need to find them."""

    def ended(self) -> list[str]:
        """Return those that are gone with what they held."""

    def admit(self, job_id: str, peers: Mapping[str, str]) -> None:
        """Admit nodes of a generation by their public keys. Raises ``AggregationError``."""

    def admits(self, job_id: str, peers: Mapping[str, str]) -> bool:
        """Ask for their admission, and return whether it is done; call again until it is.

        Raises ``AggregationError`` where it cannot be.
        """

    def remove(self, job_id: str) -> None:
        """Forget a generation's tensors and nodes. Raises ``InfraError``."""

    def held(self) -> dict[str, dict[str, Any]]:
        """Return what its own hold, by name: plain values of ``AggregatorRecord``. Those of a cluster are in its
        ledger, and left out here.
        """

    def close(self) -> None:
        """Use them no more. May be called twice. Raises ``InfraError``."""


class AggregatorGroup:
    """Starts and ends a run's aggregators. Used by one thread.

    Args:
        host: address of the interface that they listen on.
        count: number of them.
    """

    def __init__(self, host: str, count: int) -> None:
        self._host, self._count = host, count
        self._started = 0
        self._processes: dict[str, AggregatorProcess] = {}

    def start(self) -> None:
        """Start what is missing. Raises ``AggregationError``."""
        for name in [name for name, one in self._processes.items() if one.ended]:
            self._processes.pop(name).close()
        while len(self._processes) < self._count:
            self._started += 1
            name = f"aggregator-{self._started}"
            self._processes[name] = AggregatorProcess(name, self._host, linger_s=_LINGER)

    @property
    def environment(self) -> dict[str, str]:
        """Return what workers need to find them."""
        found = [
            {"name": name, "address": one.where.address, "public": one.where.public}
            for name, one in self._processes.items()
        ]
        return {AGGREGATORS: json.dumps(found)}

    @property
    def pids(self) -> dict[str, int]:
        """Return their process IDs, by name."""
        return {name: one.pid for name, one in self._processes.items()}

    def ended(self) -> list[str]:
        """Return those whose process is gone."""
        return [name for name, one in self._processes.items() if one.ended]

    def admit(self, job_id: str, peers: Mapping[str, str]) -> None:
        """Admit nodes of a generation by their public keys. Raises ``AggregationError``."""
        self._all(do="admit", job=job_id, workers=dict(peers))

    def admits(self, job_id: str, peers: Mapping[str, str]) -> bool:
        """Admit them, and return that it is done. Raises ``AggregationError``."""
        self.admit(job_id, peers)
        return True

    def remove(self, job_id: str) -> None:
        """Forget a generation's tensors and nodes. Raises ``AggregationError``."""
        self._all(do="remove", job=job_id)

    def status(self) -> dict[str, dict[str, int]]:
        """Return the counts of each that runs."""
        found = {}
        for name, one in self._processes.items():
            if not one.ended:
                found[name] = {key: value for key, value in one.command(do="status").items() if key != "done"}
        return found

    def held(self) -> dict[str, dict[str, Any]]:
        """Return what each holds that runs and answers."""
        found = {}
        for name, one in self._processes.items():
            with contextlib.suppress(AggregationError):  # a report is not worth a failure
                if (record := one.command(_TOLD, do="held").get("record")) is not None:
                    found[name] = record
        return found

    def close(self) -> None:
        """End all of them. May be called twice."""
        for one in self._processes.values():
            one.close()
        self._processes = {}

    def _all(self, **values: object) -> None:
        for one in self._processes.values():
            try:
                one.command(**values)
            except AggregationError:
                if not one.ended:
                    raise


def aggregators_of(settings: RunSettings, run: str, host: str, ledger: str | None = None) -> AggregatorSet:
    """Return the aggregators of a run: its own, or those of a cluster.

    Args:
        settings: of the run.
        run: its ID.
        host: address of the interface that its own listen on.
        ledger: address of the ledger in which a cluster's are found; ``None``: that of ``$EBBFLOW_LEDGER``.

    Raises ``LedgerError``.
    """
    if not settings.aggregation_cluster:
        return AggregatorGroup(host, settings.aggregators)
    from ebbflow.infra.training.service.shared_aggregators import SharedAggregators  # with the ledger

    return SharedAggregators(
        settings.aggregation_cluster, run, settings.aggregators, settings.mirrors, ledger=ledger
    )
