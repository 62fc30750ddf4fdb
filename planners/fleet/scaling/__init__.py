"""How many nodes a pool is to have: rules, which nodes leave, and what keeps the fleet from flapping.

A rule is told a pool and a curve (what n nodes are worth) and answers with a ``Target`` and its reason:

- ``PerGpuScaling``: one large job; grows while each GPU gives enough goodput, or throughput (the baseline)
- ``UtilityBand``: several jobs; keeps the cluster's utility within a band
- ``DeadlineScaling``: a query; the fewest nodes that end in time (``QueryCurve``)

``Steady`` settles wishes, ``with_drains`` names the nodes that leave, ``recorded`` keeps what led to a decision.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbflow.planners.fleet.scaling.band import UtilityBand, cluster_utility
    from ebbflow.planners.fleet.scaling.deadline import DeadlineScaling, QueryCurve
    from ebbflow.planners.fleet.scaling.limits import Curve, Rule
    from ebbflow.planners.fleet.scaling.per_gpu import (
        TARGET,
        TRIGGER,
        PerGpuScaling,
        by_throughput,
        goodput_per_gpu,
        nodes_wanted,
        per_gpu_curve,
    )
    from ebbflow.planners.fleet.scaling.record import Recorded, recorded
    from ebbflow.planners.fleet.scaling.scale_in import Leaving, NodeUse, leaving, may_end, with_drains
    from ebbflow.planners.fleet.scaling.steady import Held, Steady
    from ebbflow.planners.fleet.scaling.utility import utility_curve, utility_now

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

_PLACES = {
    "Curve": "limits",
    "DeadlineScaling": "deadline",
    "Held": "steady",
    "Leaving": "scale_in",
    "NodeUse": "scale_in",
    "PerGpuScaling": "per_gpu",
    "QueryCurve": "deadline",
    "Recorded": "record",
    "Rule": "limits",
    "Steady": "steady",
    "TARGET": "per_gpu",
    "TRIGGER": "per_gpu",
    "UtilityBand": "band",
    "by_throughput": "per_gpu",
    "cluster_utility": "band",
    "goodput_per_gpu": "per_gpu",
    "leaving": "scale_in",
    "may_end": "scale_in",
    "nodes_wanted": "per_gpu",
    "per_gpu_curve": "per_gpu",
    "recorded": "record",
    "utility_curve": "utility",
    "utility_now": "utility",
    "with_drains": "scale_in",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for only then: a module of the folder needs not all the others."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
