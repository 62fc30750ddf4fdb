"""Fractions of groups that a HAVING keeps, and of rows that IN (SELECT ...) keeps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlglot import exp, parse_one

from ebbflow.planners.model import Catalogue, ColumnStatistics, Table, TableStatistics
from ebbflow.planners.query.costs.sizes import Sizes
from ebbflow.planners.query.estimates.selectivity import UNKNOWN, having_fraction
from tests.planners.query.statements import analyse

QUANTITY = ColumnStatistics(50.0, 0.0, 1.0, 50.0, 8.0)


def fraction(condition: str, group_rows: float = 4.0) -> float:
    return having_fraction(parse_one(condition, read="spark"), group_rows, lambda _: QUANTITY)


def test_a_sum_far_above_its_mean_keeps_few_groups():
    # four values of 25.5 on average: mean 102, variance 4 * (49²/12 + 25.5²); Cantelli's bound at 300
    variance = 4.0 * (49.0**2 / 12.0 + 25.5**2)
    assert fraction("SUM(l.q) > 300") == pytest.approx(variance / (variance + 198.0**2))


def test_a_bound_below_the_mean_keeps_most():
    assert fraction("SUM(l.q) > 10") > 0.5
    assert fraction("SUM(l.q) < 10") < 0.5


def test_a_count_is_told_by_the_rows_of_a_group():
    assert fraction("COUNT(*) > 40") == pytest.approx(4.0 / (4.0 + 36.0**2))
    assert fraction("40 < COUNT(*)") == fraction("COUNT(*) > 40")


@pytest.mark.parametrize(
    "condition", ["MIN(l.q) > 3", "SUM(l.q) > AVG(l.q)", "SUM(l.q + 1) > 3", "COUNT(DISTINCT l.q) > 3"]
)
def test_anything_else_is_unknown(condition):
    assert fraction(condition) == pytest.approx(UNKNOWN)


@given(st.floats(-1e6, 1e6), st.floats(1.0, 1e6))
def test_a_fraction_is_a_fraction(limit, group_rows):
    assert 0.0 <= fraction(f"SUM(l.q) > {limit:f}", group_rows) <= 1.0


def large() -> Catalogue:
    order = ColumnStatistics(1_500_000.0, 0.0, 1.0, 6e6, 8.0)
    tables = {
        "o": Table(
            "o",
            (("k", "bigint"), ("c", "bigint")),
            "1",
            TableStatistics(1.5e6, 2.4e7, {"k": order, "c": order}),
        ),
        "l": Table(
            "l",
            (("k", "bigint"), ("q", "bigint")),
            "1",
            TableStatistics(6e6, 9.6e7, {"k": order, "q": QUANTITY}),
        ),
    }
    return Catalogue(tables)


def test_in_a_subquery_keeps_as_many_rows_as_it_admits_values():
    known = large()
    text = (
        "SELECT o.c, l.q FROM o, l WHERE o.k = l.k AND "
        "o.k IN (SELECT m.k FROM l m GROUP BY m.k HAVING sum(m.q) > 300)"
    )
    sizes = Sizes(analyse(text, known), known)
    (graph, cardinalities), *_ = [(c.graph, c) for c in sizes.blocks.values()]
    index = graph.index["o"]
    expected = 1.5e6 * having_fraction(
        parse_one("SUM(l.q) > 300", into=exp.Condition), 4.0, lambda _: QUANTITY
    )
    assert cardinalities.filtered_rows(index) == pytest.approx(expected, rel=0.05)


def test_in_a_subquery_of_a_table_counts_the_values_its_filter_leaves():
    known = large()
    text = "SELECT o.c, l.q FROM o, l WHERE o.k = l.k AND o.k IN (SELECT m.k FROM l m WHERE m.q = 7)"
    sizes = Sizes(analyse(text, known), known)
    (cardinalities,) = sizes.blocks.values()
    # of four rows of an order one in fifty has that quantity: 1 - (49/50)^4 of the orders
    expected = 1.5e6 * (1.0 - (49.0 / 50.0) ** 4)
    assert cardinalities.filtered_rows(cardinalities.graph.index["o"]) == pytest.approx(expected, rel=0.05)
