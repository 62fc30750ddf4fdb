"""Options that a request declares: what commands, flows and operators make of them."""

import ast
import inspect
import subprocess
import sys
from dataclasses import MISSING, Field, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from ebbflow.flows.runs.request_options import fields_of, with_options_of
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.options import check, declared, option, option_like


@dataclass(frozen=True)
class Walk:
    """What the tests ask for."""

    where: str
    pace: float = option(1.5, "Kilometres an hour", above=0)
    rest: float = option(60.0, "Rest between two legs", unit="s", min=0)
    dogs: int = option(0, "That come along", unless="none", min=0, max=9)
    leash: Literal["long", "short"] = option("long", "long or short")
    fast: bool = option(False, "Hurry", flags="--fast")
    by: tuple[str, ...] = option((), "Over a hill. Repeatable", metavar="HILL")
    secret: int = option(3, min=1, command=False)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class Run:
    rest: float = option_like(Walk, "rest")


def said(*arguments: str) -> tuple[str, dict[str, Any]]:
    """Return what a command prints, and what it gets."""
    app, got = typer.Typer(), {}

    @app.command()
    @with_options_of(Walk, before={"back": "fast"})
    def walk(where: str, *, back: bool = False, by: str | None = None, given: dict[str, Any]) -> None:
        got.update({"where": where, "back": back, "by": by, **given})

    return CliRunner().invoke(app, arguments, env={"COLUMNS": "120"}).output, got


def test_a_command_gets_what_was_typed_and_nothing_else() -> None:
    assert said("lake") == ("", {"where": "lake", "back": False, "by": None})
    typed = said("lake", "--pace", "4", "--fast", "--leash", "short", "--by", "col", "--back")[1]
    assert typed == {"where": "lake", "back": True, "by": "col", "pace": 4.0, "fast": True, "leash": "short"}


def test_help_says_what_holds_unless_it_is_typed() -> None:
    lines = [" ".join(line.split()) for line in said("--help")[0].splitlines()]
    options = [line.strip("│ ").split(" ", 1) for line in lines if line.startswith("│ --")]
    assert [name for name, _ in options][:-3] == [
        "--pace", "--rest", "--dogs", "--leash", "--back", "--fast", "--by"
    ]  # fmt: skip
    assert options[0][1] == "<float> Kilometres an hour. Default: 1.5."
    assert options[1][1] == "DURATION Rest between two legs. Default: 1m."
    assert options[2][1] == "<int> That come along. Default: none."


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"pace": 0}, "pace must be > 0 and finite; got 0"),
        ({"pace": float("inf")}, "pace must be > 0 and finite; got inf"),
        ({"rest": -1}, "rest must be >= 0 s and finite; got -1"),
        ({"rest": "1"}, "rest must be >= 0 s and finite; got '1'"),
        ({"dogs": 10}, "dogs must be a whole number >= 0 and <= 9; got 10"),
        ({"dogs": True}, "dogs must be a whole number >= 0 and <= 9; got True"),
        ({"leash": "none"}, "leash must be one of long, short; got 'none'"),
        ({"secret": 0}, "secret must be a whole number >= 1; got 0"),
    ],
)
def test_a_value_that_breaks_its_rule_is_refused(given: dict[str, Any], rule: str) -> None:
    with pytest.raises(OptionError) as error:
        Walk("lake", **given)
    assert str(error.value) == rule


def test_another_request_may_have_the_same_option() -> None:
    assert Run().rest == 60.0
    (one,) = declared(Run).values()
    assert one.rule == declared(Walk)["rest"].rule
    assert not one.option.command


def test_fields_are_what_the_parameters_say_something_of() -> None:
    given = {"where": "lake", "by": ["col"], "pace": None, "team": "a"}
    assert fields_of(Walk, given) == {"where": "lake", "by": ("col",)}


def test_commands_are_made_without_what_is_heavy() -> None:
    heavy = ["numpy", "sqlglot", "pyarrow", "prefect", "torch"]
    code = f"import sys, ebbflow.flows.cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.stdout.strip() == "[]", done.stderr


def _default(one: "Field[Any]") -> Any:
    """Return a field's default as a parameter has it, which may hold no list and no path of this machine."""
    if one.default_factory is not MISSING:
        return None
    return inspect.Parameter.empty if one.default is MISSING else one.default or None


def _requests() -> dict[str, tuple[Any, Any, dict[str, Any]]]:
    """Return flows and operators with their requests, and the defaults that are others on purpose."""
    from ebbflow.flows.query.flow import run_query
    from ebbflow.flows.training.flow import train
    from ebbflow.flows.tuning.flow import tune
    from ebbflow.tasks.query.request import QueryRequest
    from ebbflow.tasks.training.request import TrainingRequest
    from ebbflow.tasks.tuning.request import TuningRequest

    return {
        "train": (train.fn, TrainingRequest, {}),
        "tune": (tune.fn, TuningRequest, {"space": None}),  # a tuning run that is resumed needs none
        "run_query": (run_query.fn, QueryRequest, {"master": None}),  # the cluster's, where it has one
    }


@pytest.mark.parametrize("name", ["train", "tune", "run_query"])
def test_a_flow_has_the_names_and_the_defaults_of_its_request(name: str) -> None:
    flow, request, others = _requests()[name]
    parameters = inspect.signature(flow).parameters
    shared = {f.name: f for f in fields(request) if f.name in parameters}
    found = {name: parameters[name].default or None for name in shared}
    assert found == {name: _default(f) for name, f in shared.items()} | others
    asked_for = {name for name, one in declared(request).items() if one.option.command}
    assert asked_for <= shared.keys()


@pytest.mark.parametrize(
    ("operator", "name"), [("EbbflowTrainingOperator", "train"), ("EbbflowQueryOperator", "run_query")]
)
def test_an_operator_has_the_defaults_of_its_request(operator: str, name: str) -> None:
    source = Path(str(getattr(find_spec("ebbflow.flows.airflow.operators"), "origin", "")))  # without Airflow
    (found,) = (one for one in ast.parse(source.read_text()).body if getattr(one, "name", "") == operator)
    (init,) = (one for one in found.body if getattr(one, "name", "") == "__init__")
    defaults = {
        one.arg: ast.literal_eval(default) or None
        for one, default in zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True)
        if default is not None
    }
    _, request, others = _requests()[name]
    shared = {f.name: _default(f) for f in fields(request) if f.name in defaults}
    assert shared
    expected = shared | {name: default for name, default in others.items() if name in shared}
    assert {name: defaults[name] for name in shared} == expected
