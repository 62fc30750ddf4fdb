"""``python -m tests.evaluation renting`` as one calls it."""

import re
from pathlib import Path

from typer.testing import CliRunner

from tests.evaluation.__main__ import app


def test_a_quick_run_writes_the_page_and_its_pictures(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app,
        ["renting", "--quick", "--out", str(tmp_path / "out"), "--document", str(tmp_path)],
        env={"COLUMNS": "200"},
    )
    assert done.exit_code == 0, done.output
    page = tmp_path / "fleet-evaluation.md"
    assert f"written: {page}" in done.output
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    assert len(pictures) == 2
    assert all((tmp_path / picture).exists() for picture in pictures)


def test_help_names_options_that_exist() -> None:
    text = CliRunner().invoke(app, ["renting", "--help"], env={"COLUMNS": "160"}).output
    examples = re.findall(r"^ *python -m tests.evaluation renting (.*)", text, re.M)
    assert examples
    known = set(re.findall(r"--[a-z-]+", text.split("Options")[-1]))
    assert {word for example in examples for word in example.split() if word.startswith("--")} <= known
