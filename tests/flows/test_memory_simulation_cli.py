"""``ebbflow simulate memory``: its table, its JSON, and what it refuses."""

import json

import pytest
from typer.testing import CliRunner

from ebbflow.flows.simulation.cli import app
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.simulation.memory import MemorySimulation

SMALL = ["memory", "--machines", "6", "--containers", "12", "--seeds", "2", "--until", "2m"]


def test_policies_are_compared() -> None:
    result = CliRunner().invoke(app, [*SMALL, "--policy", "no-sharing,two-choices"], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].strip() == "12 containers on 6 machines, 2 seeds"
    assert [line.split()[0] for line in lines[1:]] == ["policy", "no-sharing", "two-choices"]
    assert "lost" not in lines[1]


def test_a_document_has_all_figures_and_what_was_asked() -> None:
    args = [*SMALL, "--policy", "two-choices", "--fault", "90s:kill:3", "--occupancy", "1.5", "--json"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["asked"]["occupancy"] == 1.5
    (policy,) = found["policies"]
    assert policy["policy"] == "two-choices"
    low, high = policy["quartiles"]
    assert low["utilization"] <= policy["median"]["utilization"] <= high["utilization"]
    assert policy["median"]["lost"] > 0
    assert policy["median"]["fault_loss"] is not None


def test_progress_tells_the_policy_and_how_far_it_is() -> None:
    seen = []
    asked = MemorySimulation(["no-sharing", "two-choices"], 4, 4, seeds=2, until_s=5.0)
    asked.run(lambda *now: seen.append(now))
    assert seen == [
        ("no-sharing", 0, 4), ("no-sharing", 1, 4), ("two-choices", 2, 4), ("two-choices", 3, 4), ("", 4, 4),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"policies": ["best"]}, "--policy must be of no-sharing, .*; got 'best'"),
        ({"policies": []}, "--policy must be of .*; got none"),
        ({"machines": 1}, "--machines must be from 2 to 1,000; got 1"),
        ({"seeds": 0}, "--seeds must be from 1 to 10,000; got 0"),
        ({"occupancy": float("nan")}, "--occupancy must be from 1 to 100; got nan"),
        ({"faults": ["4m:kill:32"]}, "machine of the fault '4m:kill:32' must be a whole number from 0 to 31"),
        ({"faults": ["4m:pause:3"]}, "a fault of a simulation of shared memory is TIME:VERB"),
    ],
)
def test_what_breaks_a_rule_is_refused(options: dict[str, object], rule: str) -> None:
    with pytest.raises(OptionError, match=rule):
        MemorySimulation(**options)  # type: ignore[arg-type]
