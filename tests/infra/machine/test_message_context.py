"""What is dropped without being closed holds up nobody."""

import subprocess
import sys

import pytest

DROPPED = """
import gc
from types import SimpleNamespace
from ebbflow.infra.aggregation.connections import WorkerLinks
from ebbflow.infra.aggregation.frames import AggregatorAddress
from ebbflow.infra.machine.encrypted_router import CurveKeys

links = WorkerLinks(CurveKeys.make(), 1.0, SimpleNamespace(meet=lambda *_: None))
links.connect("a", AggregatorAddress("127.0.0.1:9", CurveKeys.make().public))
links.itself = links
del links
gc.collect()
print("collected")
"""


@pytest.mark.timeout(120)
def test_a_worker_whose_connections_are_garbage_goes_on() -> None:
    found = subprocess.run(
        [sys.executable, "-P", "-c", DROPPED], capture_output=True, text=True, timeout=60, check=False
    )
    assert found.stdout == "collected\n", found.stderr
