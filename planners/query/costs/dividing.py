"""By which column, and into how many slices, a stage is divided."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from sqlglot import exp

from ebbflow.planners.model import Catalogue, Work
from ebbflow.planners.query.costs import cost
from ebbflow.planners.query.costs.costing import StatementCoster
from ebbflow.planners.query.costs.statement_cost import CostEstimate
from ebbflow.planners.query.estimates.relations import RelationInput
from ebbflow.planners.query.plan import slicing
from ebbflow.planners.query.plan.analysis import Analysis, BlockId
from ebbflow.planners.query.plan.qep import SharedPart, Slicing
from ebbflow.planners.query.plan.slicing import Grid
from ebbflow.planners.query.plan.staging import Choice, Rendered, Staging, Unit
from ebbflow.planners.query.plan.trees import Leaf, Tree, joins, subtree
from ebbflow.planners.query.sql.joingraph import Column
from ebbflow.planners.query.views.views import View

_LIMITS = (exp.Limit, exp.Offset, exp.Fetch)


@dataclass(frozen=True)
class Sharing:
    """What all slices of a unit read alike: of ``block`` the parts over relations ``masks``. ``inside`` is the choice
    that cuts there, too, ``apart`` the one that does not, if another, ``once`` the work of writing them and reading
    them for the first slice."""

    inside: Choice
    block: BlockId
    masks: tuple[int, ...] = ()
    once: Work = field(default_factory=Work)
    apart: Choice | None = None

    @classmethod
    def of(cls, choice: Choice, block: BlockId, masks: Collection[int], once: Work) -> "Sharing":
        """Return that slices of a unit of ``choice`` share the parts ``masks``."""
        if not masks:
            return cls(choice, block)
        cuts = {**choice.cuts, block: choice.cuts.get(block, frozenset()).union(masks)}
        return cls(replace(choice, cuts=cuts), block, tuple(masks), once, choice)


@dataclass(frozen=True)
class SlicedCost:
    """A grid, how many slices of it, what they share, and the bill of what they do more than the stage in one."""

    grid: Grid
    division: slicing.Division
    sharing: Sharing
    again: CostEstimate


class Divider:
    """Divides the units of one query. ``begun`` names divisions of which slices exist: (grid's name, slices) by
    output fingerprint; they are kept, so that the slices serve whatever plan comes next."""

    def __init__(self, analysis: Analysis, catalogue: Catalogue) -> None:
        self._analysis = analysis
        self._catalogue = catalogue
        self.begun: dict[str, tuple[str, int]] = {}
        self._limits: dict[str, tuple[bool, bool]] = {}
        self._types: dict[str, dict[str, str]] = {}

    def division(
        self, unit: Unit, choice: Choice, coster: StatementCoster, bill: CostEstimate
    ) -> SlicedCost | None:
        """Return the best division of a unit, if any pays. ``bill`` is the unit's own."""
        begun = self.begun.get(unit.output_fp)
        if begun is None and coster.share.hazard <= 0.0:
            return None
        cores = max(coster.share.total.cores, 1.0)

        def seconds(of: CostEstimate) -> float:
            return of.seconds(coster.model, coster.share)

        def reread(grid: Grid, sharing: Sharing, slices: int) -> float:
            work = coster.reread(unit, grid, slices).plus(sharing.once)
            return coster.model.core_seconds(work) / cores + coster.model.latency * len(sharing.masks)

        best: SlicedCost | None = None
        for grid in self.grids(unit, choice, partial(coster.sizes.relation)):
            if begun is not None and begun[0] != grid.name:
                continue
            sharing = self._sharing(unit, choice, grid, coster)
            again = coster.repeated(unit, sharing.inside, grid)
            found = slicing.divide(
                seconds(bill),
                seconds(again),
                partial(reread, grid, sharing),
                coster.model.latency,
                coster.share,
                slicing.COUNTS if begun is None else (begun[1],),
                coster.model.slices_at_once,
            )
            if found.slices > 1 and (best is None or found.seconds < best.division.seconds):
                more = found.slices - 1.0
                work = Work(*(amount * more for amount in again.work.vector()))
                work = work.plus(coster.reread(unit, grid, found.slices)).plus(sharing.once)
                best = SlicedCost(
                    grid,
                    found,
                    sharing,
                    CostEstimate(work, again.serial * more, again.waiting * more, again.network * more),
                )
        return best

    def _sharing(self, unit: Unit, choice: Choice, grid: Grid, coster: StatementCoster) -> Sharing:
        """Return the largest parts of a unit's tree that read nothing divided and take longer than a copy of them."""
        key, cores = unit.block or (unit.view, 0), max(coster.share.total.cores, 1.0)
        masks, once = list[int](), Work()
        for part in self.undivided(unit, choice, grid) if coster.model.embedded else ():
            bill, size = coster.part(key, part, choice)
            copy = cost.write(size).plus(cost.scan(size))
            if bill.seconds(coster.model, coster.share) > coster.model.core_seconds(copy) / cores:
                masks.append(part.mask)
                once = once.plus(copy)
        return Sharing.of(choice, key, masks, once)

    def undivided(self, unit: Unit, choice: Choice, grid: Grid) -> list[Tree]:
        """Return the largest parts of a unit's join tree that read no table that ``grid`` divides, and no stage's
        output alone."""
        key = unit.block or (unit.view, 0)
        if key not in self._analysis.blocks:
            return []
        index, node = self._analysis.blocks[key].graph.index, choice.trees[key]
        divided = sum(1 << index[alias] for alias in {alias for alias, _ in grid.columns})
        node = node if unit.block is None else subtree(node, unit.mask)
        return _undivided(node, divided, choice.cuts.get(key, frozenset()) - {unit.mask})

    def slices(self, unit: Unit, plan: SlicedCost, at_once: int) -> Slicing:
        """Return how a unit runs in slices as planned, ``at_once`` of them side by side."""
        sharing, block = plan.sharing, plan.sharing.block
        staging = Staging(self._analysis, sharing.inside)
        shared = []
        for mask in sharing.masks:
            fingerprint = self._analysis.fingerprints.subset(self._analysis.blocks[block], mask)
            part = Unit(unit.view, fingerprint, (), (), frozenset(), "", block, mask)
            shared.append(SharedPart(fingerprint, Rendered(staging, part)))
        return Slicing(
            plan.grid,
            plan.division.slices,
            Rendered(staging, unit),
            self.read_once(unit, plan.grid),
            at_once,
            tuple(shared),
            None if sharing.apart is None else Rendered(Staging(self._analysis, sharing.apart), unit),
        )

    def grids(self, unit: Unit, choice: Choice, known: Callable[[View, str], RelationInput]) -> list[Grid]:
        """Return the grids by which a unit can be divided: over base tables that its own statement scans.

        Only a join and a partial result may be divided: the union of their slices is the whole. A volatile one may
        not, since every slice would draw numbers of its own, nor may one over a LIMIT, which could keep other rows
        for each. ``known`` gives the statistics of a table that a view reads.
        """
        view = self._analysis.chain.by_name[unit.view]
        if view.volatile or (unit.block is None and not unit.partial) or self._limited(view, choice):
            return []
        key = unit.block or (unit.view, 0)
        block = self._analysis.blocks.get(key)
        if block is None:
            aliases, classes = _first_table(view), list[tuple[Column, ...]]()
        elif any(j.side in ("RIGHT", "FULL") for j in block.barriers):
            return []  # rows of the other side would come with every slice
        else:
            node = choice.trees[key]
            if unit.block is not None:
                node = next(j for j in joins(node) if j.mask == unit.mask)
            scanned = _scanned(node, choice.cuts.get(key, frozenset()), own=unit.block is not None)
            relations = [block.graph.relations[i] for i in scanned]
            aliases = {r.alias: r.source for r in relations if not r.is_view}
            inside = set(block.graph.aliases(node.mask))
            classes = [tuple(c for c in cls.columns if c[0] in inside) for cls in block.graph.classes]
        inputs = {alias: known(view, source) for alias, source in aliases.items()}
        return slicing.grids(inputs, partial(self._type, aliases), classes)

    def _limited(self, view: View, choice: Choice) -> bool:
        """Tell whether a statement of ``view`` evaluates a LIMIT below the view's own."""
        below = [
            self._analysis.chain.by_name[name] for name in view.reads_views if name not in choice.cut_views
        ]
        return self._limits_of(view)[1] or any(
            self._limits_of(v)[0] or self._limited(v, choice) for v in below
        )

    def _limits_of(self, view: View) -> tuple[bool, bool]:
        """Tell whether the text of ``view`` has a LIMIT, and whether it has one below its own."""
        found = self._limits.get(view.name)
        if found is None:
            limits = list(view.query.find_all(*_LIMITS))
            below = any(limit.parent is not view.query for limit in limits)
            found = self._limits[view.name] = (bool(limits), below)
        return found

    def read_once(self, unit: Unit, grid: Grid) -> dict[str, str]:
        """Return alias and table of the divided columns whose table the unit reads nowhere else."""
        view = self._analysis.chain.by_name[unit.view]
        named = Counter(t.name for t in view.query.find_all(exp.Table))
        inlined = {t for v in view.reads_views for t in self._below(v)}
        out = {}
        for alias, _ in grid.columns:
            name = next(t.name for t in view.query.find_all(exp.Table) if t.alias_or_name == alias)
            if named[name] == 1 and name not in inlined:
                out[alias] = name
        return out

    def _type(self, aliases: Mapping[str, str], column: Column) -> str:
        name = aliases[column[0]]
        known = self._types.get(name)
        if known is None:
            table = self._catalogue.get(name)
            columns = () if table is None else table.columns
            known = self._types[name] = {column.lower(): kind for column, kind in columns}
        return known.get(column[1].lower(), "")

    def _below(self, name: str) -> frozenset[str]:
        """Return the base tables below a view."""
        view = self._analysis.chain.by_name[name]
        return frozenset(view.reads_tables).union(*(self._below(v) for v in view.reads_views))


def _undivided(tree: Tree, divided: int, cuts: frozenset[int]) -> list[Tree]:
    """Return the largest parts of ``tree`` that have none of the relations ``divided`` and lie under no cut."""
    if tree.mask in cuts:
        return []
    if not tree.mask & divided:
        return [tree]
    if isinstance(tree, Leaf):
        return []
    return _undivided(tree.left, divided, cuts) + _undivided(tree.right, divided, cuts)


def _scanned(tree: Tree, cuts: frozenset[int], *, own: bool) -> list[int]:
    """Return the relations of ``tree`` that lie under no cut."""
    if not own and tree.mask in cuts:
        return []
    if isinstance(tree, Leaf):
        return [tree.relation]
    return _scanned(tree.left, cuts, own=False) + _scanned(tree.right, cuts, own=False)


def _first_table(view: View) -> dict[str, str]:
    """Return alias and name of the table that a SELECT without a block starts with, if every join keeps its rows
    apart."""
    select = next(view.selects())
    start = select.args.get("from_")
    first = start.this if start is not None else None
    if not isinstance(first, exp.Table) or not isinstance(first.this, exp.Identifier):
        return {}
    outer = any(j.side in ("RIGHT", "FULL") for j in select.args.get("joins") or ())
    return {} if outer or first.name in view.reads_views else {first.alias_or_name: first.name}
