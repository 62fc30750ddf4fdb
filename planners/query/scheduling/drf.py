"""Dominant resource fairness (Ghodsi et al., NSDI 2011)."""

from collections.abc import Sequence

from ebbflow.planners.query.scheduling.intra import first_fit
from ebbflow.planners.query.scheduling.ledger import Job, Ledger
from ebbflow.planners.query.scheduling.maxmin import lowest_share_first


class DRF:
    """The next task goes to the job with the least dominant share, on the first machine that it fits."""

    def assign(self, ledger: Ledger, jobs: Sequence[Job], now: float) -> None:
        """See ``Scheduler``."""
        lowest_share_first(ledger, jobs, first_fit)
