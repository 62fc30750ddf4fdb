"""What a pipeline, its queries and its ledger leave is for nobody but their user; trainings: ``test_train_cli``."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from flowcases import open_to_others, run_cli


@pytest.fixture(autouse=True)
def nothing_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let every file that nobody thought of be open to all; return the folder for what is temporary."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    before = os.umask(0)
    yield temporary
    os.umask(before)


def test_a_pipeline_and_its_ledger_leave_nothing_that_others_can_read(
    tables: str, tmp_path: Path, home: Path, nothing_masked: Path
) -> None:
    file = tmp_path / "shop.yaml"
    file.write_text(
        "name: shop\ncluster:\n  local: {pools: {gpu: {kind: gpu, nodes: 0, max_nodes: 1}}}\n"
        "queries:\n  spent:\n    sql: SELECT customer, sum(price) AS total FROM orders GROUP BY customer\n"
        f"    tables: {tables}\n"
    )
    named = tmp_path / "report.html"
    done = run_cli("run", file, "--runner", "plain", "--run-id", "walk", "--report", named)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(home.rglob("ledger.db"))
    assert list(home.rglob("*.parquet"))
    assert open_to_others(home) == []
    assert stat.S_IMODE(named.stat().st_mode) == 0o666  # what the user names follows the umask
    assert open_to_others(*nothing_masked.iterdir()) == []
