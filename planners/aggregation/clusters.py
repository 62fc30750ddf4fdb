"""Which cluster of aggregators takes a training, and whether it may start (AutoPS 5.10 and 5.12 of its reference)."""

from collections.abc import Mapping
from fractions import Fraction

from ebbflow.planners.aggregation.model import AggregatorPool, JobProfile


def free_demand(pool: AggregatorPool, max_aggregators: int) -> Fraction:
    """Return the demand that a cluster could still take, in aggregators.

    Args:
        pool: of the cluster.
        max_aggregators: that it may have.
    """
    used = sum((min(pool.load(one), Fraction(1)) for one in pool.aggregators), Fraction(0))
    return max(max_aggregators - used, Fraction(0))


def select_cluster(free: Mapping[str, Fraction], profile: JobProfile) -> str | None:
    """Return the cluster with the least free demand that suffices for a training, ties by name.

    Args:
        free: free demand of each cluster, in aggregators.
        profile: of the training, which does not span clusters.
    """
    fitting = [(room, name) for name, room in free.items() if room >= profile.demand]
    return min(fitting)[1] if fitting else None


def may_start(profile: JobProfile, running: Mapping[str, JobProfile], max_aggregators: int) -> bool:
    """Tell whether a training may start: in the worst case each runs on as many aggregators as it requested servers.

    Args:
        profile: of the training.
        running: the others.
        max_aggregators: that the cluster may have.
    """
    requested = sum(one.requested_servers for one in running.values())
    return requested + profile.requested_servers <= max_aggregators
