"""Sizes of everything in a query: relations, joined subsets, and the views that other views read."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from sqlglot import exp

from ebbflow.planners.model import Catalogue, ColumnStatistics
from ebbflow.planners.query.estimates.cardinality import Cardinalities
from ebbflow.planners.query.estimates.relations import RelationInput, member_values
from ebbflow.planners.query.estimates.selectivity import conjunction, distinct_of, having_fraction
from ebbflow.planners.query.plan.analysis import Analysis, BlockId
from ebbflow.planners.query.plan.render import open_keys
from ebbflow.planners.query.plan.state import StageOutput
from ebbflow.planners.query.sql.joingraph import Column, JoinGraph
from ebbflow.planners.query.sql.predicates import canonical, columns_of, conjuncts, has_subquery
from ebbflow.planners.query.views.views import View

UNKNOWN_ROWS = 1e6  # of a table without statistics
UNKNOWN_BYTES = 1e8


@dataclass(frozen=True)
class SelectSize:
    """What flows through one SELECT."""

    joined: float  # rows that its FROM and WHERE give
    grouped: float  # rows after GROUP BY and HAVING
    output: float  # rows it returns
    aggregates: bool
    sorts: bool


@dataclass
class Sizes:
    """Cardinalities of every block and view, from statistics, samples and finished stages.

    ``selectivities`` are fractions measured on samples, by table and predicate text (see ``Cardinalities``);
    ``actuals`` are outputs of finished stages by fingerprint and replace estimates.
    """

    analysis: Analysis
    catalogue: Catalogue
    selectivities: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    actuals: Mapping[str, StageOutput] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._views: dict[str, RelationInput] = {}
        self._selects: dict[tuple[str, int], SelectSize] = {}
        self.blocks: dict[BlockId, Cardinalities] = {}
        for view in self.analysis.chain.views:
            self._views[view.name] = self._view(view)

    def view(self, name: str) -> RelationInput:
        """Return rows, bytes and column statistics of a view's output."""
        return self._views[name]

    def select(self, view: str, position: int) -> SelectSize:
        """Return what flows through the ``position``-th SELECT of ``view``."""
        return self._selects[view, position]

    @cached_property
    def by_fingerprint(self) -> Mapping[str, float]:
        """Return actual rows by fingerprint."""
        return {fp: float(o.rows) for fp, o in self.actuals.items()}

    def relation(self, view: View, source: str) -> RelationInput:
        """Return what is known of a table or view that ``view`` reads."""
        if source in view.reads_views:
            return self._views[source]
        table = self.catalogue.get(source)
        if table is None or table.statistics is None:
            # Joins mostly follow keys: a column taken for one keeps a join as large as its inputs.
            names = [name.lower() for name, _ in table.columns] if table is not None else []
            key = ColumnStatistics(distinct=UNKNOWN_ROWS)
            return RelationInput(UNKNOWN_ROWS, UNKNOWN_BYTES, dict.fromkeys(names, key))
        known = table.statistics
        columns = {name.lower(): known.columns.get(name, ColumnStatistics()) for name, _ in table.columns}
        return RelationInput(known.rows, known.bytes, columns, table.version)

    def _view(self, view: View) -> RelationInput:
        arms: list[tuple[SelectSize, dict[str, ColumnStatistics]]] = []
        for position, select in enumerate(view.selects()):
            key = (view.name, position)
            block = self.analysis.blocks.get(key)
            if block is not None:
                self.blocks[key] = self._cardinalities(view, key)
            size, columns = self._select(view, key, select)
            self._selects[key] = size
            arms.append((size, columns))
        actual = self.by_fingerprint.get(self.analysis.fingerprints.view(view.name))
        rows = actual if actual is not None else max(sum(s.output for s, _ in arms), 1.0)
        columns = arms[0][1] if len(arms) == 1 else {}
        columns = {name: _at_most(rows, known) for name, known in columns.items()}
        width = sum(c.width for c in columns.values()) or 8.0 * max(len(view.columns), 1)
        return RelationInput(rows, rows * width, columns)

    def _cardinalities(self, view: View, key: BlockId) -> Cardinalities:
        block = self.analysis.blocks[key]
        graph = block.graph
        inputs = [self.relation(view, r.source) for r in graph.relations]
        measured: dict[str, float] = {}
        for relation in graph.relations:
            if not relation.is_view:
                measured.update(self._of_alias(relation.source, relation.alias))
        measured |= self._memberships(view, graph, inputs)
        actuals, samples = {}, {}
        if self.actuals:
            for mask in range(1, graph.everything + 1):
                if mask & (mask - 1) and len(graph.relations) <= _MAX_LOOKUP:
                    known = self.actuals.get(self.analysis.fingerprints.subset(block, mask))
                    if known is not None:
                        actuals[mask] = float(known.rows)
                        named = open_keys(block, mask) if known.keys else {}
                        samples[mask] = {i: known.keys[n] for i, n in named.items() if n in known.keys}
        return Cardinalities(
            graph,
            inputs,
            selectivities=measured,
            actuals=actuals,
            samples=samples,
            outputs=sorted(block.top_columns),
        )

    def _memberships(self, view: View, graph: JoinGraph, inputs: Sequence[RelationInput]) -> dict[str, float]:
        """Return what fraction of a relation's rows each ``column IN (SELECT ...)`` keeps: the values it admits
        over those there are, all taken to be among them."""
        out: dict[str, float] = {}
        for predicate in graph.predicates:
            node = predicate.expression.unnest()
            if not predicate.subquery or len(predicate.columns) != 1 or not isinstance(node, exp.In):
                continue
            alias, name = next(iter(predicate.columns))
            given = inputs[graph.index[alias]]
            whole = given.columns.get(name, ColumnStatistics()).distinct
            members = member_values(
                node,
                lambda source: self.relation(view, source),
                lambda source, name, parts: self.fraction(view, source, name, parts),
            )
            if whole and members is not None and isinstance(node.this, exp.Column):
                out[predicate.text] = min(members.distinct / whole, 1.0)
        return out

    def fraction(self, view: View, source: str, alias: str, parts: Sequence[exp.Expr]) -> float:
        """Return the fraction of a relation's rows that conditions on it alone keep, measured where it was."""
        if not parts:
            return 1.0
        found = self._of_alias(source, alias).get(conjuncts_key(parts))
        columns = self.relation(view, source).columns
        return conjunction(parts, lambda c: columns.get(c[1])) if found is None else found

    def _of_alias(self, table: str, alias: str) -> Mapping[str, float]:
        return self.selectivities.get(f"{table.lower()} {alias}", {})

    def _select(
        self, view: View, key: BlockId, select: exp.Select
    ) -> tuple[SelectSize, dict[str, ColumnStatistics]]:
        lookup = _Lookup(self, view, select)
        block = self.analysis.blocks.get(key)
        cardinalities = self.blocks.get(key)
        if block is not None and cardinalities is not None:
            joined = cardinalities.rows(block.graph.everything)
            rest = block.top
        else:
            first = select.args.get("from_")
            name = first.this.name if first is not None and isinstance(first.this, exp.Table) else ""
            joined = self.relation(view, name).rows if name else 1.0
            where = select.args.get("where")
            rest = tuple(conjuncts(where.this.copy())) if where is not None else ()
            alias = first.this.alias_or_name if name and first is not None else ""
            own = own_conjuncts(select, alias)
            measured = self._of_alias(name, alias).get(conjuncts_key(own)) if own else None
            if measured is not None:
                joined *= measured
                rest = tuple(p for p in rest if not any(p == o for o in own))
        joined = max(joined * conjunction(rest, lookup), 1.0)
        group = select.args.get("group")
        aggregates = group is not None or any(isinstance(e, exp.AggFunc) for e in _outer_nodes(select))
        grouped = joined
        if group is not None:
            everything = block.graph.everything if block is not None else 0
            grouped = min(joined, self._groups(group, lookup, cardinalities, everything))
        elif aggregates:
            grouped = 1.0
        having = select.args.get("having")
        if having is not None:
            grouped = max(grouped * having_fraction(having.this, joined / max(grouped, 1.0), lookup), 1.0)
        output = grouped
        limit = select.args.get("limit")
        if isinstance(limit, exp.Limit) and limit.expression is not None and limit.expression.is_int:
            output = min(output, float(limit.expression.this))
        aggregates = aggregates or bool(select.args.get("distinct"))
        size = SelectSize(joined, grouped, output, aggregates, sorts=bool(select.args.get("order")))
        return size, self._projected(select, lookup, output)

    def _groups(
        self, group: exp.Group, lookup: "_Lookup", cardinalities: Cardinalities | None, everything: int
    ) -> float:
        columns = [e for e in group.expressions if isinstance(e, exp.Column)]
        others = [e for e in group.expressions if not isinstance(e, exp.Column)]
        inside: list[Column] = [(c.table, c.name) for c in columns]
        if cardinalities is not None and all(c[0] in cardinalities.graph.index for c in inside):
            found = cardinalities.distinct(everything, inside) if inside else 1.0
        else:
            found = 1.0
            for c in inside:
                found *= getattr(lookup(c), "distinct", None) or 200.0
        for e in others:
            found *= max(distinct_of(e, lookup), 1.0)
        return max(found, 1.0)

    def _projected(self, select: exp.Select, lookup: "_Lookup", rows: float) -> dict[str, ColumnStatistics]:
        out = {}
        for item in select.selects:
            inner = item.unalias()
            known = lookup((inner.table, inner.name)) if isinstance(inner, exp.Column) else None
            out[item.alias_or_name] = _at_most(rows, known or ColumnStatistics())
        return out


_MAX_LOOKUP = 14  # relations up to which every subset is looked up among finished stages


def own_conjuncts(select: exp.Select, alias: str) -> list[exp.Expr]:
    """Return the conjuncts of a single-table SELECT's WHERE that a sample of the table can judge."""
    where = select.args.get("where")
    parts = conjuncts(where.this.copy()) if where is not None else []
    return [p for p in parts if not has_subquery(p) and {a for a, _ in columns_of(p)} == {alias}]


def conjuncts_key(parts: Iterable[exp.Expr]) -> str:
    """Return the key under which the measured fraction of ``parts`` together is kept."""
    return " AND ".join(sorted(f"({canonical(p)})" for p in parts))


def _at_most(rows: float, known: ColumnStatistics) -> ColumnStatistics:
    return known if known.distinct is None else replace(known, distinct=min(known.distinct, rows))


class _Lookup:
    """Statistics of a SELECT's columns by (alias, name)."""

    def __init__(self, sizes: Sizes, view: View, select: exp.Select) -> None:
        tables = [t for t in select.find_all(exp.Table) if t.parent_select is select]
        self._inputs = {t.alias_or_name: sizes.relation(view, t.name) for t in tables}

    def __call__(self, column: Column) -> ColumnStatistics | None:
        given = self._inputs.get(column[0])
        return given.columns.get(column[1]) if given is not None else None


def _outer_nodes(select: exp.Select) -> list[exp.Expr]:
    """Return the nodes of the projections that do not belong to a nested query or a window."""
    out: list[exp.Expr] = []
    stack: list[exp.Expr] = [*select.selects]
    while stack:
        node = stack.pop()
        if isinstance(node, (exp.Query, exp.Window)):
            continue
        out.append(node)
        stack += list(node.iter_expressions())
    return out
