"""The rewrites of a chain of views that are decided by cost, once selectivities are known; in order."""

from collections.abc import Callable, Collection
from dataclasses import replace

from ebbflow.planners.query.plan.analysis import Analysis
from ebbflow.planners.query.subqueries.factoring import factored
from ebbflow.planners.query.subqueries.hints import hinted
from ebbflow.planners.query.subqueries.known import AnalyzedChain
from ebbflow.planners.query.subqueries.reduction import reduced
from ebbflow.planners.query.subqueries.repeats import shared_joins
from ebbflow.planners.query.views.views import ViewChain

Rewrite = Callable[[ViewChain, AnalyzedChain], ViewChain]
REWRITES: tuple[tuple[tuple[str, Rewrite], ...], ...] = (
    (("shared-joins", shared_joins),),  # joins that several SELECTs repeat, made once
    (
        ("factoring", factored),  # joins that correlated subqueries hang on, made once and told to them
        ("reduction", reduced),  # correlated subqueries kept to what they can be asked for
        ("hints", hinted),  # small sets of keys broadcast
    ),
)
"""By name; each returns a chain with the same rows, the same chain where it does nothing.

Within a group all go by what is known of the chain as the group found it; for the next one it is taken apart anew.
What makes the chain in the first place is in ``views.views``.
"""


def rewritten(known: AnalyzedChain, salt: str, without: Collection[str] = ()) -> Analysis:
    """Return the analysis of the rewritten chain of ``known``, the same one where nothing was to be done.

    ``salt`` is unique to the run, as in ``Analysis.of``; rewrites named in ``without`` are left out.
    """
    for group in REWRITES:
        chain = known.analysis.chain
        for name, rewrite in group:
            if name not in without:
                chain = rewrite(chain, known)
        if chain is not known.analysis.chain:
            known = replace(known, analysis=Analysis.of(chain, known.catalogue, salt))
    return known.analysis
