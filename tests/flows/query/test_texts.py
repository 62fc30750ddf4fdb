"""Values of every type as cells of CSV and as JSON."""

import csv
import io
import json
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.flows.query.texts import csv_cells, csv_line, json_object, json_text, json_values, unique

NOON = datetime(2020, 2, 29, 12, 0, 0, 120000)
EAST = timezone(timedelta(hours=2))


@pytest.mark.parametrize(
    ("kind", "value", "cell", "found"),
    [
        (pa.int64(), 2**63 - 1, "9223372036854775807", "9223372036854775807"),
        (pa.bool_(), True, "true", "true"),
        (pa.float64(), 0.1, "0.1", "0.1"),
        (pa.float64(), 1e300, "1e+300", "1e+300"),
        (pa.float32(), 0.1, "0.1", "0.1"),
        (pa.float64(), float("nan"), "NaN", '"NaN"'),
        (pa.float64(), float("-inf"), "-Infinity", '"-Infinity"'),
        (pa.decimal128(38, 9), Decimal("0.000000001"), "0.000000001", "0.000000001"),
        (pa.decimal128(38, 2), Decimal("123456789012345678901234.50"), "123456789012345678901234.50", None),
        (pa.string(), 'é "x", y\n', 'é "x", y\n', '"é \\"x\\", y\\n"'),
        (pa.string(), "", "", '""'),
        (pa.binary(), b"\xff\x00", "/wA=", '"/wA="'),
        (pa.date32(), date(1969, 12, 31), "1969-12-31", '"1969-12-31"'),
        (pa.time64("us"), time(1, 2, 3, 400000), "01:02:03.4", '"01:02:03.4"'),
        (pa.timestamp("us"), NOON, "2020-02-29T12:00:00.12", '"2020-02-29T12:00:00.12"'),
        (pa.timestamp("ns"), NOON.replace(microsecond=0), "2020-02-29T12:00:00", '"2020-02-29T12:00:00"'),
        (
            pa.timestamp("us", "Europe/Paris"),
            NOON.replace(tzinfo=EAST),
            "2020-02-29T10:00:00.12Z",
            '"2020-02-29T10:00:00.12Z"',
        ),
        (pa.timestamp("s", "UTC"), datetime(2020, 1, 1, tzinfo=UTC), "2020-01-01T00:00:00Z", None),
        (pa.duration("ns"), timedelta(seconds=90), "0:01:30", '"0:01:30"'),
        (pa.list_(pa.int32()), [1, None], "[1, null]", "[1, null]"),
        (pa.list_(pa.int32(), 2), [1, 2], "[1, 2]", "[1, 2]"),
        (pa.list_(pa.list_(pa.string())), [[], ["a"], None], '[[], ["a"], null]', None),
        (pa.struct([("a", pa.decimal128(4, 1)), ("b", pa.date32())]), {"a": Decimal("1.5")}, None, None),
        (pa.map_(pa.int32(), pa.bool_()), [(1, True)], '{"1": true}', '{"1": true}'),
        (pa.dictionary(pa.int32(), pa.string()), "x", "x", '"x"'),
    ],
    ids=str,
)
def test_a_value_has_its_text(kind: pa.DataType, value: Any, cell: str | None, found: str | None) -> None:
    column = pa.array([value, None, value], kind)
    for part, known in ((column, [True, False, True]), (column.slice(1), [False, True])):
        cells, values = csv_cells(part), json_values(part)
        assert [one is not None for one in cells] == known
        assert [one != "null" for one in values] == known
        json.loads(values[-1])
        if cell is not None:
            assert cells[-1] == cell
        if found is not None:
            assert values[-1] == found


def test_a_struct_is_an_object() -> None:
    rows = [{"a": Decimal("1.50"), "b": [date(2020, 1, 1)]}, None, {"a": None, "b": None}]
    column = pa.array(rows, pa.struct([("a", pa.decimal128(4, 2)), ("b", pa.list_(pa.date32()))]))
    assert json_values(column) == ['{"a": 1.50, "b": ["2020-01-01"]}', "null", '{"a": null, "b": null}']
    assert json_values(column[:0]) == []


texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"))
rows = st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(texts | st.none(), min_size=n, max_size=n)))


@given(rows)
def test_csv_is_read_back_as_it_was(rows: list[list[str | None]]) -> None:
    columns = [csv_cells(pa.array(column, pa.string())) for column in zip(*rows, strict=True)]
    written = "".join(csv_line(row) for row in zip(*columns, strict=True))
    assert list(csv.reader(io.StringIO(written, newline=""))) == [
        [cell or "" for cell in row] for row in rows
    ]


@given(st.lists(texts))
def test_json_is_read_back_as_it_was(values: list[str]) -> None:
    assert json.loads(f"[{', '.join(json_values(pa.array(values, pa.string())))}]") == values


def test_null_and_the_empty_text_differ_and_no_line_is_empty() -> None:
    assert csv_line([None, "", "a b", " a"]) == ',"",a b," a"\n'
    assert csv_line([None]) == '""\n'


def test_columns_of_one_name_get_a_number() -> None:
    names = unique(["a", "a", "a_2", "a"])
    assert names == ["a", "a_3", "a_2", "a_4"]
    assert json_object([json_text(name) for name in names[:2]], ["1", "2"]) == '{"a": 1, "a_3": 2}'
