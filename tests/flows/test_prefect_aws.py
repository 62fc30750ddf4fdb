"""The block of an AWS account: flows that take it act in the account that it names, emulated over HTTP."""

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import uuid4

import pytest
from prefect import flow
from prefect.blocks.core import Block
from pydantic import BaseModel, SecretStr

from ebbflow.flows.blocks import EbbflowAws, EbbflowCluster
from ebbflow.infra.ledger import Ledger
from ebbflow.planners.model.ledger import AppEntered, AppReport, AppSpec
from ebbflow.tasks.apps.loop_report import STOP, stop_request

if TYPE_CHECKING:
    from tests.aws.cluster import Cluster
    from tests.aws.emulator import AccountAt

pytestmark = [pytest.mark.prefect, pytest.mark.processes, pytest.mark.usefixtures("prefect_server")]

PRICES = 'source = "made up"\nregion = "us-east-1"\n[on_demand]\n"g5.xlarge" = 1.006\n'
LIMITS = """
[loop]
auction_interval = 5
[scaling]
pools = { gpu = "gpus" }
provision_time = 5
scale_out_after = 0.5
cooldown = 0.5
[intervals]
poll_interval = 0.05
capacity_poll_interval = 0.1
fleet_poll_interval = 0.5
batch_delay = 0.02
"""


class ClientParameters(BaseModel):
    endpoint_url: str | None = None


class AwsCredentials(Block):
    """The fields of prefect-aws' block of this name that Ebbflow reads."""

    _block_type_name: ClassVar[str] = "AWS Credentials"
    _block_type_slug: ClassVar[str] = "aws-credentials"

    aws_access_key_id: str | None = None
    aws_secret_access_key: SecretStr | None = None
    aws_session_token: str | None = None
    profile_name: str | None = None
    aws_client_parameters: ClientParameters = ClientParameters()


@pytest.fixture
def lab(aws_account: "AccountAt") -> "Cluster":
    from tests.aws.emulator import PoolShape

    return aws_account.cluster("lab", PoolShape("gpu", "gpu", types=("g5.xlarge",), most=2))


@pytest.fixture
def account(aws_account: "AccountAt", lab: "Cluster", monkeypatch: pytest.MonkeyPatch) -> str:
    """Save what says where the account is and by which keys; the environment says something else."""
    name = f"aws-{uuid4().hex[:6]}"
    given = aws_account.environment
    AwsCredentials(
        aws_access_key_id=given["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=given["AWS_SECRET_ACCESS_KEY"],
        aws_client_parameters=ClientParameters(endpoint_url=given["AWS_ENDPOINT_URL"]),
    ).save(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA000000000000EBBF")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of another account")
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    EbbflowAws(settings=dict(lab.outputs), credentials=name).save(name)
    return name


@pytest.fixture
def prices(tmp_path: Path) -> str:
    (tmp_path / "prices.toml").write_text(PRICES)
    return str(tmp_path / "prices.toml")


def test_a_flow_of_ones_own_looks_at_the_fleet_of_an_account(
    account: str, lab: "Cluster", prices: str
) -> None:
    from ebbflow.flows.fleet.tasks import observe_fleet

    @flow
    def look(account: str) -> tuple[Any, str | None]:
        with EbbflowAws.load(account).fleet(prices=prices) as fleet:  # type: ignore[union-attr]
            settings = fleet.settings
            seen = observe_fleet(settings.cluster, settings.region, fleet.control, fleet.prices)
            return seen.pool("gpu"), os.environ.get("AWS_SESSION_TOKEN")

    before = dict(os.environ)
    pool, token = look(account)
    assert (pool.name, pool.planned, pool.max_nodes) == ("gpu", 0, 2)
    assert token is None
    assert dict(os.environ) == before


def test_the_loop_of_a_cluster_s_block_rents_nodes_in_its_account(
    account: str, lab: "Cluster", prices: str, tmp_path: Path
) -> None:
    from ebbflow.flows.capacity.flow import capacity_loop

    limits = tmp_path / "limits.toml"
    limits.write_text(LIMITS)
    file, name = str(tmp_path / "ledger.db"), f"lab-{uuid4().hex[:6]}"
    EbbflowCluster(
        ledger=file,
        cluster="lab",
        source="aws",
        config=str(limits),
        aws=EbbflowAws.load(account),
    ).save(name)
    held: list[str] = []
    with Ledger.open(file, cluster="lab") as ledger:
        ledger.write([AppEntered(AppSpec("fit", "training", gpus=1, min_gpus=1, max_gpus=1))])

        def wait_for_a_lease() -> None:
            for _ in range(1200):
                now = ledger.clock.now()
                if leases := ledger.state().held("fit"):
                    held.extend(lease.node for lease in leases)
                    break
                ledger.report("fit", AppReport(now, phase="waiting"))
                ledger.clock.sleep(0.1)
            leader = ledger.leader()
            if leader is not None:
                ledger.report(STOP, stop_request(leader.token, ledger.clock.now()))

        waiting = threading.Thread(target=wait_for_a_lease)
        waiting.start()
        capacity_loop(ledger=f"ebbflow-cluster/{name}", prices=prices)
        waiting.join(150)
    assert held
    assert set(held) <= {node["id"] for node in lab.nodes("gpu")}
