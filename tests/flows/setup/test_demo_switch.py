"""What the demo of a switch says of its runs."""

import io
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console

from ebbflow.flows.setup.demo_switch import Pair, _wait_for, findings, print_comparison
from ebbflow.infra.errors import ClusterError
from ebbflow.infra.local_fleet import LocalFleet
from ebbflow.planners.model import Capacity, Node
from ebbflow.tasks.query.opening import OpenedEngine
from ebbflow.tasks.query.report import QueryReport
from tests.training_fakes import ScriptedClock


def pair(kept: float, replanned: float, switches: int) -> Pair:
    """Return two runs that took so many seconds, of which one changed its plan so often."""
    capacity = [SimpleNamespace(at=at, nodes=nodes) for at, nodes in ((0.0, 1), (5.2, 3), (7.9, 5))]
    one = SimpleNamespace(seconds=kept, switches=[], capacity=capacity)
    other = SimpleNamespace(seconds=replanned, switches=[None] * switches, capacity=capacity[:1])
    return Pair(cast(QueryReport, one), cast(QueryReport, other))


def test_the_demo_of_a_switch_says_no_more_than_its_pairs_show() -> None:
    better, worse, none = pair(30.0, 20.0, 1), pair(20.0, 25.0, 1), pair(30.0, 20.0, 0)
    even = pair(30.0, 29.5, 1)
    assert findings([better] * 3)[-1] == "the switch paid in every run that changed its plan"
    assert findings([better, worse, better])[-1] == "the switch paid in the median, not in every run"
    assert findings([even, better, even])[-1].startswith("the switch did not pay here")
    assert findings([worse, better, worse])[-1] == "the switch lost here"
    assert findings([none, none, worse])[1:] == [
        "1 of 3 runs changed their plan; their medians 20.0 and 25.0 s: 0.80 times as fast re-planned (0.80)",
        "the switch lost here",
    ]
    assert "2 of 3 runs" in findings([worse, none, better])[1]
    assert findings([none] * 3)[-1] == "no run changed its plan: what differs is chance"
    assert findings([better, worse, better])[0] == (
        "medians 30.0 and 20.0 s: 1.50 times as fast re-planned (1.50, 0.80, 1.50)"
    )
    shown = Console(record=True, width=120, file=io.StringIO())
    print_comparison([better, worse], shown)
    text = shown.export_text()
    assert "5-8 / none" in text  # when nodes came
    assert text.index("pair 1") < text.index("pair 2") < text.index("medians")


def test_a_run_begins_when_the_querys_executors_have_all_cores_of_its_nodes() -> None:
    clock = ScriptedClock()
    nodes = tuple(Node(f"spark-{n}", 2, 1.0) for n in range(3))
    held = iter([2, 4, 6])

    def pause(seconds: float) -> None:
        clock.time += seconds
        source.held = next(held, 5)

    clock.sleep = pause  # type: ignore[method-assign]
    source = SimpleNamespace(capacity=lambda: Capacity(1, nodes), held=0)
    fleet = SimpleNamespace(state=SimpleNamespace(plans={"spark": SimpleNamespace(nodes=3)}))
    opened = SimpleNamespace(source=source)

    def wait() -> None:
        _wait_for(cast(LocalFleet, fleet), cast(OpenedEngine, opened), 3, clock)

    wait()
    assert (source.held, next(held, None)) == (6, None), "it waited for all of them"
    source.held = 5
    with pytest.raises(ClusterError, match=r"there are 3 of 6 cores, of which the query's executors have 5"):
        wait()
