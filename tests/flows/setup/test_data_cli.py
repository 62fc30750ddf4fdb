"""``ebbflow data`` on the command line."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbflow.flows import cli


@pytest.mark.parametrize(
    "command", [["data"], ["data", "tpch"], ["data", "tpcds"], ["data", "skewed"]], ids=" ".join
)
def test_every_help_text_teaches_by_example(command: list[str]) -> None:
    shown = CliRunner().invoke(cli.app, [*command, "--help"])
    assert shown.exit_code == 0
    assert re.search(rf"^ +ebbflow {' '.join(command)}\b", shown.output, re.M)


def test_tables_go_into_ebbflows_own_folder_and_are_kept(home: Path) -> None:
    first = CliRunner().invoke(cli.app, ["data", "tpch", "--scale", "0.01"])
    assert first.exit_code == 0, first.output
    assert first.stdout == f"{home / 'tpch' / 'sf0.01'}\n"
    assert "generating TPC-H scale factor 0.01" in first.stderr
    assert (home / "tpch" / "sf0.01" / "lineitem.parquet").is_file()
    again = CliRunner().invoke(cli.app, ["data", "tpch", "--scale", "0.01"])
    assert again.stdout == first.stdout
    assert "cached in" in again.stderr
    assert "generating" not in again.stderr
    quiet = CliRunner().invoke(cli.app, ["data", "tpch", "--scale", "0.01", "--json", "-q"])
    assert quiet.stderr == ""
    document = json.loads(quiet.stdout)
    assert (document["directory"], document["queries"]) == (first.stdout.strip(), None)
    assert {"lineitem", "orders"} <= set(document["tables"])


def test_a_folder_of_ones_own_can_be_named(tmp_path: Path) -> None:
    target = tmp_path / "mine"
    done = CliRunner().invoke(cli.app, ["data", "tpch", "--scale", "0.01", "--parts", "2", "-o", str(target)])
    assert done.exit_code == 0, done.output
    assert len(list((target / "lineitem").iterdir())) == 2
