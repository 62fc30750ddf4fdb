"""A training of shared aggregators, in this process."""

import threading

import numpy as np

from ebbflow.infra.aggregation.agent import AggregationAgent
from ebbflow.infra.aggregation.rules import Sgd
from ebbflow.infra.machine.encrypted_router import CurveKeys
from ebbflow.infra.training.service import joining
from ebbflow.infra.training.service.shared_aggregators import SharedAggregators
from tests.infra.aggregation.round_worker import RoundWorker
from tests.infra.aggregation.services import PATIENCE

SIZES = {"weight": 30000, "bias": 5}


class FakeRun:
    """A training of one worker, which adds 1 to each gradient's sum in every round."""

    def __init__(self, run: str, servers: int, mirrors: int = 0) -> None:
        self.aggregators = SharedAggregators("local", run, servers, mirrors)
        self.aggregators.start()
        self.job = f"{self.aggregators._run}/generation-1"
        keys = CurveKeys.make()
        self.aggregators.admit("generation-1", {"node-0": keys.public})
        where = joining.addresses(self.aggregators.environment)
        names = list(where)
        self.table = {
            name: [names[(i * (mirrors == 0) + j) % len(names)] for j in range(mirrors + 1)]
            for i, name in enumerate(SIZES)
        }
        agent = AggregationAgent(
            keys, where, self.table, timeout_s=PATIENCE, retry_s=1.0, watch=self._drop_lost
        )
        self.worker = RoundWorker(agent)
        self.problem: Exception | None = None
        self.rounds = 0
        self.found: dict[str, np.ndarray] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._train)
        self._thread.start()

    def _drop_lost(self, _: bool) -> None:
        for name in self.aggregators.ended():
            self.worker.agent.drop(name)

    def _train(self) -> None:
        try:
            self._train_on()
        except Exception as exc:  # raised in the thread of the test
            self.problem = exc

    def _train_on(self) -> None:
        self.worker.init({name: np.zeros(size, np.float32) for name, size in SIZES.items()}, Sgd(lr=1.0))
        self.worker.pull(SIZES, 0)
        while not self._stop.wait(0.02):
            ones = {name: np.ones(size, np.float32).data for name, size in SIZES.items()}
            self.found = self.worker.push(ones, self.rounds)
            self.rounds += 1

    def finish(self) -> None:
        """End, and see that every round has counted once."""
        self._stop.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        assert self.problem is None, self.problem
        assert self.rounds > 0
        assert {float(value) for one in self.found.values() for value in one} == {-float(self.rounds)}
        self.worker.close()
        self.aggregators.remove("generation-1")
        self.aggregators.close()
