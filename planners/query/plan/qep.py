"""Query execution plans: stages and the DAG that they form (QOOP, sections 2.2 and 2.4)."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from sqlglot import exp

from ebbflow.planners.model import Resources, Work
from ebbflow.planners.query.plan.slicing import AT_ONCE, Grid
from ebbflow.planners.query.sql.joingraph import Column

AS_WRITTEN = "as written"  # the shape of a whole query in one stage, of which no text is made


class Statement(Protocol):
    """The SQL of a stage. It may be made when it is first asked for: most candidates never run."""

    @property
    def spark(self) -> str:
        """Return Spark SQL with join hints."""
        ...

    @property
    def fallback(self) -> str:
        """Return the same without broadcast hints, for when a broadcast does not fit."""
        ...

    @property
    def duckdb(self) -> str:
        """Return DuckDB's SQL."""
        ...


@dataclass(frozen=True, slots=True)
class Text:
    """A statement that is known as text."""

    spark: str
    fallback: str = ""
    duckdb: str = ""


class Sliceable(Statement, Protocol):
    """A statement that can be restricted to a part of its input."""

    def sliced(self, slice_: Mapping[Column, exp.Expr]) -> Statement:
        """Return the statement restricted by predicates on columns of its base tables."""
        ...


@dataclass(frozen=True, slots=True)
class SharedPart:
    """A part of a stage that every slice reads alike: a relation ``ckpt_<fingerprint>`` of their statements."""

    fingerprint: str
    statement: Statement


@dataclass(frozen=True)
class Slicing:
    """How a stage is divided into slices that are made durable one by one."""

    grid: Grid
    slices: int  # that a stage begun now would have
    source: Sliceable
    tables: Mapping[
        str, str
    ]  # of the divided columns: alias -> base table that the statement names only once
    at_once: int = AT_ONCE  # slices that run side by side
    shared: tuple[SharedPart, ...] = ()  # computed once where the slices run, and never durable
    apart: Sliceable | None = None  # computes them itself; only where something is shared

    def statement(self, first: int, last: int, *, apart: bool = False) -> Statement:
        """Return the statement of the cells ``first`` to ``last`` (exclusive); ``apart``: without shared parts."""
        source = self.source if self.apart is None or not apart else self.apart
        return source.sliced(self.grid.conditions(first, last))

    def fingerprint(self, output_fp: str, first: int, last: int) -> str:
        """Return what the slice of the stage ``output_fp`` computes: equal under every join order."""
        low, high = self.grid.bounds(first, last)
        return hashlib.sha256(f"{output_fp}|{self.grid.name}|{low}|{high}".encode()).hexdigest()[:32]

    @property
    def key(self) -> str:
        """Return what tells this division from others of the same stage."""
        return f"{self.grid.name}|{','.join(f'{e:g}' for e in self.grid.edges)}"


@dataclass(frozen=True, slots=True)
class Stage:
    """One SQL statement over tables and checkpoints, whose output is a checkpoint.

    In SQL a checkpoint appears as the relation ``ckpt_<output_fp>``; a base table under its own name.
    """

    name: str  # for people: "orders ⋈ customer"
    output_fp: str  # what it computes; equal for equivalent stages of different plans
    physical_key: str  # how: output_fp, inputs, join methods, partitioning
    inputs: tuple[str, ...]  # output_fp of the stages whose checkpoints it reads
    tables: tuple[str, ...]  # base tables it reads, sorted
    statement: Statement
    tasks: int  # tasks in its widest wave
    demand: Resources  # of one task
    duration: float  # seconds of one task
    latency: float  # seconds outside the workers: the driver's, and the rework expected from node losses
    rows: float  # estimated output rows
    bytes: float  # estimated output bytes
    work: Work  # estimated work, for calibration
    waiting: float = (
        0.0  # core-seconds of its tasks beyond that work: they wait for links or outputs, or spill
    )
    network: float = 0.0  # seconds that it keeps links busy, in its latency or its tasks' duration
    partitions: int = 0  # shuffle partitions; 0 leaves the engine's default
    logical: str = ""  # relational algebra of the whole sub-plan, for people
    covers: frozenset[str] = frozenset()  # "view.alias" of every relation below it, through its inputs
    volatile: bool = False  # non-deterministic: never reused across runs
    sink: bool = False  # produces the query's result
    slicing: Slicing | None = None  # runs as one statement unless given
    engine: str = ""  # of the ways to run a stage the one that it is costed by; empty: there is one only
    engine_reason: str = ""  # why
    keys: tuple[str, ...] = ()  # columns of its output that later joins go by, one for each equality class
    warm_up: float = 0.0  # seconds that its first tasks take longer on a core whose process is cold

    @property
    def core_seconds(self) -> float:
        """Return the stage's total task time in core-seconds."""
        return self.tasks * self.duration * max(self.demand.cores, 1e-9)

    @property
    def joins(self) -> bool:
        """Tell whether it joins anything; a relation that it joins with itself is named once."""
        return len(self.inputs) + len(self.tables) > 1 or self.work.joined_rows > 0.0


@dataclass(frozen=True)
class QueryExecutionPlan:
    """A DAG of stages. ``stages`` are in topological order and the last one is the sink."""

    id: str
    stages: tuple[Stage, ...]
    shape: str = ""  # join trees in algebra, for people: "((lineitem ⋈ orders) ⋈ᵇ nation)"
    notes: tuple[str, ...] = field(default=())

    @cached_property
    def by_fp(self) -> Mapping[str, Stage]:
        """Return the stages by ``output_fp``."""
        return {s.output_fp: s for s in self.stages}

    @property
    def sink(self) -> Stage:
        return self.stages[-1]

    @cached_property
    def total_work(self) -> float:
        """Return core-seconds summed over stages."""
        return sum(s.core_seconds for s in self.stages)

    @cached_property
    def upward_rank(self) -> Mapping[str, float]:
        """Return, per output_fp, the longest time from the stage's start to the plan's end with unbounded
        capacity: seconds."""
        consumers: dict[str, list[Stage]] = {s.output_fp: [] for s in self.stages}
        for stage in self.stages:
            for fp in stage.inputs:
                consumers[fp].append(stage)
        rank: dict[str, float] = {}
        for stage in reversed(self.stages):
            below = max((rank[c.output_fp] for c in consumers[stage.output_fp]), default=0.0)
            rank[stage.output_fp] = stage.latency + stage.duration + below
        return rank

    @cached_property
    def critical_path(self) -> float:
        """Return the time with unbounded capacity: seconds."""
        return max(self.upward_rank.values())

    @cached_property
    def peak_memory(self) -> float:
        """Return the largest memory demand of a single task: GiB."""
        return max(s.demand.memory for s in self.stages)
