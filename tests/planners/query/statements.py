"""Plans as statements: analyses, random choices, and their execution on DuckDB."""

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import duckdb
import sqlglot
from sqlglot import exp

from ebbflow.infra.query.duckdbtypes import quoted, to_spark
from ebbflow.planners.model import Catalogue, ColumnStatistics, Table, TableStatistics, Work
from ebbflow.planners.query.costs.dividing import Divider, Sharing, SlicedCost
from ebbflow.planners.query.costs.statement_cost import CostEstimate
from ebbflow.planners.query.estimates.relations import RelationInput
from ebbflow.planners.query.plan.analysis import Analysis
from ebbflow.planners.query.plan.partial import bound
from ebbflow.planners.query.plan.qep import Slicing
from ebbflow.planners.query.plan.render import checkpoint_name
from ebbflow.planners.query.plan.slicing import Division, Grid, runs
from ebbflow.planners.query.plan.staging import Choice, Rendered, Staging, Unit
from ebbflow.planners.query.plan.trees import Join, JoinMethod, Leaf, Tree, joins
from ebbflow.planners.query.sql.joingraph import JoinGraph
from ebbflow.planners.query.sql.parse import parse_query
from ebbflow.planners.query.views.views import ROOT, View, view_chain

NOW = datetime(2026, 3, 4, 5, 6, 7, 890123, tzinfo=UTC)
METHODS: tuple[JoinMethod, ...] = ("broadcast", "shuffle_hash", "sort_merge")
Rows = Counter[tuple[Any, ...]]


def catalogue(tables: Mapping[str, str], version: str = "1") -> Catalogue:
    """Make a catalogue of ``{"t": "a int, b string"}``."""
    found = {}
    for name, columns in tables.items():
        pairs = tuple(tuple(c.strip().rsplit(" ", 1)) for c in columns.split(", "))
        found[name.lower()] = Table(name, pairs, version)  # type: ignore[arg-type]
    return Catalogue(found)


def catalogue_of(connection: duckdb.DuckDBPyConnection) -> Catalogue:
    """Describe the tables and views of a connection."""
    found = {}
    for (name,) in connection.execute("SELECT table_name FROM information_schema.tables").fetchall():
        if name.startswith("ckpt_"):
            continue
        relation = connection.sql(f"SELECT * FROM {quoted(name)}")
        columns = tuple(zip(relation.columns, (to_spark(t)[0] for t in relation.types), strict=True))
        count = connection.execute(f"SELECT count(*) FROM {quoted(name)}").fetchone()
        assert count is not None
        found[name.lower()] = Table(name, columns, "1", TableStatistics(float(count[0]), 64.0 * count[0]))
    return Catalogue(found)


def analyse(text: str, known: Catalogue, *, salt: str = "run") -> Analysis:
    """Take ``text`` apart."""
    return Analysis.of(view_chain(parse_query(text, known, now=NOW), known), known, salt)


def random_tree(graph: JoinGraph, rng: random.Random) -> Tree:
    """Join connected parts in a random order, cross products only where nothing else is left."""
    parts: list[Tree] = [Leaf(i) for i in range(len(graph.relations))]
    while len(parts) > 1:
        pairs = [(a, b) for a in parts for b in parts if a is not b and _connected(graph, a, b)]
        one, other = rng.choice(pairs or [(parts[0], parts[1]), (parts[1], parts[0])])
        parts = [p for p in parts if p is not one and p is not other]
        parts.append(Join(one, other, rng.choice(METHODS)))
    return parts[0]


def _connected(graph: JoinGraph, one: Tree, other: Tree) -> bool:
    return any(one.mask >> i & 1 and near & other.mask for i, near in enumerate(graph.neighbours))


def random_choice(analysis: Analysis, rng: random.Random) -> Choice:
    """Choose trees, cuts and cut views at random."""
    trees = {key: random_tree(block.graph, rng) for key, block in analysis.blocks.items()}
    rate = rng.choice((0.0, 0.4, 1.0))
    cuts = {k: frozenset(j.mask for j in joins(t) if rng.random() < rate) for k, t in trees.items()}
    views = frozenset(v.name for v in analysis.chain.views[:-1] if rng.random() < 0.5)
    partials = frozenset(v for v in analysis.splits if v in {ROOT, *views} and rng.random() < 0.5)
    return Choice(trees, cuts, views, partials)


@dataclass(frozen=True)
class Ran:
    """A choice that was run: its stages and its result."""

    units: tuple[Unit, ...]
    columns: tuple[str, ...]
    rows: Rows
    ordered: tuple[tuple[Any, ...], ...]


def random_grid(
    analysis: Analysis, known: Catalogue, choice: Choice, unit: Unit, rng: random.Random
) -> Grid | None:
    """Choose a division of a unit at random, if it can be divided."""

    def ordered(view: View, source: str) -> RelationInput:
        table = known.get(source)
        names = [name.lower() for name, _ in table.columns] if table is not None else []
        edges = tuple(float(v) for v in sorted(rng.sample(range(-2, 30), 3)))
        return RelationInput(1.0, 1.0, {n: ColumnStatistics(edges=edges, reads=(1.0,) * 4) for n in names})

    found = Divider(analysis, known).grids(unit, choice, ordered)
    return rng.choice(found) if found else None


def random_sharing(
    analysis: Analysis, known: Catalogue, choice: Choice, unit: Unit, grid: Grid, rng: random.Random
) -> Slicing:
    """Return slices of a unit that share some of what they may share."""
    divider = Divider(analysis, known)
    masks = [part.mask for part in divider.undivided(unit, choice, grid) if rng.random() < 0.7]
    sharing = Sharing.of(choice, unit.block or (unit.view, 0), masks, Work())
    plan = SlicedCost(grid, Division(1, 0.0, 0.0), sharing, CostEstimate())
    return divider.slices(unit, plan, 1)


def run(
    connection: duckdb.DuckDBPyConnection,
    analysis: Analysis,
    choice: Choice,
    divided: Catalogue | None = None,
    rng: random.Random | None = None,
) -> Ran:
    """Execute every stage; assert that it reads exactly what its unit says it reads.

    With ``divided``, the catalogue, stages that can be are run in slices of a random division.
    """
    staging = Staging(analysis, choice)
    units = staging.units
    made: list[str] = []
    columns: dict[str, list[tuple[str, str]]] = {}
    try:
        for unit in units:
            statement = Rendered(staging, unit)
            assert reads(statement.tree) == (unit.inputs, unit.tables), statement.duckdb
            name = checkpoint_name(unit.output_fp)
            texts = [statement.duckdb]
            grid = None
            if divided is not None and rng is not None:
                grid = random_grid(analysis, divided, choice, unit, rng)
            if grid is not None and divided is not None and rng is not None:
                slices = list(runs([], grid.cells, rng.randint(1, grid.cells)))
                slicing = random_sharing(analysis, divided, choice, unit, grid, rng)
                for part in slicing.shared:
                    if (shared := checkpoint_name(part.fingerprint)) not in made:
                        made.append(shared)
                        connection.execute(
                            f"CREATE TEMP TABLE {shared} AS {bound(part.statement.duckdb, columns)}"
                        )
                # some compute what is shared themselves, as where it cannot be kept
                texts = [slicing.statement(*c, apart=rng.random() < 0.3).duckdb for c in slices]
            sql = bound(" UNION ALL ".join(f"({t})" for t in texts) if grid else texts[0], columns)
            try:
                relation = connection.execute(sql)
                names = [d[0] for d in relation.description or ()]
                assert len({n.lower() for n in names}) == len(names), f"duplicate names: {names}"
                connection.execute(f"CREATE TEMP TABLE {name} AS {sql}")
            except duckdb.Error as error:
                raise AssertionError(f"{error}\n{sql}") from error
            made.append(name)
            columns[unit.output_fp] = [
                (n, t) for n, t, *_ in connection.execute(f"DESCRIBE {name}").fetchall()
            ]
        cursor = connection.execute(f"FROM {checkpoint_name(units[-1].output_fp)}")
        rows = cursor.fetchall()
        names = [d[0] for d in cursor.description or ()]
        return Ran(units, tuple(names), multiset(rows), tuple(comparable(r) for r in rows))
    finally:
        for name in made:
            connection.execute(f"DROP TABLE {name}")


def reads(statement: exp.Expr) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the fingerprints of the checkpoints and the tables that a rendered statement names."""
    names = _outside(statement, frozenset())
    checkpoints = sorted(n.removeprefix("ckpt_") for n in names if n.startswith("ckpt_"))
    return tuple(checkpoints), tuple(sorted(n for n in names if not n.startswith("ckpt_")))


def _outside(node: exp.Expr, bound: frozenset[str]) -> set[str]:
    found: set[str] = set()
    if isinstance(node, exp.Table) and isinstance(node.this, exp.Identifier) and node.name not in bound:
        found.add(node.name)
    with_ = node.args.get("with_")
    if with_ is not None:
        for cte in with_.expressions:
            found |= _outside(cte.this, bound | {cte.alias} if with_.recursive else bound)
            bound |= {cte.alias}
    for child in node.iter_expressions():
        if child is not with_:
            found |= _outside(child, bound)
    return found


def reference(connection: duckdb.DuckDBPyConnection, text: str, dialect: str = "spark") -> Rows:
    """Execute the text as its author wrote it."""
    translated = sqlglot.transpile(text, read=dialect, write="duckdb")[0]
    return multiset(connection.execute(translated).fetchall())


def multiset(rows: Iterable[Sequence[Any]]) -> Rows:
    return Counter(comparable(r) for r in rows)


def comparable(row: Sequence[Any]) -> tuple[Any, ...]:
    """Return a row whose numbers compare whatever the order they were summed in."""
    return tuple(_plain(v) for v in row)


def _plain(value: Any) -> Any:
    if isinstance(value, float | Decimal):
        return f"{float(value):.9g}"
    if isinstance(value, list | dict):
        return repr(value)
    return value
