"""Gradients that are reduced in one process group after another are DDP's own, to the bit."""

import json
from pathlib import Path

import pytest

from tests.infra.training.worlds import run_module

pytestmark = pytest.mark.processes


def test_gradients_are_those_of_ddp_in_whatever_group(tmp_path: Path) -> None:
    run_module("tests.infra.training.replicas.replica_ranks", str(tmp_path))
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        kinds = (
            "unused False",
            "unused True",
            "accumulation",
            "handed over",
            "in place",
            "frozen",
            "left out",
        )
        assert found == dict.fromkeys(kinds, True)
