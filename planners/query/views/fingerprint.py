"""Canonical identity of what a stage computes (QOOP, section 2.4; stage equivalence).

``output_fp`` is logical: equal for every join order of the same relations, predicates and columns over the
same table versions. ``physical_key`` adds inputs, join methods and partitioning: partial progress is
interchangeable only under equal physical keys.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence

from ebbflow.planners.query.sql.predicates import written
from ebbflow.planners.query.sql.references import table_names
from ebbflow.planners.query.views.blocks import Block
from ebbflow.planners.query.views.views import ROOT, View

_LENGTH = 32  # hex digits: 128 bits


def digest(*parts: object) -> str:
    """Return a stable hash of JSON-serialisable ``parts``."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]


class Fingerprints:
    """Fingerprints of one query's views and blocks.

    ``versions`` maps table names to versions. ``salt`` is mixed into volatile stages only: pass something
    unique to the run, so that they are never reused by another.
    """

    def __init__(self, views: Sequence[View], versions: Mapping[str, str], salt: str) -> None:
        self._versions = versions
        self._views: dict[str, str] = {}
        self._reads = {view.name: frozenset(view.reads_views) for view in views}
        self._subsets: dict[int, tuple[Block, dict[int, str]]] = {}  # by the block's identity
        for view in views:
            text = written(view.query)
            inputs = [self.source(t, False) for t in view.reads_tables if t.lower() in versions]
            inputs += [self.source(v, True) for v in view.reads_views]
            name = ROOT if view.name == ROOT else "view"
            self._views[view.name] = digest(name, text, inputs, salt if view.volatile else "")

    def view(self, name: str) -> str:
        """Return the output fingerprint of a whole view."""
        return self._views[name]

    def source(self, name: str, is_view: bool) -> str:
        """Return what identifies the content of a table or view."""
        return f"{name}={self._views[name]}" if is_view else f"{name.lower()}@{self._versions[name.lower()]}"

    def subset(self, block: Block, mask: int) -> str:
        """Return the output fingerprint of the join of a block's relations ``mask``."""
        _, known = self._subsets.setdefault(id(block), (block, {}))
        if mask not in known:
            known[mask] = self._subset(block, mask)
        return known[mask]

    def joins(self, block: Block) -> str:
        """Return what identifies the rows of a block's whole join, whichever of their columns it hands upward."""
        # Without implied conditions: what they follow from may stand above the joins of one block, not of another.
        return digest("joins", *self._joined(block, block.graph.everything, implied=False))

    def _subset(self, block: Block, mask: int) -> str:
        columns = [f"{a}.{c}" for a, c in block.output(mask)]
        return digest("join", *self._joined(block, mask), columns)

    def _joined(self, block: Block, mask: int, *, implied: bool = True) -> tuple[object, ...]:
        """Return what makes the rows of a join: relations, conditions, and what subqueries in these read."""
        graph = block.graph
        relations = sorted(
            (r.alias, self._views[r.source] if r.is_view else self.source(r.source, False))
            for i, r in enumerate(graph.relations)
            if mask >> i & 1
        )
        # Implied ones too: they filter, and what they follow from may stand outside the subset.
        inside = [p for p in graph.predicates if not p.relations & ~mask and (implied or not p.implied)]
        parts = [p.text for p in inside]
        for cls in graph.classes:
            equal = [f"{a}.{c}" for a, c in cls.columns if mask >> graph.index[a] & 1]
            if len(equal) > 1:
                parts.append(" = ".join(equal))
        # Their text says of a subquery's tables and views the names only.
        named = {t for p in inside if p.subquery for t in table_names(p.expression)}
        sources = sorted(self.source(t, t in self._reads[block.view]) for t in named)
        return relations, sorted(parts), sources
