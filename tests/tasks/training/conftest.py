"""What tests of trainings share."""

from pathlib import Path

import pytest


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("print('never run here')\n")
    return str(path)
