"""How many nodes a pool is to have: rules, which nodes leave, and what keeps the fleet from flapping.

A rule is told a pool and a curve (what n nodes are worth) and answers with a ``Target`` and its reason:

- ``PerGpuScaling``: one large job; grows while each GPU gives enough goodput, or throughput (the baseline)
- ``UtilityBand``: several jobs; keeps the cluster's utility within a band
- ``DeadlineScaling``: a query; the fewest nodes that end in time (``QueryCurve``)

``StabilizationWindow`` settles wishes, ``with_drains`` names the nodes that leave, ``recorded`` keeps what led to a
decision.
"""
