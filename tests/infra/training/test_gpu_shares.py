"""GPUs of this machine, shared out among nodes; which of them there are is made up."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbflow.infra.errors import ClusterError
from ebbflow.infra.training.local_nodes import LocalNodes, _Record


@pytest.fixture(name="record")
def _record(tmp_path: Path) -> Iterator[_Record]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield _Record("mark", child, tmp_path / "node", None, 1, ("1",), 1.0)
        child.kill()


def test_nodes_of_two_trials_of_one_process_have_different_gpus(record: _Record) -> None:
    with LocalNodes(gpus=("0", "1", "2")) as one, LocalNodes(gpus=("0", "1", "2")) as other:
        one._nodes["node-1"] = record
        assert one._free_gpus("node-2", 1) == other._free_gpus("node-2", 1) == ("0",)
        assert other._free_gpus("node-1", 2) == ("0", "2")
        with pytest.raises(ClusterError, match="node-1 needs 3 GPUs and 2 of 3 are free"):
            other._free_gpus("node-1", 3)
        record.ended = "terminated"
        assert other._free_gpus("node-1", 3) == ("0", "1", "2")
