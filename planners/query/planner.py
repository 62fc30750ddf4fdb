"""From a query to its candidate execution plans."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import Literal

from ebbflow.planners.errors import OptionError
from ebbflow.planners.memory.tiers import Tier
from ebbflow.planners.model import Catalogue, Share
from ebbflow.planners.query.costs.cost import DEFAULTS, CostModel
from ebbflow.planners.query.costs.costing import StatementCoster
from ebbflow.planners.query.costs.dividing import Divider
from ebbflow.planners.query.costs.output_tiers import tier_note
from ebbflow.planners.query.costs.sizes import Sizes
from ebbflow.planners.query.orders.contrasts import contrasting_trees
from ebbflow.planners.query.orders.enumerate import enumerate_trees
from ebbflow.planners.query.plan import cuts as cutting
from ebbflow.planners.query.plan.analysis import Analysis, BlockId
from ebbflow.planners.query.plan.qep import AS_WRITTEN, QueryExecutionPlan, Stage, Statement
from ebbflow.planners.query.plan.retention import Cut, retain, sharing, varied
from ebbflow.planners.query.plan.staging import Choice, Rendered, Staging, Unit, Written, single_unit
from ebbflow.planners.query.plan.state import StageOutput
from ebbflow.planners.query.plan.trees import Tree, algebra, joins
from ebbflow.planners.query.sql.nesting import within_bounds
from ebbflow.planners.query.sql.parse import ParsedQuery, parse_query
from ebbflow.planners.query.subqueries.known import AnalyzedChain
from ebbflow.planners.query.subqueries.rewrites import REWRITES as CHAIN_REWRITES
from ebbflow.planners.query.subqueries.rewrites import rewritten
from ebbflow.planners.query.views.fingerprint import digest
from ebbflow.planners.query.views.views import HOISTING, REWRITES, ROOT, view_chain

_BY = {"native": "natively", "spark": "by Spark SQL", "duckdb": "embedded"}
REWRITE_NAMES = tuple(
    dict.fromkeys(name for group in (REWRITES, *CHAIN_REWRITES) for name, _ in group if name != HOISTING)
)
"""What ``PlannerOptions.without`` may name, in order."""

CutPolicy = Literal["cost", "every-join", "none"]


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """How candidates are made."""

    cuts: CutPolicy = "cost"  # where to cut; "every-join" reproduces QOOP's one join a stage
    keep: int = 8  # candidates (QOOP, section 5.3)
    trees: int = 6  # join trees a block that candidates are made from
    without: frozenset[str] = frozenset()  # rewrites of the query that are left out, of ``REWRITE_NAMES``

    def __post_init__(self) -> None:
        if self.cuts not in ("cost", "every-join", "none"):
            raise OptionError(f"cuts must be cost, every-join or none; got {self.cuts!r}")
        if self.keep < 1 or self.trees < 1:
            raise OptionError(f"keep and trees must be >= 1; got {self.keep} and {self.trees}")
        if unknown := sorted(self.without - {*REWRITE_NAMES}):
            raise OptionError(f"no rewrite is called {unknown[0]!r}; they are {', '.join(REWRITE_NAMES)}")


class QueryPlanner:
    """Plans one query. Deterministic: equal inputs give equal plans with equal ids."""

    @within_bounds
    def __init__(
        self,
        query: str | ParsedQuery,
        catalogue: Catalogue,
        model: CostModel,
        *,
        now: datetime,
        salt: str,
        dialect: str = "spark",
        options: PlannerOptions | None = None,
        allowed: Collection[str] = (),
        rivals: Sequence[CostModel] = (),
        tier: Tier | None = None,
    ) -> None:
        """Take apart ``query``, a text or one that was parsed against tables of these columns.

        ``now`` is what clock functions are frozen to, ``salt`` is unique to the run (see ``Fingerprints``);
        functions in ``allowed`` may read more than tables. ``rivals`` are the costs of other ways to run a stage than
        ``model``'s: each stage takes the one that is sooner done. ``tier`` is where stage outputs are kept, as
        measured: the faster it is, the more cuts pay; it may be set between calls of ``candidates``. Raises the
        errors of ``parse_query``.
        """
        if isinstance(query, str):
            query = parse_query(query, catalogue, now=now, dialect=dialect, allowed=allowed)
        self.parsed: ParsedQuery = query
        self.model = model
        self.rivals = tuple(rivals)
        self.tier = tier
        self.options = options or PlannerOptions()
        self._catalogue = catalogue
        self._salt = salt
        self.analysis = Analysis.of(view_chain(self.parsed, catalogue, self.options.without), catalogue, salt)
        self._divider = Divider(self.analysis, catalogue)
        self.selectivities: Mapping[str, Mapping[str, float]] = {}
        self._written = Written(query.expression)
        self._choices: dict[str, Choice] = {}  # by plan id, so that a plan can be costed anew

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what was frozen, is volatile, or stays as written, and why."""
        return self.analysis.notes

    def keep_divided(self, begun: Mapping[str, tuple[str, int]]) -> None:
        """Divide these stages as they are: (name of the grid, slices) by output fingerprint. Slices of them exist."""
        self._divider.begun = dict(begun)

    @property
    def partial_fps(self) -> tuple[str, ...]:
        """Return the fingerprints of the partial results that plans may have."""
        return tuple(self.analysis.partial_fp(view) for view in self.analysis.splits)

    @within_bounds
    def sample(self, selectivities: Mapping[str, Mapping[str, float]]) -> None:
        """Take fractions measured on samples: by ``"table alias"``, then by predicate text."""
        self.selectivities = selectivities
        # with built-in rates: what a stage computes must not follow how fast the last ones ran
        model = DEFAULTS.get(self.model.engine, self.model)
        known = AnalyzedChain(self.analysis, self._catalogue, model, selectivities)
        analysis = rewritten(known, self._salt, self.options.without)
        if analysis is not self.analysis:
            self.analysis = analysis
            self._divider = Divider(self.analysis, self._catalogue)

    @within_bounds
    def candidates(
        self,
        share: Share,
        actuals: Mapping[str, StageOutput] | None = None,
        also: Iterable[str] = (),
        contrasts: bool = True,
    ) -> tuple[QueryExecutionPlan, ...]:
        """Return the candidates for ``share``, those named in ``also`` (ids of earlier ones) among them.

        ``actuals`` are outputs of finished stages by fingerprint: they replace estimates. With
        ``contrasts`` there are some for capacities unlike the share, too, which takes nearly twice as long.
        """
        costers = self._costers(self._sizes(actuals), share)
        pool: dict[str, QueryExecutionPlan] = {}
        for choice in self._pool(costers[0], contrasts):
            plan = self._plan(choice, costers)
            if pool.setdefault(plan.id, plan) is plan:
                self._choices[plan.id] = choice
        kept = {p.id: p for p in retain(tuple(pool.values()), share, self.options.keep)}
        for fp in self._divider.begun:  # slices of it exist: some plan must be able to use them
            users = [p for p in pool.values() if fp in p.by_fp]
            if users and not any(fp in p.by_fp for p in kept.values()):
                best = min(users, key=lambda p: (p.total_work, p.id))
                kept[best.id] = best
        for plan_id in also:
            if plan_id in self._choices and plan_id not in kept:
                kept[plan_id] = self._plan(self._choices[plan_id], costers)
        return tuple(kept.values())

    @within_bounds
    def again(self, plan_id: str, share: Share, actuals: Mapping[str, StageOutput]) -> QueryExecutionPlan:
        """Return the plan of an earlier call with the costs of now; ``actuals`` are as in ``candidates``."""
        return self._plan(self._choices[plan_id], self._costers(self._sizes(actuals), share))

    @within_bounds
    def single(self, share: Share) -> QueryExecutionPlan:
        """Return the plan of one statement: the query as its author wrote it."""
        unit = single_unit(self.analysis, self.parsed.expression)
        sizes = self._sizes(None)
        trees = {key: self._trees(key, sizes, share)[0] for key in self.analysis.blocks}
        coster = StatementCoster(sizes, self.model, share, self.tier)
        stage = self._stage(unit, Choice(trees), coster, self._written, named="whole query")
        return QueryExecutionPlan(f"single-{stage.physical_key[:4]}", (stage,), AS_WRITTEN, self.notes)

    # --- choices ------------------------------------------------------------------------------------------

    def _sizes(self, actuals: Mapping[str, StageOutput] | None) -> Sizes:
        return Sizes(self.analysis, self._catalogue, self.selectivities, actuals or {})

    def _trees(self, key: BlockId, sizes: Sizes, share: Share) -> Sequence[Tree]:
        graph, cardinalities = self.analysis.blocks[key].graph, sizes.blocks[key]
        found: dict[str, Tree] = {}
        for model in (self.model, *self.rivals):
            best = enumerate_trees(graph, cardinalities, model, share, limit=self.options.trees)
            found |= {repr(f.tree): f.tree for f in best if repr(f.tree) not in found}
        return list(found.values())

    def _costers(self, sizes: Sizes, share: Share) -> list[StatementCoster]:
        """Return what costs statements by each model, ours first; they remember what they have costed."""
        return [StatementCoster(sizes, model, share, self.tier) for model in (self.model, *self.rivals)]

    def _pool(self, coster: StatementCoster, contrasts: bool) -> list[Choice]:
        """Return the choices worth costing."""
        sizes, share = coster.sizes, coster.share
        trees = {key: self._trees(key, sizes, share) for key in self.analysis.blocks}
        required, paying = self._cut_views(trees, coster)
        options: dict[BlockId, list[Cut]] = {}
        base: dict[BlockId, Cut] = {}
        for key in self.analysis.blocks:  # views that others read come first
            below = Choice({k: tree for k, (tree, _) in base.items()}, {}, required | paying)
            options[key] = self._block_options(key, trees[key], coster, below)
            base[key] = options[key][0]
            if contrasts and not self._as_written(share):
                options[key] += self._for_contrast(key, trees[key], coster, below)
        view_sets = [required | paying, required] if paying else [required]
        in_common = sharing(options, self._output_of) if self.options.cuts == "cost" else []
        choices = [
            Choice({k: o[0] for k, o in v.items()}, {k: o[1] for k, o in v.items()}, views)
            for v in (*varied(options), *in_common)
            for views in view_sets
        ]
        return [c for choice in choices for c in (choice, *self._in_parts(choice, coster))]

    def _output_of(self, key: BlockId, mask: int) -> str:
        return self.analysis.fingerprints.subset(self.analysis.blocks[key], mask)

    def _in_parts(self, choice: Choice, coster: StatementCoster) -> list[Choice]:
        """Return ``choice`` with partial results for the views that slices of them would pay for."""
        if self.options.cuts == "none" or self._as_written(coster.share):
            return []
        staged = {ROOT, *choice.cut_views}
        whole = replace(choice, partials=frozenset(v for v in self.analysis.splits if v in staged))
        paying = set()
        for unit in Staging(self.analysis, whole).units:
            if (
                unit.partial
                and self._divider.division(unit, whole, coster, coster.unit(unit, whole)[0]) is not None
            ):
                paying.add(unit.view)
        return [replace(choice, partials=frozenset(paying))] if paying else []

    def _block_options(
        self, key: BlockId, trees: Sequence[Tree], coster: StatementCoster, below: Choice
    ) -> list[Cut]:
        """Return one block's trees with cuts, best first; ``below`` says how the views it reads are made."""
        if self._as_written(coster.share):
            return [(trees[0], frozenset())]
        if self._volatile(key) or self.options.cuts == "none":
            return [(t, frozenset()) for t in trees]
        if self.options.cuts == "every-join":
            return [(t, cutting.every_join(t)) for t in trees]
        counts = Counter(m for t in trees for m in {j.mask for j in joins(t)})
        shared = {m: n / len(trees) for m, n in counts.items()}
        top = coster.top_seconds(key)
        ranked = [
            (found.seconds, index, tree, found.masks)
            for index, tree in enumerate(trees)
            for found in cutting.place(tree, coster.node_costs(key, tree, shared, below), coster.share, top)
        ]
        ranked.sort(key=lambda r: (r[0], r[1], sorted(r[3])))
        return [(tree, masks) for _, _, tree, masks in ranked]

    def _for_contrast(
        self, key: BlockId, trees: Sequence[Tree], coster: StatementCoster, below: Choice
    ) -> list[Cut]:
        """Return trees for other capacities than the present one that are not in ``trees``, each with its best
        cuts."""
        known = {repr(tree) for tree in trees}
        model = next((m for m in (self.model, *self.rivals) if m.exchanges), self.model)
        graph, cardinalities = self.analysis.blocks[key].graph, coster.sizes.blocks[key]
        fresh = contrasting_trees(graph, cardinalities, model, coster.share)
        found: dict[str, Cut] = {}
        for tree, cuts in self._block_options(key, [t for t in fresh if repr(t) not in known], coster, below):
            found.setdefault(repr(tree), (tree, cuts))
        return list(found.values())

    def _as_written(self, share: Share) -> bool:
        """Tell whether nothing could interrupt one stage, which DuckDB runs as written (see ``Rendered``)."""
        lasts = share.hazard == 0 and not self._divider.begun
        return self.model.embedded and lasts and self.options.cuts == "cost"

    def _volatile(self, key: BlockId) -> bool:
        """Tell whether the block reads a volatile view: cutting it would still be right, reuse would not."""
        view = self.analysis.chain.by_name[key[0]]
        return any(self.analysis.chain.by_name[v].volatile for v in view.reads_views)

    def _cut_views(
        self, trees: Mapping[BlockId, Sequence[Tree]], coster: StatementCoster
    ) -> tuple[frozenset[str], frozenset[str]]:
        """Return the views that must be computed once (volatile ones that are read twice), and the views that
        pay for it (costly ones that are read twice)."""
        chain = self.analysis.chain
        cores = max(coster.share.total.cores, 1.0)
        best = Choice({key: found[0] for key, found in trees.items()})
        required, paying = set(), set()
        for view in chain.views[:-1]:
            uses = chain.uses[view.name]
            if uses < 2:
                continue
            if view.volatile:
                required.add(view.name)
                continue
            if self._as_written(coster.share):  # DuckDB computes it once
                continue
            bill, stored = coster.unit(Unit(view.name, "", (), (), frozenset(), ""), best)
            kept = coster.kept_seconds(stored.bytes)
            once = bill.seconds(self.model, coster.share) - kept
            copy = (
                self.model.latency + self.model.rates.written_bytes * stored.bytes / cores + (1 + uses) * kept
            )
            if (uses - 1) * once > copy:
                paying.add(view.name)
        return frozenset(required), frozenset(paying)

    # --- plans --------------------------------------------------------------------------------------------

    def _plan(self, choice: Choice, costers: Sequence[StatementCoster]) -> QueryExecutionPlan:
        staging = Staging(self.analysis, choice, self._written if self.model.embedded else None)
        built = tuple(self._cheapest(u, choice, costers, Rendered(staging, u)) for u in staging.units)
        shape = "; ".join(
            algebra(tree, [r.alias for r in self.analysis.blocks[key].graph.relations])
            for key, tree in choice.trees.items()
        )
        # without partitions, which follow sizes and share: a plan that is costed anew keeps its id
        plan_id = "qep-" + digest(sorted(digest(u.output_fp, u.inputs, u.shape) for u in staging.units))[:8]
        if [unit.shape for unit in staging.units] == [AS_WRITTEN]:
            shape = AS_WRITTEN
        notes = self.notes
        if self.tier is not None:
            notes = (*notes, tier_note(built, self.tier, costers[0].share))
        return QueryExecutionPlan(plan_id, built, shape or "no inner joins", notes)

    def _cheapest(
        self, unit: Unit, choice: Choice, costers: Sequence[StatementCoster], statement: Statement
    ) -> Stage:
        """Return the stage of ``unit`` in the way of running it that is sooner done."""
        stages = [self._stage(unit, choice, coster, statement) for coster in costers]
        if len(stages) == 1:
            return stages[0]
        cores = max(costers[0].share.total.cores, 1.0)
        seconds = [stage.latency + stage.core_seconds / cores for stage in stages]
        best = min(range(len(stages)), key=lambda i: seconds[i])
        said = ", ".join(
            f"{one:.2g} s {_BY[coster.model.engine]}" for one, coster in zip(seconds, costers, strict=True)
        )
        engine = costers[best].model.engine
        key = digest(stages[best].physical_key, engine)
        return replace(stages[best], engine=engine, engine_reason=f"{said} expected", physical_key=key)

    def _stage(
        self, unit: Unit, choice: Choice, coster: StatementCoster, statement: Statement, named: str = ""
    ) -> Stage:
        bill, stored = coster.unit(unit, choice)
        cores = max(coster.share.total.cores, 1.0)
        divided, work, serial, waiting, expected = None, bill.work, bill.serial, bill.waiting, 0.0
        plan = None
        if isinstance(statement, Rendered) and self.options.cuts != "none":
            plan = self._divider.division(unit, choice, coster, bill)
        if plan is not None:
            divided = self._divider.slices(unit, plan, coster.model.slices_at_once)
            work, serial = work.plus(plan.again.work), serial + plan.again.serial
            waiting += plan.again.waiting
            expected = plan.division.seconds
        shuffles = 0 if coster.model.embedded else bill.partitions
        tasks = max(bill.widest, 1)
        seconds = coster.model.core_seconds(work) + waiting
        latency = coster.model.latency + serial
        length = latency + seconds / cores
        rework = cutting.rework_seconds(length, coster.share) if plan is None else max(expected - length, 0.0)
        return Stage(
            name=named or self._name(unit),
            output_fp=unit.output_fp,
            physical_key=digest(unit.output_fp, unit.inputs, unit.shape, shuffles),
            inputs=unit.inputs,
            tables=unit.tables,
            statement=statement,
            tasks=tasks,
            demand=coster.demand(bill),
            duration=seconds / tasks,
            latency=latency + rework,
            rows=stored.rows,
            bytes=stored.bytes,
            work=work,
            waiting=waiting,
            network=bill.network + (plan.again.network if plan is not None else 0.0),
            partitions=bill.partitions,
            logical=self._logical(unit, choice),
            covers=unit.covers,
            volatile=self.analysis.chain.by_name[unit.view].volatile,
            sink=unit.is_result,
            slicing=divided,
            keys=unit.keys,
            warm_up=coster.model.warm_up,
        )

    def _name(self, unit: Unit) -> str:
        if unit.block is None:
            return unit.view
        return " ⋈ ".join(self.analysis.blocks[unit.block].graph.aliases(unit.mask))

    def _logical(self, unit: Unit, choice: Choice) -> str:
        if unit.block is None:
            return unit.view
        graph = self.analysis.blocks[unit.block].graph
        node = next(j for j in joins(choice.trees[unit.block]) if j.mask == unit.mask)
        return algebra(node, [r.alias for r in graph.relations])

    @cached_property
    def relations_planned(self) -> int:
        """Return how many relations stand in reorderable blocks."""
        return sum(len(b.graph.relations) for b in self.analysis.blocks.values())
