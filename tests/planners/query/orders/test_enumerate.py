import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.planners.model import Share
from ebbflow.planners.query.costs.cost import GIB, NATIVE, SPARK, JoinCostModel, Size
from ebbflow.planners.query.costs.operators import STORED
from ebbflow.planners.query.estimates.cardinality import Cardinalities
from ebbflow.planners.query.estimates.relations import RelationInput
from ebbflow.planners.query.orders.enumerate import (
    Candidate,
    count_trees,
    enumerate_trees,
    evaluate,
    left_deep_best,
)
from ebbflow.planners.query.orders.search import BUILD_RATIO, Search, crossed
from ebbflow.planners.query.orders.subgraphs import components, csg_cmp_pairs, grouped, linear_pairs
from ebbflow.planners.query.plan.trees import Join, Leaf, Tree, is_linear, joins, leaves, logical_key
from ebbflow.planners.query.sql.joingraph import JoinGraph
from tests.planners.query.graphs import (
    by_edges,
    chain,
    clique,
    graph_of,
    one_class,
    random_graph,
    random_inputs,
    star,
    star_inputs,
)

SHARE = Share.uniform(8, 32, nodes=4)
EXACT = 10**6  # ways kept per set: none is lost
EXACTLY = {"keep": EXACT, "max_combinations": 10**18}


class CountingSearch(Search):
    """Counts the pairs whose ways to join are asked for."""

    asked = 0

    def variants(self, left, right):
        self.asked += 1
        return super().variants(left, right)


def connected(mask: int, graph: JoinGraph) -> bool:
    seen = mask & -mask
    while True:
        wider = seen
        for i, near in enumerate(graph.neighbours):
            if seen >> i & 1:
                wider |= near & mask
        if wider == seen:
            return seen == mask
        seen = wider


def adjacent(one: int, other: int, graph: JoinGraph) -> bool:
    return any(one >> i & 1 and near & other for i, near in enumerate(graph.neighbours))


def orders(mask: int, graph: JoinGraph) -> Iterator[tuple]:
    """Every unordered join tree without cross products, by brute force, as nested tuples."""
    if not mask & (mask - 1):
        yield (mask,)
        return
    lowest = mask & -mask
    part = (mask - 1) & mask
    while part:
        rest = mask ^ part
        if (
            part & lowest
            and connected(part, graph)
            and connected(rest, graph)
            and adjacent(part, rest, graph)
        ):
            for left in orders(part, graph):
                for right in orders(rest, graph):
                    yield (left, right)
        part = (part - 1) & mask


def physical(order: tuple, pricer: JoinCostModel, cardinalities: Cardinalities) -> Iterator[Tree]:
    """Every choice of methods and build sides for one order."""
    if len(order) == 1:
        yield Leaf(order[0].bit_length() - 1)
        return
    for one in physical(order[0], pricer, cardinalities):
        for other in physical(order[1], pricer, cardinalities):
            for left, right in ((one, other), (other, one)):
                sizes = [Size(cardinalities.rows(t.mask), cardinalities.bytes(t.mask)) for t in (left, right)]
                for method in ("broadcast", "shuffle_hash"):
                    if sizes[1].bytes <= BUILD_RATIO * sizes[0].bytes and pricer.allows(method, *sizes):
                        yield Join(left, right, method)
                if (sizes[1].rows, right.mask) <= (sizes[0].rows, left.mask):
                    yield Join(left, right, "sort_merge")


def everything(graph: JoinGraph, cardinalities: Cardinalities, share: Share = SHARE) -> list[Candidate]:
    pricer = JoinCostModel(SPARK, share)
    found = [
        evaluate(tree, cardinalities, SPARK, share)
        for order in orders(graph.everything, graph)
        for tree in physical(order, pricer, cardinalities)
    ]
    return [c for c in found if resident(c.tree, cardinalities) <= pricer.most_resident]


def resident(tree: Tree, cardinalities: Cardinalities) -> float:
    """GiB of all broadcast tables of a tree."""
    sides = [j.right.mask for j in joins(tree) if j.method == "broadcast"]
    return sum(cardinalities.bytes(m) * SPARK.hash_factor / GIB for m in sides)


@pytest.mark.parametrize(
    ("graph", "trees"),
    [(chain(4), 5), (star(3), 6), (clique(4), 15), (one_class(4), 15), (chain(1), 1), (clique(5), 105)],
)
def test_the_number_of_join_trees_is_known(graph, trees):
    assert count_trees(graph) == trees


def test_a_disconnected_graph_has_no_tree_without_a_cross_product():
    assert count_trees(by_edges(3, [(0, 1)])) == 0


@given(st.integers(1, 6), st.floats(0, 1), st.integers(0, 999), st.booleans())
def test_pairs_of_connected_subgraphs_come_exactly_once(count, density, seed, whole):
    graph = random_graph(count, density, seed, connected=whole)
    found = [frozenset(pair) for pair in csg_cmp_pairs(graph.neighbours)]
    sets = [m for m in range(1, 1 << count) if connected(m, graph)]
    expected = {frozenset((a, b)) for a in sets for b in sets if not a & b and adjacent(a, b, graph)}
    assert len(found) == len(set(found))
    assert set(found) == expected
    linear = [frozenset(pair) for pair in linear_pairs(graph.neighbours)]
    assert len(linear) == len(set(linear))
    assert set(linear) == {p for p in expected if any(not m & (m - 1) for m in p)}
    assert sum(components(graph.neighbours)) == graph.everything


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 5), st.integers(0, 999), st.sampled_from([1.0, 8.0, 256.0]))
def test_the_optimum_and_the_least_work_equal_brute_force_on_sparse_graphs(count, seed, memory):
    graph = random_graph(count, 0.15 if count < 5 else 0.0, seed)
    cardinalities = Cardinalities(graph, random_inputs(graph, seed))
    share = Share.uniform(8, memory * 4, nodes=4)
    found = enumerate_trees(graph, cardinalities, SPARK, share, limit=EXACT, cross_rows=0.0, **EXACTLY)
    brute = everything(graph, cardinalities, share)
    assert found[0].seconds == pytest.approx(min(c.seconds for c in brute), rel=1e-9)
    assert min(c.core_seconds for c in found) == pytest.approx(min(c.core_seconds for c in brute), rel=1e-9)
    assert min(c.critical_path for c in found) == pytest.approx(min(c.critical_path for c in brute), rel=1e-9)
    assert min(c.peak_memory for c in found) == pytest.approx(min(c.peak_memory for c in brute), rel=1e-9)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 999))
def test_the_optimum_equals_brute_force_on_cliques(seed):
    graph = clique(4)
    cardinalities = Cardinalities(graph, random_inputs(graph, seed))
    found = enumerate_trees(graph, cardinalities, SPARK, SHARE, **EXACTLY)
    assert found[0].seconds == pytest.approx(
        min(c.seconds for c in everything(graph, cardinalities)), rel=1e-9
    )


@settings(deadline=None)
@given(
    st.integers(2, 7),
    st.floats(0, 0.6),
    st.integers(0, 999),
    st.booleans(),
    st.sampled_from([SPARK, NATIVE]),
    st.sampled_from([1e-4, 8.0]),
    st.sampled_from([1, 4]),
)
def test_pairs_are_left_unpriced_only_where_they_cannot_be_the_fastest(
    count, density, seed, connected, model, memory, keep
):
    graph = random_graph(count, density, seed, connected=connected)
    cardinalities = Cardinalities(graph, random_inputs(graph, seed))
    share = Share.uniform(8, memory * 4, nodes=4)
    bounds = {"keep": keep, "limit": 1, "cross_rows": 0.0}
    with pytest.MonkeyPatch.context() as patch:
        (found,) = enumerate_trees(graph, cardinalities, model, share, **bounds)
        patch.setattr(Search, "_least", lambda *sides: 0.0)
        (all_priced,) = enumerate_trees(graph, cardinalities, model, share, **bounds)
    assert found.seconds == pytest.approx(all_priced.seconds, rel=1e-12)


@settings(deadline=None)
@given(st.integers(0, 999), st.sampled_from([1e-4, 8.0]))
def test_units_with_several_ways_are_bounded_by_the_least_of_each_measure(seed, memory):
    graph = clique(6)
    share = Share.uniform(8, memory * 4, nodes=4)
    search = Search(Cardinalities(graph, random_inputs(graph, seed)), SPARK, share)
    leaves = [search.leaf(i) for i in range(6)]
    pair = search.combine([leaves[0]], [leaves[1]], search.variants(1, 2))
    units, masks = [pair, *([leaf] for leaf in leaves[2:])], [3, 4, 8, 16, 32]
    pairs = grouped(csg_cmp_pairs(clique(5).neighbours), limit=10**6)
    for one, other in ((pair, units[1]), (units[1], pair)):
        joins = search.combine(one, other, search.variants(3, 4) if one is pair else search.variants(4, 3))
        assert search._least(one, other) <= min(joins)[0]
    (best,) = search.optimise(units, masks, pairs, keep=1, fastest=True)
    assert best[0] == min(search.optimise(units, masks, pairs, keep=1))[0]


def test_of_a_clique_most_pairs_are_not_priced():
    graph = clique(7)
    search = CountingSearch(Cardinalities(graph, random_inputs(graph, 1)), SPARK, SHARE)
    units, masks = [[search.leaf(i)] for i in range(7)], [1 << i for i in range(7)]
    pairs = grouped(csg_cmp_pairs(graph.neighbours), limit=10**6)
    search.optimise(units, masks, pairs, keep=1, fastest=True)
    assert search.asked < sum(map(len, pairs.values())) / 2


@settings(deadline=None)
@given(st.integers(2, 7), st.floats(0, 0.6), st.integers(0, 999))
def test_keeping_few_ways_per_set_loses_little_and_never_the_least_work(count, density, seed):
    graph = random_graph(count, density, seed)
    cardinalities = Cardinalities(graph, random_inputs(graph, seed))
    few = enumerate_trees(graph, cardinalities, SPARK, SHARE, cross_rows=0.0)
    many = enumerate_trees(graph, cardinalities, SPARK, SHARE, keep=24, cross_rows=0.0)
    assert few[0].seconds <= many[0].seconds * 1.05


@settings(deadline=None)
@given(st.integers(1, 7), st.floats(0, 0.6), st.integers(0, 999), st.booleans())
def test_every_candidate_joins_all_relations_once_within_its_bounds(count, density, seed, whole):
    graph = random_graph(count, density, seed, connected=whole)
    cardinalities = Cardinalities(graph, random_inputs(graph, seed))
    found = enumerate_trees(graph, cardinalities, SPARK, SHARE)
    assert 1 <= len(found) <= 32
    assert len({c.tree for c in found}) == len(found)
    assert found == enumerate_trees(graph, cardinalities, SPARK, SHARE)
    for candidate in found:
        assert sorted(leaf.relation for leaf in leaves(candidate.tree)) == list(range(count))
        longest = max(candidate.core_seconds / SHARE.total.cores, candidate.critical_path)
        assert longest <= candidate.seconds <= longest * 1.5 + 1e-12
        held = resident(candidate.tree, cardinalities)
        assert held <= SHARE.largest.memory * SPARK.broadcast_fraction * (1 + 1e-9)


def test_the_first_candidates_are_a_pareto_front_and_the_others_differ_in_order():
    graph = star(5)
    cardinalities = Cardinalities(graph, star_inputs(graph))
    found = enumerate_trees(graph, cardinalities, SPARK, SHARE, limit=20)
    vectors = [(c.core_seconds, c.critical_path, c.peak_memory) for c in found]
    assert found[0].seconds == min(c.seconds for c in found)
    assert len({logical_key(c.tree) for c in found}) >= 5
    assert not any(
        all(a <= b for a, b in zip(other, vectors[0], strict=True)) and other != vectors[0]
        for other in vectors
    )


def test_small_dimensions_are_broadcast_and_nothing_is_when_memory_is_short():
    graph = star(4)
    cardinalities = Cardinalities(graph, star_inputs(graph))
    roomy = enumerate_trees(graph, cardinalities, SPARK, Share.uniform(8, 64, nodes=4))[0]
    assert {j.method for j in joins(roomy.tree)} == {"broadcast"}
    short = enumerate_trees(graph, cardinalities, SPARK, Share.uniform(8, 1e-6, nodes=4))
    assert {j.method for c in short for j in joins(c.tree)} == {"sort_merge"}


def test_small_dimensions_may_be_crossed_before_the_fact_table():
    graph = graph_of(["fact", "d1", "d2"], [["fact.a", "d1.a"], ["fact.b", "d2.b"]])
    inputs = [RelationInput(1e8, 1e10), RelationInput(20, 1e3), RelationInput(30, 1e3)]
    cardinalities = Cardinalities(graph, inputs)
    found = {logical_key(c.tree) for c in enumerate_trees(graph, cardinalities, SPARK, SHARE)}
    assert frozenset({0b110, 0b111}) in found
    plain = enumerate_trees(graph, cardinalities, SPARK, SHARE, cross_rows=0.0)
    assert frozenset({0b110, 0b111}) not in {logical_key(c.tree) for c in plain}


def test_what_is_joined_is_read_again_over_links_as_its_tables_are_or_as_a_stage_kept_it():
    graph = chain(4)
    cardinalities = Cardinalities(graph, random_inputs(graph, 3))
    tables, both = NATIVE.behind_links(0.5, 0.0), NATIVE.behind_links(0.5, 1.0)
    one, two = (0.5 * cardinalities.scanned_bytes(i) for i in (1, 3))
    assert crossed(0b0010, cardinalities, tables) == pytest.approx(one)
    assert crossed(0b1010, cardinalities, tables) == pytest.approx(one + two)
    assert crossed(0b1010, cardinalities, both) == pytest.approx(cardinalities.bytes(0b1010) * STORED)
    assert crossed(0b1010, cardinalities, NATIVE) == 0.0


def test_unconnected_parts_are_joined_last():
    graph = by_edges(5, [(0, 1), (2, 3), (3, 4)])
    cardinalities = Cardinalities(graph, random_inputs(graph, 3, largest=1e4))
    for candidate in enumerate_trees(graph, cardinalities, SPARK, SHARE):
        assert {0b00011, 0b11100} <= logical_key(candidate.tree)


@settings(deadline=None)
@given(st.integers(1, 7), st.floats(0, 0.6), st.integers(0, 999), st.booleans())
def test_the_best_linear_tree_is_linear_and_of_least_work_among_linear_ones(count, density, seed, whole):
    graph = random_graph(count, density, seed, connected=whole)
    cardinalities = Cardinalities(graph, random_inputs(graph, seed))
    best = left_deep_best(graph, cardinalities, SPARK, SHARE)
    assert is_linear(best.tree)
    assert sorted(leaf.relation for leaf in leaves(best.tree)) == list(range(count))
    if whole:
        rivals = enumerate_trees(graph, cardinalities, SPARK, SHARE, cross_rows=0.0)
        linear = [c.core_seconds for c in rivals if is_linear(c.tree)]
        assert best.core_seconds <= min(linear, default=math.inf) * (1 + 1e-9)


@settings(max_examples=20, deadline=None)
@given(st.integers(3, 8), st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 999))
def test_the_greedy_fallback_gives_whole_trees_near_the_optimum(count, density, seed):
    graph = random_graph(count, density, seed)
    cardinalities = Cardinalities(graph, random_inputs(graph, seed))
    exact = enumerate_trees(graph, cardinalities, SPARK, SHARE, cross_rows=0.0)[0]
    greedy = enumerate_trees(graph, cardinalities, SPARK, SHARE, max_pairs=1)
    assert greedy == enumerate_trees(graph, cardinalities, SPARK, SHARE, max_pairs=1)
    assert all(c.tree.mask == graph.everything for c in greedy)
    assert greedy[0].seconds <= exact.seconds * 3
    linear = left_deep_best(graph, cardinalities, SPARK, SHARE, max_pairs=1)
    assert is_linear(linear.tree)
    assert linear.tree.mask == graph.everything


def test_graphs_far_beyond_dynamic_programming_are_planned():
    for graph in (clique(14), star(24), chain(40)):
        cardinalities = Cardinalities(graph, random_inputs(graph, 1, largest=1e4))
        best = enumerate_trees(graph, cardinalities, SPARK, SHARE)[0]
        assert best.tree.mask == graph.everything
        assert left_deep_best(graph, cardinalities, SPARK, SHARE).tree.mask == graph.everything
