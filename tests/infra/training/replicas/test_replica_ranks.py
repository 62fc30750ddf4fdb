"""Gradients that are reduced in one process group after another are DDP's own, to the bit."""

import json
from pathlib import Path

import pytest

from tests.infra.training.worlds import run_module

pytestmark = pytest.mark.processes


def test_gradients_are_those_of_ddp_in_whatever_group(tmp_path: Path) -> None:
    run_module("tests.infra.training.replicas.replica_ranks", str(tmp_path))
    for name, kinds in {
        "given-": ("handed over", "in place", "frozen"),
        "": ("unused False", "unused True", "accumulation", "left out"),
    }.items():
        files = sorted(tmp_path.glob(f"{name}[0-9].json"))
        assert len(files) == (4 if name else 2)
        for path in files:
            assert json.loads(path.read_text()) == dict.fromkeys(kinds, True), path.name
