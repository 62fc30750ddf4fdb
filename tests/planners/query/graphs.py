"""Join graphs for tests: chains, stars, cliques, random ones, and shapes of TPC-H queries."""

import random
from collections.abc import Iterable, Mapping, Sequence

from sqlglot import exp, parse_one

from ebbflow.planners.model import ColumnStatistics
from ebbflow.planners.query.estimates.cardinality import Cardinalities
from ebbflow.planners.query.estimates.relations import RelationInput
from ebbflow.planners.query.estimates.selectivity import Lookup
from ebbflow.planners.query.sql.joingraph import Column, EqualityClass, JoinGraph, Predicate, RelationRef


def predicate(text: str, aliases: Sequence[str], *, implied: bool = False) -> Predicate:
    """Parse one conjunct over ``aliases``."""
    node = parse_one(text, dialect="spark")
    columns = frozenset((c.table, c.name) for c in node.find_all(exp.Column) if c.table in aliases)
    mask = sum({1 << aliases.index(alias) for alias, _ in columns})
    return Predicate(node, text, mask, columns, node.find(exp.Query) is not None, implied)


def graph_of(
    aliases: Sequence[str],
    classes: Iterable[Iterable[str]],
    predicates: Iterable[str] = (),
    implied: Iterable[str] = (),
) -> JoinGraph:
    """Build a graph; ``classes`` hold columns as ``"alias.name"``."""
    equal = tuple(EqualityClass(tuple(sorted(_column(c) for c in cls))) for cls in classes)
    parsed = tuple(predicate(p, aliases) for p in predicates)
    parsed += tuple(predicate(p, aliases, implied=True) for p in implied)
    used: set[Column] = {c for cls in equal for c in cls.columns} | {c for p in parsed for c in p.columns}
    refs = (
        RelationRef(alias, alias, False, frozenset(name for a, name in used if a == alias))
        for alias in aliases
    )
    return JoinGraph(tuple(refs), parsed, equal)


def by_edges(count: int, edges: Iterable[tuple[int, int]]) -> JoinGraph:
    """Relations r0, r1, ... with one equality of their own per edge."""
    aliases = [f"r{i}" for i in range(count)]
    return graph_of(aliases, [(f"r{i}.c{i}_{j}", f"r{j}.c{i}_{j}") for i, j in edges])


def chain(count: int) -> JoinGraph:
    return by_edges(count, [(i, i + 1) for i in range(count - 1)])


def star(dimensions: int) -> JoinGraph:
    return by_edges(dimensions + 1, [(0, i) for i in range(1, dimensions + 1)])


def clique(count: int) -> JoinGraph:
    return by_edges(count, [(i, j) for i in range(count) for j in range(i + 1, count)])


def one_class(count: int) -> JoinGraph:
    """All relations joined on one shared key."""
    return graph_of([f"r{i}" for i in range(count)], [[f"r{i}.k" for i in range(count)]])


def random_graph(count: int, density: float, seed: int, *, connected: bool = True) -> JoinGraph:
    rng = random.Random(seed)
    edges = {(rng.randrange(i), i) for i in range(1, count)} if connected else set()
    edges |= {(i, j) for j in range(count) for i in range(j) if rng.random() < density}
    return by_edges(count, sorted(edges))


def random_inputs(graph: JoinGraph, seed: int, *, largest: float = 1e7) -> list[RelationInput]:
    rng = random.Random(seed)
    out = []
    for ref in graph.relations:
        rows = float(round(10 ** rng.uniform(0.7, _log10(largest))))
        columns = {
            name: ColumnStatistics(
                distinct=max(1.0, rows ** rng.uniform(0.3, 1.0)), width=rng.choice((4.0, 8.0, 20.0))
            )
            for name in sorted(ref.columns)
        }
        out.append(RelationInput(rows, rows * 60.0, columns, "1"))
    return out


def star_inputs(graph: JoinGraph) -> list[RelationInput]:
    """A fact table of ten million rows and dimensions of a hundred to a hundred thousand with unique keys."""
    out = []
    for i, ref in enumerate(graph.relations):
        rows = 1e7 if i == 0 else 10.0 ** (2 + i % 4)
        columns = {}
        for name in ref.columns:
            dimension = int(name.split("_")[1])
            columns[name] = ColumnStatistics(distinct=10.0 ** (2 + dimension % 4), width=8.0)
        out.append(RelationInput(rows, rows * 80.0, columns, "1"))
    return out


def lookup_of(columns: Mapping[str, ColumnStatistics]) -> Lookup:
    """Look columns up by ``"alias.name"``."""
    return lambda column: columns.get(f"{column[0]}.{column[1]}")


def cardinalities(graph: JoinGraph, seed: int = 0) -> Cardinalities:
    return Cardinalities(graph, random_inputs(graph, seed))


def _column(text: str) -> Column:
    alias, name = text.split(".")
    return alias, name


def _log10(value: float) -> float:
    return len(str(int(value))) - 1.0
