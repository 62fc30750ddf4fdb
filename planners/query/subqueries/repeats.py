"""Joins that several SELECTs of a query repeat, made once for all of them.

An engine computes them as often as they are written: it shares exchanges that are alike to the last column, and each
SELECT reads columns of its own (TPC-H Q11: the stock of one nation, by part and in all). They become one view with
the columns of all:

    before: SELECT ps.part, sum(ps.cost) FROM ps, s WHERE <joins> GROUP BY ps.part
            HAVING sum(ps.cost) > (SELECT sum(ps.cost) * 0.01 FROM ps, s WHERE <joins>)
    after:  _b1 AS (SELECT ps.part AS ps__part, ps.cost AS ps__cost FROM ps, s WHERE <joins>)
            SELECT _b1.ps__part, sum(_b1.ps__cost) FROM _b1 GROUP BY _b1.ps__part
            HAVING sum(_b1.ps__cost) > (SELECT sum(_b1.ps__cost) * 0.01 FROM _b1)

Read several times, the view may become a stage; where it does not, it is inlined and costs what it did. (Common
subexpressions as candidate views: Zhou et al., SIGMOD 2007.)
"""

from collections.abc import Sequence
from dataclasses import replace

from ebbflow.planners.model import Share
from ebbflow.planners.query.costs.cost import CostModel, Size, scan, write
from ebbflow.planners.query.costs.sizes import Sizes
from ebbflow.planners.query.orders.enumerate import enumerate_trees
from ebbflow.planners.query.plan.analysis import Analysis, BlockId
from ebbflow.planners.query.sql.joingraph import Column
from ebbflow.planners.query.subqueries.known import AnalyzedChain
from ebbflow.planners.query.subqueries.lifting import joins_view, lifted_name, reading, unused_names
from ebbflow.planners.query.views.views import View, ViewChain

_SHARE = Share.uniform(3.0, 12.0, 3)  # three small nodes: the real one is not known yet


def shared_joins(chain: ViewChain, known: AnalyzedChain) -> ViewChain:
    """Return ``chain``, that of ``known``, with repeated joins as views where making them once pays."""
    analysis = known.analysis
    names = unused_names(chain, known.catalogue)
    for keys in _repeated(analysis):
        if _gain(analysis, keys, known.sizes, known.model) > 0.0:
            chain = _shared(analysis, chain, keys, next(names))
    return chain


def _repeated(analysis: Analysis) -> Sequence[Sequence[BlockId]]:
    """Return the blocks that join the same under the same conditions, in groups of two and more."""
    found: dict[str, list[BlockId]] = {}
    for key, block in analysis.blocks.items():
        if not block.barriers and not analysis.chain.by_name[key[0]].volatile:
            found.setdefault(analysis.fingerprints.joins(block), []).append(key)
    return [keys for keys in found.values() if len(keys) > 1 and _distinct_names(analysis, keys)]


def _columns(analysis: Analysis, keys: Sequence[BlockId]) -> frozenset[Column]:
    return frozenset(column for key in keys for column in analysis.blocks[key].top_columns)


def _distinct_names(analysis: Analysis, keys: Sequence[BlockId]) -> bool:
    columns = _columns(analysis, keys)
    return len({lifted_name(c) for c in columns}) == len(columns) > 0


def _gain(analysis: Analysis, keys: Sequence[BlockId], sizes: Sizes, model: CostModel) -> float:
    """Return the core-seconds saved by joining once, writing the result and reading it for every block."""
    block, cardinalities = analysis.blocks[keys[0]], sizes.blocks[keys[0]]
    once = enumerate_trees(block.graph, cardinalities, model, _SHARE, limit=1)[0].core_seconds
    everything = block.graph.everything
    stored = Size(cardinalities.rows(everything), cardinalities.bytes(everything, _columns(analysis, keys)))
    copy = model.core_seconds(write(stored)) + len(keys) * model.core_seconds(scan(stored))
    return (len(keys) - 1) * once - copy - model.latency * _SHARE.total.cores


def _shared(analysis: Analysis, chain: ViewChain, keys: Sequence[BlockId], name: str) -> ViewChain:
    """Return ``chain`` with the joins of the blocks ``keys`` as the view ``name``, before the first that reads it."""
    first = analysis.chain.by_name[keys[0][0]]
    views: list[View] = []
    for view in chain.views:
        if view.name == first.name:
            views.append(joins_view(first, analysis.blocks[keys[0]], _columns(analysis, keys), name))
        changed = view
        for key in keys:
            if key[0] == view.name:
                changed = reading(changed, key, analysis.blocks[key], name)
        views.append(changed)
    return replace(chain, views=tuple(views))
