"""What ``ebbflow simulate memory`` does: machines that lend memory to each other, under several policies."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import isnan
from typing import Any

from ebbflow.planners.errors import OptionError
from ebbflow.planners.memory.simulation.outcome import Outcome, medians, quartiles, simulate
from ebbflow.planners.memory.simulation.policies import POLICIES
from ebbflow.planners.memory.simulation.scenario import DaemonFault, Scenario
from ebbflow.planners.model.numbers import parse_whole
from ebbflow.tasks.faults import Grammar

FAULTS = Grammar("a simulation of shared memory", ("kill",), "4m:kill:3")
"""A daemon's machine is named by its number."""

MAX_SEEDS = 10_000
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class MemorySimulation:
    """What is simulated. Raises ``OptionError`` for a value that breaks its rule.

    Args:
        policies: to compare, of ``POLICIES``.
        machines: of 64 GB each.
        containers: that run on them.
        occupancy: bytes of slabs touched for a byte that does not fit in a container's memory.
        seeds: number of simulations of each policy, with seeds 0, 1, ...
        until_s: seconds of a simulation.
        start_s: seconds over which containers start.
        faults: texts such as ``4m:kill:3``.
    """

    policies: Sequence[str] = tuple(POLICIES)
    machines: int = 32
    containers: int = 90
    occupancy: float = 2.1
    seeds: int = 10
    until_s: float = 600.0
    start_s: float = 0.0
    faults: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in self.policies:
            if name not in POLICIES:
                raise OptionError(f"--policy must be of {', '.join(POLICIES)}; got {name!r:.60}")
        if not self.policies:
            raise OptionError(f"--policy must be of {', '.join(POLICIES)}; got none")
        for option, value, low, high in (
            ("--machines", self.machines, 2, 1000), ("--containers", self.containers, 1, 10_000),
            ("--occupancy", self.occupancy, 1, 100), ("--seeds", self.seeds, 1, MAX_SEEDS),
            ("--until", self.until_s, 1, 86_400), ("--start-spread", self.start_s, 0, 86_400),
        ):  # fmt: skip
            if not low <= value <= high:
                raise OptionError(f"{option} must be from {low:,} to {high:,}; got {value:g}")
        self.scenario  # noqa: B018 (its rules are this one's)

    @property
    def scenario(self) -> Scenario:
        """Return the load. Raises ``OptionError``."""
        return Scenario(
            machines=self.machines,
            containers=self.containers,
            occupancy=self.occupancy,
            until_s=self.until_s,
            measure_s=min(self.until_s, 240.0 + self.start_s),
            start_s=self.start_s,
            faults=[self._fault(text) for text in self.faults],
        )

    def _fault(self, text: str) -> DaemonFault:
        fault = FAULTS.parse(text)
        machine = parse_whole(fault.target, f"machine of the fault {text!r:.60}", max=self.machines - 1)
        return DaemonFault(fault.after, machine)

    def run(self, progress: Progress = lambda what, done, total: None) -> list[dict[str, Any]]:
        """Return the figures of each policy: medians over the seeds, and their quartiles.

        Args:
            progress: is told the policy, and how many simulations of how many are done.
        """
        found, total = [], len(self.policies) * self.seeds
        for n, name in enumerate(self.policies):
            outcomes = []
            for seed in range(self.seeds):
                progress(name, n * self.seeds + seed, total)
                outcomes.append(simulate(self.scenario, POLICIES[name], seed))
            low, high = quartiles(outcomes)
            found.append(
                {
                    "policy": name,
                    "median": _plain(medians(outcomes)),
                    "quartiles": [_plain(low), _plain(high)],
                }
            )
        progress("", total, total)
        return found


def _plain(outcome: Outcome) -> dict[str, float | None]:
    return {name: None if isnan(value) else value for name, value in asdict(outcome).items()}
