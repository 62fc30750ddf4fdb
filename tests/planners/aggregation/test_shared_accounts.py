"""What trainings used of shared aggregators is paid once, and kept for teams and pipelines when they are over."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.aggregation.accounts import SharedAccounts
from ebbflow.planners.model.ledger import REMEMBERED

APPS = {"a": ("vision", "nightly"), "b": ("vision", ""), "c": ("", "nightly")}


def test_the_dollars_of_a_training_that_is_over_are_its_teams_and_its_pipelines() -> None:
    accounts = (
        SharedAccounts().paid({"a": 3.0, "b": 1.0, "": 0.5}, 10.0).settled(APPS, ["a"], 10.0, REMEMBERED)
    )
    soon = accounts.settled({"c": APPS["c"]}, [], 10.0 + REMEMBERED, REMEMBERED)
    assert soon.dollars == {"a": 3.0, "b": 1.0, "": 0.5}, "others still see it"
    late = soon.settled({"c": APPS["c"]}, ["b"], 11.0 + REMEMBERED, REMEMBERED)
    assert late.dollars == {"b": 1.0, "": 0.5}, "b still uses the service"
    assert (late.teams, late.pipelines, late.forgotten) == ({"vision": 3.0}, {"nightly": 3.0}, 3.0)
    gone = late.settled({}, [], 12.0 + 3 * REMEMBERED, REMEMBERED)
    assert gone.dollars == {"": 0.5}
    assert (gone.teams, gone.pipelines, gone.forgotten) == ({"vision": 4.0}, {}, 4.0)
    assert not gone.owners


def test_a_run_that_is_no_app_is_forgotten_once_it_uses_nothing_any_more() -> None:
    accounts = SharedAccounts().paid({"mine": 2.0}, 0.0).settled({}, ["mine"], 0.0, REMEMBERED)
    assert accounts.settled({}, ["mine"], 5 * REMEMBERED, REMEMBERED).dollars == {"mine": 2.0}
    accounts = accounts.settled({}, [], 5 * REMEMBERED, REMEMBERED)
    assert (accounts.dollars, accounts.forgotten) == ({}, 2.0)


def test_accounts_of_an_older_version_are_read() -> None:
    old = SharedAccounts.of({"until": 7.0, "dollars": {"a": 2.0}})
    assert (old.until, old.dollars, old.teams) == (7.0, {"a": 2.0}, {})
    assert old.settled({}, [], 1e9, REMEMBERED).dollars == {"a": 2.0}, "seen now for the first time"


steps = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from(["a", "b", "c", "d", ""]), st.floats(0.0, 10.0)),
        st.sets(st.sampled_from("abc")),
        st.sets(st.sampled_from("abd")),
        st.floats(0.0, 2 * REMEMBERED),
    ),
    max_size=8,
)


@given(steps)
def test_no_dollar_is_lost_or_counted_twice_and_the_account_survives_its_record(found) -> None:
    accounts, now, paid = SharedAccounts(), 0.0, 0.0
    for dollars, there, using, seconds in found:
        now += seconds
        accounts = accounts.paid(dollars, now)
        accounts = accounts.settled({app: APPS[app] for app in there}, using, now, REMEMBERED)
        accounts = SharedAccounts.of(json.loads(json.dumps(accounts.values)))
        paid += sum(dollars.values())
        assert sum(accounts.dollars.values()) + accounts.forgotten == pytest.approx(paid)
        assert sum(accounts.teams.values()) <= accounts.forgotten + 1e-9
