import pytest
from sqlglot import parse_one

from ebbflow.planners.query.estimates.literals import Constant, fold, onto_scale

JAN_1994 = 8766.0  # days since 1970


@pytest.mark.parametrize(
    ("text", "value", "kind"),
    [
        ("DATE '1994-01-01'", JAN_1994, "date"),
        ("CAST('1994-01-01' AS DATE) + INTERVAL '1' YEAR", JAN_1994 + 365, "date"),
        ("INTERVAL '1' MONTH + DATE '1994-01-01'", JAN_1994 + 31, "date"),
        ("DATE '1994-01-01' - INTERVAL 90 DAYS", JAN_1994 - 90, "date"),
        ("ADD_MONTHS(DATE '1994-01-31', 1)", JAN_1994 + 58, "date"),
        ("DATE_ADD('1994-01-01', 30)", JAN_1994 + 30, "date"),
        ("DATE_SUB(DATE '1994-01-01', 3)", JAN_1994 - 3, "date"),
        ("TO_DATE('1994-01-01')", JAN_1994, "date"),
        ("TIMESTAMP '1994-01-01 06:00:00'", JAN_1994 * 86400 + 21600, "timestamp"),
        ("0.06 - 0.01", 0.05, "number"),
        ("-(3 * 4)", -12.0, "number"),
        ("CAST('0.5' AS DECIMAL(10, 2))", 0.5, "number"),
        ("'MAIL'", "MAIL", "text"),
    ],
)
def test_constants_fold(text, value, kind):
    folded = fold(parse_one(text, dialect="spark"))
    assert folded is not None
    assert folded.kind == kind
    assert folded.value == pytest.approx(value)


@pytest.mark.parametrize(
    "text", ["a.x + 1", "1 / 0", "rand()", "CAST('soon' AS DATE)", "DATE '1994-01-01' + x"]
)
def test_what_is_not_constant_does_not_fold(text):
    assert fold(parse_one(text, dialect="spark")) is None


def test_constants_take_the_unit_of_the_column():
    assert onto_scale(Constant("1994-01-01", "text"), 8000.0) == JAN_1994
    assert onto_scale(Constant(JAN_1994, "date"), 7.0e8) == JAN_1994 * 86400
    assert onto_scale(Constant(JAN_1994 * 86400, "timestamp"), 8000.0) == JAN_1994
    assert onto_scale(Constant("17", "text"), 1.0) == 17.0
    assert onto_scale(Constant("MAIL", "text"), "AIR") == "MAIL"
    assert onto_scale(Constant("MAIL", "text"), 1.0) is None
    assert onto_scale(Constant(3.0, "number"), None) is None
