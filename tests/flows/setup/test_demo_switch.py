"""What the demo of a switch says of its runs."""

import io
from types import SimpleNamespace
from typing import cast

from rich.console import Console

from ebbflow.flows.setup.demo_switch import Pair, findings, print_comparison
from ebbflow.tasks.query.report import QueryReport


def pair(kept: float, replanned: float, switches: int) -> Pair:
    """Return two runs that took so many seconds, of which one changed its plan so often."""
    capacity = [SimpleNamespace(at=at, nodes=nodes) for at, nodes in ((0.0, 1), (5.2, 3), (7.9, 5))]
    one = SimpleNamespace(seconds=kept, switches=[], capacity=capacity)
    other = SimpleNamespace(seconds=replanned, switches=[None] * switches, capacity=capacity[:1])
    return Pair(cast(QueryReport, one), cast(QueryReport, other))


def test_the_demo_of_a_switch_says_no_more_than_its_pairs_show() -> None:
    better, worse, none = pair(30.0, 20.0, 1), pair(20.0, 25.0, 1), pair(30.0, 20.0, 0)
    assert findings([better] * 3)[-1] == "the switch paid in every run that changed its plan"
    assert findings([better, worse, better])[-1] == "the switch paid in the median, not in every run"
    assert findings([worse, better, worse])[-1].startswith("the switch did not pay here")
    assert findings([none] * 3)[-1] == "no run changed its plan: what differs is chance"
    assert findings([better, worse, better])[0] == (
        "medians 30.0 and 20.0 s: 1.50 times as fast re-planned (1.50, 0.80, 1.50)"
    )
    shown = Console(record=True, width=120, file=io.StringIO())
    print_comparison([better, worse], shown)
    text = shown.export_text()
    assert "5-8 / none" in text  # when nodes came
    assert text.index("pair 1") < text.index("pair 2") < text.index("medians")
