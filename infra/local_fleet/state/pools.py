"""Node pools of a local fleet and their rules."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Market

PoolKind = Literal["spark", "gpu", "cpu"]
_NAME = re.compile(r"[a-z][a-z0-9_]*(-[a-z][a-z0-9_]*)*")
_COUNTS = ("cores", "slots", "min_nodes", "max_nodes", "initial", "base")
_REALS = (
    "memory",
    "price",
    "on_demand_price",
    "provision_time",
    "cpus_per_slot",
    "memory_lend",
    "memory_limit",
)
_MIN_LEND = 1 / 64  # GiB: a slab
_WORKER = 0.375  # GiB that a Spark worker's own JVM takes, beside its executors


@dataclass(frozen=True, slots=True)
class LocalPool:
    """A node pool of one kind: workers of a Spark cluster, GPU nodes with slots for training processes, or CPU nodes
    that are aggregators of trainings.

    Prices are simulated. Raises ``OptionError`` for values outside their rules.
    """

    name: str  # its nodes are called name-1, name-2, ...
    kind: PoolKind
    cores: int = 1  # of each node
    memory: float = 1.0  # GiB of each node
    slots: int = 1  # gpu: training processes at once, each with a GPU of this machine where it has any
    min_nodes: int = 0
    max_nodes: int = 8
    initial: int | None = None  # nodes at the start; None: ``min_nodes``
    base: int = 0  # on-demand nodes at any time
    market: Market = "spot"
    price: float = 0.0  # $/h of a node
    on_demand_price: float | None = None  # $/h of an on-demand node; None: ``price``
    instance_type: str = "local"
    zone: str = ""
    provision_time: float = 0.0  # simulated, s from the request of a node to its start
    cpus_per_slot: float | None = None  # CPU cores behind one core or slot (control groups); None: by kind
    aggregation: str = ""  # cpu: the cluster, in the ledger, whose trainings its nodes serve as aggregators
    memory_lend: float = 0.0  # GiB that each node lends other nodes at most (``infra.memory``); 0: nothing
    memory_limit: float = (
        0.0  # GiB that all processes of a node may have together (control groups); 0: no limit
    )

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or len(self.name) > 40:
            raise OptionError(
                "a pool's name is lower-case letters, digits and '_', in parts joined by '-' that start with a "
                f"letter, at most 40; got {self.name!r}"
            )
        if self.kind not in get_args(PoolKind):
            raise OptionError(
                f"the kind of pool {self.name} must be 'spark', 'gpu' or 'cpu'; got {self.kind!r}"
            )
        if (self.kind == "cpu") != bool(self.aggregation):
            raise OptionError(
                f"pool {self.name} of kind {self.kind!r} must "
                + (
                    "name the cluster that it serves: aggregation"
                    if self.kind == "cpu"
                    else "have no aggregation"
                )
            )
        if self.market not in get_args(Market):
            raise OptionError(
                f"the market of pool {self.name} must be 'spot' or 'on-demand'; got {self.market!r}"
            )
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise OptionError(f"{name} of pool {self.name} must be a whole number; got {value!r}")
        for name in _REALS:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int | float) or not 0 <= value < float("inf")):
                raise OptionError(f"{name} of pool {self.name} must be >= 0 and finite; got {value!r}")
        if self.cores < 1 or self.slots < 1 or not self.memory > 0:
            raise OptionError(
                f"cores and slots of pool {self.name} must be >= 1 and memory > 0 GiB; got {self.cores}, "
                f"{self.slots}, {self.memory}"
            )
        if self.cpus_per_slot is not None and not self.cpus_per_slot > 0:
            raise OptionError(f"cpus_per_slot of pool {self.name} must be > 0; got {self.cpus_per_slot}")
        if 0 < self.memory_lend < _MIN_LEND:
            raise OptionError(
                f"memory_lend of pool {self.name} must be 0 or at least one slab, 16 MiB; got "
                f"{1024 * self.memory_lend:.4g} MiB"
            )
        if 0 < self.memory_limit < self._least_memory:
            worker = ", of a Spark worker's own 0.375 GiB" if self.kind == "spark" else ""
            raise OptionError(
                f"memory_limit of pool {self.name} must be at least the sum of memory, of what it lends{worker}: "
                f"{self._least_memory:g} GiB; got {self.memory_limit:g} GiB"
            )
        if not 0 <= self.base <= self.max_nodes or not 0 <= self.min_nodes <= self.start <= self.max_nodes:
            raise OptionError(
                f"pool {self.name}: 0 <= min_nodes <= initial <= max_nodes and 0 <= base <= max_nodes must hold; got "
                f"min_nodes {self.min_nodes}, initial {self.start}, max_nodes {self.max_nodes}, base {self.base}"
            )

    @property
    def start(self) -> int:
        """Return how many nodes there are to be at first."""
        return max(self.min_nodes, self.base) if self.initial is None else self.initial

    @property
    def _least_memory(self) -> float:
        return self.memory + self.memory_lend + (_WORKER if self.kind == "spark" else 0.0)

    @property
    def gpus(self) -> int:
        """Return the slots of a node that leases can name."""
        return self.slots if self.kind == "gpu" else 0

    def price_in(self, market: Market) -> float:
        """Return $/h of a node of this market."""
        if market == "on-demand" and self.on_demand_price is not None:
            return self.on_demand_price
        return self.price

    @classmethod
    def from_dict(cls, name: str, content: Mapping[str, Any]) -> "LocalPool":
        """Return a pool as a file describes it. Raises ``OptionError``."""
        known = {field.name for field in fields(cls)} - {"name"}
        if unknown := sorted(set(content) - known):
            raise OptionError(
                f"pool {name} has no setting {unknown[0]!r}; there are {', '.join(sorted(known))}"
            )
        if "kind" not in content:
            raise OptionError(f"pool {name} must say its kind: spark, gpu or cpu")
        return cls(name, **content)


def check(pools: Sequence[LocalPool]) -> tuple[LocalPool, ...]:
    """Return the pools by name. Raises ``OptionError`` for those that cannot be together."""
    if not pools:
        raise OptionError("a fleet must have at least one pool")
    found: dict[str, LocalPool] = {}
    for pool in pools:
        if pool.name in found:
            raise OptionError(f"pools must have different names; got {pool.name!r} twice")
        found[pool.name] = pool
    shapes = {(p.cores, p.memory, p.cpus_per_slot) for p in pools if p.kind == "spark"}
    if len(shapes) > 1:
        raise OptionError(
            "all Spark nodes of a fleet are workers of one cluster, with the same cores, memory and "
            "cpus_per_slot; got "
            + " and ".join(
                f"{cores} cores with {memory:g} GiB" for cores, memory, _ in sorted(shapes, key=str)
            )
        )
    return tuple(found[name] for name in sorted(found))


def shared(pools: Sequence[LocalPool], there: Sequence[str], asked: Sequence[str] | None) -> tuple[str, ...]:
    """Return the GPUs that nodes share out: those ``asked`` for, or all that are ``there`` if they are enough.

    None at all: slots are CPU cores. Raises ``OptionError`` when those asked for are not enough for the first nodes.
    """
    needed = sum(pool.start * pool.slots for pool in pools if pool.kind == "gpu")
    if asked is None:
        return tuple(there) if needed <= len(there) else ()
    if asked and needed > len(asked):
        raise OptionError(
            f"the first nodes need {needed} GPUs, and {len(asked)} are given ({', '.join(asked)}); give more, ask "
            "for fewer nodes or slots, or give none to train on CPU cores"
        )
    return tuple(asked)
