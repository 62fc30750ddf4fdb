"""How often nodes are lost."""

from ebbflow.planners.errors import OptionError

PRIOR_LOSSES = 0.05
PRIOR_NODE_HOURS = 1.0


def hazard(
    losses: int,
    node_seconds: float,
    prior_losses: float = PRIOR_LOSSES,
    prior_node_hours: float = PRIOR_NODE_HOURS,
) -> float:
    """Return the expected losses per node-hour after seeing ``losses`` in ``node_seconds``.

    Losses are a Poisson process whose rate is Gamma(``prior_losses``, ``prior_node_hours``) distributed
    before anything was seen; this is the posterior mean (prior_losses + losses) / (prior_node_hours +
    node-hours). The default prior expects one loss in twenty node-hours, cautious for spot nodes, and
    weighs one node-hour: after an hour of one node, evidence and prior count alike.

    >>> hazard(0, 0.0)
    0.05
    >>> hazard(2, 10 * 3600.0, prior_losses=1.0, prior_node_hours=20.0)
    0.1

    Raises ``OptionError`` for negative counts or times and for a prior without weight.
    """
    for name, value in (("losses", losses), ("node_seconds", node_seconds), ("prior_losses", prior_losses)):
        if not value >= 0:
            raise OptionError(f"{name} must be >= 0; got {value}")
    if not prior_node_hours > 0:
        raise OptionError(f"prior_node_hours must be > 0; got {prior_node_hours}")
    return (prior_losses + losses) / (prior_node_hours + node_seconds / 3600.0)
