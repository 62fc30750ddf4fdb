"""A realistic report: a join query that loses workers, switches plans twice and gets a worker back."""

from dataclasses import replace

from ebbflow.planners.query.plan.state import Estimate
from ebbflow.tasks.query.report import (
    CapacityReport,
    DecisionReport,
    PlanReport,
    PlanStageReport,
    QueryReport,
    StageReport,
)

STARTED = 1_790_000_000.0
QUERY = """select n_name, sum(l_extendedprice * (1 - l_discount)) as revenue
from customer, orders, lineitem, supplier, nation, region
where c_custkey = o_custkey and l_orderkey = o_orderkey and l_suppkey = s_suppkey
  and c_nationkey = s_nationkey and s_nationkey = n_nationkey and n_regionkey = r_regionkey
  and r_name = 'ASIA' and o_orderdate >= date '1994-01-01' and o_orderdate < date '1995-01-01'
group by n_name
order by revenue desc"""

NATIONS, CUSTOMERS, ORDERS = "nation ⋈ᵇ region", "customer ⋈ᵇ nation ⋈ᵇ region", "orders ⋈ customer"
LINES = "lineitem ⋈ (orders ⋈ customer ⋈ᵇ nation ⋈ᵇ region) ⋈ supplier"
SUPPLIERS = "lineitem ⋈ᵇ supplier"
RESULT = "γ n_name; revenue"


def fingerprint(name: str) -> str:
    """Return a stable stand-in for a stage's fingerprint."""
    return f"{sum(ord(c) * 31**i for i, c in enumerate(name)) % 16**16:016x}"


def planned(
    name: str,
    tables: tuple[str, ...],
    *inputs: str,
    seconds: float,
    rows: float,
    sink: bool = False,
    checkpoint: bool = False,
) -> PlanStageReport:
    """Return a stage as planned, its inputs given by name."""
    return PlanStageReport(
        name=name,
        fingerprint=fingerprint(name),
        inputs=tuple(fingerprint(i) for i in inputs),
        tables=tables,
        estimated_seconds=seconds,
        rows=rows,
        bytes=rows * 40,
        cut="" if sink else "shared by 3 candidates",
        checkpoint=checkpoint,
        sink=sink,
        logical=f"π({name})",
        sql=f"SELECT /*+ BROADCAST(n) */ * FROM ckpt_{fingerprint(name)} AS a WHERE a.x < 3",
    )


def sample_plans() -> tuple[PlanReport, ...]:
    """Return three candidates that share stages."""
    nations = planned(NATIONS, ("nation", "region"), seconds=1.1, rows=5, checkpoint=True)
    customers = planned(CUSTOMERS, ("customer",), NATIONS, seconds=2.4, rows=30_000, checkpoint=True)
    orders = planned(ORDERS, ("orders",), CUSTOMERS, seconds=6.2, rows=45_500, checkpoint=True)
    lines = planned(LINES, ("lineitem", "supplier"), ORDERS, seconds=17.5, rows=7_300)
    suppliers = planned(SUPPLIERS, ("lineitem", "supplier"), seconds=21.0, rows=6_001_215)
    first = (
        nations, customers, orders, lines, planned(RESULT, (), LINES, seconds=0.8, rows=5, sink=True)
    )  # fmt: skip
    second = (
        nations,
        replace(suppliers, inputs=(nations.fingerprint,)),
        customers,
        orders,
        planned(RESULT, (), SUPPLIERS, ORDERS, seconds=7.4, rows=5, sink=True),
    )
    third = (orders, planned(RESULT, ("customer", "lineitem"), ORDERS, seconds=49.0, rows=5, sink=True))
    return (
        PlanReport(
            id="p1", stages=first, shape="((((nation ⋈ᵇ region) ⋈ customer) ⋈ orders) ⋈ lineitem) ⋈ supplier",
            estimated_seconds=28.6, total_work=96.0, critical_path=11.8, peak_memory=0.75, chosen=True,
            reason="the shortest on 4 cores", notes=("the sub-query in FROM was unfolded",),
        ),
        PlanReport(
            id="p2", stages=second, shape="((lineitem ⋈ᵇ supplier) ⋈ (orders ⋈ (customer ⋈ nation)))",
            estimated_seconds=33.9, total_work=121.0, critical_path=9.6, peak_memory=1.5,
            reason="5.3 s longer than p1",
        ),
        PlanReport(
            id="p3", stages=third, shape="orders ⋈ customer ⋈ lineitem in one stage",
            estimated_seconds=None, total_work=88.0, critical_path=22.0, peak_memory=12.0,
            reason="a task needs 12 GiB and the largest node has 4 GiB",
        ),
    )  # fmt: skip


def ran(
    name: str, status: str, plan: str, started: float, ended: float, rows: int = 0, **more: object
) -> StageReport:
    """Return a stage run."""
    fields = {
        "name": name, "fingerprint": fingerprint(name), "status": status, "plan": plan, "started": started,
        "ended": ended, "seconds": ended - started, "rows": rows, "bytes": rows * 38, "tasks": 12,
        "estimated_seconds": None if status == "reused" else (ended - started) * 0.9,
        "estimated_rows": rows * 1.2 or 6_001_215.0,
    }  # fmt: skip
    return StageReport(**{**fields, **more})  # type: ignore[arg-type]


def sample_report() -> QueryReport:
    """Return a run with every status, decision and capacity change."""
    estimates = (
        Estimate("p1", 41.2, 2, 0, 3),
        Estimate("p2", 29.7, 3, 1, 2),
        Estimate("p3", float("inf"), 1, 0, 1),
    )
    return QueryReport(
        query=QUERY,
        name="Local suppliers (TPC-H 5)",
        planner="qoop",
        engine="spark",
        master="spark://127.0.0.1:7077",
        started=STARTED,
        seconds=44.8,
        rows=5,
        columns=(("n_name", "STRING"), ("revenue", "DECIMAL(38,4)")),
        result_path="/data/results/q5.parquet",
        stages=(
            ran(NATIONS, "completed", "p1", 0.4, 1.6, 5),
            ran(CUSTOMERS, "completed", "p1", 1.7, 4.3, 30_183),
            ran(ORDERS, "completed", "p1", 4.4, 11.0, 46_008),
            ran(LINES, "cancelled", "p1", 11.1, 14.4, note="cancelled by switch 1"),
            ran(NATIONS, "reused", "p2", 14.5, 14.5, 5, seconds=0.0, saved_seconds=1.2),
            ran(CUSTOMERS, "reused", "p2", 14.5, 14.5, 30_183, seconds=0.0, saved_seconds=2.6),
            ran(ORDERS, "reused", "p2", 14.5, 14.5, 46_008, seconds=0.0, saved_seconds=6.6),
            ran(SUPPLIERS, "failed", "p2", 14.6, 17.9, failed_tasks=3, note="executor lost three times"),
            ran(SUPPLIERS, "cancelled", "p2", 18.0, 27.5),
            ran(ORDERS, "reused", "p1", 27.6, 27.6, 46_008, seconds=0.0, saved_seconds=6.6),
            ran(LINES, "completed", "p1", 27.7, 43.5, 7_243),
            ran(RESULT, "completed", "p1", 43.6, 44.7, 5),
        ),
        decisions=(
            DecisionReport("start", 0.1, 1, "p1", "p1", "start", "p1 is expected to finish first, in 28.6 s",
                           (Estimate("p1", 28.6, 0, 0, 5), Estimate("p2", 33.9, 0, 0, 5)), 0.012),
            DecisionReport("stay", 9.4, 2, "p1", "p1", "notice: worker-3",
                           "p2 would gain 0.4 s, less than the 10 % a switch must gain", estimates, 0.004),
            DecisionReport("switch", 14.4, 3, "p1", "p2", "left: worker-3, worker-4",
                           "p2 finishes in 29.7 s, p1 in 41.2 s: a broadcast needs no shuffle on 2 cores",
                           estimates, 0.006),
            DecisionReport("switch", 27.5, 4, "p2", "p1", "arrived: worker-5, worker-6",
                           "p1 finishes in 17.0 s, p2 in 21.1 s", (Estimate("p1", 17.0, 3, 0, 2),), 0.005),
        ),
        capacity=(
            CapacityReport(0.0, 1, 4, 16.0, 4, "at start"),
            CapacityReport(9.4, 2, 3, 12.0, 3, "notice: worker-3", noticed=("worker-3",)),
            CapacityReport(14.3, 3, 2, 8.0, 2, "left: worker-3, worker-4", left=("worker-3", "worker-4")),
            CapacityReport(27.4, 4, 4, 16.0, 4, "arrived: worker-5, worker-6",
                           arrived=("worker-5", "worker-6")),
            CapacityReport(36.0, 5, 3, 12.0, 3, "left: worker-1", left=("worker-1",)),
        ),
        plans=sample_plans(),
        expected_seconds=28.6,
        problems=("checkpoint 3f2a… ignored: its manifest names orders of another version",
                  "current_date is fixed at 2026-09-21"),
        verified=True,
        verification="5 rows equal DuckDB's answer",
    )  # fmt: skip


def hostile_report() -> QueryReport:
    """Return the sample with markup in every text that a user can set."""
    bad = "</script><b>x</b>&\"'<img src=x onerror=alert(1)>"
    report = sample_report()
    return replace(
        report,
        query=f"select '{bad}'",
        name=bad,
        master=bad,
        problems=(bad,),
        stages=(replace(report.stages[0], name=bad, note=bad), *report.stages[1:]),
        decisions=tuple(replace(d, reason=bad, trigger=bad) for d in report.decisions),
        capacity=tuple(replace(c, change=bad) for c in report.capacity),
        plans=tuple(replace(p, shape=bad, reason=bad) for p in report.plans),
        verification=bad,
    )


def bare_report() -> QueryReport:
    """Return a report with nothing in it."""
    return QueryReport(
        query="select 1", planner="static", engine="duckdb", started=STARTED, seconds=0.0, rows=0
    )


def single_stage_report() -> QueryReport:
    """Return a run of one stage on capacity that never changed."""
    report = bare_report()
    stage = ran("scan", "completed", "p1", 0.0, 0.0, 1)
    plan = PlanReport("p1", (planned("scan", ("t",), seconds=0.0, rows=1, sink=True),), chosen=True)
    return replace(
        report,
        rows=1,
        stages=(stage,),
        plans=(plan,),
        capacity=(CapacityReport(0.0, 1, 2, 4.0, 1, "at start"),),
    )
