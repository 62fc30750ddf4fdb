from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.model import ColumnStatistics
from ebbflow.planners.query.estimates.cardinality import Cardinalities
from ebbflow.planners.query.estimates.ranges import KeyRange, within_text
from ebbflow.planners.query.estimates.relations import RelationInput, conjunction_text, distinct_after
from tests.planners.query.graphs import by_edges, graph_of, one_class, predicate, random_graph, random_inputs


def relation(rows: float, **distinct: float) -> RelationInput:
    columns = {n: ColumnStatistics(distinct=d, low=1.0, high=d) for n, d in distinct.items()}
    return RelationInput(rows, rows * 100.0, columns)


LINEITEM = relation(6e6, orderkey=1.5e6, partkey=2e5, suppkey=1e4, quantity=50)
ORDERS = relation(1.5e6, orderkey=1.5e6, custkey=1e5, priority=5)
PARTSUPP = relation(8e5, partkey=2e5, suppkey=1e4)
PART = relation(2e5, partkey=2e5, size=50)
SUPPLIER = relation(1e4, suppkey=1e4)


def test_a_foreign_key_join_keeps_the_referring_rows():
    graph = graph_of("lo", [["l.orderkey", "o.orderkey"]])
    assert Cardinalities(graph, [LINEITEM, ORDERS]).rows(0b11) == pytest.approx(6e6)


def test_a_filter_on_the_key_side_keeps_that_part_of_the_referring_rows():
    graph = graph_of("lo", [["l.orderkey", "o.orderkey"]], ["o.priority = 1", "l.quantity <= 25"])
    cardinalities = Cardinalities(graph, [LINEITEM, ORDERS])
    assert cardinalities.filtered_rows(1) == pytest.approx(3e5)
    assert cardinalities.base_rows(1) == 1.5e6
    assert cardinalities.rows(0b11) == pytest.approx(6e6 / 5 / 2)


def test_approximate_distinct_counts_do_not_disturb_a_foreign_key():
    noisy = relation(6e6, orderkey=1.62e6)
    key = relation(1.5e6, orderkey=1.44e6)
    graph = graph_of("lo", [["l.orderkey", "o.orderkey"]])
    assert Cardinalities(graph, [noisy, key]).rows(0b11) == pytest.approx(6e6)


def test_a_class_over_many_relations_divides_by_all_but_the_smallest_ndv():
    inputs = [relation(1000, k=10), relation(2000, k=50), relation(5000, k=200)]
    assert Cardinalities(one_class(3), inputs).rows(0b111) == pytest.approx(1000 * 2000 * 5000 / (50 * 200))
    assert Cardinalities(one_class(3), inputs).rows(0b011) == pytest.approx(1000 * 2000 / 50)


def test_a_composite_key_is_not_divided_twice():
    graph = graph_of("pl", [["p.partkey", "l.partkey"], ["p.suppkey", "l.suppkey"]])
    assert Cardinalities(graph, [PARTSUPP, LINEITEM]).rows(0b11) == pytest.approx(6e6)


def test_a_composite_key_stays_one_key_among_further_relations():
    graph = graph_of(
        ["part", "supp", "ps", "l"],
        [["part.partkey", "ps.partkey", "l.partkey"], ["supp.suppkey", "ps.suppkey", "l.suppkey"]],
        ["part.size = 7"],
    )
    cardinalities = Cardinalities(graph, [PART, SUPPLIER, PARTSUPP, LINEITEM])
    assert cardinalities.rows(0b1100) == pytest.approx(6e6)
    assert cardinalities.rows(0b1111) == pytest.approx(6e6 / 50)


def test_three_relations_on_one_composite_key_undo_two_divisions_not_three():
    graph = graph_of("abc", [["a.x", "b.x", "c.x"], ["a.y", "b.y", "c.y"]])
    same = relation(1000, x=100, y=100)
    assert Cardinalities(graph, [same, same, same]).rows(0b111) == pytest.approx(1000.0)


def test_a_constant_restated_on_the_other_side_of_a_join_counts_once():
    graph = graph_of("lo", [["l.orderkey", "o.orderkey"]], ["o.orderkey = 7"], ["l.orderkey = 7"])
    cardinalities = Cardinalities(graph, [LINEITEM, ORDERS])
    assert cardinalities.filtered_rows(0) == pytest.approx(4.0)
    assert cardinalities.rows(0b11) == pytest.approx(4.0)


def test_what_an_or_implies_of_single_relations_is_not_counted_again():
    nation = RelationInput(25, 2000, {"name": ColumnStatistics(distinct=25)})
    graph = graph_of(
        ["n1", "n2"],
        [],
        ["(n1.name = 'F' AND n2.name = 'G') OR (n1.name = 'G' AND n2.name = 'F')"],
        ["n1.name = 'F' OR n1.name = 'G'", "n2.name = 'F' OR n2.name = 'G'"],
    )
    cardinalities = Cardinalities(graph, [nation, nation])
    whole = Cardinalities(graph_of(["n1", "n2"], [], [graph.predicates[0].text]), [nation, nation])
    assert cardinalities.filtered_rows(0) == pytest.approx(2.0)
    assert cardinalities.rows(0b11) == pytest.approx(whole.rows(0b11))


def test_other_join_predicates_take_their_constants():
    graph = graph_of("ab", [], ["a.x < b.y", "EXISTS (SELECT 1 FROM t WHERE t.z = a.x AND t.w = b.y)"])
    cardinalities = Cardinalities(graph, [relation(600, x=600), relation(100, y=100)])
    assert cardinalities.rows(0b11) == pytest.approx(600 * 100 / 3 * 0.5)


def test_measured_fractions_win_and_that_of_all_predicates_together_wins_over_single_ones():
    graph = graph_of("o", [], ["o.priority = 1", "o.custkey < 100"])
    single = {"o.priority = 1": 0.5, "o.custkey < 100": 0.01}
    assert Cardinalities(graph, [ORDERS], selectivities=single).rows(1) == pytest.approx(
        1.5e6 * 0.01 * 0.5**0.5
    )
    together = {**single, conjunction_text(graph.local(0)): 0.25}
    assert Cardinalities(graph, [ORDERS], selectivities=together).rows(1) == pytest.approx(1.5e6 * 0.25)


# 200 years of dates, of which the sales have five
DATES = RelationInput(
    73_000,
    1e6,
    {"sk": ColumnStatistics(distinct=73_000, low=1, high=73_000), "year": ColumnStatistics(distinct=200)},
)
SALES = RelationInput(1e6, 1e8, {"date": ColumnStatistics(distinct=1_800, low=36_000, high=37_824)})
YEAR = "d.year = 2000"


def of_dates(predicates=(YEAR,), dates=DATES, **measured):
    graph = graph_of("sd", [["s.date", "d.sk"]], predicates)
    found = {}
    if measured:
        span = KeyRange(36_000.0, 37_824.0)
        found = {YEAR: measured["alone"], within_text(graph.local(1), "sk", span): measured["both"]}
    return Cardinalities(graph, [SALES, dates], selectivities=found)


def test_a_filter_counts_by_what_it_keeps_of_the_keys_that_are_referred_to():
    assert of_dates(()).rows(0b11) == pytest.approx(1e6)
    assert of_dates().rows(0b11) == pytest.approx(1e6 / 200)
    found = of_dates(alone=366 / 73_000, both=366 / 73_000)
    assert found.rows(0b10) == pytest.approx(366)
    assert found.rows(0b11) == pytest.approx(1e6 * 366 / 1_825, rel=0.001)
    assert of_dates(alone=366 / 73_000, both=0.0).rows(0b11) == 1.0  # a year without sales


def test_a_lone_key_far_off_does_not_empty_the_range():
    far = replace(DATES.columns["sk"], high=2_000_000_000)
    dates = replace(DATES, columns={**DATES.columns, "sk": far})
    assert of_dates((), dates).rows(0b11) == pytest.approx(1e6)
    assert of_dates(dates=dates, alone=0.005, both=0.005).rows(0b11) == pytest.approx(1e6 * 365 / 1_800)


def test_a_range_counts_once_the_relations_that_make_it_are_joined():
    graph = graph_of(["s", "d", "e"], [["s.date", "d.sk", "e.sk"]])
    cardinalities = Cardinalities(graph, [SALES, DATES, DATES])
    assert cardinalities.rows(0b110) == pytest.approx(73_000)
    assert cardinalities.rows(0b111) == pytest.approx(1e6)


def test_a_predicate_on_the_key_itself_says_which_values_are_left():
    both = of_dates(("d.sk BETWEEN 36001 AND 36365", "s.date BETWEEN 36001 AND 36365"))
    assert both.rows(0b11) == pytest.approx(1e6 * 365 / 1_825, rel=0.01)


def test_two_columns_of_one_relation_in_a_class_are_equal_inside_it():
    graph = graph_of("ab", [["a.x", "a.y", "b.x"]])
    cardinalities = Cardinalities(graph, [relation(1000, x=10, y=100), relation(10, x=10)])
    assert cardinalities.filtered_rows(0) == pytest.approx(10.0)
    assert cardinalities.rows(0b11) == pytest.approx(10.0)


def test_known_rows_are_exact_and_scale_supersets():
    graph = by_edges(3, [(0, 1), (1, 2)])
    inputs = random_inputs(graph, 5)
    plain = Cardinalities(graph, inputs)
    informed = Cardinalities(graph, inputs, actuals={0b011: plain.rows(0b011) * 7})
    assert informed.rows(0b011) == plain.rows(0b011) * 7
    assert informed.rows(0b111) == pytest.approx(max(plain.rows(0b111) * 7, 1.0), rel=0.5)
    assert informed.rows(0b110) == plain.rows(0b110)


def test_disjoint_known_sets_multiply_and_the_largest_known_set_wins_over_its_parts():
    graph = by_edges(4, [(0, 1), (1, 2), (2, 3)])
    inputs = [relation(1e5, c0_1=100, c1_2=100, c2_3=100)] * 4
    plain = Cardinalities(graph, inputs)
    two = Cardinalities(graph, inputs, actuals={0b0011: plain.rows(3) * 2, 0b1100: plain.rows(12) * 3})
    assert two.rows(0b1111) == pytest.approx(plain.rows(0b1111) * 6)
    nested = Cardinalities(graph, inputs, actuals={0b0001: 1.0, 0b0111: plain.rows(7) * 5})
    assert nested.rows(0b1111) == pytest.approx(plain.rows(0b1111) * 5)


def test_overlapping_known_sets_combine_only_over_a_known_intersection():
    graph = by_edges(3, [(0, 1), (1, 2)])
    inputs = [relation(1e5, c0_1=100, c1_2=100)] * 3
    plain = Cardinalities(graph, inputs)
    pairs = {0b011: plain.rows(3) * 10, 0b110: plain.rows(6) * 10}
    assert Cardinalities(graph, inputs, actuals=pairs).rows(7) == pytest.approx(plain.rows(7) * 10)
    pairs[0b010] = plain.rows(2) * 10  # the factor comes from the shared relation
    assert Cardinalities(graph, inputs, actuals=pairs).rows(7) == pytest.approx(plain.rows(7) * 10)


def test_an_empty_known_set_makes_its_supersets_tiny_but_not_impossible():
    graph = by_edges(2, [(0, 1)])
    cardinalities = Cardinalities(graph, [relation(1e5, c0_1=100)] * 2, actuals={0b01: 0.0})
    assert cardinalities.rows(0b01) == 0.0
    assert cardinalities.rows(0b11) == 1.0


def on_three_keys(n: int, m: int) -> Cardinalities:
    """Two joins of which each row is known, and by which of their keys they are yet to be joined: three of them."""
    inputs = [relation(1000, k=500), relation(100, j=100), relation(2000, k=500), relation(10, i=10)]
    graph = graph_of("abcd", [["a.k", "c.k"], ["a.j", "b.j"], ["c.i", "d.i"]])
    keys = {0b0011: {0: [1, 2, 3] * (n // 3)}, 0b1100: {0: [3, 4] * (m // 2)}}
    return Cardinalities(graph, inputs, actuals={0b0011: 300, 0b1100: 400}, samples=keys)


def test_known_sets_meet_as_samples_of_their_keys_do():
    plain = 300 * 400 / 500
    expected, found = 30 * 20 / 500, 10 * 10
    assert on_three_keys(30, 20).rows(0b1111) == pytest.approx(plain * (found + 1) / (expected + 1))
    assert on_three_keys(3000, 2000).rows(0b1111) == pytest.approx(300 * 400 / 6, rel=1e-3), "one pair in six"
    assert on_three_keys(0, 20).rows(0b1111) == pytest.approx(plain), "nothing is known of one of them"


def test_keys_that_never_meet_in_samples_of_which_many_should_are_few():
    inputs = [relation(1000, k=50), relation(1000, k=50), relation(9, k=9)]
    graph = one_class(3)
    keys = {0b011: {0: list(range(25)) * 40}, 0b100: {0: list(range(25, 50)) * 40}}
    few = Cardinalities(graph, inputs, actuals={0b011: 9000, 0b100: 9}, samples=keys).rows(0b111)
    many = Cardinalities(graph, inputs, actuals={0b011: 9000, 0b100: 9}).rows(0b111)
    assert few < many / 1000


@given(st.integers(1, 40), st.integers(1, 40), st.randoms(use_true_random=False))
def test_samples_of_what_was_expected_change_little(n, m, rng):
    """Of keys that are drawn as estimates take them to be, an estimate stays within what few pairs can tell."""
    inputs = [relation(1000, k=20), relation(100, j=100), relation(2000, k=20), relation(10, i=10)]
    graph = graph_of("abcd", [["a.k", "c.k"], ["a.j", "b.j"], ["c.i", "d.i"]])
    keys = {mask: {0: [*range(20)] * count} for mask, count in ((0b0011, n), (0b1100, m))}
    for sample in keys.values():
        rng.shuffle(sample[0])
    known = {0b0011: 300.0, 0b1100: 400.0}
    assert Cardinalities(graph, inputs, actuals=known, samples=keys).rows(0b1111) == pytest.approx(
        Cardinalities(graph, inputs, actuals=known).rows(0b1111)
    )


def test_columns_are_dropped_once_no_open_predicate_needs_them():
    graph = graph_of("abc", [["a.x", "b.x"], ["b.y", "c.y"]], ["a.z + b.z > 3"])
    inputs = [relation(100, x=10, z=10), relation(100, x=10, y=10, z=10), relation(100, y=10)]
    cardinalities = Cardinalities(graph, inputs, outputs=[("c", "y")])
    assert cardinalities.width(0b001) == 8 + 8 * 2
    assert cardinalities.width(0b011) == 8 + 8  # b.y for the join with c
    assert cardinalities.width(0b111) == 8 + 8  # c.y
    assert cardinalities.width(0b111, [("a", "x")]) == 8 + 8
    assert cardinalities.bytes(0b001) == 100 * 24
    assert Cardinalities(graph, inputs).width(0b111) == 8 + 8 * 6


def test_a_scan_reads_only_the_used_columns():
    columns = {n: ColumnStatistics(distinct=10, width=w) for n, w in (("x", 8), ("y", 8), ("comment", 84))}
    graph = graph_of("ab", [["a.x", "b.x"]])
    cardinalities = Cardinalities(graph, [RelationInput(10, 1000, columns), RelationInput(10, 500)])
    assert cardinalities.scanned_bytes(0) == pytest.approx(80.0)
    assert cardinalities.scanned_bytes(1) == 500.0


def test_groups_are_thinned_by_other_filters_and_never_exceed_the_rows():
    graph = graph_of("lo", [["l.orderkey", "o.orderkey"]], ["l.quantity <= 5"])
    cardinalities = Cardinalities(graph, [LINEITEM, ORDERS])
    thinned = cardinalities.distinct(0b11, [("l", "orderkey")])
    assert thinned == pytest.approx(distinct_after(1.5e6, 6e6, 0.1))
    assert thinned < cardinalities.rows(0b11) < 1.5e6
    assert cardinalities.distinct(0b11, [("l", "quantity")]) == pytest.approx(5.0)
    assert cardinalities.distinct(0b11, []) == 1.0


def test_distinct_values_after_drawing_rows():
    assert distinct_after(100, 100, 0.25) == pytest.approx(25)  # a key
    assert distinct_after(10, 1e6, 0.5) == pytest.approx(10)
    assert distinct_after(100, 1e4, 0.0) == 0.0
    assert distinct_after(100, 1e4, 1.0) == 100.0


def test_equalities_are_found_in_classes_and_between_expressions():
    graph = graph_of("abcd", [["a.x", "b.x"]], ["b.y + 1 = c.y", "c.z < d.z"])
    cardinalities = Cardinalities(graph, [relation(10)] * 4)
    assert cardinalities.has_equality(0b0001, 0b0010)
    assert cardinalities.has_equality(0b0100, 0b0011)
    assert not cardinalities.has_equality(0b0001, 0b0100)
    assert not cardinalities.has_equality(0b0100, 0b1000)


def test_inputs_must_match_the_relations():
    with pytest.raises(ValueError, match="2 relations"):
        Cardinalities(by_edges(2, [(0, 1)]), [relation(1)])


GRAPHS = st.builds(random_graph, st.integers(2, 6), st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 500))


@given(GRAPHS, st.integers(0, 500), st.randoms(use_true_random=False))
def test_estimates_do_not_depend_on_what_was_asked_before(graph, seed, rng):
    inputs = random_inputs(graph, seed)
    masks = list(range(1, graph.everything + 1))
    actuals = {m: 10.0 * m for m in rng.sample(masks, min(3, len(masks)))}
    first = Cardinalities(graph, inputs, actuals=actuals)
    forward = [first.rows(m) for m in masks]
    rng.shuffle(masks)
    other = Cardinalities(graph, inputs, actuals=actuals)
    shuffled = {m: other.rows(m) for m in masks}
    assert forward == [shuffled[m] for m in range(1, graph.everything + 1)]
    assert all(forward[m - 1] == rows for m, rows in actuals.items())


@given(GRAPHS, st.integers(0, 500))
def test_a_join_never_exceeds_the_cross_product_and_a_filter_never_adds_rows(graph, seed):
    inputs = random_inputs(graph, seed)
    plain = Cardinalities(graph, inputs)
    product = 1.0
    for i in range(len(inputs)):
        product *= plain.rows(1 << i)
    assert plain.rows(graph.everything) <= product * (1 + 1e-9)
    text = f"r0.{min(graph.relations[0].columns)} = 3"
    names = [r.alias for r in graph.relations]
    extra = type(graph)(graph.relations, (*graph.predicates, predicate(text, names)), graph.classes)
    filtered = Cardinalities(extra, inputs)
    assert filtered.filtered_rows(0) <= plain.filtered_rows(0)
