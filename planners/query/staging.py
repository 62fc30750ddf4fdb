"""From choices (a join tree per block, cuts, cut views) to the SQL statements of a plan's stages."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

from sqlglot import exp

from ebbflow.planners.model import Catalogue
from ebbflow.planners.query.blocks import Block, extract
from ebbflow.planners.query.fingerprint import Fingerprints
from ebbflow.planners.query.render import BlockRenderer, checkpoint_name
from ebbflow.planners.query.trees import Tree, joins
from ebbflow.planners.query.views import ROOT, View, ViewChain

BlockId = tuple[str, int]  # (view name, position among the view's SELECTs)


@dataclass(frozen=True)
class Analysis:
    """A query taken apart: its views, their blocks, fingerprints, and why anything stays as written."""

    chain: ViewChain
    blocks: Mapping[BlockId, Block]
    fingerprints: Fingerprints
    notes: tuple[str, ...]

    @classmethod
    def of(cls, chain: ViewChain, catalogue: Catalogue, salt: str) -> "Analysis":
        """Extract the blocks of every view. ``salt`` is unique to the run and marks volatile stages."""
        blocks: dict[BlockId, Block] = {}
        notes = list(chain.notes)
        for view in chain.views:
            for position, select in enumerate(view.selects()):
                found = extract(view, select, view.reads_views, catalogue)
                if found.block is not None:
                    blocks[view.name, position] = found.block
                elif found.reason:
                    notes.append(found.reason)
        versions = {name: table.version for name, table in catalogue.tables.items()}
        return cls(chain, blocks, Fingerprints(chain.views, versions, salt), tuple(notes))


@dataclass(frozen=True)
class Choice:
    """What makes a plan: one join tree a block, the subsets and views whose results become checkpoints."""

    trees: Mapping[BlockId, Tree]
    cuts: Mapping[BlockId, frozenset[int]] = field(default_factory=dict)
    cut_views: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Unit:
    """A stage before it is costed. ``block`` and ``mask`` are set when it computes part of a block; otherwise
    it computes the whole of ``view``."""

    view: str
    statement: exp.Expression
    output_fp: str
    inputs: tuple[str, ...]
    tables: tuple[str, ...]
    covers: frozenset[str]
    inlined: tuple[str, ...]  # views whose bodies run inside this statement, itself included if whole
    block: BlockId | None = None
    mask: int = 0

    @cached_property
    def is_result(self) -> bool:
        """Tell whether the unit produces the query's result."""
        return self.view == ROOT and self.block is None


def stages(analysis: Analysis, choice: Choice) -> tuple[Unit, ...]:
    """Return the plan's statements in topological order; the last one gives the result."""
    return _Stager(analysis, choice).units()


class _Stager:
    def __init__(self, analysis: Analysis, choice: Choice) -> None:
        self._analysis = analysis
        self._choice = choice
        self._aliases = {v.name: f"_v{i}" for i, v in enumerate(analysis.chain.views)}
        self._bodies: dict[str, exp.Expression] = {}
        self._covers: dict[str, frozenset[str]] = {}  # by output_fp
        self._renderers: dict[BlockId, BlockRenderer] = {}
        for key, block in analysis.blocks.items():
            cut = {m: analysis.fingerprints.subset(block, m) for m in choice.cuts.get(key, ())}
            self._renderers[key] = BlockRenderer(block, cut)

    def units(self) -> tuple[Unit, ...]:
        out: dict[str, Unit] = {}
        for view in self._analysis.chain.views:
            for key in [k for k in self._analysis.blocks if k[0] == view.name]:
                for unit in self._block_units(view, key):
                    out.setdefault(unit.output_fp, unit)
            self._bodies[view.name] = self._body(view)
            if view.name == ROOT or view.name in self._choice.cut_views:
                unit = self._unit(view, self._bodies[view.name].copy(), self._analysis.fingerprints.view(view.name))
                out.setdefault(unit.output_fp, unit)
        return _reachable(tuple(out.values()))

    def _block_units(self, view: View, key: BlockId) -> list[Unit]:
        block, tree = self._analysis.blocks[key], self._choice.trees[key]
        cuts = self._choice.cuts.get(key, frozenset())
        nodes = sorted((n for n in joins(tree) if n.mask in cuts), key=lambda n: n.mask.bit_count())
        return [
            self._unit(
                view,
                self._renderers[key].stage(node),
                self._analysis.fingerprints.subset(block, node.mask),
                key,
                node.mask,
            )
            for node in nodes
        ]

    def _body(self, view: View) -> exp.Expression:
        planned = {k[1]: k for k in self._analysis.blocks if k[0] == view.name}
        copy = View(view.name, view.query.copy(), (), (), False)
        for position, select in enumerate(list(copy.selects())):
            if position in planned:
                key = planned[position]
                top = self._renderers[key].top(self._choice.trees[key])
                if select is copy.query:
                    return top
                select.replace(top)
        return copy.query

    def _unit(
        self, view: View, statement: exp.Expression, output_fp: str, block: BlockId | None = None, mask: int = 0
    ) -> Unit:
        inlined: dict[str, exp.Expression] = {}
        self._bind(view, statement, inlined)
        if inlined:
            ctes = [
                exp.CTE(this=body, alias=exp.TableAlias(this=exp.to_identifier(self._aliases[name])))
                for name, body in inlined.items()
            ]
            statement.set("with_", exp.With(expressions=ctes))
        names = {t.name for t in statement.find_all(exp.Table) if isinstance(t.this, exp.Identifier)}
        local = {c.alias for c in statement.find_all(exp.CTE)}
        inputs = tuple(sorted(n.removeprefix("ckpt_") for n in names if n.startswith("ckpt_")))
        tables = tuple(sorted(n for n in names if not n.startswith("ckpt_") and n not in local))
        covers = self._relations(view, block, mask, inlined)
        for fp in inputs:
            covers |= self._covers.get(fp, frozenset())
        self._covers[output_fp] = covers
        return Unit(view.name, statement, output_fp, inputs, tables, covers, tuple(inlined), block, mask)

    def _bind(self, view: View, statement: exp.Expression, inlined: dict[str, exp.Expression]) -> None:
        """Point view names at checkpoints or at inlined bodies, which are collected in dependency order."""
        nested = {c.alias for c in statement.find_all(exp.CTE)}
        for table in list(statement.find_all(exp.Table)):
            name = table.name
            if name not in view.reads_views or name in nested:
                continue
            alias = table.alias_or_name
            if name in self._choice.cut_views:
                target = checkpoint_name(self._analysis.fingerprints.view(name))
            else:
                target = self._aliases[name]
                if name not in inlined:
                    body = self._bodies[name].copy()
                    self._bind(self._analysis.chain.by_name[name], body, inlined)
                    inlined[name] = body
            table.set("this", exp.to_identifier(target))
            table.set("alias", exp.TableAlias(this=exp.to_identifier(alias)))

    def _relations(
        self, view: View, block: BlockId | None, mask: int, inlined: Mapping[str, object]
    ) -> frozenset[str]:
        if block is not None:
            return frozenset(f"{view.name}.{a}" for a in self._analysis.blocks[block].graph.aliases(mask))
        names = {view.name, *inlined}
        return frozenset(
            f"{key[0]}.{r.alias}" for key, b in self._analysis.blocks.items() if key[0] in names for r in b.graph.relations
        )


def _reachable(units: tuple[Unit, ...]) -> tuple[Unit, ...]:
    """Drop stages that the result does not need, such as a cut inside a cut view that nobody reads."""
    needed = {units[-1].output_fp}
    for unit in reversed(units):
        if unit.output_fp in needed:
            needed.update(unit.inputs)
    return tuple(u for u in units if u.output_fp in needed)


def single_unit(analysis: Analysis, query: exp.Query) -> Unit:
    """Return the whole query as one statement, as its author wrote it: the ``single`` policy."""
    chain = analysis.chain
    names = {t.name for t in query.find_all(exp.Table) if isinstance(t.this, exp.Identifier)}
    local = {c.alias for c in query.find_all(exp.CTE)}
    covers = frozenset(f"{k[0]}.{r.alias}" for k, b in analysis.blocks.items() for r in b.graph.relations)
    return Unit(
        ROOT,
        cast("exp.Expression", query.copy()),
        analysis.fingerprints.view(ROOT),
        (),
        tuple(sorted(names - local)),
        covers,
        tuple(v.name for v in chain.views),
    )
