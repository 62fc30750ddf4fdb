"""How many nodes a pool is to have: rules, which nodes leave, and what keeps the fleet from flapping.

A rule is told a pool and a curve (what n nodes are worth) and answers with a ``Target`` and its reason:

- ``PerGpuScaling``: one large job; grows while each GPU gives enough goodput, or throughput (the baseline)
- ``UtilityBand``: several jobs; keeps the cluster's utility within a band
- ``DeadlineScaling``: a query; the fewest nodes that end in time (``QueryCurve``)

``Steady`` settles wishes, ``with_drains`` names the nodes that leave, ``recorded`` keeps what led to a decision.
"""

from ebbflow.planners.scaling.band import UtilityBand, cluster_utility
from ebbflow.planners.scaling.deadline import DeadlineScaling, QueryCurve
from ebbflow.planners.scaling.limits import Curve, Rule
from ebbflow.planners.scaling.per_gpu import (
    TARGET,
    TRIGGER,
    PerGpuScaling,
    by_throughput,
    goodput_per_gpu,
    nodes_wanted,
    per_gpu_curve,
)
from ebbflow.planners.scaling.record import Recorded, recorded
from ebbflow.planners.scaling.scale_in import Leaving, NodeUse, leaving, may_end, with_drains
from ebbflow.planners.scaling.steady import Held, Steady
from ebbflow.planners.scaling.utility import utility_curve, utility_now

__all__ = [
    "TARGET",
    "TRIGGER",
    "Curve",
    "DeadlineScaling",
    "Held",
    "Leaving",
    "NodeUse",
    "PerGpuScaling",
    "QueryCurve",
    "Recorded",
    "Rule",
    "Steady",
    "UtilityBand",
    "by_throughput",
    "cluster_utility",
    "goodput_per_gpu",
    "leaving",
    "may_end",
    "nodes_wanted",
    "per_gpu_curve",
    "recorded",
    "utility_curve",
    "utility_now",
    "with_drains",
]
