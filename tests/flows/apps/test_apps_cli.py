"""``ebbflow apps``: what it lists, shows and cancels."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ebbflow.flows.cli import app
from ebbflow.infra.ledger import Ledger
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.ledger import (
    AppEntered,
    AppMoved,
    AppSpec,
    CapacityChanged,
    Decided,
    Granted,
    Lease,
)
from ebbflow.tasks.apps.agent import AgentIntervals, AppAgent
from ebbflow.tasks.apps.lease_table import Rules
from ebbflow.tasks.apps.run_logs import Following

runner = CliRunner()


def invoke(*words: str) -> Any:
    return runner.invoke(app, ["apps", *words])


@pytest.fixture
def ledger(home: Path, tmp_path: Path) -> Any:
    """Return a ledger with a training that runs, a query that is over, and a tuning run that is lost."""
    (tmp_path / "runs" / "digits" / "logs").mkdir(parents=True)
    (tmp_path / "runs" / "digits" / "logs" / "node-1.log").write_text("one\ntwo\n")
    resume = {"kind": "training", "folder": str(tmp_path / "runs"), "id": "digits"}
    elsewhere = {"kind": "tuning", "folder": "/nowhere/runs", "id": "sweep"}
    with Ledger.open() as made:
        now = made.clock.now()
        lead = made.lead("loop", 60.0)
        lead.write(
            [
                CapacityChanged(1, (Node("gpu-1", 8, 32.0, gpus=2, price=1.5),), (), (), 0.0, "one"),
                AppEntered(
                    AppSpec("digits", "training", team="vision", title="Digits", gpus=2, resume=resume)
                ),
                Granted((Lease(1, "digits", "gpu-1", 0, now, now + 300, 1, 0.75),)),
                Decided(
                    "auction", "digits gets 1 GPU", "digits", 1, inputs={"apps": {"digits": {"rho": 1.25}}}
                ),
            ]
        )
        made.write(
            [
                AppEntered(AppSpec("orders", "query")),
                AppMoved("orders", "finished"),
                AppEntered(AppSpec("sweep", "tuning", resume=elsewhere)),
                AppMoved("sweep", "lost", "heartbeat timeout"),
            ]
        )
        yield made


def test_active_apps_are_listed_and_all_on_request(ledger: Ledger) -> None:
    shown = invoke("list")
    assert shown.exit_code == 0, shown.output
    assert "digits" in shown.output
    assert "vision" in shown.output
    assert "orders" not in shown.output
    found = {one["id"]: one for one in json.loads(invoke("list", "--all", "--json").stdout)}
    assert set(found) == {"digits", "orders", "sweep"}
    assert found["digits"]["rho"] == 1.25
    assert found["orders"]["phase"] == "finished"


def test_a_cluster_without_apps_has_an_empty_list(home: Path) -> None:
    with Ledger.open():
        pass
    assert json.loads(invoke("list", "--json").stdout) == []
    assert invoke("list").exit_code == 0


def test_an_app_is_shown_with_its_leases_and_decisions(ledger: Ledger, tmp_path: Path) -> None:
    found = json.loads(invoke("show", "digits", "--json").stdout)
    assert found["leases"][0]["node"] == "gpu-1"
    assert found["decisions"][0]["reason"] == "digits gets 1 GPU"
    assert found["run_directory"] == str(tmp_path / "runs" / "digits")
    shown = invoke("show", "digits")
    assert shown.exit_code == 0, shown.output
    for word in ("Digits", "gpu-1", "digits gets 1 GPU", "vision"):
        assert word in shown.output


def test_an_unknown_app_is_named_with_the_nearest(ledger: Ledger) -> None:
    for command in ("show", "logs", "cancel"):
        error = invoke(command, "digitz").exception
        assert isinstance(error, OptionError)
        assert "did you mean 'digits'?" in str(error)


def test_logs_are_those_of_the_run_directory(ledger: Ledger) -> None:
    shown = invoke("logs", "digits")
    assert (shown.exit_code, shown.stdout) == (0, "one\ntwo\n")
    elsewhere = invoke("logs", "sweep")
    assert elsewhere.exit_code == 1
    assert "/nowhere/runs/sweep" in elsewhere.output
    assert "is not on this machine" in elsewhere.output
    assert "has recorded no run directory" in json.loads(invoke("logs", "orders", "--json").stdout)["problem"]


def test_a_cancellation_is_confirmed(ledger: Ledger) -> None:
    refused = invoke("cancel", "digits")
    assert (refused.exit_code, "add --yes" in refused.output) == (1, True)
    over = invoke("cancel", "orders", "--yes")
    assert (over.exit_code, "orders is over: finished" in over.output) == (1, True)


def test_a_lost_app_is_stopped_for_good(ledger: Ledger) -> None:
    done = invoke("cancel", "sweep", "--yes", "--json")
    assert json.loads(done.stdout) == {
        "app": "sweep",
        "phase": "stopped",
        "reason": "cancelled by the operator",
    }


def test_an_app_that_does_not_hear_is_told(ledger: Ledger) -> None:
    late = invoke("cancel", "digits", "--yes", "--timeout", "1s")
    assert (late.exit_code, "has not ended within 1 s" in late.output) == (1, True)


def test_a_running_app_hears_of_its_cancellation_once(ledger: Ledger) -> None:
    heard: list[int] = []
    stop = threading.Event()

    def cancelled() -> None:
        heard.append(1)
        stop.set()

    def work() -> None:
        spec = AppSpec("fit", "training", gpus=1)
        pace = AgentIntervals(look=0.02, report=0.1, entry=150.0, parting=150.0)
        with AppAgent(ledger, spec, rules=Rules(fence=60.0), pace=pace, cancel=cancelled) as agent:
            stop.wait(150)
            agent.moved("stopped", "cancelled")

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(3000):
        if "fit" in ledger.state().apps:
            break
        ledger.clock.sleep(0.05)
    done = invoke("cancel", "fit", "--yes", "--timeout", "150s")
    thread.join(150)
    assert done.exit_code == 0, done.output
    assert heard == [1]
    assert "fit is stopped" in done.output
    again = []
    spec = AppSpec("fit", "training", gpus=1)
    pace = AgentIntervals(look=0.02, report=0.1, entry=150.0, parting=150.0)
    with AppAgent(ledger, spec, rules=Rules(fence=60.0), pace=pace, cancel=lambda: again.append(1)):
        ledger.clock.sleep(0.5)
    assert again == [], "a run after the request was meant by nobody"


def test_logs_of_a_run_that_is_no_app_are_found_by_its_directory(home: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "fit-1"
    for generation, node, rank, text in (
        (1, "a", 0, "old\n"),
        (2, "a", 0, "zero\nmore\n"),
        (2, "b", 1, "one\n"),
    ):
        log = run / "logs" / f"generation-{generation}" / node / f"rank-{rank}.out"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(text)
    (run / "request.json").write_text("{}")
    where = ("--runs-dir", str(tmp_path / "runs"))
    both = invoke("logs", "fit-1", *where)
    assert both.stdout == (
        "generation-2/a/rank-0.out: zero\ngeneration-2/a/rank-0.out: more\ngeneration-2/b/rank-1.out: one\n"
    )
    assert invoke("logs", "fit-1", *where, "--rank", "0", "--lines", "1").stdout == "more\n"
    assert invoke("logs", "fit-1", *where, "--generation", "1").stdout == "old\n"
    missing = invoke("logs", "fit-1", *where, "--rank", "7")
    assert (missing.exit_code, "there are (generation, rank): (1, 0), (2, 0), (2, 1)" in missing.output) == (
        1,
        True,
    )
    assert "there is no run 'fit-2'" in invoke("logs", "fit-2", *where).output
    files = json.loads(invoke("logs", "fit-1", *where, "--json").stdout)["files"]
    assert [name.rpartition("/")[2] for name in files] == ["rank-0.out", "rank-1.out"]


def test_new_lines_are_followed_into_the_next_generation(tmp_path: Path) -> None:
    first = tmp_path / "logs" / "generation-1" / "a" / "rank-0.out"
    second = tmp_path / "logs" / "generation-2" / "b" / "rank-0.out"
    first.parent.mkdir(parents=True)
    first.write_text("one\ntwo\n")
    reader = Following(str(tmp_path), tail=1)
    assert [line for _, line in reader.lines()] == ["two"]
    with first.open("a") as file:
        file.write("three\nfo")
    assert [line for _, line in reader.lines()] == ["three"]
    with first.open("a") as file:
        file.write("ur\n")
    assert [line for _, line in reader.lines()] == ["four"]
    second.parent.mkdir(parents=True)
    second.write_text("five\nsix\n")
    assert [line for _, line in reader.lines()] == ["five", "six"]
