"""Aggregators and agents of trainings, in this process."""

import threading
from collections.abc import Callable, Iterable, Mapping

from ebbflow.infra.aggregation.agent import AggregationAgent
from ebbflow.infra.aggregation.aggregator import SERVICE, Aggregator
from ebbflow.infra.aggregation.frames import AggregatorAddress
from ebbflow.infra.machine.encrypted_router import CurveKeys
from tests.infra.aggregation.round_worker import RoundWorker

PATIENCE = 150.0  # s; machines that run tests are busy


class MovingService:
    """Aggregators that give each other tensors."""

    def __init__(self, *names: str) -> None:
        self.aggregators = {name: Aggregator(name, threads=2) for name in names}
        self.workers: list[RoundWorker] = []
        for one in self.aggregators.values():
            one.admit(
                SERVICE, {name: other.peer for name, other in self.aggregators.items() if other is not one}
            )

    def __enter__(self) -> "MovingService":
        return self

    def __exit__(self, *_: object) -> None:
        for one in (*self.workers, *self.aggregators.values()):
            one.close()

    @property
    def addresses(self) -> dict[str, AggregatorAddress]:
        return {name: AggregatorAddress(one.address, one.public) for name, one in self.aggregators.items()}

    def team(self, job: str, table: Mapping[str, Iterable[str]], workers: int) -> list[RoundWorker]:
        """Return workers of a training that know only the aggregators of their table."""
        pairs = [CurveKeys.make() for _ in range(workers)]
        for one in self.aggregators.values():
            one.admit(job, {f"w{i}": pair.public for i, pair in enumerate(pairs)})
        known = {name for hosts in table.values() for name in hosts}
        where = {name: one for name, one in self.addresses.items() if name in known}
        found = []
        for place, keys in enumerate(pairs):
            hosts = {name: list(own) for name, own in table.items()}
            agent = AggregationAgent(
                keys, where, hosts, timeout_s=PATIENCE, retry_s=1.0, share_memory=place != 1
            )
            found.append(RoundWorker(agent, place, workers))
        self.workers += found
        return found

    def hosts(self, job: str) -> dict[str, set[str]]:
        """Return the aggregators that have each tensor of a training."""
        found: dict[str, set[str]] = {}
        for name, one in self.aggregators.items():
            for tensor in one.held():
                if tensor.job_id == job:
                    found.setdefault(tensor.name, set()).add(name)
        return found


def together(*acts: Callable[[], None]) -> None:
    """Do all of them at once; raise what the first of them raises."""
    failures: list[BaseException] = []

    def guarded(act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=guarded, args=(act,)) for act in acts]
    for one in threads:
        one.start()
    for one in threads:
        one.join(PATIENCE)
    assert not any(one.is_alive() for one in threads)
    if failures:
        raise failures[0]
