"""Numbers and names as people type them: finite, bounded, of ASCII; names that fit paths and ledgers."""

import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ebbflow.flows import cli
from ebbflow.flows.runs.options import parse_capacity
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.spark.cluster.options import parse_memory
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import names
from ebbflow.planners.model.numbers import parse_duration, parse_gib, parse_number, parse_whole
from ebbflow.tasks.elastic.run import parse_fault
from ebbflow.tasks.nodes import FAULTS as FLEET
from ebbflow.tasks.training.faults import FAULTS as TRAINING

BAD = ("nan", "inf", "-inf", "1e309", "-1", "", " ", "x", "١٢", "1_0", "0x1", "9" * 400, "1,5")


@pytest.mark.parametrize("text", BAD)
@pytest.mark.parametrize(
    "parse",
    [
        lambda text: parse_number(text, "it", min=0),
        lambda text: parse_whole(text, "it"),
        parse_duration,
        lambda text: parse_duration(f"{text}s"),
        lambda text: parse_gib(f"{text}GiB"),
        lambda text: parse_memory(f"{text}g"),
        lambda text: parse_capacity(f"cores={text}"),
        lambda text: parse_capacity(f"memory={text}GiB"),
        lambda text: parse_capacity(f"nodes={text},cores={text}"),
        lambda text: parse_capacity(f"interruption_rate={text}"),
        lambda text: parse_fault(f"{text}s:resize:4"),
        lambda text: parse_fault(f"3s:resize:{text}"),
        lambda text: TRAINING.parse(f"{text}s:kill:node-1"),
        lambda text: TRAINING.parse(f"3s:add:{text}"),
        lambda text: FLEET.parse(f"{text}s:kill:gpu"),
        lambda text: FLEET.parse(f"3s:add:gpu:{text}"),
    ],
)
def test_numbers_that_are_none_are_refused(parse: Callable[[str], object], text: str) -> None:
    with pytest.raises(OptionError, match="got "):
        parse(text)


def test_numbers_that_are_right_are_read() -> None:
    assert parse_number(" 1e3 ", "it") == 1000.0
    assert parse_number(".5", "it", above=0) == 0.5
    assert parse_whole("12", "it", min=1) == 12
    assert parse_duration("2.5s") == 2.5
    share = parse_capacity("cores=3,memory=6GiB,nodes=3,interruption_rate=2")
    assert (share.total.cores, share.total.memory, share.nodes, share.hazard) == (3.0, 6.0, 3, 2.0)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a b/../c", "a/b", "-x", "a\0", "\N{PILE OF POO}", "a" * 101, "a\n"]
)
def test_names_that_fit_no_path_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="a cluster's name begins with a letter or digit"):
        names.CLUSTER.check(name)
    with pytest.raises(OptionError):
        names.RUN.check(f"{name}/")
    with pytest.raises(OptionError):
        Ledger.open(str(tmp_path / "new" / "ledger.db"), cluster=name)
    assert not (tmp_path / "new").exists()


def test_a_cluster_that_cannot_be_led_leaves_no_row_and_no_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EBBFLOW_HOME", str(tmp_path / "home"))
    there = tmp_path / "there.db"
    Ledger.open(str(there), cluster="local").close()
    for ledger in (there, tmp_path / "new.db"):
        for more in (
            ["--cluster", "a b/../c"],
            ["--source", "local:nothing"],
            ["--source", "moon"],
            ["--seed", "-1"],
        ):
            given = [
                "ebbflow",
                "capacity",
                "start",
                "--cluster",
                "other",
                "--ledger",
                str(ledger),
                "--runner",
                "plain",
            ]
            monkeypatch.setattr(sys, "argv", [*given, *more])
            with pytest.raises(SystemExit) as end:
                cli.main()
            assert end.value.code in (1, 2)
            assert more[1].removeprefix("local:") in capsys.readouterr().err
    assert not (tmp_path / "new.db").exists()
    with sqlite3.connect(there) as connection:
        assert connection.execute("SELECT cluster FROM ledger_clusters").fetchall() == [("local",)]
