import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlglot import parse_one

from ebbflow.planners.model import ColumnStatistics
from ebbflow.planners.query.estimates.selectivity import (
    BETWEEN,
    EXISTS,
    LIKE_CONTAINS,
    LIKE_PREFIX,
    RANGE,
    SCALAR_SUBQUERY,
    back_off,
    conjunction,
    selectivity,
)
from tests.planners.query.graphs import lookup_of

COLUMNS = {
    "l.quantity": ColumnStatistics(distinct=50, low=1.0, high=50.0),
    "l.discount": ColumnStatistics(distinct=11, low=0.0, high=0.1),
    "l.shipdate": ColumnStatistics(distinct=2526, low=8036.0, high=10561.0),
    "l.mode": ColumnStatistics(distinct=7, low="AIR", high="TRUCK"),
    "l.note": ColumnStatistics(distinct=1000, nulls=0.25, low="a", high="z"),
    "l.flag": ColumnStatistics(distinct=3),
    "o.key": ColumnStatistics(distinct=100),
}
LOOKUP = lookup_of(COLUMNS)


def of(text: str) -> float:
    return selectivity(parse_one(text, dialect="spark"), LOOKUP)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("l.mode = 'MAIL'", 1 / 7),
        ("'MAIL' = l.mode", 1 / 7),
        ("l.mode <> 'MAIL'", 6 / 7),
        ("l.mode IN ('MAIL', 'SHIP')", 2 / 7),
        ("NOT l.mode IN ('MAIL', 'SHIP')", 5 / 7),
        ("l.mode = 'MAIL' OR l.mode = 'SHIP'", 2 / 7),
        ("l.quantity < 24", 23 / 50),
        ("24 > l.quantity", 23 / 50),
        ("l.quantity <= 24", 24 / 50),
        ("l.quantity > 49", 1 / 50),
        ("l.quantity >= 1", 1.0),
        ("l.quantity = 99", 0.0),
        ("l.quantity > 60", 0.0),
        ("l.discount BETWEEN 0.05 AND 0.07", 3 / 11),
        ("l.discount BETWEEN 0.06 - 0.01 AND 0.06 + 0.01", 3 / 11),
        (
            "l.shipdate >= DATE '1994-01-01' AND l.shipdate < DATE '1994-01-01' + INTERVAL '1' YEAR",
            365 / 2526,
        ),
        ("YEAR(l.shipdate) = 1995", 1 / 7),
        ("l.note IS NULL", 0.25),
        ("NOT l.note IS NULL", 0.75),
        ("l.note = 'mmm'", 0.75 / 1000),
        ("NOT l.note = 'mmm'", 0.75 - 0.75 / 1000),
        ("l.note LIKE 'abc%'", 0.75 * LIKE_PREFIX),
        ("l.mode LIKE '%abc%'", LIKE_CONTAINS),
        ("l.mode LIKE '%abc%def%'", LIKE_CONTAINS / 2),
        ("l.mode LIKE 'MAIL'", 1 / 7),
        ("l.mode LIKE '%'", 1.0),
        ("l.flag < 2", RANGE),
        ("l.flag < l.quantity", RANGE),
        ("l.quantity = o.key", 1 / 100),
        ("EXISTS (SELECT 1 FROM t)", EXISTS),
        ("NOT EXISTS (SELECT 1 FROM t)", EXISTS),
        ("l.quantity < (SELECT AVG(x) FROM t)", SCALAR_SUBQUERY),
        ("TRUE", 1.0),
        ("NULL", 0.0),
    ],
)
def test_formulas(text, expected):
    assert of(text) == pytest.approx(expected, rel=1e-9)


def test_or_over_several_columns_is_inclusion_exclusion():
    assert of("l.mode = 'MAIL' OR l.quantity <= 25") == pytest.approx(1 / 7 + 1 / 2 - 1 / 14)


def test_and_backs_off_from_the_most_selective():
    assert of("l.mode = 'MAIL' AND l.quantity <= 25") == pytest.approx(1 / 7 * (1 / 2) ** 0.5)


def test_both_ends_of_a_range_are_one_interval_and_unknown_ends_take_the_constants():
    assert of("l.quantity > 10 AND l.quantity <= 20") == pytest.approx(10 / 50)
    assert of("l.quantity > 20 AND l.quantity < 10") == 0.0
    assert of("l.flag BETWEEN 1 AND 2") == pytest.approx(BETWEEN)


def test_estimating_leaves_the_expression_as_it_was():
    node = parse_one("l.quantity BETWEEN 1 AND 5 AND l.mode LIKE 'A%'", dialect="spark")
    between = node.this
    selectivity(node, LOOKUP)
    assert between.this.parent is between
    assert node.sql("spark") == "l.quantity BETWEEN 1 AND 5 AND l.mode LIKE 'A%'"


ATOMS = st.sampled_from(
    [
        "l.mode = 'MAIL'",
        "l.quantity < 24",
        "l.quantity >= 10",
        "l.discount BETWEEN 0.05 AND 0.07",
        "l.note IS NULL",
        "l.note LIKE 'a%'",
        "l.shipdate < DATE '1995-01-01'",
        "l.flag > 3",
        "EXISTS (SELECT 1 FROM t)",
    ]
)


@given(st.lists(ATOMS, min_size=1, max_size=5), ATOMS)
def test_a_further_conjunct_never_adds_rows_and_a_further_disjunct_never_removes_any(texts, extra):
    nodes = [parse_one(t, dialect="spark") for t in texts]
    more = [*nodes, parse_one(extra, dialect="spark")]
    assert 0.0 <= conjunction(more, LOOKUP) <= conjunction(nodes, LOOKUP) + 1e-12 <= 1.0 + 1e-12
    assert of(" OR ".join([*texts, extra])) >= of(" OR ".join(texts)) - 1e-12


@given(st.lists(st.floats(0, 1), max_size=6), st.floats(0, 1))
def test_back_off_lies_between_the_product_and_the_smallest(fractions, extra):
    product = extra
    for fraction in fractions:
        product *= fraction
    combined = back_off([*fractions, extra])
    assert product - 1e-12 <= combined <= min([*fractions, extra]) + 1e-12
    assert combined <= back_off(fractions) + 1e-12
