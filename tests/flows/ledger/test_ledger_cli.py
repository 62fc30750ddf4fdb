"""``ebbflow ledger`` on a SQLite file."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbflow.flows import cli
from ebbflow.flows.ledger import cli as ledger_cli
from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import LedgerError
from ebbflow.infra.ledger import Ledger
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Node, Notice
from ebbflow.planners.model.ledger import (
    AppEntered,
    AppMoved,
    AppSpec,
    CapacityChanged,
    Decided,
    Ended,
    Extended,
    Granted,
    Lease,
    Recalled,
    Saved,
)

LONG_AGO = 1_000_000_000.0  # September 2001


class PastClock(SystemClock):
    """A clock that starts long ago."""

    def now(self) -> float:
        return LONG_AGO


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the address of a ledger with old events and new ones, of a loop that leads now."""
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setattr(ledger_cli.console, "width", 150)  # a console keeps the width that it was made with
    path = str(tmp_path / "ledger.db")
    with Ledger.open(path, clock=PastClock()) as ledger:
        ledger.write(
            [
                AppEntered(AppSpec("digits", "training", team="blue", gpus=2)),
                AppEntered(AppSpec("q", "query")),
            ]
        )
        lead = ledger.lead("old [b]loop[/b]")
        notice = Notice("n2", LONG_AGO + 60)
        lead.write(
            [CapacityChanged(1, (Node("n1", 8, 32.0, gpus=2), Node("n2", 8, 32.0, gpus=2)), (), (notice,))]
        )
        leases = tuple(Lease(n, "digits", "n1", n - 1, LONG_AGO, LONG_AGO + 60, 1) for n in (1, 2))
        why = Decided("auction", "only [red]one[/] bids\x1b[31m", "digits", inputs={"rho": {"digits": 1.5}})
        lead.write([why, Granted(leases)])
        lead.write(
            [
                Extended((1, 2), LONG_AGO + 99),
                Recalled((2,), LONG_AGO + 50, "leaves"),
                Ended((2,), "released"),
            ]
        )
        lead.resign()
    with Ledger.open(path) as ledger:
        ledger.lead("new")
        ledger.write([Saved("digits", "file:///ckpt", 7), AppMoved("digits", "stopped", "on request")])
    return path


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, ["ledger", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def test_status_says_where_who_and_how_much(url: str) -> None:
    code, said = run("status", "--ledger", url)
    assert code == 0
    flat = " ".join(said.split())
    assert "cluster local" in flat
    assert "new is the leader (fencing token 2), for another" in flat
    assert "events 12, up to number 12, the last" in flat
    assert "nodes 2 with 4 GPUs, revision 1" in flat
    assert "apps 2, 1 active" in flat
    found = json.loads(run("status", "--ledger", url, "--json")[1])
    assert (found["last"], found["lead"]["holder"], found["lead_alive"], found["leases"]) == (
        12,
        "new",
        True,
        1,
    )
    with Ledger.open(url) as ledger:
        ledger.lead("new").resign()
    assert "no leader: new has resigned (fencing token 3)" in " ".join(
        run("status", "--ledger", url)[1].split()
    )


def test_events_are_told_in_words(url: str) -> None:
    code, said = run("events", "--ledger", url)
    assert code == 0
    for words in (
        "training digits of team blue"
        " registered", "query q registered", "loop old [b]loop[/b] is the leader (fencing token 1)",
        "capacity is at revision 1: nodes n1, n2; notices n2", "auction for digits", "only [red]one[/] bids",
        "2 leases granted: digits on n1 (2)", "2 leases extended: 1, 2", "1 lease preempted: 2", "1 lease ended: 2",
        "released", "digits saved step 7", "digits is stopped", "on request",
    ):  # fmt: skip
        assert words in said
    assert "\x1b" not in said


def test_events_are_chosen_by_kind_app_and_number(url: str) -> None:
    found = [json.loads(line) for line in run("events", "--ledger", url, "--json")[1].splitlines()]
    assert [line["number"] for line in found] == list(range(1, 13))
    assert found[4]["change"]["inputs"] == {"rho": {"digits": 1.5}}
    chosen = run("events", "--ledger", url, "--kind", "lease-granted", "--kind", "Ended", "--json")[
        1
    ].splitlines()
    assert [json.loads(line)["kind"] for line in chosen] == ["lease-granted", "lease-ended"]
    newest = run("events", "--ledger", url, "--app", "digits", "--limit", "2", "--json")[1].splitlines()
    assert [json.loads(line)["kind"] for line in newest] == ["checkpoint-saved", "app-phase-changed"]
    later = run("events", "--ledger", url, "--after", "3", "--limit", "2", "--json")[1].splitlines()
    assert [json.loads(line)["number"] for line in later] == [4, 5]
    assert run("events", "--ledger", url, "--app", "nobody")[1].split() == ["number", "time", "what", "why"]
    assert run("events", "--ledger", url, "--app", "nobody", "--json")[1] == ""
    with pytest.raises(OptionError, match="no kind of change 'gone'"):
        run("events", "--ledger", url, "--kind", "gone")


def test_events_can_be_followed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []

    def look(clock: SystemClock, seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt
        with Ledger.open(url) as ledger:
            ledger.write([AppEntered(AppSpec(f"late{len(looks)}", "query"))])

    monkeypatch.setattr(SystemClock, "sleep", look)
    code, said = run("events", "--ledger", url, "--limit", "1", "--follow", "--json")
    assert code == 0
    assert [json.loads(line)["number"] for line in said.splitlines()] == [12, 13, 14]


def test_verify_leaves_with_1_when_something_is_wrong(url: str) -> None:
    code, said = run("verify", "--ledger", url)
    assert (code, "12 events replayed: tables and snapshots agree" in said) == (0, True)
    assert json.loads(run("verify", "--ledger", url, "--json")[1])["differences"] == []
    import sqlite3

    with sqlite3.connect(url) as connection:
        connection.execute("UPDATE ledger_apps SET phase = 'lost' WHERE app = 'digits'")
    connection.close()
    code, said = run("verify", "--ledger", url)
    assert code == 1
    assert "wrong: apps: 'digits' is AppRecord" in " ".join(said.split())


def test_prune_drops_only_what_it_was_asked_for(url: str) -> None:
    assert "would drop 9 events and what 1 decision were based on" in run(
        "prune", "--ledger", url, "--before", "2015-01-01", "--dry-run"
    )[1].replace("\n", " ")
    code, said = run("prune", "--ledger", url, "--before", "2015-01-01")
    assert (code, "add --yes" in said) == (1, True)
    found = json.loads(run("prune", "--ledger", url, "--before", "1d", "--keep-events", "--yes", "--json")[1])
    assert found == {"events": 0, "payloads": 1, "up_to": 0, "reports": 0, "dry_run": False}
    found = json.loads(run("prune", "--ledger", url, "--before", "1d", "--yes", "--json")[1])
    assert found == {"events": 9, "payloads": 0, "up_to": 9, "reports": 0, "dry_run": False}
    assert "no event is that old" in run("prune", "--ledger", url, "--before", "1d", "--yes")[1]
    assert run("verify", "--ledger", url)[0] == 0
    assert "pruned up to number 9" in " ".join(run("status", "--ledger", url)[1].split())


@pytest.mark.parametrize("when", ["soon", "-1d", "nand", "infh", "2015-13-01"])
def test_a_moment_that_is_none_is_refused(url: str, when: str) -> None:
    with pytest.raises(OptionError, match="--before must be an age"):
        run("prune", "--ledger", url, f"--before={when}", "--yes")


def test_migrate_says_that_nothing_is_to_do(url: str) -> None:
    assert "nothing to migrate" in run("migrate", "--ledger", url)[1]


def test_where_no_ledger_is_none_is_made(tmp_path: Path, home: Path) -> None:
    path = tmp_path / "none.db"
    for command in (["status"], ["events"], ["verify"], ["migrate"], ["prune", "--before", "1d"]):
        with pytest.raises(LedgerError, match="there is no ledger at"):
            run(*command, "--ledger", str(path))
        with pytest.raises(LedgerError, match="there is no ledger at"):
            run(*command)
    assert not path.exists()


@pytest.mark.parametrize(
    "command", [[], *([c.callback.__name__] for c in ledger_cli.app.registered_commands if c.callback)]
)
def test_help_teaches_by_example(command: list[str]) -> None:
    code, said = run(*command, "--help")
    assert code == 0
    assert "ebbflow ledger" in said
