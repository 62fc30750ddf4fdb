"""Dominant resource fairness (Ghodsi et al., NSDI 2011)."""

from collections.abc import Sequence

from tests.evaluation.qoop.intra import first_fit
from tests.evaluation.qoop.ledger import Job, Ledger
from tests.evaluation.qoop.maxmin import lowest_share_first


class DRF:
    """The next task goes to the job with the least dominant share, on the first machine that it fits."""

    def assign(self, ledger: Ledger, jobs: Sequence[Job], now: float) -> None:
        """See ``Scheduler``."""
        lowest_share_first(ledger, jobs, first_fit)
