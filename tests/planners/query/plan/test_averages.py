import pytest

from tests.planners.query.statements import analyse, catalogue

KNOWN = catalogue(
    {
        "t": "k int, f double, d decimal(15,2), w decimal(32,4), n void, b bigint",
        "u": "k int, d decimal(15,2)",
    }
)


@pytest.mark.parametrize(
    ("average", "adds_up"),
    [
        ("t.k", True),
        ("t.f * (1 - t.k)", True),
        ("t.d", True),
        ("CASE WHEN t.k > 1 THEN t.d ELSE 0 END", True),
        ("coalesce(t.d, 0)", True),
        ("if(t.k > 1, t.d, NULL)", True),
        ("CAST(t.w AS DECIMAL(20, 2))", True),
        ("CAST(t.w AS DOUBLE)", True),
        ("CAST(t.b AS DOUBLE)", True),
        # Spark sums bigints in floating point to average them; a sum of its own may overflow
        ("t.b", False),
        ("t.k + t.b", False),
        ("CAST(t.k AS BIGINT)", False),
        ("t.k * 4000000000", False),
        # sums of decimal(42, 4), cut to 38, over a count: 6 digits after the point, where Spark gives 8
        ("t.w", False),
        ("t.d * (1 - t.d)", False),
        ("abs(t.d)", False),
        ("round(t.d, 1)", False),
        ("t.n", False),
    ],
)
def test_an_average_is_put_together_only_where_that_gives_the_same(average, adds_up):
    text = f"SELECT t.k, avg({average}) AS a, sum(t.w) AS s FROM t JOIN u ON t.k = u.k GROUP BY t.k"
    assert ("Result" in analyse(text, KNOWN).splits) is adds_up


def test_an_average_of_a_views_column_is_put_together_where_it_is_a_floating_point_number():
    text = "SELECT avg(v.m) AS a FROM (SELECT k, {} AS m FROM t GROUP BY k) v"
    assert "Result" in analyse(text.format("sum(f)"), KNOWN).splits
    assert "Result" not in analyse(text.format("sum(d * d)"), KNOWN).splits


def test_averages_of_subqueries_are_their_own():
    text = "SELECT sum(t.k) AS s FROM t WHERE t.k > (SELECT avg(w) FROM t AS o)"
    assert "Result" in analyse(text, KNOWN).splits
