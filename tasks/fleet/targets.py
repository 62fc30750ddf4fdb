"""How many nodes work wants: a query that must end in time."""

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.query.checkpoints import ParquetCheckpointStore
from ebbflow.planners.errors import OptionError
from ebbflow.planners.fleet.scaling.deadline import DeadlineScaling, QueryCurve
from ebbflow.planners.model import Resources, Share
from ebbflow.planners.model.fleet import Target
from ebbflow.planners.query.plan.state import ExecutionState
from ebbflow.planners.query.running.session import MAX_PARALLEL_STAGES, candidates
from ebbflow.tasks.fleet.steps import Observation
from ebbflow.tasks.query.planning import prepare
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import session_of

BOOT = 180.0
"""Seconds from asking for a node to work on it, assumed: cloud-init installs Spark and Ebbflow first."""
_SYSTEM = 1 / 8  # of a node's memory, which is left to the system


def for_query(
    seen: Observation,
    pool: str,
    request: QueryRequest,
    seconds: float,
    boot: float = BOOT,
    clock: Clock | None = None,
) -> Target:
    """Return the fewest nodes on which the whole query ends within ``seconds``, as a wish for ``pool``.

    Raises ``OptionError`` where it is not known what a node of the pool has, and what planning the query raises.
    """
    clock = clock or SystemClock()
    state = seen.pool(pool)
    node = smallest(seen, pool)
    store = ParquetCheckpointStore(request.store_place, clock=clock)
    gathered, planner = prepare(request, store, clock, run_id="fleet")
    first, *others = (
        Share.uniform(node.cores * nodes, node.memory * nodes, nodes)
        for nodes in sorted({1, max(state.planned, 1), max(state.max_nodes, 1)})
    )
    session = session_of(request, gathered, planner, first)
    plans = dict(session.plans)
    for share in others:
        plans |= {plan.id: plan for plan in candidates(planner, request.planner, share)}
    found = tuple(plans.values())
    curve = QueryCurve(found, ExecutionState(found[0]), node, clock.now(), MAX_PARALLEL_STAGES)
    return DeadlineScaling(seconds, boot).decide(state, seen.fleet.revision, curve)


def smallest(seen: Observation, pool: str) -> Resources:
    """Return what every node of a pool has at least. Raises ``OptionError`` where that is not known."""
    nodes = [(float(node.cores), node.memory) for node in seen.pool(pool).nodes]
    offered = [(float(one.cores), one.memory * (1 - _SYSTEM)) for one in seen.offers.get(pool, ())]
    known = nodes + offered
    if not known:
        raise OptionError(
            f"resources of a node of {pool} are not known: the pool is empty and AWS did not describe"
            f" its instance types"
        )
    return Resources(min(cores for cores, _ in known), min(memory for _, memory in known))
