"""Training jobs with deadlines, and how fast they are on which rented machines.

Speeds are those that Gavel's authors measured (OSDI 2020, artefact: steps per second on 1, 2, 4 and 8 GPUs, on one
server and on several of one GPU each); between those counts they are taken to lie on straight lines. A job on more
nodes than help it leaves some out.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.prices import HOUR, Machine

MACHINES: Mapping[str, Machine] = {
    machine.instance_type: machine
    for machine in (
        Machine("p2.xlarge", 4, 61.0, 1, 0.90),
        Machine("p2.8xlarge", 32, 488.0, 8, 7.20),
        Machine("p3.2xlarge", 8, 61.0, 1, 3.06),
        Machine("p3.8xlarge", 32, 244.0, 4, 12.24),
        Machine("p3.16xlarge", 64, 488.0, 8, 24.48),
    )
}
"""By type, with the on-demand prices of the US regions in early 2020, $/h."""

COUNTS = (1, 2, 4, 8)

Speeds = Mapping[str, tuple[float, ...]]
"""Steps per second of 1, 2, 4, ... nodes, by instance type."""

MODELS: Mapping[str, Speeds] = {
    "ResNet-50": {  # batch size 32
        "p2.xlarge": (1.237, 2.559, 5.040, 10.003),
        "p2.8xlarge": (8.792,),
        "p3.2xlarge": (7.787, 8.974, 12.846, 22.830),
        "p3.8xlarge": (13.763,),
        "p3.16xlarge": (24.067,),
    },
    "ResNet-18": {  # batch size 64
        "p2.xlarge": (7.052, 13.993, 25.065, 45.615),
        "p2.8xlarge": (42.644,),
        "p3.2xlarge": (24.093, 31.480, 38.311, 63.154),
        "p3.8xlarge": (95.588,),
        "p3.16xlarge": (255.829,),
    },
    "Transformer": {  # batch size 128
        "p2.xlarge": (0.982, 1.566, 2.853, 5.178),
        "p2.8xlarge": (5.257,),
        "p3.2xlarge": (5.446, 5.049, 7.784, 13.030),
        "p3.8xlarge": (14.175,),
        "p3.16xlarge": (30.884,),
    },
    "LM": {  # batch size 80
        "p2.xlarge": (6.054, 10.127, 17.434, 28.984),
        "p2.8xlarge": (28.286,),
        "p3.2xlarge": (28.240, 17.747, 26.650, 47.891),
        "p3.8xlarge": (74.807,),
        "p3.16xlarge": (231.176,),
    },
    "A3C": {"p2.xlarge": (3.439,), "p3.2xlarge": (7.176,)},
    "Recommendation": {"p2.xlarge": (10.441,), "p3.2xlarge": (7.470,)},  # batch size 2048
}
"""Of Gavel's job types one of each model and size of gang; the last two run on one GPU only."""


@dataclass(frozen=True, slots=True)
class Job:
    """So many steps of a model, to be done within ``allowed`` seconds of its start."""

    model: str
    steps: float
    allowed: float  # s

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise OptionError(f"model must be one of {', '.join(MODELS)}; got {self.model!r}")
        if not (self.steps > 0 and self.allowed > 0):
            raise OptionError(f"steps and allowed must be > 0; got {self.steps}, {self.allowed}")

    @property
    def types(self) -> tuple[str, ...]:
        """Return the instance types that it runs on."""
        return tuple(MODELS[self.model])

    def most(self, kind: str) -> int:
        """Return the most nodes of a type that it can use."""
        return COUNTS[len(MODELS[self.model][kind]) - 1]

    def speed(self, kind: str, nodes: int) -> float:
        """Return steps per second on the best number of up to ``nodes`` nodes of one type."""
        known = MODELS[self.model].get(kind)
        if known is None or nodes < 1:
            return 0.0
        tried = np.arange(1, min(nodes, self.most(kind)) + 1)
        return float(np.interp(tried, COUNTS[: len(known)], known).max())


def fastest_single(model: str) -> float:
    """Return steps per second on the better of a K80 and a V100."""
    return max(MODELS[model]["p2.xlarge"][0], MODELS[model]["p3.2xlarge"][0])


def job_of(model: str, hours: float, slack: float) -> Job:
    """Return a job of ``hours`` on the better single GPU, allowed ``slack`` times as long."""
    return Job(model, hours * HOUR * fastest_single(model), slack * hours * HOUR)
