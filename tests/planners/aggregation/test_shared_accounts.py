"""What trainings used of shared aggregators is paid once, and kept for teams and pipelines when they are over."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.aggregation.accounts import MAX_FINISHED, AccountOwner, SharedAccounts
from ebbflow.planners.model.ledger import REMEMBERED, RESUMABLE

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


def test_dollars_come_back_with_a_training_and_with_a_pipeline_that_return() -> None:
    away = SharedAccounts().paid({"a": 3.0}, 0.0).settled(APPS, [], 0.0, RESUMABLE)
    for now in (2 * REMEMBERED, RESUMABLE):
        away = away.settled({}, [], now, RESUMABLE)
    back = away.settled({"a": APPS["a"]}, ["a"], RESUMABLE + 1.0, RESUMABLE)
    assert (back.dollars, back.teams) == ({"a": 3.0}, {}), "its own budget counts them"
    away = back.settled({"c": APPS["c"]}, [], 2 * RESUMABLE + 2.0, RESUMABLE)
    assert (away.dollars, away.pipelines) == ({}, {"nightly": 3.0})
    away = SharedAccounts.of(away.settled({}, [], 3 * RESUMABLE, RESUMABLE).values)
    back = away.settled({"c": APPS["c"]}, [], 3 * RESUMABLE + 1.0, RESUMABLE)
    assert back.pipelines == {"nightly": 3.0}, "with another of its apps"
    assert back.settled({}, [], 5 * RESUMABLE, RESUMABLE).pipelines == {}


def test_a_bounded_number_of_trainings_that_are_away_is_kept() -> None:
    accounts, apps = SharedAccounts(), {}
    for at in range(3):
        apps = {f"run-{at}-{i}": ("vision", "") for i in range(MAX_FINISHED // 2)}
        accounts = accounts.paid(dict.fromkeys(apps, 1.0), at).settled(apps, [], float(at), RESUMABLE)
    accounts = accounts.settled(apps, [], 3.0, RESUMABLE)
    assert len(accounts.dollars) == 3 * (MAX_FINISHED // 2), "those that are there do not count"
    accounts = accounts.settled({}, [], 4.0, RESUMABLE)
    assert len(accounts.dollars) == MAX_FINISHED
    assert not any(run.startswith("run-0-") for run in accounts.dollars)
    assert accounts.teams == {"vision": MAX_FINISHED / 2}
    assert len(accounts.finished(3.0)) == MAX_FINISHED / 2


def test_accounts_of_an_older_version_are_read() -> None:
    old = SharedAccounts.of({"until": 7.0, "dollars": {"a": 2.0}})
    assert (old.until, old.dollars, old.teams) == (7.0, {"a": 2.0}, {})
    assert old.settled({}, [], 1e9, REMEMBERED).dollars == {"a": 2.0}, "seen now for the first time"


def test_what_a_newer_version_has_more_is_left_out() -> None:
    body = {"owners": {"a": ["vision", "nightly", 7.0, "more"]}, "more": 1}
    assert SharedAccounts.of(body).owners == {"a": AccountOwner("vision", "nightly", 7.0)}


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
