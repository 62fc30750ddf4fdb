"""Frozen dataclasses as plain values and back, in each of the forms."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import pytest

from ebbflow.infra.storage.values import Form


class Spot(NamedTuple):
    row: int
    seat: int


@dataclass(frozen=True)
class Guest:
    name: str
    size: Literal["small", "large"] = "small"
    spot: Spot | None = None


@dataclass(frozen=True)
class Party:
    guests: tuple[Guest, ...]
    spots: tuple[Spot, ...] = ()
    pair: tuple[str, int] = ("", 0)
    cost: float = 0.0
    limit: float | None = None
    by: Mapping[str, Guest] = field(default_factory=dict)
    said: Mapping[str, Any] = field(default_factory=dict)
    kind: str = field(default="", metadata={"json": "class"})
    secret: str = field(default="", metadata={"json": None})


PARTY = Party(
    (Guest("a", "large", Spot(1, 2)),),
    (Spot(3, 4),),
    ("x", 1),
    math.inf,
    by={"b": Guest("b")},
    kind="k",
    secret="s",
)
REPORT, BOOK, LEDGER = Form(strict=False), Form(strict=True), Form(strict=True, sparse=True, named=True)


def test_all_is_written_but_what_has_no_key() -> None:
    found = REPORT.to_plain(PARTY)
    assert found == BOOK.to_plain(PARTY)
    assert found["guests"] == [{"name": "a", "size": "large", "spot": {"row": 1, "seat": 2}}]
    assert (found["spots"], found["pair"], found["class"]) == ([{"row": 3, "seat": 4}], ["x", 1], "k")
    assert (found["cost"], found["limit"]) == (None, None)
    assert {"kind", "secret"}.isdisjoint(found)


def test_a_sparse_form_leaves_defaults_out_and_names_numbers() -> None:
    assert LEDGER.to_plain(Party((Guest("a"),), cost=math.inf)) == {
        "guests": [{"name": "a"}],
        "cost": {"$float": "inf"},
    }


@pytest.mark.parametrize("form", [REPORT, BOOK])
def test_it_comes_back(form: Form) -> None:
    again = form.from_plain(Party, form.to_plain(PARTY))
    assert again == Party(**{**vars(PARTY), "secret": ""})


def test_a_named_tuple_is_read_from_a_list_as_well() -> None:
    assert REPORT.from_plain(Guest, {"name": "a", "spot": [1, 2]}) == Guest("a", spot=Spot(1, 2))
    with pytest.raises(ValueError, match="spot: wants a list of 2; got"):
        REPORT.from_plain(Guest, {"name": "a", "spot": [1]})


def test_forms_differ_in_what_they_refuse() -> None:
    more = {**BOOK.to_plain(Guest("a")), "more": 1}
    assert REPORT.from_plain(Guest, more) == Guest("a")
    for form in (BOOK, LEDGER):
        with pytest.raises(ValueError, match="Guest has no 'more'"):
            form.from_plain(Guest, more)
    assert REPORT.from_plain(Guest, {"name": "a"}) == LEDGER.from_plain(Guest, {"name": "a"}) == Guest("a")
    with pytest.raises(ValueError, match="Guest lacks 'size'"):
        BOOK.from_plain(Guest, {"name": "a"})
    with pytest.raises(ValueError, match="Guest lacks 'name'"):
        REPORT.from_plain(Guest, {})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("guests", [{"name": 1}], "guests: name: wants a string; got 1"),
        ("guests", [{"name": "a", "size": "huge"}], "size: wants one of small, large; got 'huge'"),
        ("by", {"a": 3}, "by: Guest wants an object; got 3"),
        ("pair", ["x"], "pair: wants a list of 2"),
        ("cost", True, "cost: wants a number; got True"),
        ("class", 3, "class: wants a string; got 3"),
    ],
)
def test_what_does_not_fit_is_named(key: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        REPORT.from_plain(Party, {"guests": [], key: value})
