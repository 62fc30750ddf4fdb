"""From choices (a join tree per block, cuts, cut views) to the stages of a plan and their SQL.

What a stage computes and reads is known from the choice alone; its SQL is rendered when it is asked for,
since most candidates are only compared.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from sqlglot import exp

from ebbflow.planners.query.plan.analysis import Analysis, BlockId, output_names
from ebbflow.planners.query.plan.partial import PartialQuery, split, type_of
from ebbflow.planners.query.plan.qep import AS_WRITTEN
from ebbflow.planners.query.plan.render import (
    BlockRenderer,
    checkpoint_name,
    open_keys,
    quote,
    unused_prefix,
    without_broadcast,
    without_hints,
)
from ebbflow.planners.query.plan.trees import Join, Leaf, Tree, joins, subtree
from ebbflow.planners.query.sql.dialect import duckdb_sql, spark_sql
from ebbflow.planners.query.sql.joingraph import Column
from ebbflow.planners.query.sql.references import outside_tables
from ebbflow.planners.query.views.views import ROOT, View, ViewChain


@dataclass(frozen=True)
class Choice:
    """What makes a plan: one join tree a block, the subsets and views whose results become checkpoints, and the
    views that are merged from partial results (the query's own, or cut ones)."""

    trees: Mapping[BlockId, Tree]
    cuts: Mapping[BlockId, frozenset[int]] = field(default_factory=dict)
    cut_views: frozenset[str] = frozenset()
    partials: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Unit:
    """A stage before it is costed. ``block`` and ``mask`` are set when it computes part of a block; otherwise
    it computes the whole of ``view``, or its partial result."""

    view: str
    output_fp: str
    inputs: tuple[str, ...]
    tables: tuple[str, ...]
    covers: frozenset[str]
    shape: str  # join trees with methods, and which joins are read: with output_fp and inputs, how the stage computes
    block: BlockId | None = None
    mask: int = 0
    partial: bool = False
    keys: tuple[str, ...] = ()  # as of ``qep.Stage``

    @property
    def is_result(self) -> bool:
        """Tell whether the unit produces the query's result."""
        return self.view == ROOT and self.block is None and not self.partial


@dataclass
class _Reads:
    """What a statement reads, collected on the way."""

    inputs: set[str] = field(default_factory=set)
    tables: set[str] = field(default_factory=set)
    covers: set[str] = field(default_factory=set)
    shapes: list[str] = field(default_factory=list)


class Staging:
    """The stages of one choice."""

    def __init__(self, analysis: Analysis, choice: Choice, written: "Written | None" = None) -> None:
        """``written`` is the query for an engine that runs the whole of it, in one stage, as it is."""
        self.analysis = analysis
        self.choice = choice
        self.written = written if written is not None and not written.repeats(analysis.chain) else None

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """Return the stages in topological order; the last one gives the result."""
        out: dict[str, Unit] = {}
        for view in self.analysis.chain.views:
            for key in self.analysis.blocks_of(view.name):
                cuts = self._cuts(key)
                nodes = [j for j in joins(self.choice.trees[key]) if j.mask in cuts]
                for node in sorted(nodes, key=lambda n: (n.mask.bit_count(), n.mask)):
                    unit = self._block_unit(key, node, out)
                    out.setdefault(unit.output_fp, unit)
            if view.name == ROOT or view.name in self.choice.cut_views:
                if view.name in self.choice.partials:
                    unit = self._partial_unit(view, out)
                    out.setdefault(unit.output_fp, unit)
                unit = self._view_unit(view, out)
                if unit.is_result and not unit.inputs and self.written is not None:
                    unit = replace(unit, shape=AS_WRITTEN)
                out.setdefault(unit.output_fp, unit)
        return _reachable(tuple(out.values()))

    def statement(self, unit: Unit, slice_: Mapping[Column, exp.Expr] | None = None) -> exp.Expr:
        """Return the unit's SQL as a tree that belongs to the caller; ``slice_`` holds the predicates that make
        it that of a slice."""
        return self._renderer.statement(unit, slice_ or {})

    @cached_property
    def _renderer(self) -> "_Renderer":
        return _Renderer(self.analysis, self.choice)

    def _cuts(self, key: BlockId) -> frozenset[int]:
        return self.choice.cuts.get(key, frozenset())

    def _block_unit(self, key: BlockId, node: Join, known: Mapping[str, Unit]) -> Unit:
        reads = _Reads()
        self._read_tree(key, node, reads, own=True)
        block = self.analysis.blocks[key]
        fingerprint = self.analysis.fingerprints.subset(block, node.mask)
        keys = tuple(open_keys(block, node.mask).values())
        return self._unit(key[0], fingerprint, reads, known, block=key, mask=node.mask, keys=keys)

    def _view_unit(self, view: View, known: Mapping[str, Unit]) -> Unit:
        reads = _Reads()
        if view.name in self.choice.partials:
            reads.inputs.add(self.analysis.partial_fp(view.name))
            reads.shapes.append("merge")
            for name in self.analysis.merged[view.name]:
                self._read_source(view, name, reads)
        else:
            self._read_view(view, reads)
        return self._unit(view.name, self.analysis.fingerprints.view(view.name), reads, known)

    def _partial_unit(self, view: View, known: Mapping[str, Unit]) -> Unit:
        reads = _Reads()
        self._read_view(view, reads, self.analysis.strangers_below[view.name])
        return self._unit(view.name, self.analysis.partial_fp(view.name), reads, known, partial=True)

    def _unit(
        self,
        view: str,
        fingerprint: str,
        reads: _Reads,
        known: Mapping[str, Unit],
        *,
        block: BlockId | None = None,
        mask: int = 0,
        partial: bool = False,
        keys: tuple[str, ...] = (),
    ) -> Unit:
        covers = set(reads.covers)
        for fp in reads.inputs:
            covers |= known[fp].covers
        return Unit(
            view,
            fingerprint,
            tuple(sorted(reads.inputs)),
            tuple(sorted(reads.tables)),
            frozenset(covers),
            "; ".join(reads.shapes),
            block,
            mask,
            partial,
            keys,
        )

    def _read_tree(self, key: BlockId, node: Tree, reads: _Reads, *, own: bool = False) -> None:
        block, view = self.analysis.blocks[key], self.analysis.chain.by_name[key[0]]
        place = len(reads.shapes)
        reads.shapes.append(repr(node))
        cuts = self._cuts(key)
        below: list[int] = []
        stack: list[tuple[Tree, bool]] = [(node, own)]
        while stack:
            tree, first = stack.pop()
            if tree.mask in cuts and not first:
                reads.inputs.add(self.analysis.fingerprints.subset(block, tree.mask))
                below.append(tree.mask)
            elif isinstance(tree, Leaf):
                relation = block.graph.relations[tree.relation]
                reads.covers.add(f"{key[0]}.{relation.alias}")
                self._read_source(view, relation.source, reads)
            else:
                stack += [(tree.left, False), (tree.right, False)]
        if below:  # another block of the statement may compute the same join itself
            reads.shapes[place] += f" from {sorted(below)}"
        for predicate in block.graph.predicates:
            inside = not predicate.relations & ~node.mask
            done = any(not predicate.relations & ~mask for mask in below)
            if predicate.subquery and inside and not done:
                for name in output_names(predicate.expression):
                    self._read_source(view, name, reads)

    def _read_view(self, view: View, reads: _Reads, strangers: frozenset[str] | None = None) -> None:
        for key in self.analysis.blocks_of(view.name):
            self._read_tree(key, self.choice.trees[key], reads)
        for name in sorted(self.analysis.strangers[view.name] if strangers is None else strangers):
            self._read_source(view, name, reads)

    def _read_source(self, view: View, name: str, reads: _Reads) -> None:
        if name not in view.reads_views:
            reads.tables.add(name)
        elif name in self.choice.cut_views:
            reads.inputs.add(self.analysis.fingerprints.view(name))
        else:
            self._read_view(self.analysis.chain.by_name[name], reads)


class _Renderer:
    """Renders the statements of one choice."""

    def __init__(self, analysis: Analysis, choice: Choice) -> None:
        self._analysis = analysis
        self._choice = choice
        views = analysis.chain.views
        prefix = unused_prefix(t for v in views for t in v.reads_tables)
        self._aliases = {v.name: f"{prefix}v{i}" for i, v in enumerate(views)}
        self._bodies: dict[str, exp.Expr] = {}
        self._blocks = {key: self._block(key, {}) for key in analysis.blocks}

    def _block(self, key: BlockId, slice_: Mapping[Column, exp.Expr]) -> BlockRenderer:
        block = self._analysis.blocks[key]
        cut = {m: self._analysis.fingerprints.subset(block, m) for m in self._choice.cuts.get(key, ())}
        return BlockRenderer(block, cut, slice_)

    def statement(self, unit: Unit, slice_: Mapping[Column, exp.Expr]) -> exp.Expr:
        statement: exp.Expr
        if unit.block is not None:
            node = subtree(self._choice.trees[unit.block], unit.mask)
            statement = (self._block(unit.block, slice_) if slice_ else self._blocks[unit.block]).stage(node)
        elif unit.partial:
            statement = self._split(unit.view, self._sliced_body(unit.view, slice_)).partial
        elif unit.view in self._choice.partials:
            statement = self._split(unit.view, self._body(unit.view)).merge
        else:
            statement = self._body(unit.view).copy()
        inlined: dict[str, exp.Expr] = {}
        self._bind(self._analysis.chain.by_name[unit.view], statement, inlined)
        if inlined:
            ctes = [
                exp.CTE(this=body, alias=exp.TableAlias(this=exp.to_identifier(self._aliases[name])))
                for name, body in inlined.items()
            ]
            statement.set("with_", exp.With(expressions=ctes))
        return statement

    def _split(self, view: str, body: exp.Expr) -> PartialQuery:
        fingerprint = self._analysis.partial_fp(view)
        assert isinstance(body, exp.Select)
        found = split(body, checkpoint_name(fingerprint), type_of(fingerprint))
        assert found is not None  # as written it could be split, and a join order changes nothing above
        return found

    def _sliced_body(self, name: str, slice_: Mapping[Column, exp.Expr]) -> exp.Expr:
        """Return the query of a view of one SELECT, restricted to a slice."""
        key = (name, 0)
        if not slice_:
            return self._body(name)
        if key in self._blocks:
            return self._block(key, slice_).top(self._choice.trees[key])
        body = self._analysis.chain.by_name[name].query.copy()
        assert isinstance(body, exp.Select)
        return body.where(*(condition.copy() for condition in slice_.values()), copy=False)

    def _body(self, name: str) -> exp.Expr:
        """Return a view's query with its planned blocks in place."""
        if name not in self._bodies:
            query = self._analysis.chain.by_name[name].query.copy()
            view = View(name, query, (), (), False)
            body: exp.Expr = query
            for position, select in enumerate(list(view.selects())):
                if (name, position) in self._blocks:
                    key = (name, position)
                    top = self._blocks[key].top(self._choice.trees[key])
                    if select is query:
                        body = top
                    else:
                        select.replace(top)
            self._bodies[name] = body
        return self._bodies[name]

    def _bind(self, view: View, statement: exp.Expr, inlined: dict[str, exp.Expr]) -> None:
        """Point view names at checkpoints or at inlined bodies, which are collected in dependency order."""
        for table in list(outside_tables(statement)):
            name = table.name
            if name not in view.reads_views:
                continue
            alias = table.alias_or_name
            if name in self._choice.cut_views:
                target = checkpoint_name(self._analysis.fingerprints.view(name))
            else:
                target = self._aliases[name]
                if name not in inlined:
                    body = self._body(name).copy()
                    self._bind(self._analysis.chain.by_name[name], body, inlined)
                    inlined[name] = body
            table.set("this", exp.to_identifier(target))
            table.set("alias", exp.TableAlias(this=exp.to_identifier(alias)))


class _Texts(ABC):
    """The SQL of a statement, made when first asked for (see ``qep.Statement``)."""

    @property
    @abstractmethod
    def tree(self) -> exp.Expr:
        """Return the statement, all identifiers quoted."""

    @cached_property
    def spark(self) -> str:
        return spark_sql(self.tree)

    @cached_property
    def fallback(self) -> str:
        return spark_sql(without_broadcast(self.tree))

    @cached_property
    def duckdb(self) -> str:
        return duckdb_sql(without_hints(self.tree))


class Written(_Texts):
    """A whole query as its author wrote it (see ``qep.Statement``)."""

    def __init__(self, query: exp.Query) -> None:
        self._query = query

    def repeats(self, chain: ViewChain) -> bool:
        """Tell whether it has what ``chain`` has as one view in several places: DuckDB computes a WITH once, but not
        equal derived tables."""
        names = {cte.alias.lower() for cte in self._query.find_all(exp.CTE)}
        named = Counter(table.name.lower() for table in self._query.find_all(exp.Table))
        shared = sum(uses > 1 for uses in chain.uses.values())
        return shared > sum(named[name] > 1 for name in names)

    @cached_property
    def tree(self) -> exp.Expr:
        """Return the query, all identifiers quoted."""
        tree = self._query.copy()
        quote(tree)
        return tree


class Rendered(_Texts):
    """A unit's SQL, rendered when first asked for (see ``qep.Statement``).

    A whole query in one stage is ``written`` to DuckDB as its author did: it orders the joins of one statement by
    statistics of its own, which the nested SELECTs of a join tree hide from it.
    """

    def __init__(self, staging: Staging, unit: Unit, slice_: Mapping[Column, exp.Expr] | None = None) -> None:
        self._staging = staging
        self._unit = unit
        self._slice = slice_

    def sliced(self, slice_: Mapping[Column, exp.Expr]) -> "Rendered":
        """Return the SQL of the part of the unit's result that these predicates select."""
        return Rendered(self._staging, self._unit, slice_)

    @cached_property
    def tree(self) -> exp.Expr:
        """Return the statement, all identifiers quoted."""
        statement = self._staging.statement(self._unit, self._slice)
        quote(statement)
        return statement

    @cached_property
    def duckdb(self) -> str:
        if self._unit.shape == AS_WRITTEN and self._staging.written is not None:
            return self._staging.written.duckdb
        return duckdb_sql(without_hints(self.tree))


def _reachable(units: tuple[Unit, ...]) -> tuple[Unit, ...]:
    """Drop stages that the result does not need, such as a cut inside a cut view that nobody reads."""
    needed = {units[-1].output_fp}
    for unit in reversed(units):
        if unit.output_fp in needed:
            needed.update(unit.inputs)
    return tuple(u for u in units if u.output_fp in needed)


def single_unit(analysis: Analysis, query: exp.Query) -> Unit:
    """Return the whole query as one stage, as its author wrote it: the ``single`` policy."""
    covers = frozenset(f"{k[0]}.{r.alias}" for k, b in analysis.blocks.items() for r in b.graph.relations)
    tables = tuple(sorted(set(output_names(query))))
    return Unit(ROOT, analysis.fingerprints.view(ROOT), (), tables, covers, AS_WRITTEN)
