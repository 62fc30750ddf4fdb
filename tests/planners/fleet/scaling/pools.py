"""Pools, nodes and query plans for the tests of scaling."""

from ebbflow.planners.model import Resources, Work
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.fleet import PoolState
from ebbflow.planners.query.plan.qep import QueryExecutionPlan, Stage, Text


def nodes(*ids: str, price: float = 1.0, market: str = "spot") -> tuple[Node, ...]:
    return tuple(Node(id_, 4, 16.0, gpus=1, price=price, market=market) for id_ in ids)  # type: ignore[arg-type]


def pool(
    planned: int, *, min_nodes: int = 0, max_nodes: int = 32, there: int | None = None, on_demand: int = 0
) -> PoolState:
    count = planned if there is None else there
    return PoolState(
        "etl",
        planned,
        planned,
        nodes(*(f"n{at:02}" for at in range(count))),
        on_demand=on_demand,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
    )


def stage(
    name: str,
    inputs: tuple[str, ...] = (),
    *,
    tasks: int,
    seconds: float,
    cores: float = 1.0,
    memory: float = 1.0,
) -> Stage:
    return Stage(
        name=name,
        output_fp=name,
        physical_key=f"{name}|{tasks}",
        inputs=inputs,
        tables=(),
        statement=Text(""),
        tasks=tasks,
        demand=Resources(cores, memory),
        duration=seconds,
        latency=0.0,
        rows=0.0,
        bytes=0.0,
        work=Work(),
    )


def plan(name: str, *stages: Stage) -> QueryExecutionPlan:
    return QueryExecutionPlan(name, stages)
