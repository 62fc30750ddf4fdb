"""What the command line attaches to a flow run, and how runs are named."""

from types import SimpleNamespace

import pytest

from ebbflow.flows.runs import attached as module
from ebbflow.flows.runs.attached import Attached, run_name
from ebbflow.tasks.drawing.wording import shorten

ATTACHED: Attached[str, int] = Attached("of_a_test")


def flow(outcome: int | None = 1, error: Exception | None = None) -> None:
    attachment = ATTACHED.get()
    assert attachment is not None
    assert attachment.given == "listener"
    attachment.outcome = outcome
    if error is not None:
        raise error


def test_the_run_has_what_is_given_and_the_watcher_its_outcome() -> None:
    assert ATTACHED.get() is None
    assert ATTACHED.run("listener", flow) == 1
    assert ATTACHED.get() is None


def test_an_error_that_the_outcome_tells_is_dropped() -> None:
    assert ATTACHED.run("listener", lambda: flow(2, ValueError("told")), handled=ValueError) == 2


def test_other_errors_and_those_before_an_outcome_are_raised() -> None:
    with pytest.raises(KeyError):
        ATTACHED.run("listener", lambda: flow(2, KeyError("untold")), handled=ValueError)
    with pytest.raises(ValueError, match="early"):
        ATTACHED.run("listener", lambda: flow(None, ValueError("early")), handled=ValueError)
    assert ATTACHED.get() is None


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        ({"title": "sales", "sql": "SELECT 1"}, "query sales"),
        ({"title": "", "sql": "SELECT 1"}, "query SELECT 1"),
        ({"sql": "x" * 70}, f"query {shorten('x' * 70, 60)}"),
        ({}, "query "),
    ],
)
def test_a_run_is_named_by_the_first_parameter_that_says_something(
    parameters: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "flow_run", SimpleNamespace(parameters=parameters))
    assert run_name("query", "title", "sql")() == name
