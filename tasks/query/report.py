"""What a query run did and why: the values behind every report, and their JSON form.

All times called ``at``, ``started`` and ``ended`` inside a report are seconds after ``QueryReport.started``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal

from ebbflow.infra.errors import InfraError, StorageError
from ebbflow.infra.packages import require
from ebbflow.infra.protocols import Checkpoint
from ebbflow.infra.storage.files import write_text
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.model import Capacity, CapacityDiff, Share
from ebbflow.planners.query.coverage import BlockCoverage
from ebbflow.planners.query.plan.qep import QueryExecutionPlan, Stage
from ebbflow.planners.query.plan.state import DecisionKind, Estimate, ReplanDecision
from ebbflow.tasks.drawing.codec import encode, from_text, to_text
from ebbflow.tasks.drawing.tables import table_html
from ebbflow.tasks.drawing.wording import label_text, plural, seconds_text

FORMAT = 3  # of the JSON form; grows when a key changes its name or meaning
_SHOWN = 10  # rows in a notebook

StageStatus = Literal["completed", "reused", "cancelled", "failed"]
MARKS: dict[StageStatus, str] = {"completed": "✓", "reused": "↺", "cancelled": "✂", "failed": "✗"}


@dataclass(frozen=True, slots=True)
class StageReport:
    """One run, or one reuse, of a stage. A stage that was cancelled and run again appears twice."""

    name: str
    fingerprint: str
    status: StageStatus
    plan: str  # id of the plan it ran for
    started: float = 0.0  # seconds after the query's start; for a reused stage, when it was taken
    ended: float = 0.0
    rows: int = 0
    bytes: int = 0
    seconds: float = 0.0  # wall time spent on it in this run; 0 when reused
    tasks: int = 0
    failed_tasks: int = 0
    estimated_seconds: float | None = None
    estimated_rows: float | None = None
    saved_seconds: float = 0.0  # what the reused checkpoint once took
    note: str = ""  # the failure, or what went differently


@dataclass(frozen=True, slots=True)
class DecisionReport:
    """One decision of the replanner, "stay" included."""

    kind: DecisionKind
    at: float  # seconds after the query's start
    revision: int = field(metadata={"former": "epoch"})
    current: str  # plan id before
    chosen: str  # plan id after
    trigger: str
    reason: str
    estimates: tuple[Estimate, ...] = ()
    planner_seconds: float = 0.0

    @classmethod
    def of(cls, decision: ReplanDecision, started: float) -> "DecisionReport":
        """Return ``decision`` with its time relative to ``started`` (seconds since the Unix epoch)."""
        return cls(
            kind=decision.kind,
            at=decision.at - started,
            revision=decision.revision,
            current=decision.current,
            chosen=decision.chosen,
            trigger=decision.trigger,
            reason=reason_text(decision),
            estimates=decision.estimates,
            planner_seconds=decision.seconds,
        )


@dataclass(frozen=True, slots=True)
class SwitchReport:
    """A change from one plan to another."""

    at: float  # seconds after the query's start
    revision: int = field(metadata={"former": "epoch"})
    source: str = field(metadata={"json": "from"})
    target: str = field(metadata={"json": "to"})
    reason: str
    estimates: tuple[Estimate, ...] = ()


@dataclass(frozen=True, slots=True)
class CapacityReport:
    """The capacity from ``at`` until the next entry."""

    at: float  # seconds after the query's start
    revision: int = field(metadata={"former": "epoch"})
    cores: float
    memory: float  # GiB
    nodes: int
    change: str = ""  # for people: "left: worker-2"
    arrived: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    noticed: tuple[str, ...] = ()

    @classmethod
    def of(cls, capacity: Capacity, before: Capacity | None, started: float) -> "CapacityReport":
        """Return what may be planned on in ``capacity``, and what changed since ``before``.

        ``started`` is the query's start in seconds since the Unix epoch.
        """
        first = before is None
        diff = CapacityDiff() if first else CapacityDiff.between(before, capacity)
        share = Share.of(capacity)
        shared = capacity.portion.queries if capacity.portion else 1
        start = f"at start, {shared} queries share the cluster" if shared > 1 else "at start"
        return cls(
            at=capacity.at - started,
            revision=capacity.revision,
            cores=share.total.cores,
            memory=share.total.memory,
            nodes=share.nodes,
            change=start if first else str(diff),
            arrived=diff.arrived,
            left=diff.left,
            noticed=diff.noticed,
        )


@dataclass(frozen=True, slots=True)
class PlanStageReport:
    """One stage of a plan, as planned."""

    name: str
    fingerprint: str
    inputs: tuple[str, ...] = ()  # fingerprints of the stages whose checkpoints it reads
    tables: tuple[str, ...] = ()  # base tables it reads
    estimated_seconds: float | None = None
    rows: float | None = None  # estimated
    bytes: float | None = None  # estimated
    cut: str = ""  # why its output is a checkpoint
    checkpoint: bool = False  # a checkpoint of it exists
    sink: bool = False
    logical: str = ""
    sql: str = ""

    @classmethod
    def of(
        cls,
        stage: Stage,
        *,
        cores: float | None = None,
        seconds: float | None = None,
        cut: str = "",
        checkpoint: bool = False,
        engine: str = "spark",
    ) -> "PlanStageReport":
        """Return ``stage`` as a report shows it, with its SQL for ``engine``.

        Without ``seconds`` its time is estimated as if it ran alone on ``cores``: latency plus the larger of
        one task's duration and total work over cores. ``None`` cores means unbounded capacity.
        """
        if seconds is None:
            spread = stage.core_seconds / max(cores, 1e-9) if cores is not None else 0.0
            seconds = stage.latency + max(stage.duration, spread)
        return cls(
            name=stage.name,
            fingerprint=stage.output_fp,
            inputs=stage.inputs,
            tables=stage.tables,
            estimated_seconds=seconds,
            rows=stage.rows,
            bytes=stage.bytes,
            cut=cut,
            checkpoint=checkpoint,
            sink=stage.sink,
            logical=stage.logical,
            sql=stage.statement.duckdb if engine == "duckdb" else stage.statement.spark,
        )


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A candidate plan with the figures it is compared by."""

    id: str
    stages: tuple[PlanStageReport, ...]
    shape: str = ""
    estimated_seconds: float | None = None  # on the capacity at planning time; None when it fits no node
    total_work: float = 0.0  # core-seconds
    critical_path: float = 0.0  # seconds with unbounded capacity
    peak_memory: float = 0.0  # GiB, the largest demand of a single task
    chosen: bool = False
    reason: str = ""  # why it was chosen, or not
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        plan: QueryExecutionPlan,
        *,
        estimated_seconds: float | None = None,
        cores: float | None = None,
        chosen: bool = False,
        reason: str = "",
        cuts: Mapping[str, str] | None = None,
        checkpoints: frozenset[str] = frozenset(),
        engine: str = "spark",
    ) -> "PlanReport":
        """Return ``plan`` as a report shows it.

        ``cuts`` says per fingerprint why the plan was cut after that stage, ``checkpoints`` are fingerprints
        whose output exists, ``engine`` is the one whose SQL is shown.
        """
        cuts = cuts or {}
        stages = tuple(
            PlanStageReport.of(
                stage,
                cores=cores,
                cut=cuts.get(stage.output_fp, ""),
                checkpoint=stage.output_fp in checkpoints,
                engine=engine,
            )
            for stage in plan.stages
        )
        return cls(
            id=plan.id,
            stages=stages,
            shape=plan.shape,
            estimated_seconds=_finite(estimated_seconds),
            total_work=plan.total_work,
            critical_path=plan.critical_path,
            peak_memory=plan.peak_memory,
            chosen=chosen,
            reason=reason,
            notes=plan.notes,
        )


@dataclass(frozen=True)
class QueryReport:
    """Everything worth knowing about one run of a query."""

    query: str
    planner: str  # ``qoop``, ``clarinet``, ``volcano`` or ``single``
    engine: str
    started: float  # seconds since the Unix epoch
    seconds: float  # wall time from start to result
    rows: int
    columns: tuple[tuple[str, str], ...] = ()  # (name, type)
    result_path: str = ""
    master: str = ""  # Spark master, empty for DuckDB
    engine_reason: str = ""  # why the engine is this one, where nobody named it
    name: str = ""  # display name of the query
    stages: tuple[StageReport, ...] = ()
    decisions: tuple[DecisionReport, ...] = ()
    capacity: tuple[CapacityReport, ...] = ()
    plans: tuple[PlanReport, ...] = ()
    expected_seconds: float | None = None  # of the first plan when the query started
    problems: tuple[str, ...] = ()  # ignored checkpoints, frozen functions, blocks left whole and why
    verified: bool | None = None  # None: not checked
    verification: str = ""  # how, or what differed
    blocks: tuple[BlockCoverage, ...] = ()  # the query's inner-join blocks, planned or left as written
    result: Checkpoint | None = field(  # the rows; only in the process that ran the query
        default=None, compare=False, repr=False, metadata={"json": None}
    )

    @property
    def switches(self) -> tuple[SwitchReport, ...]:
        """Return the decisions that replaced one plan by another, in order."""
        return tuple(
            SwitchReport(d.at, d.revision, d.current, d.chosen, d.reason, d.estimates)
            for d in self.decisions
            if d.kind == "switch"
        )

    def plan(self, plan_id: str) -> PlanReport | None:
        """Return the plan called ``plan_id``, if it was reported."""
        return next((p for p in self.plans if p.id == plan_id), None)

    @property
    def first_plan(self) -> PlanReport | None:
        """Return the plan that the query started with."""
        return self.plan(self.decisions[0].chosen) if self.decisions else self._chosen

    @property
    def last_plan(self) -> PlanReport | None:
        """Return the plan that produced the result."""
        return self.plan(self.decisions[-1].chosen) if self.decisions else self._chosen

    @property
    def _chosen(self) -> PlanReport | None:
        return next((p for p in self.plans if p.chosen), None)

    def with_status(self, status: StageStatus) -> tuple[StageReport, ...]:
        """Return the stage runs that ended in ``status``."""
        return tuple(s for s in self.stages if s.status == status)

    def to_arrow(self) -> Any:
        """Return all rows of the result as a ``pyarrow.Table``.

        Raises ``StorageError`` where they are not there any more, or not as the query wrote them.
        """
        from ebbflow.infra.query.results import read_checkpoint

        place = self._place()
        table = read_checkpoint(place)
        if table.num_rows != self.rows:
            raise StorageError(
                f"the result at {place.uri} has {plural(table.num_rows, 'row')}, not the {self.rows:,} that the "
                "query wrote: run the query again"
            )
        return table

    def to_pandas(self) -> Any:
        """Return all rows of the result as a ``pandas.DataFrame``; pandas is not installed with Ebbflow.

        Raises ``EngineUnavailableError`` without pandas, and what ``to_arrow`` raises.
        """
        require("pandas", "to_pandas()")
        return self.to_arrow().to_pandas()

    def _place(self) -> Checkpoint:
        """Return where the rows are. Raises ``StorageError``."""
        from ebbflow.infra.query.results import is_whole, result_at

        if self.result is not None and is_whole(self.result):
            return self.result
        return result_at(StorageLocation(self.result_path), self.columns, self.rows)

    def _repr_html_(self) -> str:
        """Return what notebooks show: what it was, and the first rows where this process has run it."""
        said = f"{plural(self.rows, 'row')} in {seconds_text(self.seconds)}, {self.engine}, planner {self.planner}"
        head = f"<b>{escape(label_text(self.name, 80))}</b> " if self.name else ""
        return f"<div><p>{head}{escape(said)}</p>{self._rows_html()}</div>"

    def _rows_html(self) -> str:
        from ebbflow.infra.query.results import preview

        if self.result is None:  # read from a file, which may name any place
            return f"<p>{escape(label_text(self.result_path, 300))}</p>"
        try:
            return table_html(preview(self._place(), _SHOWN), self.rows)
        except (
            InfraError,
            ValueError,
            OverflowError,
        ) as error:  # a notebook shows nothing of a repr that raises
            return f"<p>{escape(label_text(str(error), 300))}</p>"

    def to_json(self) -> str:
        """Return the report as JSON text; infinite and undefined numbers are ``null``."""
        return to_text(self, FORMAT, switches=[encode(one) for one in self.switches])

    @classmethod
    def from_json(cls, text: str) -> "QueryReport":
        """Read what ``to_json`` of this or an older version wrote. Keys unknown to this version are ignored.

        Raises ``ReportError`` when ``text`` is no report or of a newer format.
        """
        return from_text(cls, text, FORMAT, {1: _renamed_keys, 2: dict})  # 2: fields read their former key

    def write_json(self, path: Path | str) -> Path:
        """Write the report to ``path`` atomically and return the path."""
        return write_text(path, self.to_json())


def reason_text(decision: ReplanDecision) -> str:
    """Return a decision's reason without its kind, which stands beside it in every report."""
    return decision.reason.removeprefix(f"{decision.kind}: ")


def _renamed_keys(data: dict[str, Any]) -> dict[str, Any]:
    """Return a report of format 1 with the keys of format 2: planner and name, once policy and title."""
    names = {"policy": "planner", "title": "name"}
    return {names.get(key, key): value for key, value in data.items()}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
