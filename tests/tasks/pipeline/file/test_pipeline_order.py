"""Which steps wait for which, and how references are found and filled in."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.numbers import parse_duration, parse_gib
from ebbflow.tasks.pipeline.file.order import find_cycle, hopeless, ready
from ebbflow.tasks.pipeline.file.references import Reference, fill_in, references

NAMES = st.sampled_from("abcdefg")
GRAPHS = st.dictionaries(NAMES, st.frozensets(NAMES, max_size=3), min_size=1).map(
    lambda needs: {name: frozenset(wanted & needs.keys()) for name, wanted in needs.items()}
)


@given(GRAPHS)
def test_a_graph_either_has_a_cycle_or_runs_to_its_end(needs: dict[str, frozenset[str]]) -> None:
    finished: set[str] = set()
    while found := ready(needs, finished, finished):
        finished |= set(found)
    cycle = find_cycle(needs)
    assert (cycle == ()) == (finished == set(needs))
    if cycle:
        assert cycle[0] == cycle[-1]
        assert all(need in needs[step] for step, need in pairwise(cycle))


def test_a_long_chain_is_no_cycle() -> None:
    needs = {f"s{n}": frozenset({f"s{n + 1}"}) for n in range(5000)} | {"s5000": frozenset()}
    assert find_cycle(needs) == ()
    assert find_cycle(needs | {"s5000": frozenset({"s0"})})[0] == "s0"


@given(GRAPHS, st.sets(NAMES))
def test_what_waits_for_a_failed_step_is_hopeless(needs: dict[str, frozenset[str]], failed: set[str]) -> None:
    found = hopeless(needs, failed)
    assert not found.keys() & failed
    for step, cause in found.items():
        assert cause in failed
        assert any(need in failed or need in found for need in needs[step])
    for step in needs.keys() - found.keys() - failed:
        assert not needs[step] & (failed | found.keys())


def test_references_are_found_in_order() -> None:
    text = "${queries.a.path}/x $${no} ${tunings.s.best.lr}${env:KEY} ${trainings.t.metrics.r2} ${run.id}"
    assert references(text) == (
        Reference("queries", "a", "path"),
        Reference("tunings", "s", "best.lr"),
        Reference("env", "KEY"),
        Reference("trainings", "t", "metrics.r2"),
        Reference("run", "", "id"),
    )
    assert fill_in(text, lambda one: f"<{one.of}>") == ("<queries>/x ${no} <tunings><env> <trainings> <run>")


@pytest.mark.parametrize(
    "text", ["${", "${}", "${a}", "${a.b.c}", "${queries.a}", "${queries.a.x}", "${env:1}", "${run.x}",
             "${trainings.t.metrics}", "${trainings.t.metrics.}", "${tunings.s.best.}", "${queries..path}"]
)  # fmt: skip
def test_other_references_are_refused(text: str) -> None:
    with pytest.raises(OptionError):
        references(text)


@given(st.text(alphabet="ab.${}:", max_size=20))
def test_any_text_has_references_or_our_error(text: str) -> None:
    try:
        found = references(text)
    except OptionError:
        return
    assert fill_in(text, str) == text.replace("$${", "${")
    assert all(str(one) in text for one in found)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("1h30m", 5400), ("500ms", 0.5), ("2d", 172_800), ("1.5min", 90)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-1s", "1y", "1h 30", "1e5h", "99999d"])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(OptionError):
        parse_duration(text)


def test_sizes() -> None:
    assert [parse_gib(text) for text in ("2", "2GiB", "512m", "1 t")] == [2.0, 2.0, 0.5, 1024.0]
