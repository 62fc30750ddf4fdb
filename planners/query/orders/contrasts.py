"""Join trees for capacities unlike the present one: what a re-planner has to choose from when capacity changes."""

from collections.abc import Sequence
from dataclasses import replace

from ebbflow.planners.model import Resources, Share
from ebbflow.planners.query.costs.cost import CostModel
from ebbflow.planners.query.estimates.cardinality import Cardinalities
from ebbflow.planners.query.orders.enumerate import enumerate_trees, left_deep_best
from ebbflow.planners.query.plan.trees import Tree
from ebbflow.planners.query.sql.joingraph import JoinGraph

_LITTLE = 1.0 / 1024.0  # GiB of a node: next to nothing is broadcast or hashed
_WIDE = 8.0  # times the present nodes
_NARROW = 4.0  # MB/s of a link over which nothing large is broadcast
_SMALL = 6  # relations up to which there are two trees for each of these capacities, else one
_COMBINATIONS = 1_000  # considered for each
_PAIRS = 4_000  # of connected sets, beyond which each is found greedily and improved by windows


def contrasts(share: Share) -> dict[str, Share]:
    """Return capacities unlike ``share``, by what they favour.

    ``partitioned`` has little memory and narrow links, so that nothing large is broadcast; ``broadcast`` is one node
    of as much as there is in all, on which a table is built once; ``wide`` has many more nodes, on which the longest
    path counts and not the work: bushy trees.
    """
    nodes, total, largest = max(share.nodes, 1), share.total, share.largest
    cores, memory = max(total.cores, 1.0), max(total.memory, 1.0)
    little = min(largest.memory, _LITTLE)
    return {
        "partitioned": replace(
            share,
            total=Resources(cores, little * nodes, network=_NARROW * nodes),
            largest=Resources(max(largest.cores, 1.0), little),
        ),
        "broadcast": Share.uniform(cores, memory, 1, share.revision, share.hazard),
        "wide": replace(
            share,
            total=Resources(cores, memory, network=total.network).times(_WIDE),
            nodes=int(nodes * _WIDE),
        ),
    }


def contrasting_trees(
    graph: JoinGraph, cardinalities: Cardinalities, model: CostModel, share: Share
) -> Sequence[Tree]:
    """Return the best trees for each of the ``contrasts`` of ``share``, and the best linear one; none twice."""
    if len(graph.relations) < 2:
        return ()
    found: dict[str, Tree] = {}
    each = 2 if len(graph.relations) <= _SMALL else 1
    for other in contrasts(share).values():
        trees = enumerate_trees(
            graph,
            cardinalities,
            model,
            other,
            keep=each,
            limit=each,
            max_pairs=_PAIRS,
            max_combinations=_COMBINATIONS,
        )
        for candidate in trees:
            found.setdefault(repr(candidate.tree), candidate.tree)
    linear = left_deep_best(graph, cardinalities, model, share, keep=each, max_pairs=_PAIRS).tree
    found.setdefault(repr(linear), linear)
    return tuple(found.values())
