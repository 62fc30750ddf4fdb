"""A pipeline as its file says, checked: values for the run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ebbflow.infra.local_fleet.state.pools import LocalPool, PoolKind
from ebbflow.planners.fleet.limits import Limits
from ebbflow.tasks.faults import Fault
from ebbflow.tasks.pipeline.file.kinds import DeadlineSpec

StepKind = Literal["query", "training", "tuning", "elastic"]
TABLES: Mapping[StepKind, str] = {
    "query": "queries",
    "training": "trainings",
    "tuning": "tunings",
    "elastic": "elastic_jobs",
}
"""The section of the file that each kind of step stands in."""


@dataclass(frozen=True, slots=True)
class TeamSpec:
    """A team; what its apps may hold together stands in the quotas."""

    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class LocalSpec:
    """A cluster on this machine."""

    pools: tuple[LocalPool, ...]
    hazard: float | None = None  # losses per node-hour
    faults: tuple[Fault, ...] = ()

    def of(self, kind: PoolKind) -> tuple[LocalPool, ...]:
        """Return the pools of one kind."""
        return tuple(pool for pool in self.pools if pool.kind == kind)

    @property
    def gpus(self) -> int:
        """Return the slots for trainings that there can be."""
        return sum(pool.max_nodes * pool.slots for pool in self.of("gpu"))


@dataclass(frozen=True, slots=True)
class AwsSpec:
    """The cluster that Terraform has made."""

    directory: str
    ledger: str  # as written: may hold ${env:NAME}
    pools: tuple[str, ...] = ()  # that trainings and elastic jobs run on
    spark_pools: tuple[str, ...] = ()  # whose workers queries run on
    terraform_output: str = ""  # empty: $EBBFLOW_TERRAFORM_OUTPUT
    prices: str = ""  # file of on-demand prices; empty: AWS's own list
    name: str = "local"  # of the cluster in that ledger
    master: str = ""
    loop: bool = False


@dataclass(frozen=True, slots=True)
class ExistingSpec:
    """A cluster whose capacity loop runs elsewhere."""

    ledger: str  # as written: may hold ${env:NAME}
    name: str = "local"
    directory: str = ""
    master: str = ""
    fleet: str = ""  # local fleet whose nodes trainings run on


ClusterSpec = LocalSpec | AwsSpec | ExistingSpec


@dataclass(frozen=True, slots=True)
class LoopSpec:
    """How the capacity loop decides; settings that are not given keep their defaults. Durations are in seconds."""

    policy: str = "rho-bounded"
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, float] = field(default_factory=dict)  # by key (``LOOP_KEYS``)
    scaling: Mapping[str, float] = field(default_factory=dict)  # by key (``SCALING_KEYS``)


@dataclass(frozen=True, slots=True)
class StepSpec:
    """One query, training, tuning run or elastic job."""

    kind: StepKind
    name: str
    line: int  # of the file
    display_name: str = ""
    team: str = ""
    after: tuple[str, ...] = ()  # as the file says
    needs: frozenset[str] = frozenset()  # those, and the steps whose results it refers to
    deadline: DeadlineSpec | None = None
    weight: float = 1.0
    budget: float | None = None  # dollars
    attempts: int = 3
    environment: Mapping[str, str] = field(default_factory=dict)  # as written: may hold ${env:NAME}
    options: Mapping[str, Any] = field(default_factory=dict)  # of its request, references as written

    @property
    def label(self) -> str:
        """Return the display name; without one, the name."""
        return self.display_name or self.name

    @property
    def path(self) -> str:
        """Return where it stands in the file."""
        return f"{TABLES[self.kind]}.{self.name}"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """All that one file says."""

    name: str
    cluster: ClusterSpec
    steps: Mapping[str, StepSpec]  # by section: queries, trainings, tunings, elastic jobs
    display_name: str = ""
    teams: Mapping[str, TeamSpec] = field(default_factory=dict)
    loop: LoopSpec = field(default_factory=LoopSpec)
    quotas: Limits = field(default_factory=Limits)
    budget: float | None = None  # dollars of all its apps
    store: str = ""  # of queries' checkpoints; empty: the default
    source: str = ""  # the file, for errors
    folder: str = ""  # of the file: what relative paths are relative to
    text: str = ""  # of the file; holds references to the environment, never what they stand for

    @property
    def needs(self) -> dict[str, frozenset[str]]:
        """Return the steps that each step waits for."""
        return {name: step.needs for name, step in self.steps.items()}

    def of(self, kind: StepKind) -> tuple[StepSpec, ...]:
        """Return the steps of one kind."""
        return tuple(step for step in self.steps.values() if step.kind == kind)
