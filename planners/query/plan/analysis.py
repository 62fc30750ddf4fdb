"""What planning needs to know of a query before its plans are cut into stages."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from sqlglot import exp

from ebbflow.planners.model import Catalogue
from ebbflow.planners.query.plan.partial import PartialQuery, averages_add_up, split, type_of
from ebbflow.planners.query.sql.references import outside_tables
from ebbflow.planners.query.views.blocks import Block, extract
from ebbflow.planners.query.views.column_types import families
from ebbflow.planners.query.views.fingerprint import Fingerprints, digest
from ebbflow.planners.query.views.views import ViewChain

BlockId = tuple[str, int]  # (view name, position among the view's SELECTs)


UNNAMED = "__partial"  # stands for a partial result whose fingerprint does not matter


def output_names(node: exp.Expr) -> list[str]:
    """Return the table and view names under ``node``, with repetitions, without those that it defines."""
    return [t.name for t in outside_tables(node)]


@dataclass(frozen=True)
class Analysis:
    """A query taken apart: its views, their blocks, fingerprints, and why anything stays as written."""

    chain: ViewChain
    blocks: Mapping[BlockId, Block]
    fingerprints: Fingerprints
    notes: tuple[str, ...]
    whole: frozenset[str] = frozenset()  # views with averages that parts do not add up to

    @classmethod
    def of(cls, chain: ViewChain, catalogue: Catalogue, salt: str) -> "Analysis":
        """Extract the blocks of every view. ``salt`` is unique to the run and marks volatile stages."""
        blocks: dict[BlockId, Block] = {}
        notes = list(chain.notes)
        known = families(chain, catalogue)
        for view in chain.views:
            for position, select in enumerate(view.selects()):
                found = extract(view, select, known[view.name])
                if found.block is not None:
                    blocks[view.name, position] = found.block
                elif found.reason:
                    notes.append(found.reason)
        versions = {name: table.version for name, table in catalogue.tables.items()}
        whole = frozenset(v.name for v in chain.views if not averages_add_up(v, catalogue, known[v.name]))
        return cls(chain, blocks, Fingerprints(chain.views, versions, salt), tuple(notes), whole)

    def blocks_of(self, view: str) -> Iterable[BlockId]:
        """Return the ids of a view's blocks, in order."""
        return [key for key in self.blocks if key[0] == view]

    @cached_property
    def strangers(self) -> Mapping[str, frozenset[str]]:
        """Return per view the tables and views that it names outside its blocks and their predicates.

        They stand in outer joins, in other subqueries, or are the only table of a SELECT.
        """
        return {view.name: self._strangers(view.name, view.query) for view in self.chain.views}

    @cached_property
    def strangers_below(self) -> Mapping[str, frozenset[str]]:
        """Return per divisible view those of its strangers that its partial result reads."""
        return {view: self._strangers(view, found.partial) for view, found in self.splits.items()}

    @cached_property
    def merged(self) -> Mapping[str, tuple[str, ...]]:
        """Return per divisible view what the merging of its partial result reads besides that."""
        return {
            view: tuple(name for name in output_names(found.merge) if name != UNNAMED)
            for view, found in self.splits.items()
        }

    def _strangers(self, view: str, query: exp.Expr) -> frozenset[str]:
        names = Counter(output_names(query))
        for key in self.blocks_of(view):
            graph = self.blocks[key].graph
            names.subtract(r.source for r in graph.relations)
            for predicate in graph.predicates:
                if predicate.subquery and not predicate.implied:
                    names.subtract(output_names(predicate.expression))
        return frozenset(n for n, count in names.items() if count > 0)

    @cached_property
    def splits(self) -> Mapping[str, PartialQuery]:
        """Return, of the views that can be computed from parts, the two statements as written."""
        out = {}
        for view in self.chain.views:
            possible = not view.opaque and not view.volatile and view.name not in self.whole
            if isinstance(view.query, exp.Select) and possible:
                found = split(view.query, UNNAMED, type_of(""))
                if found is not None:
                    out[view.name] = found
        return out

    def partial_fp(self, view: str) -> str:
        """Return the output fingerprint of a view's partial result."""
        return digest("partial", self.fingerprints.view(view))
