"""Checkpoints on S3 behind a network that is lost, silent, or slow: nothing is lost, nothing waits for ever."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch

from ebbflow.infra.errors import StorageError
from ebbflow.infra.storage import filesystems
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.checkpoints.folder import CheckpointFolder
from tests.chaos.proxy import Proxy
from tests.infra.training.checkpoint_cases import state

if TYPE_CHECKING:
    from tests.aws.emulator import Emulator


@pytest.fixture(name="network")
def _network(aws_emulator: "Emulator", monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with Proxy(httpx.URL(aws_emulator.url).port or 80) as proxy:
        for name in ("AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(filesystems, "CONNECT_TIMEOUT", 2.0)
        monkeypatch.setattr(filesystems, "REQUEST_TIMEOUT", 2.0)
        monkeypatch.setattr(filesystems, "MAX_ATTEMPTS", 2)
        yield proxy


@pytest.fixture(name="uri")
def _uri(network: Proxy, tmp_path: Path) -> str:
    bucket = f"network-{os.getpid()}-{abs(hash(tmp_path.name)) % 10**6}"
    httpx.put(f"{os.environ['AWS_ENDPOINT_URL']}/{bucket}", timeout=20).raise_for_status()
    return f"s3://{bucket}/run/checkpoints"


def _step(uri: str) -> int:
    folder = CheckpointFolder(StorageLocation(uri))
    found = folder.latest()
    assert found is not None
    assert torch.equal(folder.load(found)["model"]["w"], state(found.step)["model"]["w"])
    return int(found.step)


@pytest.mark.parametrize("how", ["cut", "silent"])
def test_a_save_without_its_network_is_an_error_and_the_one_before_stays(
    network: Proxy, uri: str, how: Any
) -> None:
    folder = CheckpointFolder(StorageLocation(uri))
    folder.save(state(1), 1)
    network.set(how)
    with pytest.raises(StorageError, match="cannot"):
        folder.save(state(2), 2)
    with pytest.raises(StorageError):  # not "there is none", upon which a run would begin again
        CheckpointFolder(StorageLocation(uri)).latest()
    network.set("open")
    assert _step(uri) == 1
    folder.save(state(3), 3)
    assert _step(uri) == 3


def test_a_slow_network_delays_a_save_and_changes_nothing(network: Proxy, uri: str) -> None:
    network.set("slow")
    folder = CheckpointFolder(StorageLocation(uri))
    folder.save(state(5), 5)
    assert _step(uri) == 5
