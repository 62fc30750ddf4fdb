"""The work, time and memory of a plan's statements."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil
from typing import TypeAlias

from sqlglot import exp

from ebbflow.planners.memory.tiers import Tier
from ebbflow.planners.model import Resources, Share, Work
from ebbflow.planners.query.costs import cost
from ebbflow.planners.query.costs.cost import CostModel, JoinCost, JoinCostModel, Size
from ebbflow.planners.query.costs.links import shuffle_seconds, spilled_bytes, store_seconds
from ebbflow.planners.query.costs.operators import STORED, split_bytes
from ebbflow.planners.query.costs.output_tiers import output_seconds
from ebbflow.planners.query.costs.sizes import Sizes
from ebbflow.planners.query.costs.statement_cost import CostEstimate, PricedJoins
from ebbflow.planners.query.plan.analysis import BlockId, output_names
from ebbflow.planners.query.plan.cuts import NodeCost
from ebbflow.planners.query.plan.slicing import Grid, aligned_tables
from ebbflow.planners.query.plan.staging import Choice, Unit
from ebbflow.planners.query.plan.trees import Join, Leaf, Tree, joins
from ebbflow.planners.query.views.views import View

_PARTIAL_WIDTH = 16.0  # bytes that a row of partial aggregates has more than one of results: averages are two
_COLUMNS_READ = 0.3  # fraction of a table's bytes that a SELECT outside any block is taken to read
_Costed: TypeAlias = tuple[Choice, CostEstimate, Size]


@dataclass(frozen=True)
class StatementCoster:
    """Costs statements of one query on one share."""

    sizes: Sizes
    model: CostModel
    share: Share
    tier: Tier | None = None  # of stages' outputs; nothing: the model's rates hold all that these take
    _views: dict[tuple[object, ...], _Costed] = field(default_factory=dict, compare=False)

    @cached_property
    def _joins(self) -> PricedJoins:
        return PricedJoins(self.sizes, JoinCostModel(self.model, self.share))

    def demand(self, bill: CostEstimate) -> Resources:
        """Return what one task demands: one core, its own memory and its part of what is resident."""
        slots = max(self.share.largest.cores, 1.0)
        own = bill.task + bill.resident / slots
        # What any task takes is not worth waiting for: on small nodes it has what is left, and the engine spills.
        return Resources(1.0, max(own, min(self.model.task_memory + own, self.share.largest.memory / slots)))

    def unit(self, unit: Unit, choice: Choice) -> tuple[CostEstimate, Size]:
        """Return the bill of one statement and the size of its output (bytes as stored)."""
        bill = CostEstimate()
        view = self.sizes.analysis.chain.by_name[unit.view]
        if unit.block is not None:
            node = next(j for j in joins(choice.trees[unit.block]) if j.mask == unit.mask)
            size = self._tree(bill, unit.block, node, choice, own=True)
        elif not unit.partial and unit.view in choice.partials:
            size = self._merge(bill, view)
        else:
            bill, size = self._whole(view, choice)
            size = self._partial(size, view) if unit.partial else size
        if (known := self.sizes.actuals.get(unit.output_fp)) is None:
            stored = Size(size.rows, size.bytes * STORED)
        else:
            stored = Size(float(known.rows), float(known.bytes))
        self._split(bill)
        bill.add(cost.write(stored))
        self._keep(bill, stored.bytes)
        bill.add(Work(tasks=float(bill.widest)))
        return bill, stored

    def _whole(self, view: View, choice: Choice) -> tuple[CostEstimate, Size]:
        """Return the bill of all that a view takes, partial results or not, and the size of its rows."""
        key = view.name, id(choice.trees), id(choice.cuts), choice.cut_views
        if (found := self._views.get(key)) is None:
            bill = CostEstimate()
            found = self._views[key] = choice, bill, self._view(bill, view, choice)  # which keeps its ids
        return found[1].copy(), found[2]

    def part(self, block: BlockId, node: Tree, choice: Choice) -> tuple[CostEstimate, Size]:
        """Return the bill of a part of a block's tree, and the size of its rows as they are stored."""
        bill = CostEstimate()
        size = self._tree(bill, block, node, choice, own=True)
        return bill, Size(size.rows, size.bytes * STORED)

    def repeated(self, unit: Unit, choice: Choice, grid: Grid) -> CostEstimate:
        """Return the bill of what every slice of ``unit`` computes again: all that ``grid`` does not divide."""
        bill = CostEstimate()
        view = self.sizes.analysis.chain.by_name[unit.view]
        if unit.block is not None:
            node = next(j for j in joins(choice.trees[unit.block]) if j.mask == unit.mask)
            self._repeated(bill, unit.block, node, choice, self._divided(unit.block, grid), own=True)
            self._split(bill)
            return bill
        key = (unit.view, 0)
        divided = {alias for alias, _ in grid.columns}
        select = next(view.selects())
        if key in self.sizes.analysis.blocks:
            self._repeated(bill, key, choice.trees[key], choice, self._divided(key, grid))
            inside = self._inside(key)
        else:
            inside = Counter(t.name for t in select.find_all(exp.Table) if t.alias_or_name in divided)
        self._others(bill, view, 0, inside + Counter(aligned_tables(select, grid)), choice)
        self._split(bill)
        return bill

    def reread(self, unit: Unit, grid: Grid, slices: int) -> Work:
        """Return the work of reading more of the divided tables than once, in ``slices`` slices."""
        work = Work()
        view = self.sizes.analysis.chain.by_name[unit.view]
        key = unit.block or (unit.view, 0)
        block = self.sizes.analysis.blocks.get(key)
        for alias in {a for a, _ in grid.columns}:
            more = grid.times_read(alias, slices) - 1.0
            if block is not None:
                i = block.graph.index[alias]
                cardinalities = self.sizes.blocks[key]
                size = Size(cardinalities.base_rows(i), cardinalities.scanned_bytes(i))
            else:
                name = next(t.name for t in view.query.find_all(exp.Table) if t.alias_or_name == alias)
                known = self.sizes.relation(view, name)
                size = Size(known.rows, known.bytes_stored * _COLUMNS_READ)
            work = work.plus(cost.scan(Size(size.rows * more, size.bytes * more)))
        return work

    def node_costs(
        self, block: BlockId, tree: Tree, shared: Mapping[int, float], below: Choice
    ) -> dict[int, NodeCost]:
        """Return, per join of ``tree``, its own time on the share and what a cut above it would cost.

        ``shared`` is the fraction of candidate trees with the same subset; ``below`` says how the views that
        the block reads are made.
        """
        cores = max(self.share.total.cores, 1.0)
        out = {}
        for join in joins(tree):
            bill, before = CostEstimate(), 0.0
            for side in (join.left, join.right):
                before = bill.crossed
                if isinstance(side, Leaf):
                    self._subqueries(bill, block, side, below)
                    self._leaf(bill, block, side, below)
            left, right = self._size(block, join.left.mask), self._size(block, join.right.mask)
            size = self._join(bill, block, join, left, right, bill.crossed - before)
            self._subqueries(bill, block, join, below)
            self._split(bill)
            stored = Size(size.rows, size.bytes * STORED)
            copy = cost.write(stored).plus(cost.scan(stored))
            kept = 2.0 * self.kept_seconds(stored.bytes)
            out[join.mask] = NodeCost(
                bill.seconds(self.model, self.share),
                self.model.latency + self.model.core_seconds(copy) / cores + kept,
                shared.get(join.mask, 1.0),
            )
        return out

    def top_seconds(self, block: BlockId) -> float:
        """Return the time of what stands above a block in its own SELECT, on the share."""
        bill = CostEstimate()
        self._above(bill, block, Size(0.0, 0.0))
        return self.model.latency + bill.seconds(self.model, self.share)

    def kept_seconds(self, size: float) -> float:
        """Return the seconds in which all nodes write, or read, ``size`` bytes of a stage's output, beyond what the
        model's rates hold."""
        across = store_seconds(size * self.model.store_wire, self.share)
        return output_seconds(size, self.tier, self.share) + across

    # --- walking ------------------------------------------------------------------------------------------

    def _size(self, block: BlockId, mask: int) -> Size:
        cardinalities = self.sizes.blocks[block]
        return Size(cardinalities.rows(mask), cardinalities.bytes(mask))

    def _tree(
        self, bill: CostEstimate, block: BlockId, node: Tree, choice: Choice, *, own: bool = False
    ) -> Size:
        size = self._size(block, node.mask)
        if not own and node.mask in choice.cuts.get(block, frozenset()):
            self._scan(bill, Size(size.rows, size.bytes * STORED))
            self._keep(bill, size.bytes * STORED)
            return size
        self._subqueries(bill, block, node, choice)
        if isinstance(node, Leaf):
            self._leaf(bill, block, node, choice)
            return size
        left, before = self._tree(bill, block, node.left, choice), bill.crossed
        right = self._tree(bill, block, node.right, choice)
        return self._join(bill, block, node, left, right, bill.crossed - before)

    def _divided(self, block: BlockId, grid: Grid) -> int:
        index = self.sizes.analysis.blocks[block].graph.index
        return sum(1 << place for place in {index[alias] for alias, _ in grid.columns})

    def _repeated(
        self,
        bill: CostEstimate,
        block: BlockId,
        node: Tree,
        choice: Choice,
        divided: int,
        *,
        own: bool = False,
    ) -> None:
        """Add what each slice computes of ``node``: everything that touches no relation of ``divided``."""
        stored = not own and node.mask in choice.cuts.get(block, frozenset())
        if stored or not node.mask & divided:
            self._tree(bill, block, node, choice)
            return
        self._subqueries(bill, block, node, choice)
        if isinstance(node, Leaf):
            return
        nothing, before = Size(0.0, 0.0), 0.0
        sizes = []
        for side in (node.left, node.right):
            before = bill.crossed
            self._repeated(bill, block, side, choice, divided)
            whole = side.mask in choice.cuts.get(block, frozenset()) or not side.mask & divided
            sizes.append(self._size(block, side.mask) if whole else nothing)
        if any(size is not nothing for size in sizes):
            left, right = sizes
            self._add_join(bill, block, node, left, right, nothing, bill.crossed - before)

    def _partial(self, view_size: Size, view: View) -> Size:
        """Return the size of a view's partial result: its groups before HAVING and LIMIT, or all its rows."""
        size = self.sizes.select(view.name, 0)
        rows = size.joined
        if size.aggregates:
            group = next(view.selects()).args.get("group")
            rows = size.grouped if group is not None else 1.0
        width = view_size.bytes / view_size.rows if view_size.rows else 32.0
        return Size(rows, rows * (width + _PARTIAL_WIDTH))

    def _merge(self, bill: CostEstimate, view: View) -> Size:
        """Add what merging a partial result takes."""
        size = self.sizes.view(view.name)
        partial = self._partial(Size(size.rows, size.bytes_stored), view)
        self._scan(bill, Size(partial.rows, partial.bytes * STORED))
        self._keep(bill, partial.bytes * STORED)
        self._above(bill, (view.name, 0), partial)
        return Size(size.rows, size.bytes_stored)

    def _leaf(self, bill: CostEstimate, block: BlockId, leaf: Leaf, choice: Choice) -> None:
        relation = self.sizes.analysis.blocks[block].graph.relations[leaf.relation]
        cardinalities = self.sizes.blocks[block]
        if relation.is_view and relation.source not in choice.cut_views:
            self._view(bill, self.sizes.analysis.chain.by_name[relation.source], choice)
            return
        size = Size(cardinalities.base_rows(leaf.relation), cardinalities.scanned_bytes(leaf.relation))
        self._scan(bill, size, cardinalities.inputs[leaf.relation].bytes_stored)
        if relation.is_view:
            self._keep(bill, size.bytes)
        else:
            self._cross(bill, size.bytes * self.model.table_wire)

    def _scan(self, bill: CostEstimate, size: Size, stored: float = 0.0) -> None:
        """Add a scan of ``size``; ``stored`` are the relation's bytes with all columns, where those are more."""
        bill.read.append(max(stored, size.bytes))
        bill.add(Work(scanned_rows=size.rows, scanned_bytes=size.bytes))

    def _keep(self, bill: CostEstimate, size: float) -> None:
        """Add what writing or reading ``size`` bytes of a stage's output waits for."""
        bill.waiting += output_seconds(size, self.tier, self.share) * max(self.share.total.cores, 1.0)
        self._cross(bill, size * self.model.store_wire)

    def _cross(self, bill: CostEstimate, size: float) -> None:
        """Add what tasks wait for until nodes have read or written ``size`` bytes over their links."""
        seconds = store_seconds(size, self.share)
        bill.crossed += size
        bill.network += seconds
        bill.waiting += seconds * max(self.share.total.cores, 1.0)

    def _split(self, bill: CostEstimate) -> None:
        """Add the tasks that read: files are split by all their bytes, whichever columns are read."""
        if not bill.read:
            return
        split = split_bytes(max(bill.read), self.share.total.cores, self.share.hazard)
        counts = [max(ceil(size / split), 1) for size in bill.read]
        bill.widest = max(bill.widest, *counts)
        bill.add(Work(tasks=float(sum(counts))))

    def _join(
        self, bill: CostEstimate, block: BlockId, join: Join, left: Size, right: Size, read: float
    ) -> Size:
        out = self._size(block, join.mask)
        price = self._add_join(bill, block, join, left, right, out, read)
        bill.resident += price.resident
        bill.task = max(bill.task, price.task)
        if join.method != "broadcast":
            bill.shuffle(left.bytes + right.bytes, self.share)
        return out

    def _add_join(
        self, bill: CostEstimate, block: BlockId, join: Join, left: Size, right: Size, out: Size, read: float
    ) -> JoinCost:
        """Add a join; ``read`` are the bytes that crossed links for its build side, which may be read again."""
        work, price, exchanged = self._joins.price(block, join, left, right, out, read)
        bill.add(work)
        bill.network += price.network
        cores = max(self.share.total.cores, 1.0)
        if not self.model.exchanges:
            kept = output_seconds(2.0 * exchanged, self.tier, self.share)  # written, and read
            bill.waiting += price.waiting + kept * cores
        elif join.method == "broadcast":  # what waits for it is in the serial time
            # the work counts what every node builds, and of all cores' time in which nothing else is done the rest
            idle = max(1.0 - self.model.builders(self.share) / cores, 0.0)
            bill.serial += price.network + (price.serial - price.network) * idle
        else:
            bill.serial += price.serial
            bill.waiting += price.waiting
        return price

    def _exchange(self, bill: CostEstimate, size: float, tasks: int) -> None:
        """Add what a shuffle of ``size`` bytes waits for, besides joins'."""
        network = shuffle_seconds(size * self.model.shuffled_wire, self.share)
        bill.network += network
        bill.waiting += network * max(self.share.total.cores, 1.0)
        bill.waiting += spilled_bytes(size, tasks, self.model.task_room(self.share)) * self.model.spill_rate

    def _view(self, bill: CostEstimate, view: View, choice: Choice) -> Size:
        known = self.sizes.view(view.name)
        if not bill.first(view.name) and self.model.embedded:  # DuckDB computes it once
            return Size(known.rows, known.bytes_stored)
        for position in range(len(view.tables_by_select)):
            key = (view.name, position)
            joined, inside = Size(0.0, 0.0), Counter[str]()
            if key in self.sizes.analysis.blocks:
                joined, inside = self._tree(bill, key, choice.trees[key], choice), self._inside(key)
            self._others(bill, view, position, inside, choice)
            self._above(bill, key, joined)
        return Size(known.rows, known.bytes_stored)

    def _others(
        self, bill: CostEstimate, view: View, position: int, inside: Counter[str], choice: Choice
    ) -> None:
        """Add tables that no block holds: outer joins, subqueries, single tables. ``inside`` is used up."""
        names = view.tables_by_select[position]
        for name in names:
            if inside[name] > 0:
                inside[name] -= 1
            else:
                self._source(bill, view, name, choice, joined=len(names) > 1)

    def _source(self, bill: CostEstimate, view: View, name: str, choice: Choice, *, joined: bool) -> None:
        """Add what ``view`` reads of a table or another view that no tree holds."""
        if name in view.reads_views and name not in choice.cut_views:
            self._view(bill, self.sizes.analysis.chain.by_name[name], choice)
            return
        known = self.sizes.relation(view, name)
        fraction = 1.0 if name in view.reads_views else _COLUMNS_READ
        size = Size(known.rows, known.bytes_stored * fraction)
        self._scan(bill, size, known.bytes_stored)
        if name in view.reads_views:
            self._keep(bill, size.bytes)
        else:
            self._cross(bill, size.bytes * self.model.table_wire)
        if joined:
            self._exchange(bill, size.bytes, bill.shuffle(size.bytes, self.share))
            bill.add(Work(built_rows=size.rows, probed_rows=size.rows, shuffled_bytes=size.bytes))

    def _inside(self, block: BlockId) -> Counter[str]:
        """Return what the trees of ``block`` hold: its relations, and what conditions on them read."""
        graph = self.sizes.analysis.blocks[block].graph
        found = Counter(r.source for r in graph.relations)
        for predicate in graph.predicates:
            if predicate.subquery and not predicate.implied:
                found.update(output_names(predicate.expression))
        return found

    def _subqueries(self, bill: CostEstimate, block: BlockId, node: Tree, choice: Choice) -> None:
        """Add what the subqueries of those conditions read that can be judged at ``node`` and nowhere below it."""
        view = self.sizes.analysis.chain.by_name[block[0]]
        below = () if isinstance(node, Leaf) else (node.left.mask, node.right.mask)
        for predicate in self.sizes.analysis.blocks[block].graph.predicates:
            here = not predicate.relations & ~node.mask
            if not predicate.subquery or predicate.implied or not here:
                continue
            if all(predicate.relations & ~mask for mask in below):
                for name in output_names(predicate.expression):
                    self._source(bill, view, name, choice, joined=True)

    def _above(self, bill: CostEstimate, key: BlockId, joined: Size) -> None:
        size = self.sizes.select(*key)
        width = joined.bytes / joined.rows if joined.rows else 32.0
        source = Size(size.joined, size.joined * width)
        groups = Size(size.grouped, size.grouped * width)
        if size.aggregates:
            count = bill.shuffle(groups.bytes, self.share)
            work = cost.aggregate(source, groups, count)
            bill.add(work)
            self._exchange(bill, work.shuffled_bytes, count)
        if size.sorts:
            bill.add(cost.sort(Size(size.output, size.output * width), 1))
