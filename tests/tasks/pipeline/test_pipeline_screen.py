"""How a pipeline looks on a terminal and in a log, from a real ledger."""

import io
from collections.abc import Iterator

import pytest
from rich.console import Console

from ebbflow.flows.pipeline.terminal import PipelineScreen
from ebbflow.infra.clock import SystemClock
from ebbflow.infra.ledger import Ledger
from ebbflow.planners.model.capacity import Node, Notice
from ebbflow.planners.model.ledger import (
    AppEntered,
    AppMoved,
    AppReport,
    AppSpec,
    CapacityChanged,
    Decided,
    Granted,
    Lease,
)
from ebbflow.tasks.pipeline.outcome import StepOutcome
from ebbflow.tasks.pipeline.view import ClusterView


@pytest.fixture
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    """Return a ledger with two apps of one run, one on a GPU of a node that is about to leave, and one of another."""
    clock = SystemClock()
    with Ledger.open(
        str(tmp_path_factory.mktemp("ledger") / "ledger.db"), cluster="one", clock=clock
    ) as found:
        now = clock.now()
        lead = found.lead("test", 60.0)
        found.write(
            [
                AppEntered(
                    AppSpec(
                        "one.fit", "training", "sales", "the [bold]fit", "one", 2, 1, 2, deadline=now + 60
                    )
                ),
                AppEntered(AppSpec("one.rows", "query", "sales", "rows of it", "one")),
                AppEntered(AppSpec("two.other", "query", "sales", "of another run", "two")),
            ]
        )
        node = Node("gpu-1", 1, 2.0, gpus=1, price=0.9)
        lead.write([CapacityChanged(1, (node,), (), (Notice("gpu-1", now + 30),))])
        lead.write([Granted((Lease(1, "one.fit", "gpu-1", 0, now, now + 60, 1, 0.9),))])
        found.write(
            [
                AppMoved("one.fit", "running"),
                AppMoved("one.rows", "finished", "3 rows"),
                Decided(
                    "auction", "one.fit gets 1 of gpu-1", outcome={"placements": {"one.fit": {"gpu-1": 1}}}
                ),
                Decided("auction", "no allocation changes", outcome={"placements": {}, "waits": {}}),
            ]
        )
        found.report("one.fit", AppReport(now, (1,), progress=0.25, seconds_left=30.0, work_left=30.0))
        yield found


STEPS = (
    StepOutcome("fit", "training", "the [bold]fit", "sales", "running", app="one.fit"),
    StepOutcome("rows", "query", "rows of it", "sales", "finished", app="one.rows"),
    StepOutcome("late", "search", "late\x1b[2J ones", "sales", "waiting"),
)


def shown(ledger: Ledger, *, terminal: bool, ticks: int = 1) -> str:
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=terminal, width=120, color_system=None, _environ={"TERM": "xterm"}
    )
    clock = SystemClock()
    with PipelineScreen(console, clock, every=0.0) as screen:
        screen.watch(ClusterView(ledger, clock, "one", "one"), lambda: STEPS)
        for _ in range(ticks):
            screen.tick()
        screen.ended(
            StepOutcome(
                "rows",
                "query",
                "rows",
                "sales",
                "finished",
                began=1.0,
                ended=3.0,
                details={"rows": 3, "right": True},
            )
        )
    return out.getvalue()


def test_a_terminal_has_a_table_of_apps_nodes_and_decisions(ledger: Ledger) -> None:
    text = shown(ledger, terminal=True)
    row = next(line for line in text.splitlines() if "the [bold]fit" in line)
    assert "running" in row
    assert "1/2" in row
    assert "25%" in row
    assert "on course" in row
    assert "1 node: 1 core, 1 GPU, 1 about to leave" in text
    assert "fit gets 1 of gpu-1" in text
    assert "no allocation changes" not in text
    assert "waits for others" in text
    assert "of another run" not in text
    assert "\x1b[2J ones" not in text  # a title cannot steer the terminal


def test_elsewhere_there_are_plain_lines_and_each_decision_once(ledger: Ledger) -> None:
    text = shown(ledger, terminal=False, ticks=3)
    assert "\x1b" not in text
    assert text.count("auction: fit gets 1 of gpu-1") == 1
    assert "no allocation changes" not in text
    assert "the [bold]fit of sales: running, 1 GPU, 25 %, 30.0 s left" in text
    assert "✓ rows finished in 2.00 s, rows 3, right ✓" in text


def test_a_ledger_that_is_away_is_told_and_what_was_seen_stays(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ebbflow.infra.errors import LedgerUnavailableError

    view = ClusterView(ledger, SystemClock(), "one", "one")
    seen = view.look(now=True)
    assert seen is not None

    def away(*_: object) -> None:
        raise LedgerUnavailableError("it is down")

    monkeypatch.setattr(ledger, "events", away)
    assert view.look(now=True) is seen
    assert view.problem == "it is down"


def test_a_ledger_whose_old_events_are_gone_is_read_from_there(ledger: Ledger) -> None:
    before = ClusterView(ledger, SystemClock(), "one", "one").look(now=True)
    assert before is not None
    assert ledger.prune(ledger.clock.now() + 1.0).events
    view = ClusterView(ledger, SystemClock(), "one", "one")
    after = view.look(now=True)
    assert view.problem == ""
    assert after is not None
    assert [(app.id, app.held) for app in after.apps] == [(app.id, app.held) for app in before.apps]
    assert view.history.state.leases
