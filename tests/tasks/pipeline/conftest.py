"""A cluster on emulated AWS, for pipelines."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rented import Everybody, cluster_with

if TYPE_CHECKING:
    from tests.aws.cluster import Cluster
    from tests.aws.emulator import AccountAt
    from tests.infra.aws.systems_manager import SystemsManager


@pytest.fixture
def ssm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> "Iterator[SystemsManager]":
    """Run a Systems Manager to which all calls of this process go, and keep nodes within the test's folder."""
    from ebbflow.infra.aws import train_nodes
    from tests.infra.aws.systems_manager import SystemsManager

    service = SystemsManager()
    service.online = Everybody()
    monkeypatch.setenv("AWS_ENDPOINT_URL_SSM", service.url)
    monkeypatch.setattr(train_nodes, "LOGS", str(tmp_path / "node-logs"))
    defaults = train_nodes.AwsNodes.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "folder", str(tmp_path / "node-work"))
    yield service
    service.close()
    assert service.problems == []


@pytest.fixture
def lab(aws_account: "AccountAt", tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Cluster":
    """Return a cluster with a pool that is empty at first."""
    from tests.aws.emulator import PoolShape

    return cluster_with(
        aws_account, tmp_path, monkeypatch, PoolShape("gpu", "gpu", types=("g5.xlarge",), most=3)
    )
