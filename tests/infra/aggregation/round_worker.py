"""A worker of tests that does whole rounds over an agent: all workers agree on every step."""

from collections.abc import Iterable, Mapping

import numpy as np

from ebbflow.infra.aggregation.agent import AggregationAgent
from ebbflow.infra.aggregation.frames import Buffer, TensorFrame
from ebbflow.infra.aggregation.rules import Adam, Floats, Sgd, as_float32, rule_values


class RoundWorker:
    def __init__(self, agent: AggregationAgent, place: int = 0, places: int = 1) -> None:
        self.agent, self.place, self.places, self.view = agent, place, places, 1
        self.squares: dict[str, float] = {}
        self.number = 0  # of its last round

    def init(
        self, tensors: Mapping[str, Floats], rule: Sgd | Adam, step: int = 0, moments: Iterable[str] = ()
    ) -> None:
        options = {"rule": rule_values(rule), "step": step, "moments": list(moments)}
        data = {name: memoryview(one).cast("B") if one.size else b"" for name, one in tensors.items()}
        self.agent.init(data, dict.fromkeys(tensors, options))

    def pull(self, names: Iterable[str], number: int) -> dict[str, Floats]:
        names = list(names)
        self.agent.pull(names, number)
        return _arrays(self.agent.parameters(names))

    def push(
        self, gradients: Mapping[str, Buffer], number: int, *, dtype: str = "float32", skip: bool = False
    ) -> dict[str, Floats]:
        for name, data in gradients.items():
            raw = memoryview(data).cast("B")
            self.agent.push(name, raw, number, self.view, self.place, self.places, dtype=dtype)
        self.squares = self.agent.norms(gradients)
        self.agent.commit(dict.fromkeys(gradients, {"skip": True} if skip else {}), number, self.view)
        return _arrays(self.agent.parameters(gradients))

    def close(self) -> None:
        self.agent.close()


def _arrays(frames: Mapping[str, TensorFrame]) -> dict[str, Floats]:
    return {name: np.array(as_float32(one.payload, one.dtype)) for name, one in frames.items()}
