"""``ebbflow init``: what it writes is valid right away, and existing files are kept."""

import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbflow.flows import cli
from ebbflow.flows.setup.init import FILES, template
from ebbflow.planners.errors import OptionError


def invoke(*arguments: str | Path) -> tuple[int, str, str]:
    done = CliRunner().invoke(cli.app, [*map(str, arguments)])
    if isinstance(done.exception, OptionError):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def test_what_is_written_is_a_valid_pipeline_right_away(tmp_path: Path, home: Path) -> None:
    place = tmp_path / "shop"
    code, written, said = invoke("init", place)
    assert code == 0
    assert written.split() == [str(place / name) for name in (*FILES, "data/sales.parquet")]
    assert f"cd {place}" in said
    assert "ebbflow run pipeline.yaml --check" in said
    code, plan, _ = invoke("run", place / "pipeline.yaml", "--check", "--json")
    assert code == 0
    assert [one["name"] for one in json.loads(plan)["steps"]] == ["features", "fit"]


def test_existing_files_are_kept_unless_force_is_given(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("mine")
    with pytest.raises(OptionError, match=r"train\.py exists already; --force overwrites it"):
        invoke("init", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    assert (tmp_path / "train.py").read_text() == "mine"
    assert invoke("init", tmp_path, "--force")[0] == 0
    assert (tmp_path / "train.py").read_text() == template("train.py")


def test_the_data_is_always_the_same(tmp_path: Path) -> None:
    for name in ("one", "two"):
        invoke("init", tmp_path / name)
    one, two = ((tmp_path / name / "data" / "sales.parquet").read_bytes() for name in ("one", "two"))
    assert one == two


def test_comments_hold_what_is_valid_without_the_marks(tmp_path: Path, home: Path) -> None:
    assert tomllib.loads(template("ebbflow.toml")) == {}
    invoke("init", tmp_path)
    text = template("pipeline.yaml")
    head, _, block = text.partition("# tunings:")
    (tmp_path / "pipeline.yaml").write_text(head + "tunings:" + block.replace("\n# ", "\n"))
    code, plan, _ = invoke("run", tmp_path / "pipeline.yaml", "--check", "--json")
    assert code == 0
    assert [one["name"] for one in json.loads(plan)["steps"]] == ["features", "fit", "rates"]
